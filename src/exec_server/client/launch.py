"""A server of our own: started as a child, spoken to over its stdin and stdout, ended with us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from .. import log
from ..limits import Limits
from ..transport.channel import Receiver
from ..transport.stdio import StdioChannel
from .errors import ExecServerError

__all__ = ["ExecServerLaunchCommand", "Launched", "launch"]

STOP_SECONDS: Final = 2.0
"""What a server has to end after its stdin was closed, and again after SIGTERM, before it is killed."""

STATUS_SECONDS: Final = 1.0
"""How long a server that has closed its output may take to end, so that its status can be told."""

POLL_SECONDS: Final = 0.02
"""Between two looks at a server, where the kernel cannot tell us about its end."""

READ_BYTES: Final = 64 * 1024
"""As much as a pipe holds."""

LINE_BYTES: Final = 8 * 1024
"""What is kept of a line that does not end; as much as a line of any log."""

LAST_LINES: Final = 5
LAST_BYTES: Final = 300
"""How much of what a server complained about is told when it did not start: lines, and bytes of each."""


_stopping: Final[set[asyncio.Task[None]]] = set()
"""Servers that are being stopped behind everybody's back; a task nobody holds may vanish."""


class ExecServerLaunchCommand(Struct, frozen=True, kw_only=True):
    """How to start a server that speaks on stdio. Its stderr goes to our debug log, line by line."""

    program: str
    args: list[str] = []
    env: Mapping[str, str] | None = None
    cwd: str | None = None


class Launched:
    """A server that runs."""

    def __init__(
        self, server: subprocess.Popen[bytes], read_fd: int, write_fd: int, complaints: Complaints
    ) -> None:
        self._server = server
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._complaints = complaints

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def last_words(self) -> str:
        """The last lines of its stderr, as one; all of them only after `stop`."""
        return self._complaints.last_words

    async def dial(self, receiver: Receiver) -> StdioChannel:
        """The channel to it; there is only one."""
        channel = StdioChannel(asyncio.get_running_loop(), self._read_fd, self._write_fd, Limits())
        channel.attach(receiver)
        return channel

    async def status(self) -> int | None:
        """Its exit status, if it has ended or is just about to."""
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                await self._ended()
        except TimeoutError:
            pass
        return self._server.poll()

    def blamed(self, error: BaseException, status: int | None = None) -> str:
        """An error, how the server ended, and its last words."""
        self._complaints.take()
        parts = [str(error)]
        if status is not None:
            parts.append(
                f"it ended with status {status}" if status >= 0 else f"it was killed by signal {-status}"
            )
        if self.last_words:
            parts.append(f"the last it said: {self.last_words}")
        return "; ".join(parts)

    def stop_behind(self) -> None:
        """The same as `stop`, for nobody to wait for. If the loop ends before, so does the server."""
        task = asyncio.ensure_future(self._stop_or_kill())
        _stopping.add(task)
        task.add_done_callback(_stopping.discard)

    async def _stop_or_kill(self) -> None:
        try:
            await self.stop()
        except asyncio.CancelledError:
            self._signal(signal.SIGKILL)
            self._server.wait()
            raise

    async def stop(self) -> None:
        """It ends when its stdin does; if not, its whole group is told to, and then killed."""
        try:
            await self._stop()
        finally:
            self._complaints.close()

    async def _stop(self) -> None:
        for step in (None, signal.SIGTERM, signal.SIGKILL):
            if step is not None:
                self._signal(step)
            try:
                async with asyncio.timeout(STOP_SECONDS if step is not signal.SIGKILL else None):
                    await self._ended()
            except TimeoutError:
                continue
            return

    async def _ended(self) -> None:
        """Wait without a thread: at the end of a program there are none to be had."""
        while self._server.poll() is None:
            watched = os.pidfd_open(self._server.pid) if hasattr(os, "pidfd_open") else None
            if watched is None:
                await asyncio.sleep(POLL_SECONDS)
                continue
            loop = asyncio.get_running_loop()
            over = asyncio.Event()
            loop.add_reader(watched, over.set)
            try:
                await over.wait()
            finally:
                loop.remove_reader(watched)
                os.close(watched)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._server.pid, number)
        except OSError:
            self._server.send_signal(number)  # it has left its group, or the group is gone


class Complaints:
    """The stderr of a server: into the debug log, and its end is remembered."""

    def __init__(self, descriptor: int, program: str, pid: int) -> None:
        self._descriptor: int | None = descriptor
        self._program = program
        self._pid = pid
        self._rest = b""
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._read)

    @property
    def last_words(self) -> str:
        return " | ".join(self._last)

    def close(self) -> None:
        """Take what is there, and no more: what it has left running may keep the other end for ever."""
        self._read()
        self._end()

    def take(self) -> None:
        """Take what is there, also of a line that has no end yet."""
        self._read()
        rest, self._rest = self._rest, b""
        self._take(rest)

    def _read(self) -> None:
        if self._descriptor is None:
            return
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end()
            return
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        while len(rest) > LINE_BYTES:
            self._take(rest[:LINE_BYTES])
            rest = rest[LINE_BYTES:]
        self._rest = rest

    def _take(self, line: bytes) -> None:
        line = line.rstrip()
        if line:
            log.debug("a server said", program=self._program, pid=self._pid, line=_shown(line))
            self._last.append(_shown(line[:LAST_BYTES]))

    def _end(self) -> None:
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
            self._take(self._rest)
            self._rest = b""


def _shown(line: bytes) -> str:
    """What a server says must not steer the terminal it is shown on."""
    text = line.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def launch(command: ExecServerLaunchCommand) -> Launched:
    """Start the server. There has to be a running loop, which listens to its stderr."""
    theirs_in, our_out = os.pipe()
    our_in, theirs_out = os.pipe()
    complaints, theirs_err = os.pipe()
    try:
        server = subprocess.Popen(
            [command.program, *command.args],
            stdin=theirs_in,
            stdout=theirs_out,
            stderr=theirs_err,
            env=None if command.env is None else dict(command.env),
            cwd=command.cwd,
            # Ctrl-C in our terminal is for us: what we do about it may well need the server.
            process_group=0,
        )
    except (OSError, ValueError) as error:
        os.close(our_in)
        os.close(our_out)
        os.close(complaints)
        if command.cwd is not None and getattr(error, "filename", None) == command.cwd:
            raise ExecServerError(f"failed to spawn exec-server: its directory (cwd): {error}") from error
        raise ExecServerError(f"failed to spawn exec-server: {error}") from error
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
        os.close(theirs_err)
    return Launched(server, our_in, our_out, Complaints(complaints, command.program, server.pid))
