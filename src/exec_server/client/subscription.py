"""Events on their way to one reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ..services import Event, Output

__all__ = ["Subscription"]


class Subscription:
    """A queue with a bound: a full one either asks the process to wait, or drops and says so."""

    def __init__(self, max_bytes: int, max_events: int, on_pressure: Callable[[bool], None] | None) -> None:
        self._queue: deque[Event] = deque()
        self._bytes = 0
        self._max_bytes = max_bytes
        self._max_events = max_events
        self._on_pressure = on_pressure
        self._pressed = False
        self._wake: asyncio.Future[None] | None = None
        self.lagged = False
        """Events were dropped; the reader must fetch them again."""

    def put(self, event: Event) -> None:
        """One more event, in order."""
        self._queue.append(event)
        if isinstance(event, Output):
            self._bytes += len(event.data)
        if self._bytes > self._max_bytes or len(self._queue) > self._max_events:
            self._overflow()
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def take(self) -> Event | None:
        """The next event, if it is there."""
        if not self._queue:
            return None
        event = self._queue.popleft()
        if isinstance(event, Output):
            self._bytes -= len(event.data)
        if self._pressed and self._bytes <= self._max_bytes // 4:
            self._press(False)
        return event

    async def wait(self) -> None:
        """Until there may be something to take."""
        if not self._queue and not self.lagged:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None

    def make_lossy(self) -> None:
        """Drop from now on instead of making the process wait."""
        self._on_pressure, press = None, self._on_pressure
        if self._pressed and press is not None:
            self._pressed = False
            press(False)
        if self._bytes > self._max_bytes or len(self._queue) > self._max_events:
            self._overflow()

    def _overflow(self) -> None:
        if self._on_pressure is None:
            self._queue.clear()
            self._bytes = 0
            self.lagged = True
        elif self._bytes > self._max_bytes and not self._pressed:
            self._press(True)

    def _press(self, pressed: bool) -> None:
        self._pressed = pressed
        if self._on_pressure is not None:
            self._on_pressure(pressed)
