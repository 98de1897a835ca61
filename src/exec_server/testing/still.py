"""An asyncio loop whose clock stands still until a test moves it: 25 seconds of retries take no time.

Sockets, pipes and threads are real and work as ever; only timers wait for `advance`. To wait for something
real inside such a loop use `until`, since `asyncio.sleep` would sleep for ever.

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(main())
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["StillLoop", "until"]

PATIENCE_SECONDS = 20.0
"""Real time before a test gives up."""


class StillLoop(asyncio.SelectorEventLoop):
    """Everything of asyncio's loop, at a time of the test's choosing."""

    def __init__(self) -> None:
        super().__init__()
        self._still_at = 1000.0

    def time(self) -> float:
        return self._still_at

    def advance(self, seconds: float) -> None:
        """Let time pass; what is due happens in the next turns of the loop."""
        self._still_at += seconds


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait, in real time, for something to become true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        await asyncio.to_thread(time.sleep, 0.001)
        if condition():
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true in {PATIENCE_SECONDS:g} s")
