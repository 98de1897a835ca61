"""File calls in sandboxes without a thread: a warm helper is asked, and its answer read, on the loop.

A thread in between has to be woken twice, which takes longer than all the rest of a small read. So when a
call only reads, its plan is known and still true, a helper of that plan is free, and nothing that would
have to be looked at can hang, the loop asks the helper itself. Whatever is not as simple as that (an answer
that is large or late, a helper that has died) goes on in a thread, like every other call from the start.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any, Final

from msgspec import Raw

from ...loop import Loop, Pending
from ..files.lane import Abandoned, Lane, Touch, Turn
from ..files.pool import POOL
from .helper_process import Answer, HelperProcess
from .helpers import Helpers

__all__ = ["Answers", "DirectCall"]

PATIENCE: Final = 0.02
"""Seconds until a thread waits in place of the loop: it notices when nobody wants the answer any more."""


_ONCE: Final = select.EPOLLIN | select.EPOLLONESHOT


class Answers:
    """Tells when helpers answer. One descriptor of the loop's for all of them: watching each with the loop,
    call by call, takes as long as the call."""

    def __init__(self, loop: Loop) -> None:
        self._awaited: dict[int, Callable[[], None]] = {}
        self._loop = loop
        self._events = select.epoll()
        loop.add_reader(self._events.fileno(), self._tell)

    def expect(self, descriptor: int, then: Callable[[], None]) -> None:
        """Call back once when there is something to read."""
        self._awaited[descriptor] = then
        try:
            self._events.modify(descriptor, _ONCE)
        except FileNotFoundError:
            self._events.register(descriptor, _ONCE)

    def forget(self, descriptor: int) -> None:
        """It is not expected any more, at least not here."""
        if self._awaited.pop(descriptor, None) is not None:
            self._events.unregister(descriptor)

    def close(self) -> None:
        if not self._events.closed:
            self._loop.remove_reader(self._events.fileno())
            self._events.close()

    def _tell(self) -> None:
        for descriptor, _ in self._events.poll(0):
            then = self._awaited.pop(descriptor, None)
            if then is not None:
                then()


class DirectCall:
    """One call on its way. Lives on the loop, but for what it leaves to a thread."""

    def __init__(
        self,
        helpers: Helpers,
        helper: HelperProcess,
        loop: Loop,
        answers: Answers,
        lane: Lane,
        again: Callable[[Turn], Raw],
    ) -> None:
        """`again` does the whole call in a thread, if this helper turns out to be dead."""
        self._helpers = helpers
        self._helper = helper
        self._loop = loop
        self._answers = answers
        self._lane = lane
        self._again = again
        self._descriptor = helper.descriptor

    def begin(self, touches: tuple[Touch, ...], method: str, params: bytes) -> Pending[Raw] | None:
        """Ask; None if the lane says that others come first."""
        job = self._lane.alongside(touches)
        if job is None:
            self._give_back()
            return None
        self._job = job
        self._answers.expect(self._descriptor, self._answered)
        self._timer = self._loop.call_later(PATIENCE, self._leave_to_thread)
        try:
            self._helper.ask(method, params)
        except (OSError, EOFError):
            self._leave_to_thread(self._repeat)
        return job.pending

    def _answered(self) -> None:
        try:
            answer = self._helper.take_answer()
        except (OSError, EOFError):
            self._leave_to_thread(self._repeat)
        except Exception as error:
            self._stop_listening()
            self._give_back()
            self._settle(error)
        else:
            if answer is None:
                self._leave_to_thread()
                return
            self._stop_listening()
            self._give_back()
            self._settle(Raw(answer.result))

    def _give_back(self) -> None:
        if not self._helpers.give_back(self._helper):
            POOL.run(self._helpers.end, self._helper)

    def _stop_listening(self) -> None:
        self._answers.forget(self._descriptor)
        self._timer.cancel()

    def _settle(self, outcome: Any) -> None:
        self._lane.finish(self._job)
        if isinstance(outcome, BaseException):
            self._job.pending.fail(outcome)
        else:
            self._job.pending.resolve(outcome)

    # In a thread

    def _leave_to_thread(self, work: Callable[[], Any] | None = None) -> None:
        self._stop_listening()
        POOL.run(self._work, work or self._wait)

    def _work(self, work: Callable[[], Any]) -> None:
        try:
            outcome: Any = work()
        except BaseException as error:
            outcome = error
        try:
            self._loop.call_soon_threadsafe(self._settle, outcome)
        except RuntimeError:
            pass  # the loop is closed; nobody is waiting

    def _wait(self) -> Raw:
        """For the rest of the answer."""
        answer: Answer | None = self._helpers.finish(self._helper, self._job)
        return self._again(self._job) if answer is None else Raw(answer.result)

    def _repeat(self) -> Raw:
        """It has died. Asking another one is no harm: the call only reads."""
        self._helpers.end(self._helper)
        if self._job.abandoned:
            raise Abandoned
        return self._again(self._job)
