"""A server of our own: started as a child, spoken to over its stdin and stdout, ended with us."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from ..limits import Limits
from ..transport.channel import Receiver
from ..transport.stdio import StdioChannel
from .errors import ExecServerError

__all__ = ["ExecServerLaunchCommand", "Launched", "launch"]

STOP_SECONDS: Final = 2.0
"""What a server has to end after its stdin was closed, before it is killed."""


class ExecServerLaunchCommand(Struct, frozen=True, kw_only=True):
    """How to start a server that speaks on stdio. Its stderr is ours."""

    program: str
    args: list[str] = []
    env: Mapping[str, str] | None = None
    cwd: str | None = None


class Launched:
    """A server that runs."""

    def __init__(self, server: subprocess.Popen[bytes], read_fd: int, write_fd: int) -> None:
        self._server = server
        self._read_fd = read_fd
        self._write_fd = write_fd

    @property
    def pid(self) -> int:
        return self._server.pid

    async def dial(self, receiver: Receiver) -> StdioChannel:
        """The channel to it; there is only one."""
        channel = StdioChannel(asyncio.get_running_loop(), self._read_fd, self._write_fd, Limits())
        channel.attach(receiver)
        return channel

    async def stop(self) -> None:
        """It ends when its stdin does; if not, it is killed."""
        try:
            await asyncio.to_thread(self._server.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            await asyncio.to_thread(self._server.wait)


def launch(command: ExecServerLaunchCommand) -> Launched:
    """Start the server."""
    theirs_in, our_out = os.pipe()
    our_in, theirs_out = os.pipe()
    try:
        server = subprocess.Popen(
            [command.program, *command.args],
            stdin=theirs_in,
            stdout=theirs_out,
            env=None if command.env is None else dict(command.env),
            cwd=command.cwd,
        )
    except OSError as error:
        os.close(our_in)
        os.close(our_out)
        raise ExecServerError(f"failed to spawn exec-server: {error}") from error
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
    return Launched(server, our_in, our_out)
