"""The load client over stdio: the server is a child, its pipes are the connection."""

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Sequence
from typing import IO

from .client import Client

__all__ = ["StdioClient"]

PIPE_SIZE = 1 << 20
"""Both pipes are enlarged to this, for both servers alike, so that the pipe is not what is measured."""


class StdioClient(Client):
    """Starts the command in the constructor; closing stdin ends it."""

    def __init__(self, argv: Sequence[str], stderr: IO[bytes], environment: dict[str, str]) -> None:
        super().__init__()
        self.process = subprocess.Popen(
            [*argv, "--listen", "stdio"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            bufsize=0,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to, self._from = self.process.stdin.fileno(), self.process.stdout.fileno()
        for descriptor in (self._to, self._from):
            with contextlib.suppress(OSError):  # the user's pipe budget may be spent
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_SIZE)

    def _read_into(self, room: memoryview) -> int:
        return os.readv(self._from, (room,))

    def _span(self, start: int, end: int) -> tuple[int, int, int] | None:
        last = self.buffer.find(b"\n", start, end)
        return None if last < 0 else (start, last, last + 1)

    def frame(self, message: bytes) -> bytes:
        return message + b"\n"

    def send_raw(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._to, data) :]

    def close(self) -> None:
        """Hang up and wait until the server is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
