"""All streams of an environment: who may open one, which one a frame is for, and what outlives a connection.

    frame        stream unknown        being validated            active
    handshake    read, then validate   drop it, reset, failure    reset; the stream goes on
    data         reset                 drop it, reset, failure    to the stream
    reset        nothing               drop it                    end it, say nothing
    heartbeat    reset                 nothing                    to the stream
    resume       reset unless a claim  nothing                    to the stream
    ack          nothing               nothing                    to the stream

A handshake that repeats the last one byte for byte was doubled on the way: it is ignored while that one is
being validated, and answered again while nothing else has arrived. Whoever fails eight handshakes on one
connection closes the door for ten seconds; streams that are open do not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .. import log
from ..loop import Loop, Pending, Timer
from ..transport.channel import Channel, Receiver
from .channel import LINK_BYTES, Link, RelayChannel
from .frame import (
    NOTHING_RECEIVED,
    WIDE,
    Ack,
    BadFrame,
    Data,
    Frame,
    Handshake,
    Heartbeat,
    Reset,
    Resume,
    decode,
    encode,
)
from .keys import Identity, PublicKey
from .noise import HandshakeFailed, Responder, prologue
from .reasons import HANDSHAKES_PAUSED, NOT_TRUSTED, REGISTRY_SILENT, TOO_MANY_STREAMS
from .stream import PROTOCOL_ERROR, Stream

__all__ = ["Accept", "NotTrusted", "Streams", "Validate"]

MAX_STREAMS: Final = 128
MAX_VALIDATIONS: Final = 32
MAX_FAILURES: Final = 8
PAUSE_SECONDS: Final = 10.0
MAX_AUTHORIZATION_BYTES: Final = 4096
"""All five as in the reference."""

GRACE_SECONDS: Final = 30.0
"""How long acked streams wait for the next connection; as long as a session waits for the next stream."""

RESET_BYTES: Final = 4 * LINK_BYTES
"""Unsent bytes of a connection above which nobody is told that there is no such stream, or told again that
there is."""

Accept = Callable[[Channel], Receiver]
"""Serves a new channel: gives the receiver of what arrives on it."""

Validate = Callable[[str, PublicKey, str], Pending[bool]]
"""Asks the registry about a stream id, the peer's key and the authorization it brought."""


class NotTrusted(Exception):
    """The peer is turned away whatever the registry says; a failure of `Validate`."""


class _Validation:
    """A stream whose peer is being asked about."""

    def __init__(
        self, message: bytes, responder: Responder, acked: bool, wide: bool, answer: Pending[bool]
    ) -> None:
        self.message = message
        self.responder = responder
        self.acked = acked
        self.wide = wide
        self.answer = answer


class _Active:
    """A stream that is open; the messages of its handshake are kept until the first record."""

    def __init__(self, channel: RelayChannel, first_message: bytes, answer: bytes) -> None:
        self.channel = channel
        self.first_message: bytes | None = first_message
        self.answer = answer


