"""One WebSocket of the relay, either end: a frame in each binary message, and pings that must be answered."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Final, Protocol

from picows import WSCloseCode, WSError, WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from .. import log
from ..transport.websocket import keep_freed_memory
from .frame import MAX_FRAME_BYTES

__all__ = ["LinkOwner", "UpgradeFailed", "WebSocketLink", "open_link"]

PING_INTERVAL: Final = 30.0
PONG_LIMIT: Final = 60.0
"""Seconds from a ping to its answer, after which the connection is taken for dead."""

UPGRADE_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 5.0
"""For what is unsent to get out before a connection is cut."""

HIGH_WATER: Final = 512 * 1024
"""Unsent bytes at which the transport reports itself full; it reports room at a quarter of that."""

_HEADER_BYTES: Final = 14
"""The longest header of a WebSocket frame; picows counts it in."""


class UpgradeFailed(OSError):
    """No WebSocket; `status` is the HTTP answer, if there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class LinkOwner(Protocol):
    """What a link calls."""

    def frame_arrived(self, message: bytes | memoryview) -> None:
        """A view is valid during the call only: whoever keeps it, copies it."""

    def text_arrived(self) -> None: ...
    def link_drained(self) -> None: ...
    def link_closed(self, reason: str) -> None: ...


class WebSocketLink(WSListener):
    """One side of the connection."""

    def __init__(self, owner: LinkOwner, high_water: int = HIGH_WATER, *, reading: bool = True) -> None:
        super().__init__()
        keep_freed_memory()
        self.full = False
        """More is unsent than `high_water`; `link_drained` follows when a quarter of it is left."""
        self._high_water = high_water
        self._owner: LinkOwner | None = owner
        self._loop = asyncio.get_running_loop()
        self._transport: WSTransport | None = None
        self._parts = bytearray()
        self._in_message = False
        self._kept: deque[bytes] = deque()
        self._reading = reading
        self._failed = False
        self._timer: asyncio.TimerHandle | None = None
        self._reason = "the connection was cut"
        self.opened_at = self._loop.time()

    def send(self, frame: bytes | memoryview) -> None:
        if self._transport is not None:
            self._transport.send(WSMsgType.BINARY, frame)

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def unsent(self) -> int:
        return 0 if self._transport is None else self._transport.underlying_transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Nothing more arrives for now. One read may have brought megabytes; what is left of them is kept."""
        self._reading = False
        if self._transport is not None:
            self._transport.underlying_transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._hand_out)

    def _hand_out(self) -> None:
        while self._kept and self._reading and self._owner is not None:
            self._owner.frame_arrived(self._kept.popleft())
        if self._reading and not self._kept and self._transport is not None:
            self._transport.underlying_transport.resume_reading()

    def _arrived(self, message: bytes | memoryview, owner: LinkOwner) -> None:
        if self._reading and not self._kept:
            owner.frame_arrived(message)
        else:
            self._kept.append(bytes(message))

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Say goodbye; the owner hears nothing more."""
        self._owner = None
        self._stop_timer()
        if self._transport is not None:
            self._transport.send_close(WSCloseCode(code), reason.encode())
            self._transport.disconnect()
            # Who does not read never lets the last words out.
            self._timer = self._loop.call_later(CLOSE_SECONDS, self._cut)

    def _cut(self) -> None:
        self._timer = None
        if self._transport is not None:
            self._transport.disconnect(False)

    def fail(self, reason: str) -> None:
        """Drop the connection for this reason, and tell the owner."""
        self._reason = reason
        self._failed = True
        if self._transport is not None:
            self._transport.disconnect(False)

    # What picows calls ---------------------------------------------------------------------------

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        transport.underlying_transport.set_write_buffer_limits(high=self._high_water)
        self._timer = self._loop.call_later(PING_INTERVAL, self._ping)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        owner, kind = self._owner, frame.msg_type
        if owner is None or self._failed:
            return  # what came in the same breath as the reason to end has no effect
        if frame.payload_size + len(self._parts) > MAX_FRAME_BYTES:
            transport.send_close(WSCloseCode.MESSAGE_TOO_BIG)
            self.fail(f"a message is longer than {MAX_FRAME_BYTES} bytes")
        elif kind == WSMsgType.BINARY and frame.fin and not self._in_message:
            self._arrived(frame.get_payload_as_memoryview(), owner)
        elif kind == WSMsgType.BINARY or (kind == WSMsgType.CONTINUATION and self._in_message):
            self._add_part(frame, owner)
        elif kind == WSMsgType.TEXT or kind == WSMsgType.CONTINUATION:
            owner.text_arrived()
        elif kind == WSMsgType.PONG:
            self._stop_timer()
            self._timer = self._loop.call_later(PING_INTERVAL, self._ping)
        elif kind == WSMsgType.CLOSE:
            reason = frame.get_close_reason()
            self._reason = f"the peer closed the connection{f': {reason}' if reason else ''}"
            transport.send_close(frame.get_close_code())
            transport.disconnect()

    def _add_part(self, frame: WSFrame, owner: LinkOwner) -> None:
        self._in_message = True
        self._parts += frame.get_payload_as_memoryview()
        if frame.fin:
            message, self._parts, self._in_message = bytes(self._parts), bytearray(), False
            self._arrived(message, owner)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        del transport
        self._transport = None
        self._stop_timer()
        owner, self._owner = self._owner, None
        if owner is not None:
            if not self._failed:
                while self._kept:
                    owner.frame_arrived(self._kept.popleft())
            owner.link_closed(self._reason)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self._owner is not None:
            self._owner.link_drained()

    # Pings ---------------------------------------------------------------------------------------

    def _ping(self) -> None:
        if self._transport is not None:
            self._transport.send_ping(b"")
            self._timer = self._loop.call_later(PONG_LIMIT, self._no_pong)

    def _no_pong(self) -> None:
        self._timer = None
        log.warning("a connection of the relay is dead, dropping it", seconds=PONG_LIMIT)
        self.fail(f"no ping was answered for {PONG_LIMIT:g} s")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def open_link(
    url: str, owner: LinkOwner, *, headers: dict[str, str] | None = None, ssl: Any = None
) -> WebSocketLink:
    """Open the WebSocket of a URL that the registry gave. The URL is a secret: it is not in the errors."""
    link = WebSocketLink(owner, reading=False)
    try:
        async with asyncio.timeout(UPGRADE_SECONDS):
            await ws_connect(
                lambda: link,
                url,
                ssl_context=ssl,
                extra_headers=headers,
                max_frame_size=MAX_FRAME_BYTES + _HEADER_BYTES,
                max_redirects=0,
                websocket_handshake_timeout=UPGRADE_SECONDS,
                read_buffer_init_size=64 * 1024,
                logger_name=_QUIET,
            )
    except TimeoutError:
        raise UpgradeFailed(f"the rendezvous did not answer within {UPGRADE_SECONDS:g} s") from None
    except (OSError, WSError, ValueError) as error:
        response = getattr(error, "response", None)
        status = None if response is None else int(response.status)
        text = f"HTTP {status}" if status is not None else f"{type(error).__name__}: {error}"
        raise UpgradeFailed(f"no connection to the rendezvous: {text}", status) from None
    if not link.is_open:
        # A peer that hangs up without an answer ends the wait for one, and not with an error.
        raise UpgradeFailed("no connection to the rendezvous: it was cut before it was answered")
    # What came in the same breath as the upgrade waits until the caller knows its link.
    link.resume_reading()
    return link


_QUIET: Final = logging.getLogger("exec_server.relay.link")
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False
