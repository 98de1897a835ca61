"""Accepting connections, also when there are no descriptors left to accept them with."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import aiofastnet

from .. import log
from .lobby import Guest, Lobby

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
        make_protocol: Callable[..., asyncio.Protocol],
        ssl: Any,
        path: str | None = None,
        handshake_timeout: float | None = None,
        lobby: Lobby | None = None,
    ) -> None:
        """With a lobby, `make_protocol` is given a guest of it, which has to leave when it is none."""
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._make_protocol = make_protocol
        self._ssl = ssl
        self._opening: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._quiet_until = 0.0
        self._silent_until = 0.0
        self._handshake_timeout = handshake_timeout if ssl is not None else None
        self._lobby = lobby
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
                connection, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                self._rest(error)
                return
            guest = None
            if self._lobby is not None:
                guest = self._enter(self._lobby, _origin(str(address[0])))
            task = self._loop.create_task(self._open(connection, guest))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
            if guest is not None:
                guest.cut = partial(_cancel, task, connection)

    def _enter(self, lobby: Lobby, address: str) -> Guest:
        before = lobby.turned_out
        guest = lobby.enter(address, lambda: None)
        now = self._loop.time()
        if lobby.turned_out > before and now >= self._silent_until:
            self._silent_until = now + COMPLAINT_INTERVAL
            log.warning("too many connections show no key, so the oldest of them are cut", latest=address)
        return guest

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

    async def _open(self, connection: socket.socket, guest: Guest | None) -> None:
        make = self._make_protocol
        try:
            transport, _ = await aiofastnet.connect_accepted_socket(
                self._loop,
                make if guest is None else lambda: make(guest),
                connection,
                ssl=self._ssl,
                ssl_handshake_timeout=self._handshake_timeout,
            )
            if guest is not None:
                guest.cut = transport.abort
        except (OSError, asyncio.CancelledError) as error:
            connection.close()
            if guest is not None:
                guest.leave()
                if isinstance(error, asyncio.CancelledError):
                    return  # it was turned out, and there may be thousands of those
            log.info("a connection failed before its first request", reason=str(error))


def _cancel(task: asyncio.Task[None], connection: socket.socket) -> None:
    task.cancel()
    # A task that never began does not close what it was given.
    task.add_done_callback(lambda task: connection.close() if task.cancelled() else None)


def _origin(address: str) -> str:
    """Whom an address belongs to: of version 6, everybody has a whole network of them."""
    if ":" not in address or address.startswith("::ffff:"):
        return address
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8].hex()


def _identity(path: str | None) -> tuple[int, int] | None:
    """Which file is at a path: another server may have put its own there."""
    if path is None:
        return None
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
