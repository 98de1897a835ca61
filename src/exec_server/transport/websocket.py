"""WebSocket channels: frames by picows, reassembly and the protocol's limits here."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final
from urllib.parse import urlsplit

from picows import WSFrame, WSListener, WSMsgType, WSTransport
from picows import picows as compiled

from ..limits import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, Limits
from .address import without_password
from .channel import Receiver
from .reading import keeps_back, read_on

__all__ = ["ConnectFailed", "WebSocketChannel", "connect", "hand_over", "upgrade"]

_WSProtocol: Final[Any] = vars(compiled)["WSProtocol"]
"""The protocol half of picows: exported, but missing in its type stub."""

_TEXT: Final = WSMsgType.TEXT
_BINARY: Final = WSMsgType.BINARY
_FRAME_7: Final = struct.Struct("!BB").pack
_FRAME_16: Final = struct.Struct("!BBH").pack
_FRAME_64: Final = struct.Struct("!BBQ").pack
VECTOR_BYTES: Final = 8 * 1024
"""From this size on, copying a message costs more than handing out its parts."""

FRAGMENT_BYTES: Final = MAX_FRAME_BYTES // 2
"""A message too long for one frame goes in pieces of this size, which leaves room for head and tail."""

_READ_BUFFER_BYTES: Final = 64 * 1024
_ROOM_FOR_HEADER: Final = bytes(14)

_LARGEST_FREED_BYTES: Final = 8 * 1024 * 1024
"""More than the blocks of a transfer that are on their way at once."""

KEEPALIVE_SECONDS: Final = 30
"""Silence after which a client asks whether the server is there, and what it waits for an acknowledgement."""

logging.getLogger("picows").addHandler(logging.NullHandler())
logging.getLogger("picows").propagate = False


class ConnectFailed(OSError):
    """The WebSocket could not be opened; `status` is the HTTP answer, if there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@cache
def keep_freed_memory() -> None:
    """Make transfers use the same memory again and again.

    glibc gives freed memory back to the system as soon as it exceeds twice the largest block that was ever
    freed, and then every page of the next message is faulted in again, which costs as much as copying it
    twice. So one large block is freed once; it is never touched, and costs nothing.
    """
    bytes(_LARGEST_FREED_BYTES)


