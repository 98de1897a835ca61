"""A router with an environment, without sockets and on a clock of its own."""

from __future__ import annotations

from exec_server.relay.frame import Frame, Handshake, Reset, Resume, decode, encode
from exec_server.rendezvous.router import Router
from exec_server.rendezvous.routes import Harness
from exec_server.testing import ManualLoop

__all__ = ["MARK", "FakeSocket", "Play"]

MARK = 0xFFFFFFFF


class FakeSocket:
    """Remembers what it was given; full or overflowing when the test says so."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed: int | None = None
        self.reading = True
        self.full = False
        self.overflowing = False

    def send(self, frame: bytes) -> bool:
        if not self.overflowing:
            self.sent.append(frame)
        return not self.overflowing

    def is_full(self) -> bool:
        return self.full

    def pause(self) -> None:
        self.reading = False

    def resume(self) -> None:
        self.reading = True

    def close(self, code: int, reason: str) -> None:
        self.closed = code

    def frames(self) -> list[Frame]:
        sent, self.sent = self.sent, []
        return [decode(message) for message in sent]

    def resets(self) -> list[str]:
        """The streams it was told are over, and nothing else."""
        frames = self.frames()
        assert all(isinstance(frame.body, Reset) for frame in frames)
        return [frame.stream_id for frame in frames]


class Play:
    """A router with an environment."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.router = Router(self.loop)
        self.environment = FakeSocket()
        self.router.environment_opened("reg", self.environment)

    def harness(self, key: str = "key", caller: str = "") -> tuple[Harness, FakeSocket]:
        socket = FakeSocket()
        return self.router.harness_opened("reg", key, socket, caller), socket

    def from_harness(self, harness: Harness, *frames: Frame) -> None:
        for frame in frames:
            self.router.harness_frame(harness, encode(frame))

    def from_environment(self, *frames: Frame) -> None:
        for frame in frames:
            self.router.environment_frame("reg", self.environment, encode(frame))

    def stream(
        self, stream_id: str = "s", *, acked: bool = False, caller: str = ""
    ) -> tuple[Harness, FakeSocket]:
        """A stream whose handshake is over."""
        harness, socket = self.harness(caller=caller)
        ack = MARK if acked else 0
        hello = (Frame(stream_id, Resume(), ack), Frame(stream_id, Handshake(b"1"), ack))
        self.from_harness(harness, *hello)
        answer = Frame(stream_id, Handshake(b"2"), ack)
        self.from_environment(answer)
        assert self.environment.frames() == list(hello)
        assert socket.frames() == [answer]
        return harness, socket
