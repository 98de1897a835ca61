"""Unified exec: the two tools by which a model runs commands, on any machine.

`exec_command` starts a command and waits a while for it; one that goes on gets a number, by which
`write_stdin` types into it or looks at it again. How long a call waits is decided here, not by the machine:
a window of time, which the end of the command cuts short.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from .. import log
from ..client.errors import ExecServerError, ProcessFailed, ServerRejected, StdinClosed
from ..services import Environment
from ..wire.errors import RpcError
from ..wire.uri import ForeignPath
from .buffer import BUFFER_BYTES
from .exec import (
    Declined,
    ExecCommand,
    ExecRequest,
    Prepare,
    ToolError,
    WriteStdin,
    about,
    request_of,
    variables,
)
from .screen import ScreenUnavailable, ScreenView
from .unified_events import ExecEvent, Listener, TerminalInteraction
from .unified_process import UnifiedProcess
from .unified_start import Starter
from .unified_store import MAX_PROCESSES, ProcessStore
from .unified_text import ToolOutput
from .unified_window import MAX_POLL_MS, Pauses, collect, first_window, write_window

__all__ = ["RunningCommand", "Settings", "UnifiedExec"]

AFTER_WRITE_SECONDS: Final = 0.1
"""Time for a program to react to what was typed."""

CLEANUP_SECONDS: Final = 2.0
"""How long the exit of a killed process is waited for before its end is told without it."""

INTERRUPT: Final = "\x03"


class Settings(Struct, frozen=True, kw_only=True):
    """What can be different from thread to thread."""

    login_allowed: bool = True
    max_poll_ms: int = MAX_POLL_MS
    buffer_bytes: int = BUFFER_BYTES
    max_processes: int = MAX_PROCESSES
    sequential_ids: bool = False
    """Numbers 1000, 1001, … instead of random ones, for tests."""
    tty_term: str | None = None
    """TERM of commands on a terminal. The reference says `dumb`; programs that paint need `linux`."""
    rows: int | None = None
    cols: int | None = None
    """Size of a terminal; None leaves it to the machine: 24 rows of 80 columns."""


class RunningCommand(Struct, frozen=True):
    """A command that goes on."""

    number: int
    call_id: str
    command: list[str]
    cwd: str
    tty: bool


class UnifiedExec:
    """The commands of one thread. `close` ends them all.

    `environments` are the machines by their ids, looked up anew with every call. `prepare` applies policy;
    without it commands are started as they are. `emit` is told what happens, at once and in order.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        primary: str,
        *,
        emit: Listener | None = None,
        prepare: Prepare | None = None,
        settings: Settings | None = None,
        thread_id: str | None = None,
        session_id: str | None = None,
    ) -> None:
        self._environments = environments
        self._primary = primary
        self._listener = emit
        self._prepare = prepare
        self._settings = settings or Settings()
        self._thread_id = thread_id
        self._session_id = session_id
        self._store: ProcessStore[UnifiedProcess] = ProcessStore(
            self._settings.max_processes, sequential=self._settings.sequential_ids
        )
        self._starting = 0
        """Commands that are being started and will need room."""
        self._calls_over = asyncio.Event()
        """Set whenever a call is over: there may be room now."""
        self._pauses = Pauses()
        self._starter = Starter(self._settings.buffer_bytes, self._emit, self._in_background)
        self._background: set[asyncio.Future[object]] = set()

    # The tools -------------------------------------------------------------------------------------

    async def exec_command(self, call: ExecCommand, call_id: str) -> ToolOutput:
        """Start a command and wait for it, for a while. The text of a ToolError is for the model."""
        environment_id = call.environment_id or self._primary
        environment = self._environments.get(environment_id)
        if environment is None:
            raise ToolError(f"unknown turn environment id `{environment_id}`")
        number = self._store.reserve()
        try:
            request = await self._decide(call, call_id, number, environment, environment_id)
            await self._make_room()
            running = await self._start_counted(environment, request, call, call_id, number)
        except BaseException:
            self._store.release(number)
            raise
        window = first_window(call, environment.info.platform_os)
        try:
            return await self._first_window(running, window, call.max_output_tokens)
        finally:
            self._calls_over.set()

    async def write_stdin(self, call: WriteStdin) -> ToolOutput:
        """Type into a command that goes on, or look at it, and wait for what it says to that."""
        number = call.session_id
        running = self._store.get(number)
        if running is None:
            raise _unknown("write_stdin", number)
        try:
            return await self._interact(running, call)
        finally:
            self._calls_over.set()

    async def _interact(self, running: UnifiedProcess, call: WriteStdin) -> ToolOutput:
        number = running.number
        async with running.lock:
            if self._store.get(number) is not running:
                raise _unknown("write_stdin", number)
            self._store.touch(running)
            if call.chars:
                await self._type(running, call.chars)
            window = write_window(call, self._settings.max_poll_ms)
            output = await self._collected(running, window, call.max_output_tokens)
            if running.failure is not None:
                self._store.release(number)
                running.give_up()
                raise ToolError(f"write_stdin failed: Unified exec process failed: {running.failure}")
            if call.chars or output.session_id is not None:
                self._emit(TerminalInteraction(call_id=running.call_id, process_id=number, stdin=call.chars))
        await self._told(running)
        return output

    def screen(self, number: int) -> ScreenView:
        """What is on the terminal of a command that goes on."""
        running = self._store.get(number)
        if running is None:
            raise _unknown("screen", number)
        if running.screen is None:
            raise ScreenUnavailable(f"process {number} has no terminal; start it with tty=true")
        return running.screen.view()

    # Everything that runs --------------------------------------------------------------------------

    def running(self) -> list[RunningCommand]:
        """The commands that go on, by number."""
        return [
            RunningCommand(one.number, one.call_id, one.request.argv, one.request.cwd, one.request.tty)
            for one in self._store.running()
        ]

    async def terminate(self, number: int) -> bool:
        """End one command. False if there is none of that number, or it could not be ended."""
        running = self._store.get(number)
        if running is None:
            return False
        gone = await running.terminate()
        self._calls_over.set()
        if gone and self._store.get(number) is running:
            self._store.release(number)
            self._in_background(running.told(CLEANUP_SECONDS))
        return gone

    async def close(self) -> None:
        """End every command of the thread, and wait until their ends have been told."""
        await asyncio.gather(*(self._end(running) for running in self._store.clear()))
        await asyncio.gather(*self._background, return_exceptions=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While a person is asked something, no window runs out."""
        loop = asyncio.get_running_loop()
        self._pauses.begin(loop.time())
        try:
            yield
        finally:
            self._pauses.end(loop.time())
            if not self._pauses:
                for running in self._store:
                    running.wake()

    # Starting --------------------------------------------------------------------------------------

    async def _decide(
        self, call: ExecCommand, call_id: str, number: int, environment: Environment, environment_id: str
    ) -> ExecRequest:
        term = self._settings.tty_term if call.tty else None
        env = variables(self._thread_id, self._session_id, call_id, term)
        try:
            request = request_of(call, environment, environment_id, env, self._settings.login_allowed)
            request = replace(request, metadata=about(self._thread_id, call_id))
        except (RpcError, ForeignPath, ValueError) as error:  # a URI the model made up
            raise ToolError(f"exec_command failed: workdir {call.workdir!r}: {error}") from None
        if call.tty:
            request = replace(request, rows=self._settings.rows, cols=self._settings.cols)
        if self._prepare is None:
            return request
        try:
            return await self._prepare(request, call)
        except Declined as refusal:
            self._starter.never_ran(request, call_id, number, "declined", str(refusal))
            raise ToolError(f"exec_command failed: {refusal}") from None

    async def _make_room(self) -> None:
        """Until there is room for one more command: an old one goes for it, but none that somebody is
        waiting for. If there are only such, this one waits, too."""
        while self._store.is_full(self._starting):
            gone = self._store.make_room()
            if gone is not None:
                self._in_background(self._end(gone))
                continue
            self._calls_over.clear()
            await self._calls_over.wait()

    async def _start_counted(
        self, environment: Environment, request: ExecRequest, call: ExecCommand, call_id: str, number: int
    ) -> UnifiedProcess:
        self._starting += 1
        try:
            running = await self._starter.start(environment, request, call, call_id, number)
            if not running.exit_seen:
                # Stored before anything is waited for, so that an interrupted turn does not lose it.
                self._store.store(running)
            return running
        finally:
            self._starting -= 1
            self._calls_over.set()

    async def _first_window(
        self, running: UnifiedProcess, window: float, max_tokens: int | None
    ) -> ToolOutput:
        async with running.lock:
            output = await self._collected(running, window, max_tokens)
        if running.failure is not None:
            self._store.release(running.number)
            running.give_up()
            await self._told(running)
            raise ToolError(f"exec_command failed: Unified exec process failed: {running.failure}")
        await self._told(running)
        return output

    # Talking ---------------------------------------------------------------------------------------

    async def _type(self, running: UnifiedProcess, chars: str) -> None:
        if not running.request.tty:
            if chars != INTERRUPT:
                raise ToolError(
                    "write_stdin failed: stdin is closed for this session; rerun exec_command with tty=true"
                    " to keep stdin open"
                )
            try:
                await running.process.signal("interrupt")
            except ServerRejected:
                pass  # it has ended by itself; what it said is collected
            except (ExecServerError, OSError) as error:
                raise await self._lost(running, error) from None
            return
        try:
            await running.process.write(chars.encode("utf-8", "replace"))
        except StdinClosed:
            running.given_up = True
        except ProcessFailed as error:
            if "(starting)" in str(error):
                raise ToolError("write_stdin failed: failed to write to stdin") from None
            running.given_up = True
        except (ExecServerError, OSError) as error:
            raise await self._lost(running, error) from None
        else:
            await asyncio.sleep(AFTER_WRITE_SECONDS)

    async def _lost(self, running: UnifiedProcess, error: Exception) -> ToolError:
        """What was typed may or may not have arrived: nobody can go on from there."""
        self._store.release(running.number)
        self._in_background(running.terminate())
        running.failure = running.failure or str(error)
        running.give_up()
        return ToolError(f"write_stdin failed: Unified exec process failed: {running.failure}")

    async def _collected(self, running: UnifiedProcess, window: float, max_tokens: int | None) -> ToolOutput:
        """Wait for the window or the end, and report which it was. A process that is over is let go."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        buffer = await collect(running, window, self._pauses, self._settings.buffer_bytes)
        if running.ended:
            self._store.release(running.number)
            running.fallback = running.fallback or buffer.joined().decode("utf-8", "replace")
            running.give_up()
        return ToolOutput(
            wall_time=loop.time() - began,
            buffer=buffer,
            chunk_id=secrets.token_hex(3),
            exit_code=running.exit_code if running.ended else None,
            session_id=None if running.ended else running.number,
            max_output_tokens=max_tokens,
        )

    async def _told(self, running: UnifiedProcess) -> None:
        """If it is over and silent, let its end be told before the call returns."""
        if running.given_up and running.output_over:
            await asyncio.shield(running.finished)

    async def _end(self, running: UnifiedProcess) -> None:
        """Kill it, and see to it that its end is told, even if it will not go."""
        await running.terminate()
        await running.told(CLEANUP_SECONDS)

    # The rest --------------------------------------------------------------------------------------

    def _emit(self, event: ExecEvent) -> None:
        if self._listener is None:
            return
        try:
            self._listener(event)
        except Exception as error:  # whoever listens must not be able to lose a command
            log.error("a listener of command events failed", kind=type(event).__name__, error=repr(error))

    def _in_background(self, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _unknown(tool: str, number: int) -> ToolError:
    return ToolError(f"{tool} failed: Unknown process id {number}")
