"""A stream of the relay as a Channel: what the server and the client see, and they see nothing else.

The stream decides what to say and when; this file gives it the time, the connection and a receiver. The
connection may be replaced by another while the channel lives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from .. import log
from ..loop import Loop, Timer
from ..transport.channel import Receiver
from .frame import Frame
from .stream import Stream, StreamFailed

__all__ = ["Link", "RelayChannel"]

LINK_BYTES: Final = 1024 * 1024
"""Unsent bytes of a connection from which on streams keep what they have to themselves."""

TURN_BYTES: Final = 256 * 1024
"""What one stream may put on a shared connection before the others have their turn."""

QUEUE_BYTES: Final = 1024 * 1024
"""Queued bytes of one stream at which whoever fills it is told to pause; told to go on at half of it."""

CLOSE_SECONDS: Final = 5.0
"""What a closing stream has to get its last words across."""

MIN_WAKE: Final = 0.001
"""Seconds; a timer that is due now still lets others have their turn."""

STARVED_WAKE: Final = 0.5
"""Seconds between looks at a connection that is full."""

JSON_STARTS: Final = frozenset(b'{[ \t\r\n"-0123456789tfn')
"""What a JSON text begins with. Messages that begin otherwise are our own binary ones."""


class Link(Protocol):
    """A connection to the rendezvous, as far as a stream needs it."""

    def send(self, frame: bytes) -> None: ...
    def unsent(self) -> int: ...


class RelayChannel:
    """One stream, either end."""

    resumable = True
    parse_failure = "failed to parse JSON-RPC message from exec-server relay stream"

    def __init__(
        self,
        loop: Loop,
        stream: Stream,
        link: Link,
        *,
        peer: str,
        on_end: Callable[[], object],
        on_silence: Callable[[], object] | None = None,
        on_reading: Callable[[bool], object] | None = None,
    ) -> None:
        """`on_silence` is called when an acked peer is not heard any more, instead of calling for it on
        the same connection; `on_reading` when the taker falls behind and when it has caught up."""
        self.peer = peer
        self.carries_binary = stream.acked
        self.stream = stream
        self._loop = loop
        self._link: Link | None = link
        self._on_end = on_end
        self._on_silence = on_silence
        self._on_reading = on_reading
        self._receiver: Receiver | None = None
        self._reading = True
        self._delivering = False
        self._peer_waits = False
        self._paused = False
        self._pump_planned = False
        self._starved = False
        """The connection was full when there may have been something to say."""
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._closing: Timer | None = None
        self._ended: str | None = None

    def attach(self, receiver: Receiver) -> None:
        """Deliver to this receiver."""
        self._receiver = receiver
        if self._ended is not None:
            receiver.channel_closed(self._ended)
        else:
            self._catch_up()

    # What receivers use --------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        self._send(message)

    def send_parts(self, head: bytes, body: bytes | memoryview, tail: bytes, *, binary: bool) -> None:
        del binary  # the first byte tells
        self._send(head, body, tail)

    def _send(self, *parts: bytes | memoryview) -> None:
        if self._ended is not None or self._closing is not None:
            return
        try:
            self.stream.send(*parts)
        except ValueError as error:
            log.error("a message cannot go through the relay", peer=self.peer, reason=str(error))
            self.abort()
            return
        self._plan_pump()
        if not self._paused and self.stream.queued > QUEUE_BYTES:
            # Before pausing anybody, let the connection take what it can.
            self._pump()
            if self._ended is None and self.stream.queued > QUEUE_BYTES:
                self._paused = True
                if self._receiver is not None:
                    self._receiver.writing_paused()

    def unsent(self) -> int:
        return self.stream.unsent

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._loop.call_soon(self._catch_up)

    def close(self) -> None:
        if self._ended is None and self._closing is None:
            self._closing = self._loop.call_later(CLOSE_SECONDS, self._finish)
            self._pump()

    def abort(self) -> None:
        self._finish()

    # What the owner of the connection calls ------------------------------------------------------

    def frame_received(self, frame: Frame) -> None:
        """Data, ack, resume or heartbeat of this stream."""
        if self._ended is not None:
            return
        try:
            self.stream.receive(frame, self._loop.time())
        except StreamFailed as error:
            self._fail(error)
            return
        self._deliver()
        self._pump()

    def reset_received(self) -> None:
        """The peer, or the rendezvous, says that it is over. Nothing is sent back."""
        self._end_by_peer("the peer ended the stream")

    def link_lost(self, reason: str) -> None:
        """The connection is gone. A plain stream goes with it; an acked one waits for the next."""
        self._link = None
        if self.stream.acked:
            self.stream.path_lost()
        else:
            self._end_by_peer(reason)

    def link_found(self, link: Link) -> None:
        """There is a connection again."""
        if self._ended is None:
            self._link = link
            self.stream.resume(self._loop.time())
            self._pump()

    def give_up(self, reason: str) -> None:
        """There will be no connection any more."""
        self._end(reason)

    def link_drained(self) -> None:
        """The connection has room again."""
        self._pump()

    @property
    def wants_room(self) -> bool:
        """Whether there is more to send than the connection took."""
        return self._ended is None and (self._starved or self.stream.queued > 0)

    # Sending -------------------------------------------------------------------------------------

    def _plan_pump(self) -> None:
        if not self._pump_planned:
            # What else is said in this turn of the loop shares the record.
            self._pump_planned = True
            self._loop.call_soon(self._planned_pump)

    def _planned_pump(self) -> None:
        self._pump_planned = False
        self._pump()

    def _pump(self) -> None:
        link = self._link
        if self._ended is not None or link is None:
            return
        now = self._loop.time()
        if not self.stream.queued and not self._paused and self._closing is None:
            # Nothing to say is what most frames that arrive lead to.
            at = self.stream.wake_at()
            if at is None or at > now:
                self._starved = False
                self._plan_wake(at)
                return
        if self.stream.silent(now):
            if self._on_silence is not None:
                self._on_silence()
                return
            self.stream.resume(now)
        room = min(LINK_BYTES - link.unsent(), TURN_BYTES)
        self._starved = room <= 0
        try:
            frames = self.stream.frames(now, room)
        except StreamFailed as error:
            self._fail(error)
            return
        for frame in frames:
            link.send(frame)
        if self._closing is not None and self.stream.drained:
            self._finish()
            return
        if frames and self.stream.queued and link.unsent() < LINK_BYTES:
            self._plan_pump()
        if self._paused and self.stream.queued < QUEUE_BYTES // 2:
            self._paused = False
            if self._receiver is not None:
                self._receiver.writing_resumed()
        self._plan_wake(self.stream.wake_at())

    def _plan_wake(self, at: float | None) -> None:
        """One timer, moved only forward in urgency: most wakes are put off again by what happens before."""
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        # A full connection calls when it has drained; until then there is little to wake for.
        delay = max(at - self._loop.time(), STARVED_WAKE if self._starved else MIN_WAKE)
        self._timer_at = self._loop.time() + delay
        self._timer = self._loop.call_later(delay, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._pump()

    # Receiving -----------------------------------------------------------------------------------

    def _deliver(self) -> None:
        receiver = self._receiver
        if receiver is None or self._delivering:
            return
        self._delivering = True
        try:
            while self._reading and self._ended is None and self._closing is None:
                message = self.stream.take()
                if message is None:
                    break
                if message[0] in JSON_STARTS:
                    receiver.message_received(message)
                else:
                    receiver.binary_received(message)
        except StreamFailed as error:
            self._fail(error)
        finally:
            self._delivering = False
        if self._on_reading is not None and self.stream.behind != self._peer_waits:
            self._peer_waits = self.stream.behind
            self._on_reading(not self._peer_waits)

    def _catch_up(self) -> None:
        """Deliver what has waited for its taker, and tell the peer that there is room."""
        self._deliver()
        if self._ended is None:
            self._plan_pump()

    # The end -------------------------------------------------------------------------------------

    def _fail(self, error: StreamFailed) -> None:
        log.info("a stream of the relay failed", peer=self.peer, stream=self.stream.id, reason=str(error))
        self._say_reset(error.reason)
        self._end(str(error))

    def _finish(self) -> None:
        if self._ended is None:
            self._say_reset("closed")
            self._end("closed")

    def _say_reset(self, reason: str) -> None:
        if self._link is not None:
            self._link.send(self.stream.reset(reason))

    def _end_by_peer(self, reason: str) -> None:
        """What arrived before the end is delivered before it, also to a receiver that had paused."""
        self._reading = True
        self._deliver()
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._ended is not None:
            return
        self._ended = reason
        self._link = None
        for timer in (self._timer, self._closing):
            if timer is not None:
                timer.cancel()
        self._on_end()
        if self._receiver is not None:
            self._receiver.channel_closed(reason)
