"""Accepting connections, also when there are no descriptors left to accept them with."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Any, Final

import aiofastnet

from .. import log

__all__ = ["Listener"]

BACKLOG: Final = 1024
ACCEPTS_PER_WAKE: Final = 64
"""Connections accepted before others get their turn."""

NO_DESCRIPTORS_DELAY: Final = 0.5
"""Seconds until the next try when descriptors or memory have run out. The peers wait in the backlog."""

COMPLAINT_INTERVAL: Final = 60.0
"""Seconds between log lines that say so."""

_OUT_OF_RESOURCES: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Listener:
    """A listening socket and the protocols of what it accepts."""

    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        ssl: Any,
        path: str | None = None,
        handshake_timeout: float | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._make_protocol = make_protocol
        self._ssl = ssl
        self._opening: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._quiet_until = 0.0
        self._handshake_timeout = handshake_timeout if ssl is not None else None
        self._path = path
        """The file of a unix socket, removed at the end."""
        self._file = _identity(path)
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._loop.add_reader(sock.fileno(), self._accept)

    @property
    def port(self) -> int:
        """The port it got."""
        return int(self._sock.getsockname()[1])

    def close(self) -> None:
        """Accept no more."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            for task in self._opening:
                task.cancel()
            if self._path is not None and self._file is not None and _identity(self._path) == self._file:
                try:
                    os.unlink(self._path)
                except OSError:
                    pass  # somebody else has taken it away

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_WAKE):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                self._rest(error)
                return
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _rest(self, error: OSError) -> None:
        now = self._loop.time()
        if now >= self._quiet_until:
            self._quiet_until = now + COMPLAINT_INTERVAL
            log.error(
                "cannot accept connections for now; raise the limit on open files (ulimit -n)",
                reason=error.strerror,
            )
        self._loop.remove_reader(self._sock.fileno())
        self._loop.call_later(NO_DESCRIPTORS_DELAY, self._resume)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await aiofastnet.connect_accepted_socket(
                self._loop,
                self._make_protocol,
                connection,
                ssl=self._ssl,
                ssl_handshake_timeout=self._handshake_timeout,
            )
        except (OSError, asyncio.CancelledError) as error:
            connection.close()
            log.info("a connection failed before its first request", reason=str(error))


def _identity(path: str | None) -> tuple[int, int] | None:
    """Which file is at a path: another server may have put its own there."""
    if path is None:
        return None
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