class WebSocketChannel(WSListener):
    """One WebSocket, either end."""

    carries_binary = True
    resumable = True

    def __init__(self, peer: str, limits: Limits, *, server_side: bool) -> None:
        super().__init__()
        keep_freed_memory()
        self.peer = peer
        self.parse_failure = f"failed to parse websocket JSON-RPC message from exec-server websocket {peer}"
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limits = limits
        self._server_side = server_side
        self._receiver: Receiver | None = None
        self._view_received: Callable[[memoryview], None] | None = None
        self._transport: WSTransport | None = None
        self._parts = bytearray()
        self._in_parts = False
        self._parts_type = _TEXT
        self._early: list[tuple[bool, bytes]] = []
        self._closed_reason: str | None = None
        self._reason = "the peer closed the connection"
        self._loop = asyncio.get_running_loop()
        self._outbox: list[bytes | memoryview] = []
        self._in_frame = False
        self._flush_planned = False
        self._over = False
        self._held = False
        self._full = False
        self._pong: bytes | None = None
        """The answer to the newest ping, while the peer takes nothing."""
        self._pinger: asyncio.TimerHandle | None = None
        self.pinged_at = 0.0
        """When the peer last asked whether we are there, on the loop's clock."""

    # What receivers use --------------------------------------------------------------------------

    def attach(self, receiver: Receiver) -> None:
        """Deliver to this receiver, beginning with what came before it."""
        self._receiver = receiver
        self._view_received = getattr(receiver, "view_received", None)
        early, self._early = self._early, []
        for binary, message in early:
            (receiver.binary_received if binary else receiver.message_received)(message)
        if self._closed_reason is not None:
            receiver.channel_closed(self._closed_reason)

    def send(self, message: bytes) -> None:
        if self._transport is None:
            return
        size = len(message)
        if size > MAX_FRAME_BYTES:
            self._send_fragments(b"", message, b"")
            return
        if not self._server_side:
            self._transport.send(_TEXT, message)  # masked, so it is copied anyway
            return
        if size >= VECTOR_BYTES:
            self._outbox += (_frame(0x81, size), message)
            self._flush()
            return
        self._outbox.append(_frame(0x81, size) + message)
        if not self._in_frame and not self._flush_planned:
            # What else is said in this turn of the loop goes out with it.
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    def _send_fragments(self, head: bytes, body: bytes | memoryview, tail: bytes) -> None:
        """A text message larger than the largest frame peers take, in several, without copying it."""
        view = memoryview(body)
        starts = range(0, len(view), FRAGMENT_BYTES)
        for start in starts:
            first, last = start == 0, start == starts[-1]
            part = view[start : start + FRAGMENT_BYTES]
            before, after = head if first else b"", tail if last else b""
            if self._transport is None:
                return
            if self._server_side:
                opcode = (0x01 if first else 0x00) | (0x80 if last else 0x00)
                self._outbox += (_frame(opcode, len(before) + len(part) + len(after)) + before, part, after)
                self._flush()
            else:
                kind = _TEXT if first else WSMsgType.CONTINUATION
                self._transport.send(kind, b"".join((before, part, after)), last)

    def send_parts(self, head: bytes, body: bytes | memoryview, tail: bytes, *, binary: bool) -> None:
        if self._transport is None:
            return
        size = len(head) + len(body) + len(tail)
        if size > MAX_FRAME_BYTES and not binary:
            self._send_fragments(head, body, tail)
        elif not self._server_side:
            # Put together with room for a frame's header, it is masked where it is.
            message = bytearray().join((_ROOM_FOR_HEADER, head, body, tail))
            kind = _BINARY if binary else _TEXT
            self._transport.send_reuse_external_bytearray(kind, message, len(_ROOM_FOR_HEADER))
        elif size < VECTOR_BYTES and not binary:
            self.send(b"".join((head, body, tail)))
        else:
            # A frame of a server is a header and the payload as it is, so the parts can go as they are.
            self._outbox += (_frame(0x82 if binary else 0x81, size) + head, body, tail)
            self._flush()

    def _flush(self) -> None:
        self._flush_planned = False
        outbox = self._outbox
        if outbox:
            self._outbox = []
            if self._transport is not None and not self._transport.underlying_transport.is_closing():
                if len(outbox) == 1:
                    self._transport.underlying_transport.write(outbox[0])
                else:
                    self._transport.underlying_transport.writelines(outbox)

    def unsent(self) -> int:
        transport = self._transport
        return 0 if transport is None else transport.underlying_transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._held = True
        if self._transport is not None:
            self._transport.underlying_transport.pause_reading()

    def resume_reading(self) -> None:
        self._held = False
        if self._transport is not None:
            if keeps_back(self._transport.underlying_transport):
                self._loop.call_soon(self._read_on)
            else:
                self._transport.underlying_transport.resume_reading()

    def _read_on(self) -> None:
        if self._transport is not None and not self._held:
            read_on(self._transport.underlying_transport)

    def close(self) -> None:
        self._over = True
        if self._transport is not None:
            self._flush()
            self._transport.send_close()
            self._transport.disconnect()

    def abort(self) -> None:
        self._over = True
        if self._transport is not None:
            self._transport.disconnect(False)

    # What picows calls ---------------------------------------------------------------------------

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        transport.underlying_transport.set_write_buffer_limits(high=self._limits.outgoing_high_water)
        if self._server_side:
            self._plan_ping()
        if not self.opened.done():
            self.opened.set_result(None)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        self._in_frame = True
        try:
            self._take_frame(transport, frame)
        finally:
            # Answers to all that came in one read go out in one write.
            if frame.last_in_buffer:
                self._in_frame = False
                self._flush()

    def _take_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        kind = frame.msg_type
        if self._over:
            return  # what came in the same breath as the reason to end has no effect
        if frame.rsv1 or frame.rsv2 or frame.rsv3:
            self._violation("reserved bits are set, but no extension was agreed on")
        elif kind in (_TEXT, _BINARY):
            if self._in_parts:
                self._violation("a new message began inside a fragmented one")
            elif not frame.fin:
                self._parts_type = kind
                self._add_part(frame)
            elif kind == _BINARY and self._view_received is not None:
                self._view_received(frame.get_payload_as_memoryview())
            else:
                self._deliver(kind, frame.get_payload_as_bytes())
        elif kind == WSMsgType.CONTINUATION:
            if not self._in_parts:
                self._violation("a continuation without a beginning")
                return
            self._add_part(frame)
            if frame.fin and self._in_parts:
                message, self._parts, self._in_parts = bytes(self._parts), bytearray(), False
                self._deliver(self._parts_type, message)
        elif kind == WSMsgType.PING:
            self.pinged_at = asyncio.get_running_loop().time()
            self._pong = frame.get_payload_as_bytes()
            self._answer_ping()
        elif kind == WSMsgType.CLOSE:
            self._over = True
            self._flush()
            transport.send_close(frame.get_close_code())
            # Who has not read by now may never do so: what is unsent is not waited for.
            transport.disconnect(self.unsent() == 0)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        del transport
        self._transport = None
        if self._pinger is not None:
            self._pinger.cancel()
        self._closed_reason = self._reason
        if self._receiver is not None:
            self._receiver.channel_closed(self._reason)

    def pause_writing(self) -> None:
        self._full = True
        if self._receiver is not None:
            self._receiver.writing_paused()

    def resume_writing(self) -> None:
        self._full = False
        self._answer_ping()
        if self._receiver is not None:
            self._receiver.writing_resumed()

    # ---------------------------------------------------------------------------------------------

    def _deliver(self, kind: Any, message: bytes) -> None:
        binary = kind == _BINARY
        if not binary and not message.isascii():
            try:
                message.decode()
            except UnicodeDecodeError:
                self._violation("a text message is not UTF-8")
                return
        receiver = self._receiver
        if receiver is None:
            self._early.append((binary, message))
        elif binary:
            receiver.binary_received(message)
        else:
            receiver.message_received(message)

    def _add_part(self, frame: WSFrame) -> None:
        if len(self._parts) + frame.payload_size > MAX_MESSAGE_BYTES:
            self._violation(f"a message is longer than {MAX_MESSAGE_BYTES} bytes")
            return
        # Not a list: millions of parts of a few bytes, or of none, would be far larger than what is in them.
        self._in_parts = True
        self._parts += frame.get_payload_as_memoryview()

    def _answer_ping(self) -> None:
        """Only the newest needs an answer. Who takes none gets none, so that they do not pile up here."""
        if self._pong is not None and self._transport is not None and not self._full and not self._over:
            self._transport.send_pong(self._pong)
            self._pong = None

    def _violation(self, reason: str) -> None:
        self._reason = f"protocol violation: {reason}"
        self._parts, self._in_parts = bytearray(), False
        self.abort()

    def _plan_ping(self) -> None:
        loop = asyncio.get_running_loop()
        self._pinger = loop.call_later(self._limits.ping_interval, self._ping)

    def _ping(self) -> None:
        if self._transport is not None:
            self.probe()
            self._plan_ping()

    def probe(self) -> None:
        """Ask whether the peer is there: if the connection is known to be broken, this ends it."""
        if self._transport is not None:
            self._transport.send_ping(b"")


