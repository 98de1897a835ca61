"""Ends of the relay without sockets: links that are lists, receivers that remember, a harness by hand."""

from __future__ import annotations

from exec_server.loop import Pending
from exec_server.relay.channel import RelayChannel
from exec_server.relay.frame import NOTHING_RECEIVED, Frame, Handshake, Reset, Resume, decode, encode
from exec_server.relay.keys import Identity, PublicKey
from exec_server.relay.noise import Initiator, prologue
from exec_server.relay.stream import Stream
from exec_server.relay.streams import Streams
from exec_server.testing import ManualLoop
from exec_server.transport.channel import Channel

__all__ = ["EXECUTOR", "HARNESS", "HandHarness", "MemoryLink", "Remembering", "Site"]

HARNESS = Identity.generate()
EXECUTOR = Identity.generate()


class MemoryLink:
    """What was sent on it, and a backlog that the test sets."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.backlog = 0

    def send(self, frame: bytes) -> None:
        self.sent.append(frame)

    def unsent(self) -> int:
        return self.backlog

    def frames(self) -> list[Frame]:
        """Everything since the last look."""
        sent, self.sent = self.sent, []
        return [decode(message) for message in sent]


class Remembering:
    """A receiver that keeps what it is told; `echo` sends every message back."""

    def __init__(self, channel: Channel | None = None, *, echo: bool = False) -> None:
        self.channel = channel
        self.messages: list[bytes] = []
        self.binary: list[bytes] = []
        self.pauses = 0
        self.paused = False
        self.closed: str | None = None
        self._echo = echo

    def message_received(self, message: bytes) -> None:
        self.messages.append(message)
        if self._echo and self.channel is not None:
            self.channel.send(message)

    def binary_received(self, message: bytes) -> None:
        self.binary.append(message)

    def writing_paused(self) -> None:
        self.paused = True
        self.pauses += 1

    def writing_resumed(self) -> None:
        self.paused = False

    def channel_closed(self, reason: str) -> None:
        assert self.closed is None
        self.closed = reason


class Site:
    """An environment's streams on a link, with a registry that answers when the test says so."""

    def __init__(self, *, acks: bool = True, echo: bool = True) -> None:
        self.loop = ManualLoop()
        self.link = MemoryLink()
        self.receivers: list[Remembering] = []
        self.questions: list[tuple[str, PublicKey, str, Pending[bool]]] = []
        self.cancelled = 0
        self.answer: bool | None = True
        """What the registry says at once; None to be asked later."""
        self._echo = echo
        self.streams = Streams(
            self.loop, EXECUTOR, "env-1", "reg-1", accept=self._accept, validate=self._validate, acks=acks
        )
        self.streams.link_found(self.link)

    def _accept(self, channel: Channel) -> Remembering:
        receiver = Remembering(channel, echo=self._echo)
        self.receivers.append(receiver)
        return receiver

    def _validate(self, stream_id: str, key: PublicKey, authorization: str) -> Pending[bool]:
        def cancel() -> None:
            self.cancelled += 1

        answer: Pending[bool] = Pending(cancel)
        self.questions.append((stream_id, key, authorization, answer))
        if self.answer is not None:
            answer.resolve(self.answer)
        return answer

    def give(self, *frames: Frame) -> list[Frame]:
        """Let frames arrive and give what is said in return."""
        for frame in frames:
            self.streams.frame_arrived(encode(frame))
        self.loop.settle()
        return self.link.frames()

    def said(self, *frames: Frame) -> list[str]:
        """The same, as names of bodies."""
        return [type(frame.body).__name__ for frame in self.give(*frames)]


class HandHarness:
    """The other side of one stream of a Site, on the same clock."""

    def __init__(self, site: Site, stream_id: str = "stream-1", *, acks: bool = True) -> None:
        self.site = site
        self.id = stream_id
        self.acks = acks
        self._initiator = Initiator(HARNESS, EXECUTOR.public, prologue("env-1", "reg-1", stream_id))
        ack = NOTHING_RECEIVED if acks else 0
        self.claim = Frame(stream_id, Resume(), ack)
        self.hello = Frame(stream_id, Handshake(self._initiator.write(b"let me in")), ack)
        self.link = MemoryLink()
        self.receiver = Remembering()
        self.channel: RelayChannel | None = None
        self.ended = 0

    def open(self) -> RelayChannel:
        """Shake hands and give the channel."""
        (answer,) = self.site.give(self.claim, self.hello)
        return self.answered(answer)

    def answered(self, answer: Frame) -> RelayChannel:
        assert isinstance(answer.body, Handshake)
        sealer, opener = self._initiator.read(answer.body.payload)
        acked = answer.acknowledges
        stream = Stream(self.id, sealer, opener, acked=acked, now=self.site.loop.time())

        def ended() -> None:
            self.ended += 1

        self.channel = RelayChannel(self.site.loop, stream, self.link, peer="test", on_end=ended)
        self.channel.attach(self.receiver)
        return self.channel

    def exchange(self) -> None:
        """Carry frames both ways until there are none."""
        assert self.channel is not None
        while True:
            self.site.loop.settle()
            there, back = self.link.frames(), self.site.link.frames()
            if not there and not back:
                return
            for frame in there:
                self.site.streams.frame_arrived(encode(frame))
            for frame in back:
                if isinstance(frame.body, Reset):
                    self.channel.reset_received()
                else:
                    self.channel.frame_received(frame)
