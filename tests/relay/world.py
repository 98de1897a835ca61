"""A whole relay in virtual time and from a seed: an environment, a router that restarts, a harness, cables.

The ends and the router are the real ones; only sockets are missing. Run as a program for many seeds at once:

    python -m relay.world 10000          (in tests/)
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

from exec_server.loop import Pending, resolved
from exec_server.relay.channel import RelayChannel
from exec_server.relay.frame import NOTHING_RECEIVED, Frame, Handshake, Reset, Resume, decode, encode
from exec_server.relay.keys import PublicKey
from exec_server.relay.noise import Initiator, prologue
from exec_server.relay.stream import Stream
from exec_server.relay.streams import Streams
from exec_server.rendezvous.router import Router
from exec_server.rendezvous.routes import Harness
from exec_server.testing import ManualLoop

from .support import EXECUTOR, HARNESS, Remembering

__all__ = ["World"]

STREAM = "stream-1"


class Cable:
    """A connection between an end and the router: in order, with delay, sometimes losing a frame."""

    def __init__(
        self, world: World, to_router: Callable[[bytes], None], to_end: Callable[[bytes], None]
    ) -> None:
        self.world = world
        self.alive = True
        self.on_cut: list[Callable[[], None]] = []
        self._to_router = to_router
        self._to_end = to_end
        self._last = {True: 0.0, False: 0.0}

    # The end's side

    def send(self, frame: bytes | memoryview) -> bool:
        self._carry(frame, True)
        return True

    def unsent(self) -> int:
        return 0

    def _carry(self, frame: bytes | memoryview, upwards: bool) -> None:
        world = self.world
        if not self.alive or (world.lossy and world.random.random() < world.loss):
            return
        loop = world.loop
        at = max(loop.time() + world.random.uniform(*world.delay), self._last[upwards])
        self._last[upwards] = at
        loop.call_later(at - loop.time(), self._arrive, bytes(frame), upwards)

    def _arrive(self, frame: bytes, upwards: bool) -> None:
        if self.alive:
            (self._to_router if upwards else self._to_end)(frame)

    def cut(self) -> None:
        if self.alive:
            self.alive = False
            for call in self.on_cut:
                call()


class RouterSide:
    """The router's side of a cable."""

    def __init__(self, cable: Cable) -> None:
        self.cable = cable

    def send(self, frame: bytes | memoryview) -> bool:
        self.cable._carry(frame, False)
        return True

    def is_full(self) -> bool:
        return False

    def pause(self) -> None:
        raise AssertionError("nothing is ever full here")

    def resume(self) -> None:
        pass

    def close(self, code: int, reason: str) -> None:
        self.cable.world.loop.call_soon(self.cable.cut)


