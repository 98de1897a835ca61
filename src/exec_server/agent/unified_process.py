"""One command of a model: what it has printed, whether it is over, and who waits for that."""

from __future__ import annotations

import asyncio
from typing import Final

from .. import log
from ..client.errors import ExecServerError
from ..services import Closed, Exited, Failed, Output, Process
from .buffer import HeadTailBuffer
from .exec import ExecRequest
from .screen import Screen
from .unified_events import Deltas, ExecCommandBegin, ExecCommandEnd, Listener

__all__ = ["UnifiedProcess"]

TRAILING_SECONDS: Final = 0.1
"""How long after the exit output may still trickle in before the end is told."""

LOST_EXIT: Final = -1
"""The exit code of what was lost or never started."""


class UnifiedProcess:
    """A started process. `watch` follows it; everything else looks at what was seen.

    On this machine a process is over when it was reaped; across a connection, when the server says that it
    is closed, so that no output is overtaken by the news of the exit.
    """

    def __init__(
        self,
        number: int,
        call_id: str,
        process: Process,
        request: ExecRequest,
        *,
        remote: bool,
        capacity: int,
        emit: Listener,
    ) -> None:
        self.number = number
        self.call_id = call_id
        self.process = process
        self.request = request
        self.lock = asyncio.Lock()
        """One interaction at a time."""
        self.pending = HeadTailBuffer(capacity)
        """What no call has reported yet."""
        self.transcript = HeadTailBuffer(capacity)
        self.exit: Exited | None = None
        self.closed = False
        self.failure: str | None = None
        self.given_up = False
        """A call has reported the end, or found that nobody is there any more."""
        self.screen = Screen(request.rows or 24, request.cols or 80) if request.tty else None
        self._remote = remote
        self._emit = emit
        self._deltas = Deltas(call_id, emit)
        self._waiters: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._ended_at: float | None = None
        self._announced = False
        self._watching = asyncio.ensure_future(self._watch())
        self.finished = asyncio.ensure_future(self._finish())
        """Done when the end has been told."""
        self.fallback = ""
        """What the call that reports the end has collected, in case the transcript is empty."""

    # What is known ---------------------------------------------------------------------------------

    @property
    def exit_seen(self) -> bool:
        """Whether there is no need to wait for the exit any longer."""
        if self.failure is not None or self.closed:
            return True
        return self.exit is not None and not self._remote

    @property
    def output_over(self) -> bool:
        return self.closed or self.failure is not None

    @property
    def ended(self) -> bool:
        return self.exit is not None or self.output_over or self.given_up

    @property
    def busy(self) -> bool:
        return self.lock.locked()

    @property
    def exit_code(self) -> int | None:
        return None if self.exit is None else self.exit.exit_code

    # Waiting ---------------------------------------------------------------------------------------

    async def changed(self, timeout: float | None) -> None:
        """Until something happens, or the time is over."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            pass
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def wake(self) -> None:
        """Something happened; let everybody look."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_exit(self, timeout: float) -> None:
        """Until the exit or a failure is known, or the time is over."""
        deadline = self._loop.time() + timeout
        while not self.exit_seen:
            left = deadline - self._loop.time()
            if left <= 0:
                return
            await self.changed(left)

    async def wait_output_over(self, timeout: float) -> None:
        """Until no more output can come, or the time is over."""
        deadline = self._loop.time() + timeout
        while not self.output_over and (left := deadline - self._loop.time()) > 0:
            await self.changed(left)

    # Following it ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        try:
            async for event in self.process.events():
                if isinstance(event, Output):
                    self.pending.push(event.data)
                    self.transcript.push(event.data)
                    self._deltas.push(event.data)
                    if self.screen is not None:
                        self.screen.feed(event.data)
                elif isinstance(event, Exited):
                    self.exit = event
                    self._ended_at = self._loop.time()
                elif isinstance(event, Closed):
                    self.closed = True
                elif isinstance(event, Failed):
                    self.failure = event.message
                self.wake()
                if isinstance(event, Closed | Failed):
                    return
            if not self.closed:
                self.failure = "the events of the process ended before the process did"
        except (ExecServerError, OSError) as error:
            self.failure = str(error)
        finally:
            self.wake()

    def announce(self) -> None:
        """Tell that it was started, and what it has printed since."""
        self._announced = True
        request = self.request
        self._emit(
            ExecCommandBegin(
                call_id=self.call_id, process_id=self.number, command=request.argv, cwd=request.cwd
            )
        )
        self._deltas.open()
        self.wake()

    async def _finish(self) -> None:
        """Tell the end, once, after all output and between interactions."""
        while not (self._announced and (self.exit_seen or self.given_up)):
            await self.changed(None)
        await self.wait_output_over(TRAILING_SECONDS)
        async with self.lock:
            self._deltas.end()
            self._emit(self._end())
        if not self.output_over:
            self._watching.cancel()  # somebody else holds its output open; nobody here reads it any more

    def _end(self) -> ExecCommandEnd:
        text = self.transcript.joined().decode("utf-8", "replace") or self.fallback
        code, error, aggregated = self.exit_code, "", text
        if self.failure is not None:
            code, error = LOST_EXIT, self.failure
            aggregated = f"{text}\n{error}" if text else error
        ended_at = self._ended_at if self._ended_at is not None else self._loop.time()
        return ExecCommandEnd(
            call_id=self.call_id,
            process_id=self.number,
            command=self.request.argv,
            cwd=self.request.cwd,
            stdout=text,
            stderr=error,
            aggregated_output=aggregated,
            exit_code=LOST_EXIT if code is None else code,
            duration=max(ended_at - self._started_at, 0.0),
            status="completed" if code == 0 else "failed",
        )

    # Ending it -------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """A call has told that it is over."""
        self.given_up = True
        self.wake()

    async def told(self, timeout: float) -> None:
        """Until its end has been told: with its exit code if that comes in time, without it if not."""
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self.finished)
        except TimeoutError:
            self.give_up()
            await asyncio.shield(self.finished)

    async def terminate(self) -> bool:
        """Kill it; True if it is gone, now or already."""
        try:
            await self.process.terminate()
        except (ExecServerError, OSError) as error:
            log.warning("a command could not be terminated", process=self.process.id, error=str(error))
            return self.ended
        return True

    def abandon(self) -> None:
        """Stop following it: it was never announced, or nobody listens any more."""
        self._watching.cancel()
        self.finished.cancel()
