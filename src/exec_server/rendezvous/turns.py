"""How much of one WebSocket is read at once, so that the others have their turns.

A read takes whatever the kernel has, and that may be a million empty messages, which all arrive before
anybody can say stop. So a socket is read in pieces: small ones while what it sends is small.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from picows import picows as compiled

from ..relay.frame import MAX_FRAME_BYTES
from ..relay.link import SURPLUS_FRAMES, TURN_FRAMES, WebSocketLink
from ..transport.websocket import hand_over

__all__ = ["make_websocket"]

_WSProtocol: Final[Any] = vars(compiled)["WSProtocol"]
"""The protocol half of picows: exported, but missing in its type stub."""

READ_BUFFER_BYTES: Final = 16 * 1024
"""Of a socket that is idle, as most are; it grows with what arrives."""

LEAST_BYTES: Final = 4 * 1024
MOST_BYTES: Final = 4 * 1024 * 1024
"""Of one read. Large frames in small pieces cost half as much again."""

WARY_BYTES: Final = 512 * 1024
"""The most from a socket that has once sent far too many frames at once."""

_HEADER_BYTES: Final = 14

_get_buffer: Final = _WSProtocol.get_buffer


class _Protocol(_WSProtocol):  # type: ignore[misc]  # missing in the stub
    """Reads less at once from a peer that sends many frames at once."""

    link: WebSocketLink
    _most = READ_BUFFER_BYTES
    _bound = MOST_BYTES
    _seen = 0

    def get_buffer(self, hint: int) -> memoryview:
        arrived = self.link.taken - self._seen
        self._seen += arrived
        if arrived > TURN_FRAMES:
            self._most = max(LEAST_BYTES, self._most // 4)
            if arrived > SURPLUS_FRAMES:
                self._bound = WARY_BYTES
        elif self._most < self._bound:
            self._most *= 2
        view: memoryview = _get_buffer(self, hint)[: self._most]
        return view


def make_websocket(
    transport: asyncio.Transport, link: WebSocketLink, request: bytes, opened: Callable[[], None]
) -> None:
    """Give the connection to picows, with a request head it likes and what came behind the real one."""
    protocol = _Protocol(
        None,
        "/",
        False,
        lambda *_: link,
        _QUIET,
        True,
        None,
        False,
        10,
        10,
        compiled.WSAutoPingStrategy.PING_WHEN_IDLE,
        False,  # pongs are the link's, which has a bound for them
        MAX_FRAME_BYTES + _HEADER_BYTES,
        {},
        READ_BUFFER_BYTES,
    )
    protocol.link = link
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    opened()
    hand_over(request, protocol)


_QUIET: Final = logging.getLogger("exec_server.rendezvous.turns")
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False
