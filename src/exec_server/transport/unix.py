"""WebSocket over a unix socket: the same door and the same frames, guarded by file permissions."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from typing import Any

import aiofastnet

from ..limits import Limits
from .channel import Receiver
from .door import Accept, Door, Route
from .listener import Listener
from .websocket import WebSocketChannel, open_channel, without_tcp_options

__all__ = ["connect", "listen"]


def listen(path: str, route: Route, accept: Accept, limits: Limits) -> Listener:
    """Listen on a socket that only this account can open. A stale socket file is replaced."""
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        sock.bind(path)
    except OSError as error:
        sock.close()
        # The system names neither the path nor, for one that is too long, an error number.
        raise OSError(error.errno or errno.ENAMETOOLONG, error.strerror or str(error), path) from None
    finally:
        os.umask(before)
    # aiofastnet's transports copy what they cannot send at once, which picows relies on.
    return Listener(sock, lambda: Door(route, accept, limits, f"unix:{path}"), None, path)


async def connect(
    path: str, receiver: Receiver, limits: Limits, *, headers: dict[str, str], timeout: float
) -> WebSocketChannel:
    """Open the socket at `path` and deliver to the receiver."""

    async def open_transport(factory: Any) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await aiofastnet.create_unix_connection(loop, asyncio.Protocol, path)
        protocol = factory()
        transport.set_protocol(protocol)
        protocol.connection_made(without_tcp_options(transport))

    return await open_channel(
        f"unix://{path}", "localhost", "/", open_transport, receiver, limits, headers, timeout
    )


def _remove_stale(path: str) -> None:
    """A socket file that nobody listens on was left by a server that was killed."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except OSError:
        return
    finally:
        probe.close()