class World:
    """Run it once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.loop = ManualLoop()
        self.router = Router(self.loop)
        rng = self.random
        self.loss = rng.choice((0.0, 0.02, 0.2))
        self.lossy = False
        self.delay = rng.choice(((0.0, 0.001), (0.01, 0.05), (0.0, 0.5)))
        self.count = rng.randint(1, 40)
        self.sent = [
            b"[%d,%b]" % (number, b"0" * rng.choice((1, 1, 100, 70_000))) for number in range(self.count)
        ]
        self.server: Remembering | None = None
        self.client = Remembering()
        self.streams = Streams(
            self.loop, EXECUTOR, "env", "reg", accept=self._accept, validate=self._validate
        )
        self.environment: Cable | None = None
        self.harness: Cable | None = None
        self.channel: RelayChannel | None = None
        self.given_up_at: float | None = None

    def _accept(self, channel: object) -> Remembering:
        self.server = Remembering(channel, echo=True)  # type: ignore[arg-type]  # a channel
        return self.server

    def _validate(self, stream_id: str, key: PublicKey, authorization: str) -> Pending[bool]:
        return resolved(True)

    # The environment -----------------------------------------------------------------------------

    def connect_environment(self) -> None:
        router = self.router

        def upwards(frame: bytes) -> None:
            router.environment_frame("reg", side, frame)

        cable = Cable(self, upwards, self.streams.frame_arrived)
        side = RouterSide(cable)
        cable.on_cut = [
            lambda: router.environment_closed("reg", side),
            lambda: self.streams.link_lost("cut"),
            lambda: self._later(0.2, 2.0, self.connect_environment),
        ]
        self.environment = cable
        router.environment_opened("reg", side)
        self.streams.link_found(cable)

    # The harness ---------------------------------------------------------------------------------

    def connect_harness(self) -> None:
        if self.client.closed is not None:
            return
        if not self.router.is_online("reg"):
            patience = self.given_up_at
            if self.channel is not None and patience is not None and self.loop.time() > patience:
                self.channel.give_up("no connection in time")
                return
            self._later(0.5, 0.75, self.connect_harness)
            return
        router = self.router

        def upwards(frame: bytes) -> None:
            router.harness_frame(handle, frame)

        cable = Cable(self, upwards, self._harness_frame)
        side = RouterSide(cable)
        handle: Harness = router.harness_opened("reg", "key", side)
        cable.on_cut = [lambda: router.harness_closed(handle), self._harness_lost]
        self.harness = cable
        self.given_up_at = None
        if self.channel is None:
            self._initiator = Initiator(HARNESS, EXECUTOR.public, prologue("env", "reg", STREAM))
            cable.send(encode(Frame(STREAM, Resume(), NOTHING_RECEIVED)))
            hello = Handshake(self._initiator.write(b"a"))
            cable.send(encode(Frame(STREAM, hello, NOTHING_RECEIVED)))
        else:
            self.channel.link_found(cable)

    def _harness_lost(self) -> None:
        self.harness = None
        if self.channel is not None and self.client.closed is None:
            self.channel.link_lost("cut")
            self.given_up_at = self.loop.time() + 25.0
            self._later(0.05, 1.0, self.connect_harness)

    def _harness_frame(self, message: bytes) -> None:
        frame = decode(message)
        body = frame.body
        if self.channel is None:
            assert isinstance(body, Handshake), body
            sealer, opener = self._initiator.read(body.payload)
            assert frame.acknowledges
            stream = Stream(STREAM, sealer, opener, acked=True, now=self.loop.time())
            assert self.harness is not None
            self.channel = RelayChannel(
                self.loop, stream, self.harness, peer="x", on_end=lambda: None, on_silence=self._silence
            )
            self.channel.attach(self.client)
            self.lossy = True
            for index, text in enumerate(self.sent):
                self.loop.call_later(index * 0.1, self.channel.send, text)
        elif isinstance(body, Reset):
            self.channel.reset_received()
        else:
            self.channel.frame_received(frame)

    def _silence(self) -> None:
        if self.harness is not None:
            self.loop.call_soon(self.harness.cut)

    # What goes wrong -----------------------------------------------------------------------------

    def restart_router(self) -> None:
        self.router.close()
        self.router = Router(self.loop)
        for cable in (self.environment, self.harness):
            if cable is not None:
                cable.cut()

    def _later(self, least: float, most: float, call: Callable[[], None]) -> None:
        self.loop.call_later(self.random.uniform(least, most), call)

    def run(self) -> str | None:
        """None when all is well, else what is wrong."""
        self.connect_environment()
        self.connect_harness()
        self.loop.advance(5.0)
        assert self.channel is not None, "a quiet handshake failed"
        troubles: list[Callable[[], None]] = [
            lambda: self.environment.cut() if self.environment else None,
            lambda: self.harness.cut() if self.harness else None,
            self.restart_router,
        ]
        for _ in range(self.random.choice((0, 1, 2, 5))):
            self.loop.call_later(self.random.uniform(0, 6), self.random.choice(troubles))
        for _ in range(300):
            self.loop.advance(1.0)
            if self.client.messages == self.sent or self.client.closed:
                break
        self.loop.advance(60.0)
        assert self.server is not None
        received = self.client.messages
        if received != self.sent[: len(received)]:
            return "something else arrived than was sent"
        if received == self.sent:
            return None
        if self.client.closed is not None and self.server.closed is not None:
            return None
        return f"{len(received)} of {len(self.sent)}; {self.client.closed=} {self.server.closed=}"


def main(runs: int) -> None:
    """Many seeds; the first that goes wrong is named."""
    resets = 0
    for seed in range(runs):
        world = World(seed)
        problem = world.run()
        if problem is not None:
            sys.exit(f"seed {seed}: {problem}")
        resets += world.client.messages != world.sent
    sys.stdout.write(f"{runs} runs, {resets} ended in a reset that both ends saw, nothing lost or doubled\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