class Streams:
    """Of one registration, on one connection after another."""

    def __init__(
        self,
        loop: Loop,
        identity: Identity,
        environment_id: str,
        registration_id: str,
        *,
        accept: Accept,
        validate: Validate,
        acks: bool = True,
    ) -> None:
        self._loop = loop
        self._identity = identity
        self._environment_id = environment_id
        self._registration_id = registration_id
        self._accept = accept
        self._validate = validate
        self._acks = acks
        self._link: Link | None = None
        self._validations: dict[str, _Validation] = {}
        self._active: dict[str, _Active] = {}
        self._failures = 0
        self._paused_until = 0.0
        self._grace: Timer | None = None

    def __len__(self) -> int:
        return len(self._active)

    # The connection ------------------------------------------------------------------------------

    def link_found(self, link: Link) -> None:
        """A new connection: streams that can go on do."""
        self._link = link
        self._failures, self._paused_until = 0, 0.0
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        for active in list(self._active.values()):
            active.channel.link_found(link)

    def link_lost(self, reason: str) -> None:
        """The connection is gone: plain streams go with it, acked ones wait for the next."""
        self._link = None
        for validation in list(self._validations.values()):
            validation.answer.cancel()
        self._validations.clear()
        for active in list(self._active.values()):
            active.channel.link_lost(reason)
        if self._active and self._grace is None:
            self._grace = self._loop.call_later(GRACE_SECONDS, self.give_up, reason)

    def give_up(self, reason: str) -> None:
        """No stream will go on: there is no connection in time, or the registration is another."""
        self._grace = None
        for active in list(self._active.values()):
            active.channel.give_up(reason)

    def close(self) -> None:
        """End every stream and tell its peer."""
        if self._grace is not None:
            self._grace.cancel()
        for validation in list(self._validations.values()):
            validation.answer.cancel()
        self._validations.clear()
        for active in list(self._active.values()):
            active.channel.abort()

    def link_drained(self) -> None:
        """The connection has room: everybody who waits for it has a turn, the first of now last next time."""
        waiting = [stream_id for stream_id, active in self._active.items() if active.channel.wants_room]
        for stream_id in waiting:
            active = self._active.pop(stream_id, None)
            if active is not None:
                self._active[stream_id] = active
                active.channel.link_drained()

    # Frames --------------------------------------------------------------------------------------

    def frame_arrived(self, message: bytes | memoryview) -> None:
        """One message of the connection; what is not a valid frame is dropped."""
        try:
            frame = decode(message)
        except BadFrame as error:
            log.debug("a frame was dropped", reason=str(error))
            return
        body, active = frame.body, self._active.get(frame.stream_id)
        if active is not None:
            self._for_active(active, frame)
        elif frame.stream_id in self._validations:
            self._for_validation(frame)
        elif type(body) is Handshake:
            self._handshake(frame, body.payload)
        elif type(body) is Data or type(body) is Heartbeat:
            self._reset(frame.stream_id)
        elif type(body) is Resume and (body.next_seq > 0 or frame.ack not in (0, NOTHING_RECEIVED)):
            self._reset(frame.stream_id)  # a stream that went on elsewhere, or before our time

    def _for_active(self, active: _Active, frame: Frame) -> None:
        body = frame.body
        if type(body) is Reset:
            active.channel.reset_received()
        elif type(body) is Handshake:
            if body.payload == active.first_message:
                if self._has_room():
                    self._say(active.answer)
            else:
                self._reset(frame.stream_id)
        else:
            if type(body) is Data:
                active.first_message, active.answer = None, b""
            active.channel.frame_received(frame)

    def _for_validation(self, frame: Frame) -> None:
        body, validation = frame.body, self._validations[frame.stream_id]
        if type(body) in (Ack, Resume, Heartbeat):
            return
        if type(body) is Handshake and body.payload == validation.message:
            return
        del self._validations[frame.stream_id]
        validation.answer.cancel()
        if type(body) is not Reset:
            self._refuse(frame.stream_id, "something came before the answer to its handshake")

    # Handshakes ----------------------------------------------------------------------------------

    def _handshake(self, frame: Frame, message: bytes) -> None:
        stream_id = frame.stream_id
        if (
            len(self._active) >= MAX_STREAMS
            or len(self._validations) >= MAX_VALIDATIONS
            or self._loop.time() < self._paused_until
        ):
            paused = self._loop.time() < self._paused_until
            reason = HANDSHAKES_PAUSED if paused else TOO_MANY_STREAMS
            log.info("a stream was refused", stream=stream_id, reason=reason)
            self._reset(stream_id, reason if frame.acknowledges else PROTOCOL_ERROR)
            return
        responder = Responder(
            self._identity, prologue(self._environment_id, self._registration_id, stream_id)
        )
        try:
            peer, payload = responder.read(message)
            if len(payload) > MAX_AUTHORIZATION_BYTES:
                raise HandshakeFailed("the authorization is too long")
            authorization = payload.decode()
        except (HandshakeFailed, UnicodeDecodeError) as error:
            self._refuse(stream_id, str(error))
            return
        answer = self._validate(stream_id, peer, authorization)
        acked = self._acks and frame.acknowledges
        validation = self._validations[stream_id] = _Validation(
            message, responder, acked, acked and frame.wide, answer
        )
        answer.then(lambda settled: self._validated(stream_id, validation, settled))

    def _validated(self, stream_id: str, validation: _Validation, answer: Pending[bool]) -> None:
        if self._validations.get(stream_id) is not validation or self._link is None:
            return
        del self._validations[stream_id]
        try:
            welcome = answer.result()
        except NotTrusted as error:
            self._refuse(stream_id, str(error), NOT_TRUSTED if validation.acked else PROTOCOL_ERROR)
            return
        except Exception as error:
            told = REGISTRY_SILENT if validation.acked else PROTOCOL_ERROR
            self._refuse(stream_id, f"the registry could not be asked: {error}", told)
            return
        if not welcome:
            self._refuse(stream_id, "the registry does not know the peer")
        elif len(self._active) >= MAX_STREAMS:
            self._reset(stream_id, TOO_MANY_STREAMS if validation.acked else PROTOCOL_ERROR)
        else:
            self._open(stream_id, validation)

    def _open(self, stream_id: str, validation: _Validation) -> None:
        try:
            message, sealer, opener = validation.responder.write()
        except HandshakeFailed as error:
            self._refuse(stream_id, str(error))
            return
        link = self._link
        if link is None:
            return
        ack = NOTHING_RECEIVED if validation.acked else 0
        stream = Stream(
            stream_id,
            sealer,
            opener,
            acked=validation.acked,
            now=self._loop.time(),
            wide=validation.wide,
        )
        channel = RelayChannel(
            self._loop,
            stream,
            link,
            peer=f"relay stream {stream_id}",
            on_end=lambda: self._forget(stream_id, channel),
        )
        answer = encode(Frame(stream_id, Handshake(message), ack, WIDE if validation.wide else 0))
        self._active[stream_id] = _Active(channel, validation.message, answer)
        link.send(answer)
        log.info("a stream was opened", stream=stream_id, acked=validation.acked)
        channel.attach(self._accept(channel))

    def _forget(self, stream_id: str, channel: RelayChannel) -> None:
        active = self._active.get(stream_id)
        if active is not None and active.channel is channel:
            del self._active[stream_id]

    # Refusing ------------------------------------------------------------------------------------

    def _refuse(self, stream_id: str, reason: str, told: str = PROTOCOL_ERROR) -> None:
        """A handshake failed; too many of them, and nobody gets in for a while."""
        log.info("a handshake failed", stream=stream_id, reason=reason)
        self._reset(stream_id, told)
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            log.warning("too many failed handshakes, none is taken for a while", seconds=PAUSE_SECONDS)
            self._failures = 0
            self._paused_until = self._loop.time() + PAUSE_SECONDS

    def _reset(self, stream_id: str, reason: str = PROTOCOL_ERROR) -> None:
        """Any other reason than the reference's one is for an end of ours: one that acknowledges."""
        if self._has_room():
            self._say(encode(Frame(stream_id, Reset(reason))))

    def _has_room(self) -> bool:
        """Who floods us and does not read would fill our memory with answers."""
        return self._link is not None and self._link.unsent() < RESET_BYTES

    def _say(self, message: bytes) -> None:
        if self._link is not None:
            self._link.send(message)
