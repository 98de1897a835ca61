"""Running `codex exec --json` from a program: its records as they come, and whether it succeeded.

What goes wrong for others is taken care of: stdin is written and closed (or the program waits for it in
silence), stdout is read to its end in lines of any length, stderr is read beside it, the whole process group
gets the signals, and a resumed thread is compared with the one that was asked for.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from msgspec import Struct

from .lines import LineSplitter
from .model import Record, ThreadStarted
from .reader import parse_line
from .reducer import CUT_OFF, Keep, Reducer

__all__ = ["Producer", "ProducerError", "Verdict", "codex_exec"]

BLOCK_BYTES: Final = 64 * 1024
STDERR_TAIL_BYTES: Final = 64 * 1024
"""How much of stderr is kept, to explain an end without events."""

INTERRUPT_SECONDS: Final = 10.0
TERMINATE_SECONDS: Final = 5.0
"""How long a producer gets after SIGINT, and after SIGTERM, before it is killed."""

_LOG_LINE: Final = re.compile(r"(?:\x1b\[[0-9;]*m)*\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


class ProducerError(RuntimeError):
    """The producer does something else than it was asked for."""


class Verdict(Struct, frozen=True, kw_only=True):
    """How a run ended. Success needs both: a completed turn and an exit code of 0."""

    success: bool
    outcome: str
    """`completed`, `failed`, `incomplete` or `none`."""
    exit_code: int
    """Negative after death by that signal."""
    thread_id: str | None
    answer: str | None
    reason: str | None
    """Why not, if it was no success."""


def codex_exec(
    prompt: str,
    *,
    program: Sequence[str] = ("codex",),
    options: Sequence[str] = ("--skip-git-repo-check",),
    resume: str | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Producer:
    """A run of the reference. `resume` goes on with a thread, by its id.

    Use it as a context, iterate over it, and then ask for its verdict.
    """
    thread = [] if resume is None else ["resume", resume]
    return Producer([*program, "exec", "--json", *options, *thread, "-"], prompt, resume, cwd, env)


class Producer:
    """A program that writes the event stream. Leaving its context stops it if it still runs."""

    def __init__(
        self,
        argv: Sequence[str],
        prompt: str = "",
        thread_id: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._argv = list(argv)
        self._prompt = prompt
        self._expected = thread_id
        self._cwd = cwd
        self._env = env
        self._process: asyncio.subprocess.Process | None = None
        self._beside: asyncio.Future[tuple[None, None]] | None = None
        self._stderr = bytearray()
        self.reducer = Reducer(Keep.OUTLINE)
        """The state so far."""

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._cwd,
            env=None if self._env is None else dict(self._env),
            start_new_session=True,
        )
        self._beside = asyncio.gather(self._feed(self._process), self._listen(self._process))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop(0.0 if kind is not None else INTERRUPT_SECONDS)

    async def __aiter__(self) -> AsyncIterator[Record]:
        process = self._running()
        assert process.stdout is not None  # noqa: S101  # it was asked for above
        splitter = LineSplitter()
        while block := await process.stdout.read(BLOCK_BYTES):
            for line in splitter.feed(block):
                yield self._take(parse_line(line))
        for line in splitter.end():
            yield self._take(parse_line(line))

    async def verdict(self) -> Verdict:
        """How it ended, once everything was read."""
        process = self._running()
        code = await process.wait()
        if self._beside is not None:
            await self._beside
        run = self.reducer.run
        success = run.outcome == "completed" and code == 0
        return Verdict(
            success=success,
            outcome=run.outcome,
            exit_code=code,
            thread_id=run.thread_id,
            answer=run.answer,
            reason=None if success else self._reason(code),
        )

    async def stop(self, patience: float = INTERRUPT_SECONDS) -> None:
        """Ask it to stop, then tell it, then make it: the program and whatever still writes for it."""
        process = self._running()
        over = process.returncode is not None and process.stdout is not None and process.stdout.at_eof()
        steps = ((signal.SIGINT, patience), (signal.SIGTERM, min(patience, TERMINATE_SECONDS)))
        for number, seconds in steps:
            if not over and seconds > 0:
                self._signal(process, number)
                try:
                    async with asyncio.timeout(seconds):
                        await self._drained(process)
                    over = True
                except TimeoutError:
                    pass
        if not over:
            self._signal(process, signal.SIGKILL)
            await process.wait()
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.wait([self._beside])

    # How -------------------------------------------------------------------------------------------

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise ProducerError("use the producer as a context: `async with codex_exec(…) as run`")
        return self._process

    def _take(self, record: Record) -> Record:
        self.reducer.feed(record)
        if isinstance(record, ThreadStarted) and self._expected not in (None, record.thread_id):
            raise ProducerError(
                f"asked for thread {self._expected}, the producer started {record.thread_id} instead"
            )
        return record

    async def _drained(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the end, and throw away what nobody reads, which would keep it from coming."""
        if process.stdout is not None:
            while await process.stdout.read(BLOCK_BYTES):
                pass
        await process.wait()

    async def _feed(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is None:
            return
        try:
            process.stdin.write(self._prompt.encode("utf-8", "replace"))
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it does not want it; its exit code says more
        process.stdin.close()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        if process.stderr is None:
            return
        while block := await process.stderr.read(BLOCK_BYTES):
            self._stderr += block
            del self._stderr[:-STDERR_TAIL_BYTES]

    def _signal(self, process: asyncio.subprocess.Process, number: int) -> None:
        """The launcher of the reference is a script with the real program as its child: signal both."""
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass  # it has just ended

    def _reason(self, code: int) -> str:
        run = self.reducer.run
        if run.error is not None:
            return run.error
        if run.outcome == "incomplete":
            return CUT_OFF
        lines = self._stderr.decode("utf-8", "replace").split("\n")
        said = [line.strip() for line in lines if line.strip() and not _LOG_LINE.match(line)]
        return said[-1] if said else f"exit code {code}"
