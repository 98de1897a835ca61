"""The front door of a node: WebSockets go to picows and the router, everything else to aiohttp.

It reads one request head. An upgrade is checked against its ticket while nothing more is read; any other
request is handed on with every byte received, and so is the connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

import msgspec
from picows import picows as compiled

from .. import log
from ..relay.frame import MAX_FRAME_BYTES
from ..relay.link import WebSocketLink
from .router import POLICY, Router
from .routes import Harness
from .service import Refused, Rendezvous
from .store import StoreUnavailable
from .tickets import EnvironmentTicket, HarnessTicket

__all__ = ["Carrier", "Door", "LocalCarrier"]

_WSProtocol: Final[Any] = vars(compiled)["WSProtocol"]
"""The protocol half of picows: exported, but missing in its type stub."""

MAX_HEAD_BYTES: Final = 16 * 1024
HEAD_SECONDS: Final = 10.0
"""For a peer to send its request."""

QUEUE_BYTES: Final = 8 * 1024 * 1024
"""Unsent bytes of a socket at which frames are dropped."""

FULL_BYTES: Final = 4 * 1024 * 1024
"""Unsent bytes of a socket at which whoever fills it is no longer read."""

READ_BUFFER_BYTES: Final = 16 * 1024
"""Of a socket that is idle, as most are; it grows with what arrives."""

IDLE_SECONDS: Final = 10.0
"""How long a harness's socket may be open without a stream."""

UNSUPPORTED: Final = 1003

ROUTER_HOLD, CLUSTER_HOLD, HOME_HOLD = 1, 2, 4
"""Why a socket is not read: its other end is full, or the way to other nodes, or its other end on one."""

_UPGRADE_HEAD: Final = (
    b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: %b\r\n\r\n"
)
_HEADER_BYTES: Final = 14
_WS_PATH: Final = re.compile(r"/ws/environment/([^/?]+)")


class Carrier(ABC):
    """Where the frames of sockets go: the router of this node, or the one that has the environment."""

    def __init__(self) -> None:
        self.sockets: set[_Socket] = set()
        """All that are open."""

    @abstractmethod
    def environment(self, ticket: EnvironmentTicket) -> EnvironmentSocket: ...

    @abstractmethod
    def harness(self, ticket: HarnessTicket) -> _Socket: ...


