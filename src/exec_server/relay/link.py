"""One WebSocket of the relay, either end: a frame in each binary message, and pings that must be answered."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Final, Protocol

from picows import WSCloseCode, WSError, WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from .. import log
from ..transport.reading import read_on
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

TURN_FRAMES: Final = 256
"""After so many frames of one socket it is not read for a turn of the loop, so that others have theirs."""

SURPLUS_FRAMES: Final = 1024
"""One read may have brought many more. So many are handled all the same; the rest waits for the next turn."""

MAX_PIECES: Final = 1024
"""Of one message. Nobody cuts messages of the relay into more, and pieces may be empty."""

MAX_QUOTED: Final = 100
"""Characters of what a peer says about its going away."""

_HEADER_BYTES: Final = 14
"""The longest header of a WebSocket frame; picows counts it in."""

PROTOCOL_ERROR, POLICY_VIOLATION, MESSAGE_TOO_BIG = 1002, 1008, 1009

_BINARY, _TEXT, _CONTINUATION = WSMsgType.BINARY, WSMsgType.TEXT, WSMsgType.CONTINUATION
_PING, _PONG, _CLOSE = WSMsgType.PING, WSMsgType.PONG, WSMsgType.CLOSE


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

    def __init__(
        self, owner: LinkOwner, high_water: int = HIGH_WATER, *, reading: bool = True, quoting: bool = True
    ) -> None:
        """`quoting` off keeps out of our texts what the peer says when it goes away."""
        super().__init__()
        keep_freed_memory()
        self.full = False
        """More is unsent than `high_water`; `link_drained` follows when a quarter of it is left."""
        self._high_water = high_water
        self._owner: LinkOwner | None = owner
        self._loop = asyncio.get_running_loop()
        self._transport: WSTransport | None = None
        self._parts = bytearray()
        self._pieces = 0
        """Of the message that is being put together; 0 when there is none."""
        self._pong: bytes | None = None
        """The answer to the newest ping, while the peer takes nothing."""
        self._pinged = False
        self._quoting = quoting
        self._kept: deque[bytes] = deque()
        self._reading = reading
        self._direct = reading
        """Whether the next message goes to the owner as it is."""
        self._handing = False
        self.taken = 0
        """Frames of every kind that have arrived."""
        self._rest_at = TURN_FRAMES
        self._resting = False
        self._tired = False
        self._failed = False
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._reason = "the connection was cut"
        self.opened_at = self._loop.time()

    def send(self, frame: bytes | memoryview) -> None:
        if self._transport is not None:
            self._transport.send(WSMsgType.BINARY, frame)

    def hand_to(self, owner: LinkOwner) -> None:
        """Somebody else is told from now on."""
        if self._owner is not None:
            self._owner = owner

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def unsent(self) -> int:
        return 0 if self._transport is None else self._transport.underlying_transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Nothing more arrives for now. One read may have brought megabytes; what is left of them is kept."""
        self._reading = self._direct = False
        if self._transport is not None:
            self._transport.underlying_transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._plan_handing()

    def _plan_handing(self) -> None:
        if not self._handing:
            self._handing = True
            self._loop.call_soon(self._hand_out)

    def _hand_out(self) -> None:
        """What was kept, as much as is right for one turn of the loop; then more is read."""
        self._handing = False
        left, ended = TURN_FRAMES, self._ended
        while self._kept and (self._reading or ended) and self._owner is not None and not self._failed:
            if not left:
                self._plan_handing()
                return
            left -= 1
            self._owner.frame_arrived(self._kept.popleft())
        if ended:
            self._end()
        elif self._reading and not self._kept and not self._resting and self._transport is not None:
            self._settle()
            read_on(self._transport.underlying_transport)

    def _settle(self) -> None:
        self._direct = self._reading and not (self._kept or self._tired or self._pieces)

    def _rest(self) -> None:
        """Others first."""
        if self._resting:
            self._tired, self._direct = True, False
            self._rest_at += SURPLUS_FRAMES
        elif self._transport is not None:
            self._resting = True
            self._rest_at += SURPLUS_FRAMES
            self._transport.underlying_transport.pause_reading()
            self._loop.call_soon(self._rested)

    def _rested(self) -> None:
        self._resting = self._tired = False
        self._rest_at = self.taken + TURN_FRAMES
        self._answer_ping()
        self._plan_handing() if self._kept else self._hand_out()

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

    def refuse(self, code: int, reason: str) -> None:
        """The same, and say why to the peer, as far as it reads at all."""
        if self._transport is not None:
            self._transport.send_close(WSCloseCode(code), reason.encode())
        self.fail(reason)

    # What picows calls ---------------------------------------------------------------------------

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        transport.underlying_transport.set_write_buffer_limits(high=self._high_water)
        self._timer = self._loop.call_later(PING_INTERVAL, self._ping)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        owner = self._owner
        if owner is None or self._failed:
            return  # what came in the same breath as the reason to end has no effect
        self.taken = taken = self.taken + 1
        if taken >= self._rest_at:
            self._rest()
        kind = frame.msg_type
        if frame.rsv1 or frame.rsv2 or frame.rsv3:
            self.refuse(PROTOCOL_ERROR, "reserved bits are set, but nothing was agreed on")
        elif kind is _BINARY and self._direct and frame.fin and frame.payload_size <= MAX_FRAME_BYTES:
            owner.frame_arrived(frame.get_payload_as_memoryview())
        else:
            self._take(transport, frame, kind, owner)

    def _take(self, transport: WSTransport, frame: WSFrame, kind: WSMsgType, owner: LinkOwner) -> None:
        """Anything that is not the usual."""
        if frame.payload_size + len(self._parts) > MAX_FRAME_BYTES:
            self.refuse(MESSAGE_TOO_BIG, f"a message is longer than {MAX_FRAME_BYTES} bytes")
        elif kind == _BINARY and frame.fin and not self._pieces:
            self._kept.append(frame.get_payload_as_bytes())
        elif kind == _BINARY or (kind == _CONTINUATION and self._pieces):
            self._add_piece(frame, owner)
        elif kind in (_TEXT, _CONTINUATION):
            owner.text_arrived()
        elif kind == _PING:
            self._pong = frame.get_payload_as_bytes()
            self._answer_ping()
        elif kind == _PONG:
            self._pong_arrived()
        elif kind == _CLOSE:
            self._reason = self._goodbye(frame)
            transport.send_close(frame.get_close_code())
            transport.disconnect()

    def _add_piece(self, frame: WSFrame, owner: LinkOwner) -> None:
        self._pieces += 1
        if self._pieces > MAX_PIECES:
            self.refuse(POLICY_VIOLATION, f"a message is in more than {MAX_PIECES} pieces")
            return
        self._direct = False
        self._parts += frame.get_payload_as_memoryview()
        if frame.fin:
            message, self._parts, self._pieces = bytes(self._parts), bytearray(), 0
            self._settle()
            if self._direct:
                owner.frame_arrived(message)
            else:
                self._kept.append(message)

    def _goodbye(self, frame: WSFrame) -> str:
        """What the peer's going away looks like in a log. Its own words may be anything: they are cleaned."""
        code = int.from_bytes(frame.get_payload_as_bytes()[:2], "big")
        said = frame.get_close_reason() if self._quoting else None
        shown = "".join(c if c.isprintable() else "?" for c in (said or "")[:MAX_QUOTED])
        return f"the peer closed the connection ({code or 'no code'}){f': {shown}' if shown else ''}"

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        del transport
        self._transport = None
        self._stop_timer()
        self._ended = True
        if self._failed:
            self._kept.clear()
        if not self._kept:
            self._end()
        else:
            self._plan_handing()

    def _end(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.link_closed(self._reason)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self._answer_ping()
        if self._owner is not None:
            self._owner.link_drained()

    # Pings ---------------------------------------------------------------------------------------

    def _answer_ping(self) -> None:
        """Only the newest needs an answer. Who takes none gets none, so that they do not pile up here."""
        transport = self._transport
        if self._pong is not None and transport is not None and not self.full and not self._tired:
            transport.send_pong(self._pong)
            self._pong = None

    def _pong_arrived(self) -> None:
        if self._pinged:  # a timer is expensive, and anybody can send pongs
            self._pinged = False
            self._stop_timer()
            self._timer = self._loop.call_later(PING_INTERVAL, self._ping)

    def _ping(self) -> None:
        if self._transport is not None:
            self._pinged = True
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
                enable_auto_pong=False,  # ours have a bound
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
