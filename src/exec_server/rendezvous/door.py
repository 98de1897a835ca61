"""The front door of a node: WebSockets go to picows and the router, everything else to aiohttp.

It reads one request head. An upgrade is checked against its ticket while nothing more is read; any other
request is handed on with every byte received, and so is the connection.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

import msgspec

from .. import log
from ..transport.lobby import Guest
from ..transport.reading import read_on
from .audit import Visit
from .service import Refused, Rendezvous
from .sockets import Carrier, _Socket
from .store import StoreUnavailable
from .tickets import EnvironmentTicket
from .turns import make_websocket

__all__ = ["Door"]

MAX_HEAD_BYTES: Final = 16 * 1024
HEAD_SECONDS: Final = 10.0
"""For a peer to send its request."""

CALL_SECONDS: Final = 60.0
"""For a call of the registry from its head to the end of its answer."""

_UPGRADE_HEAD: Final = (
    b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: %b\r\n\r\n"
)
_WS_PATH: Final = re.compile(r"/ws/environment/([^/?]+)")


class Door(asyncio.Protocol):
    """One accepted connection, until somebody else has it."""

    def __init__(
        self,
        service: Rendezvous,
        carrier: Carrier,
        make_http: Callable[[], asyncio.BaseProtocol],
        guest: Guest,
    ) -> None:
        self._guest = guest
        self._http: Any = None
        """Who answers, where it is not a WebSocket."""
        self._service = service
        self._carrier = carrier
        self._make_http = make_http
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a listening socket gives transports
        self._timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guest.leave()
        self._transport = None
        self._stop_timer()
        if self._task is not None:
            self._task.cancel()
        if self._http is not None:
            self._http.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return None if self._http is None else self._http.eof_received()

    def pause_writing(self) -> None:
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._http is not None:
            self._http.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._http is not None:
            self._http.data_received(data)
            return
        self._received += data
        if self._task is not None or self._transport is None:
            return
        end = self._received.find(b"\r\n\r\n")
        if end < 0 and len(self._received) <= MAX_HEAD_BYTES:
            return
        self._stop_timer()
        self._guest.speak()
        upgrade = None if end < 0 else _read_upgrade(bytes(self._received[:end]))
        if upgrade is None:
            self._hand_on(self._transport)
        else:
            self._transport.pause_reading()
            self._task = asyncio.ensure_future(self._upgrade(self._transport, end + 4, *upgrade))

    def _hand_on(self, transport: asyncio.Transport) -> None:
        """It stays a guest until it has ended, so what comes for it goes through here."""
        self._timer = asyncio.get_running_loop().call_later(CALL_SECONDS, self._too_slow)
        self._http = self._make_http()
        self._http.connection_made(transport)
        self._http.data_received(bytes(self._received))
        self._received.clear()

    async def _upgrade(
        self, transport: asyncio.Transport, end: int, environment: str, query: dict[str, str], key: bytes
    ) -> None:
        try:
            ticket = await self._service.admit(environment, query)
        except Refused as refused:
            self._refuse(transport, refused)
            return
        except StoreUnavailable as error:
            self._refuse(transport, self._service.unavailable(error))
            return
        except Exception as error:
            log.error("an upgrade failed in an unforeseen way", exc_info=error)
            self._refuse(transport, Refused(500, "internal_error", "something went wrong here"))
            return
        if self._transport is None:
            return
        socket: _Socket
        if isinstance(ticket, EnvironmentTicket):
            socket = self._carrier.environment(ticket)
        else:
            socket = self._carrier.harness(ticket)
        socket.until = ticket.until
        socket.visit = Visit(self._service.journal, ticket, _address(transport))
        self._transport = None
        self._guest.leave()
        make_websocket(
            transport, socket.link, (_UPGRADE_HEAD % key) + bytes(self._received[end:]), socket.opened
        )
        read_on(transport)

    def _refuse(self, transport: asyncio.Transport, refused: Refused) -> None:
        self._service.journal.refused("upgrade", refused.code, str(refused), _address(transport))
        body = msgspec.json.encode({"error": {"code": refused.code, "message": str(refused)}})
        lines = (
            f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            "\r\n",
        )
        transport.write("\r\n".join(lines).encode() + body)
        transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _address(transport: asyncio.Transport) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""


def _read_upgrade(head: bytes) -> tuple[str, dict[str, str], bytes] | None:
    """Environment, query and key of a WebSocket upgrade; None for any other request."""
    request, *lines = head.split(b"\r\n")
    words = request.split(b" ")
    if len(words) != 3 or words[0] != b"GET" or words[2] != b"HTTP/1.1":
        return None
    path, _, query = words[1].decode("latin-1").partition("?")
    match = _WS_PATH.fullmatch(path)
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    key = headers.get(b"sec-websocket-key", b"")
    if (
        match is None
        or headers.get(b"upgrade", b"").lower() != b"websocket"
        or b"upgrade" not in headers.get(b"connection", b"").lower()
        or headers.get(b"sec-websocket-version") != b"13"
        or not re.fullmatch(rb"[A-Za-z0-9+/]{22}==", key)
    ):
        return None
    return unquote(match[1]), dict(parse_qsl(query)), key
