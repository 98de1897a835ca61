"""A place among the events of a process: what comes next, each event once and in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from ..services import Closed, Event, Exited, Failed, Output
from .errors import OutputLost
from .subscription import Subscription

__all__ = ["Fetch", "Reader"]

Fetch = Callable[[int, int | None], Awaitable[tuple[list[Event], bool]]]
"""The events after a number (and before another, if given) from the server; and whether they are all."""


class Reader:
    """Reads a subscription, and fetches what fell out of it. A wait that is cancelled loses nothing.

    Several may ask one reader at once; then each event goes to one of them.
    """

    def __init__(
        self, process_id: str, subscription: Subscription, fetch: Fetch, ended: Callable[[], bool]
    ) -> None:
        self.subscription = subscription
        self._process_id = process_id
        self._fetch = fetch
        self._ended = ended
        self._last = 0
        self._fetched: deque[Event] = deque()
        self._early: Output | Exited | Closed | None = None
        """Taken from the subscription, but something is missing before it."""
        self._lost = False
        self._over = False
        self._one_at_a_time = asyncio.Lock()

    async def next(self) -> Event | None:
        """The next event; None after the last. Raises OutputLost, every time, if it cannot be had."""
        if not self._one_at_a_time.locked() and (event := self._take()) is not None:
            return event
        async with self._one_at_a_time:
            while (event := self._take()) is None:
                if self._lost:
                    raise OutputLost(self._process_id, self._last)
                if self._early is not None:
                    await self._fetch_before(self._early)
                elif self.subscription.lagged:
                    await self._fetch_dropped()
                elif self._over or self._ended():
                    return None
                else:
                    await self.subscription.wait()
            return event

    def _take(self) -> Event | None:
        """The next event, if it is here and nothing is missing before it."""
        if self._fetched:
            event = self._fetched.popleft()
        elif self._over or self._lost or self._early is not None or self.subscription.lagged:
            return None
        else:
            while True:
                taken = self.subscription.take()
                if taken is None:
                    return None
                if isinstance(taken, Failed) or taken.seq == self._last + 1:
                    event = taken
                    break
                if taken.seq > self._last:
                    self._early = taken
                    return None
        if not isinstance(event, Failed):
            self._last = event.seq
        if isinstance(event, Closed | Failed):
            self._over = True
        return event

    async def _fetch_before(self, early: Output | Exited | Closed) -> None:
        events, complete = await self._fetch(self._last, early.seq)
        self._early = None
        self._fetched.extend(events)
        if complete:
            self._fetched.append(early)
        else:
            self._lost = True

    async def _fetch_dropped(self) -> None:
        self.subscription.lagged = False  # and true again if more falls out meanwhile
        try:
            events, complete = await self._fetch(self._last, None)
        except BaseException:
            self.subscription.lagged = True
            raise
        self._fetched.extend(events)
        self._lost = not complete