def _frame(opcode: int, size: int) -> bytes:
    """The header of an unmasked frame."""
    if size < 126:
        return _FRAME_7(opcode, size)
    return _FRAME_16(opcode, 126, size) if size < 65536 else _FRAME_64(opcode, 127, size)


class _Protocol(_WSProtocol):  # type: ignore[misc]  # missing in the stub
    """Where a transport would send what is unsent to a peer that has ended its side, this gives up."""

    def eof_received(self) -> bool:
        if self.transport is not None:
            self.transport.disconnect(False)
        return False


def make_protocol(channel: WebSocketChannel, *, host: str | None, path: str, headers: dict[str, str]) -> Any:
    """The picows half of a channel: a client when it has a host, a server when not."""
    return _Protocol(
        host,
        path,
        host is not None,
        lambda *_: channel,
        logging.getLogger("picows"),
        True,
        None,
        False,
        10,
        10,
        compiled.WSAutoPingStrategy.PING_WHEN_IDLE,
        False,  # pongs are ours, so that every frame comes through on_ws_frame
        MAX_FRAME_BYTES,
        headers,
        _READ_BUFFER_BYTES,
    )


def upgrade(transport: asyncio.Transport, channel: WebSocketChannel, request: bytes) -> None:
    """Make an accepted connection a WebSocket; `request` is all that was received on it so far."""
    protocol = make_protocol(channel, host=None, path="/", headers={})
    transport.set_protocol(protocol)
    protocol.connection_made(without_tcp_options(transport))
    hand_over(request, protocol)


def hand_over(received: bytes, protocol: Any) -> None:
    """Give a protocol what was received before it was there."""
    view = memoryview(received)
    while view:
        buffer = protocol.get_buffer(len(view))
        size = min(len(buffer), len(view))
        buffer[:size] = view[:size]
        protocol.buffer_updated(size)
        view = view[size:]


