"""asyncio on a clock of its own: when nothing is left to do, it is later at once.

For code that only waits for time and for other code. Waiting for a descriptor would never end, so a loop
that has neither a timer nor anything to do raises.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["run_virtual"]

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everybody waits and nothing will ever happen")
        if not ready and timeout:
            self._advance(timeout)
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_Selector(self._later))

    def _later(self, seconds: float) -> None:
        self._now += seconds

    def time(self) -> float:
        return self._now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, in no time."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)