class _Socket(ABC):
    """A WebSocket of this node as the router sees it."""

    caller = ""
    """The id of the API key that opened it, or that registered what it serves."""

    def __init__(self, carrier: Carrier, full: int = FULL_BYTES, most: int = QUEUE_BYTES) -> None:
        """From `full` unsent bytes on whoever fills it has to wait, and from `most` on frames are dropped."""
        self.link = WebSocketLink(self, full)
        self._most = most
        self._open = carrier.sockets
        self._open.add(self)
        self._idle: asyncio.TimerHandle | None = None
        self._holds = 0

    def send(self, frame: bytes | memoryview) -> bool:
        if self.link.unsent() + len(frame) > self._most:
            return False
        self.link.send(frame)
        return True

    def is_full(self) -> bool:
        return self.link.full

    def pause(self) -> None:
        self.hold(ROUTER_HOLD)

    def resume(self) -> None:
        self.release(ROUTER_HOLD)

    def hold(self, reason: int) -> None:
        """Read nothing from it until every reason is gone."""
        if not self._holds:
            self.link.pause_reading()
        self._holds |= reason

    def release(self, reason: int) -> None:
        if self._holds & reason:
            self._holds &= ~reason
            if not self._holds:
                self.link.resume_reading()

    @abstractmethod
    def opened(self) -> None: ...

    def watch_idle(self) -> None:
        """Look again and again whether there is a stream; who has none has no business here."""
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._look)

    def _look(self) -> None:
        if self.has_stream():
            self.watch_idle()
        else:
            self.close(POLICY, "no stream on this connection")

    def has_stream(self) -> bool:
        return True

    def stop_watching(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def close(self, code: int, reason: str) -> None:
        self._open.discard(self)
        self.stop_watching()
        self.link.close(code, reason)

    @abstractmethod
    def revoke(self) -> None:
        """The key behind it is revoked: it ends now, with all that is on it."""

    @abstractmethod
    def frame_arrived(self, message: bytes | memoryview) -> None: ...

    @abstractmethod
    def text_arrived(self) -> None: ...

    @abstractmethod
    def link_drained(self) -> None: ...

    def link_closed(self, reason: str) -> None:
        log.info("a socket is gone", reason=reason)
        self._open.discard(self)
        self.stop_watching()


class EnvironmentSocket(_Socket):
    """An environment's WebSocket."""

    def __init__(
        self,
        carrier: Carrier,
        router: Router,
        ticket: EnvironmentTicket,
        full: int = FULL_BYTES,
        most: int = QUEUE_BYTES,
    ) -> None:
        super().__init__(carrier, full, most)
        self._router = router
        self.registration_id = ticket.registration_id
        self.caller = ticket.caller

    def opened(self) -> None:
        self._router.environment_opened(self.registration_id, self)

    def frame_arrived(self, message: bytes | memoryview) -> None:
        self._router.environment_frame(self.registration_id, self, message)

    def revoke(self) -> None:
        self._router.revoke(self.registration_id)

    def text_arrived(self) -> None:
        """Ignored, as environments do with text."""

    def link_drained(self) -> None:
        self._router.environment_drained(self.registration_id)

    def link_closed(self, reason: str) -> None:
        super().link_closed(reason)
        self._router.environment_closed(self.registration_id, self)


class HarnessSocket(_Socket):
    """A harness's WebSocket, for an environment on this node."""

    def __init__(self, carrier: Carrier, router: Router, ticket: HarnessTicket) -> None:
        super().__init__(carrier)
        self._router = router
        self.caller = ticket.caller
        self.harness: Harness = router.harness_opened(
            ticket.registration_id, ticket.key_digest, self, ticket.caller
        )

    def opened(self) -> None:
        """Its first frame says what it is."""
        self.watch_idle()

    def has_stream(self) -> bool:
        return self.harness.route is not None

    def frame_arrived(self, message: bytes | memoryview) -> None:
        self._router.harness_frame(self.harness, message)

    def revoke(self) -> None:
        self._router.harness_revoked(self.harness)

    def text_arrived(self) -> None:
        self.close(UNSUPPORTED, "frames are binary")

    def link_drained(self) -> None:
        self._router.harness_drained(self.harness)

    def close(self, code: int, reason: str) -> None:
        super().close(code, reason)
        self._router.harness_closed(self.harness)

    def link_closed(self, reason: str) -> None:
        super().link_closed(reason)
        self._router.harness_closed(self.harness)


class LocalCarrier(Carrier):
    """All sockets are here."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self._router = router

    def environment(self, ticket: EnvironmentTicket) -> EnvironmentSocket:
        return EnvironmentSocket(self, self._router, ticket)

    def harness(self, ticket: HarnessTicket) -> HarnessSocket:
        return HarnessSocket(self, self._router, ticket)


class Door(asyncio.Protocol):
    """One accepted connection, until somebody else has it."""

    def __init__(
        self, service: Rendezvous, carrier: Carrier, make_http: Callable[[], asyncio.BaseProtocol]
    ) -> None:
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
        del exc
        self._transport = None
        self._stop_timer()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._task is not None or self._transport is None:
            return
        end = self._received.find(b"\r\n\r\n")
        if end < 0 and len(self._received) <= MAX_HEAD_BYTES:
            return
        self._stop_timer()
        upgrade = None if end < 0 else _read_upgrade(bytes(self._received[:end]))
        if upgrade is None:
            self._hand_on(self._transport)
        else:
            self._transport.pause_reading()
            self._task = asyncio.ensure_future(self._upgrade(self._transport, end + 4, *upgrade))

    def _hand_on(self, transport: asyncio.Transport) -> None:
        protocol: Any = self._make_http()
        self._transport = None
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(bytes(self._received))
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
        self._transport = None
        _make_websocket(
            transport, socket.link, (_UPGRADE_HEAD % key) + bytes(self._received[end:]), socket.opened
        )
        transport.resume_reading()

    def _refuse(self, transport: asyncio.Transport, refused: Refused) -> None:
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


def _make_websocket(
    transport: asyncio.Transport, link: WebSocketLink, request: bytes, opened: Callable[[], None]
) -> None:
    """Give the connection to picows, with a request head it likes and what came behind the real one."""
    protocol = _WSProtocol(
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
        True,
        MAX_FRAME_BYTES + _HEADER_BYTES,
        {},
        READ_BUFFER_BYTES,
    )
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    opened()
    view = memoryview(request)
    while view:
        buffer = protocol.get_buffer(len(view))
        size = min(len(buffer), len(view))
        buffer[:size] = view[:size]
        protocol.buffer_updated(size)
        view = view[size:]


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


_QUIET: Final = logging.getLogger("exec_server.rendezvous.door")
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False