async def connect(
    url: str, receiver: Receiver, limits: Limits, *, headers: dict[str, str], timeout: float, ssl: Any = None
) -> WebSocketChannel:
    """Open `ws://` or `wss://` and deliver to the receiver."""
    import aiofastnet

    parts = urlsplit(url)
    secure = parts.scheme == "wss"
    port = parts.port or (443 if secure else 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    async def open_transport(factory: Any) -> Any:
        loop = asyncio.get_running_loop()
        if secure:
            _mend_complaints(loop)
        opened = await aiofastnet.create_connection(
            loop,
            factory,
            parts.hostname,
            port,
            ssl=(ssl or True) if secure else None,
        )
        _watch_over(opened[0].get_extra_info("socket"))
        return opened

    host = parts.netloc.rpartition("@")[2]
    shown = without_password(url)
    return await open_channel(shown, host, path, open_transport, receiver, limits, headers, timeout)


async def open_channel(
    url: str,
    host: str,
    path: str,
    open_transport: Any,
    receiver: Receiver,
    limits: Limits,
    headers: dict[str, str],
    timeout: float,
) -> WebSocketChannel:
    """The client's handshake over any transport. The URL is for messages."""
    from picows import WSError

    channel = WebSocketChannel(host, limits, server_side=False)
    protocol = make_protocol(channel, host=host, path=path, headers=headers)
    try:
        async with asyncio.timeout(timeout):
            await open_transport(lambda: protocol)
            await protocol.wait_until_handshake_complete()
            if not channel.opened.done():
                # To picows that is the end of a handshake, too.
                raise ConnectionResetError("the peer closed the connection before it answered")
            await channel.opened
    except TimeoutError:
        _give_up(protocol)
        secure = url.startswith("wss:")
        hint = "; if it is served without TLS, its address begins with ws://" if secure else ""
        raise ConnectFailed(
            f"timed out connecting to exec-server websocket `{url}` after {timeout:g}s{hint}"
        ) from None
    except (OSError, WSError, ValueError) as error:
        _give_up(protocol)
        response = getattr(error, "response", None)
        status = None if response is None else int(response.status)
        body = getattr(error, "raw_body", None)
        text = f"HTTP {status} {bytes(body or b'').decode('utf-8', 'replace')}" if status else str(error)
        if url.startswith("wss:") and _is_no_tls(error):
            said = text or "it hung up"
            text = f"there is no TLS on that port; does its address begin with ws://? ({said})"
        raise ConnectFailed(
            f"failed to connect to exec-server websocket `{url}`: {text.strip()}", status
        ) from None
    except BaseException:
        _give_up(protocol)
        raise
    channel.attach(receiver)
    return channel


def _is_no_tls(error: Exception) -> bool:
    """Whether the peer of a TLS handshake did not take part in it."""
    import ssl

    if isinstance(error, ssl.SSLError):
        return error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
    return isinstance(error, ConnectionResetError) and not str(error)


def _mend_complaints(loop: asyncio.AbstractEventLoop) -> None:
    """Keep a loop from complaining about a peer that ends a TLS handshake: we say so ourselves.

    aiofastnet gives the loop a class where an exception belongs, at which asyncio's own complaint fails in
    turn, with a page of text.
    """
    before = loop.get_exception_handler()
    if getattr(before, "is_ours", False):
        return

    def complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), type):
            return
        if before is None:
            loop.default_exception_handler(context)
        else:
            before(loop, context)

    complain.is_ours = True  # type: ignore[attr-defined]  # so that it is put there once
    loop.set_exception_handler(complain)


def _watch_over(socket: Any) -> None:
    """Let the kernel find out that a peer has vanished: behind a NAT, or while this machine slept."""
    import socket as sockets

    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_SECONDS // 3),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", KEEPALIVE_SECONDS * 1000),
    ):
        if hasattr(sockets, name):
            socket.setsockopt(sockets.IPPROTO_TCP, getattr(sockets, name), value)


def _give_up(protocol: Any) -> None:
    if protocol.transport is not None:
        protocol.transport.disconnect(False)


def without_tcp_options(transport: Any) -> Any:
    """picows sets TCP options on every socket; one that is not TCP must not mind."""
    socket = transport.get_extra_info("socket")
    import socket as sockets

    return transport if socket.family != sockets.AF_UNIX else _UnixTransport(transport)


class _UnixTransport:
    """A transport whose socket takes TCP options and ignores them."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        value = self._transport.get_extra_info(name, default)
        return _UnixSocket(value) if name == "socket" else value


class _UnixSocket:
    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def fileno(self) -> int:
        return int(self._socket.fileno())

    def setsockopt(self, *_: Any) -> None:
        """There is nothing to set."""

    def getsockopt(self, *_: Any) -> int:
        return 0
