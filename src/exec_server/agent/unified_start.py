"""Starting one command: until it runs, or the model can be told why it does not."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import secrets
from collections.abc import Awaitable, Callable
from typing import Final, Literal
from uuid import uuid4

from .. import log
from ..client.errors import ExecServerError, ServerRejected
from ..services import Environment, Process
from .exec import DirectExec, ExecCommand, ExecRequest, PreparedExec, ToolError, start
from .unified_events import ExecCommandBegin, ExecCommandEnd, Listener
from .unified_process import LOST_EXIT, TRAILING_SECONDS, UnifiedProcess
from .unified_text import ToolOutput

__all__ = ["SandboxDenied", "Starter"]

EARLY_EXIT_SECONDS: Final = 0.15
"""How long a command is watched before it is announced: a sandbox mostly refuses at once."""


class SandboxDenied(ToolError):
    """The sandbox stopped a command before it got anywhere. The model is told as of any other command."""

    def __init__(self, result: ToolOutput) -> None:
        super().__init__(result.text())
        self.result = result


class Starter:
    """Starts commands, and tells of them. What nobody waits for is given to `in_background`."""

    def __init__(
        self, capacity: int, emit: Listener, in_background: Callable[[Awaitable[object]], None]
    ) -> None:
        self._capacity = capacity
        self._emit = emit
        self._in_background = in_background

    async def start(
        self, environment: Environment, request: ExecRequest, call: ExecCommand, call_id: str, number: int
    ) -> UnifiedProcess:
        """A command that was announced; the text of a ToolError is for the model."""
        missing = _missing_program(environment, request)
        if missing is not None:
            raise self._not_started(request, call_id, number, missing) from None
        starting = asyncio.ensure_future(start(environment, request, f"{number}-{uuid4()}"))
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._in_background(_end_when_started(starting))
            raise
        except (ExecServerError, OSError, ValueError, TypeError) as error:
            cause = error.message if isinstance(error, ServerRejected) else str(error)
            raise self._not_started(request, call_id, number, cause) from None
        running = UnifiedProcess(
            number,
            call_id,
            process,
            request,
            remote=environment.is_remote,
            capacity=self._capacity,
            emit=self._emit,
        )
        try:
            await running.wait_exit(EARLY_EXIT_SECONDS)
            if await _denied(running):
                await running.wait_output_over(TRAILING_SECONDS)
                raise SandboxDenied(
                    ToolOutput(
                        wall_time=0.0,
                        buffer=running.pending.drain(),
                        chunk_id=secrets.token_hex(3),
                        exit_code=running.exit_code,
                        max_output_tokens=call.max_output_tokens,
                    )
                )
        except BaseException:
            running.abandon()
            self._in_background(running.terminate())
            raise
        running.announce()
        self._in_background(running.finished)
        return running

    def _not_started(self, request: DirectExec, call_id: str, number: int, cause: str) -> ToolError:
        text = f"Failed to create unified exec process: {cause}"
        self.never_ran(request, call_id, number, "failed", text)
        return ToolError(f"exec_command failed: {text}")

    def never_ran(
        self,
        request: DirectExec,
        call_id: str,
        number: int,
        status: Literal["declined", "failed"],
        text: str,
    ) -> None:
        """Tell the beginning and the end of a command that never ran."""
        self._emit(
            ExecCommandBegin(call_id=call_id, process_id=number, command=request.argv, cwd=request.cwd)
        )
        self._emit(
            ExecCommandEnd(
                call_id=call_id,
                process_id=number,
                command=request.argv,
                cwd=request.cwd,
                stdout="",
                stderr=text,
                aggregated_output=text,
                exit_code=None if status == "declined" else LOST_EXIT,
                duration=0.0,
                status=status,
            )
        )


async def _denied(running: UnifiedProcess) -> bool:
    if running.exit is None:
        return False
    if running.exit.sandbox_denied is None:
        try:
            return (await running.process.read(after_seq=running.exit.seq)).sandbox_denied
        except (ExecServerError, OSError):
            return False  # it does not say; its exit code and its output will
    return running.exit.sandbox_denied


def _missing_program(environment: Environment, request: ExecRequest) -> str | None:
    """Why there is no such program on this machine. A sandbox would start all the same, and say so itself."""
    if environment.is_remote or not isinstance(request, PreparedExec) or request.sandbox is None:
        return None
    program = request.argv[0]
    if not posixpath.isabs(program) or os.access(program, os.X_OK):
        return None
    return os.strerror(errno.EACCES if os.path.exists(program) else errno.ENOENT) + f": {program}"


async def _end_when_started(starting: asyncio.Future[Process]) -> None:
    """Nobody waits for it any more, but the machine may have started it."""
    try:
        await (await starting).terminate()
    except (ExecServerError, OSError, ValueError, TypeError) as error:
        log.debug("a command whose call was cancelled did not start", error=str(error))
