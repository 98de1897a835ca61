"""Calls that are sent again on every new connection until they are answered."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Final

from msgspec import Raw

from .errors import ConnectionLost, TooManyCalls
from .rpc import MAX_CALLS, Rpc

__all__ = ["Repeats"]

FIRST_BYTES: Final = 64 * 1024
MOST_BYTES: Final = 8 * 1024 * 1024
"""What is sent again before anything of it is answered, at first and at most; one call always is."""


class _Repeat:
    """A call, and who waits for its answer."""

    __slots__ = ("answer", "call", "lane", "method", "params", "size")

    def __init__(self, method: str, params: Any, answer: asyncio.Future[Raw], lane: _Lane | None) -> None:
        self.method = method
        self.params = params
        self.answer = answer
        self.lane = lane
        self.call: asyncio.Future[Raw] | None = None
        self.size = len(params.get("chunk", "")) if isinstance(params, dict) else 0
        """What it has to carry, in bytes, as far as it matters."""


class _Lane:
    """The calls about one process, which must stay in their order, on the connection that there is."""

    __slots__ = ("limit", "unanswered", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_Repeat] = deque()
        """Until others are answered."""
        self.unanswered = 0
        self.limit = FIRST_BYTES


class Repeats:
    """All of them, of one session.

    A line that broke under all that was on its way may not break under a part. So on a new connection what is
    small is sent at once, and of what is large more and more, as it is answered: what is answered is never
    sent again.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._order = count()
        self._made: dict[int, _Repeat] = {}
        self._lanes: dict[str, _Lane] = {}
        self._link: Rpc | None = None

    def number(self) -> int:
        """The place of a call among all, taken when it is made."""
        return next(self._order)

    def must_wait(self, params: Any) -> bool:
        """Whether calls about the same process that were made before still wait to be sent again."""
        return bool(self._lanes) and self._lane(params) is not None

    def _lane(self, params: Any) -> _Lane | None:
        lane = self._lanes.get(_process_of(params))
        return lane if lane is not None and lane.waiting else None

    async def answer(self, number: int, method: str, params: Any, *, sent: bool) -> Raw:
        """The answer, from a later connection or after others. What was `sent` before is never too much."""
        if not sent and len(self._made) >= MAX_CALLS:
            raise TooManyCalls(f"exec-server has reached its limit of {MAX_CALLS} pending requests")
        lane = self._lane(params)
        repeat = self._made[number] = _Repeat(method, params, self._loop.create_future(), lane)
        if lane is not None:
            lane.waiting.append(repeat)
        try:
            return await repeat.answer
        finally:
            self._made.pop(number, None)
            if repeat.call is not None and not repeat.call.done():
                repeat.call.cancel()

    def resume(self, link: Rpc) -> None:
        """There is a connection: send them, in the order in which they were made."""
        self._link = link
        self._lanes = {}
        for _, repeat in sorted(self._made.items()):
            repeat.lane = self._lanes.setdefault(_process_of(repeat.params), _Lane())
            repeat.lane.waiting.append(repeat)
        for lane in self._lanes.values():
            self._send(lane)

    def pause(self) -> None:
        """There is none any more."""
        self._link = None
        self._lanes = {}

    def fail(self, error: Callable[[], ConnectionLost]) -> None:
        """There will be none; everybody gets an error of their own."""
        for repeat in list(self._made.values()):
            if not repeat.answer.done():
                repeat.answer.set_exception(error())
                repeat.answer.exception()

    def _send(self, lane: _Lane) -> None:
        link = self._link
        while lane.waiting and link is not None:
            repeat = lane.waiting[0]
            if repeat.answer.done():
                lane.waiting.popleft()
                continue
            if lane.unanswered and lane.unanswered + repeat.size > lane.limit:
                return
            try:
                repeat.call = link.send(repeat.method, repeat.params, again=True)
            except ConnectionLost:
                return  # lost again already; the next connection gets them
            lane.waiting.popleft()
            lane.unanswered += repeat.size
            repeat.call.add_done_callback(partial(self._answered, repeat, lane))

    def _answered(self, repeat: _Repeat, lane: _Lane, done: asyncio.Future[Raw]) -> None:
        lane.unanswered -= repeat.size
        if repeat.call is done and not done.cancelled() and not repeat.answer.done():
            error = done.exception()
            if error is None:
                repeat.answer.set_result(done.result())
            elif not isinstance(error, ConnectionLost):
                repeat.answer.set_exception(error)
        if lane.waiting and self._link is not None and not self._link.closed:
            lane.limit = min(lane.limit * 2, MOST_BYTES)
            self._send(lane)


def _process_of(params: Any) -> str:
    """The id of the process that a call is about; empty for one that is about none."""
    return str(params.get("processId", "")) if isinstance(params, dict) else ""
