"""A loop whose time moves when the test says so: a 30-second timeout takes no time at all."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

__all__ = ["ManualLoop"]

Callback = Callable[..., object]


class _Planned:
    def __init__(self, callback: Callback, args: tuple[Any, ...]) -> None:
        self.callback: Callback | None = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None


class ManualLoop:
    """Everything exec_server.loop.Loop asks for, without a clock and without descriptors."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[tuple[Callback, tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, _Planned]] = []
        self._order = count()
        self.readers: dict[int, tuple[Callback, tuple[Any, ...]]] = {}
        self.writers: dict[int, tuple[Callback, tuple[Any, ...]]] = {}
        self.signals: dict[int, tuple[Callback, tuple[Any, ...]]] = {}

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Callback, *args: Any) -> None:
        self._ready.append((callback, args))

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callback, *args: Any) -> _Planned:
        planned = _Planned(callback, args)
        heapq.heappush(self._timers, (self._now + max(delay, 0.0), next(self._order), planned))
        return planned

    def add_reader(self, fd: int, callback: Callback, *args: Any) -> None:
        self.readers[fd] = (callback, args)

    def remove_reader(self, fd: int) -> bool:
        return self.readers.pop(fd, None) is not None

    def add_writer(self, fd: int, callback: Callback, *args: Any) -> None:
        self.writers[fd] = (callback, args)

    def remove_writer(self, fd: int) -> bool:
        return self.writers.pop(fd, None) is not None

    def add_signal_handler(self, sig: int, callback: Callback, *args: Any) -> None:
        self.signals[sig] = (callback, args)

    def settle(self) -> None:
        """Do everything that is due now, and what that makes due."""
        while self._ready:
            callback, args = self._ready.popleft()
            callback(*args)

    def advance(self, seconds: float) -> None:
        """Let time pass; timers fire in their order, each at its own time."""
        end = self._now + seconds
        self.settle()
        while self._timers and self._timers[0][0] <= end:
            due, _, planned = heapq.heappop(self._timers)
            self._now = max(self._now, due)
            if planned.callback is not None:
                planned.callback(*planned.args)
            self.settle()
        self._now = end
