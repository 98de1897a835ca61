"""Two ends of a stream and a bad network between them, in virtual time and from a seed.

Frames are lost, doubled, delayed and so overtaken; the connection of either end breaks, and whatever was on
it is gone; the router in between restarts. Run as a program for many seeds at once:

    python -m relay.simulation 10000          (in tests/)
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from exec_server.relay.frame import MAX_FRAME_BYTES, Ack, Data, Frame, decode
from exec_server.relay.noise import Opener, Sealer
from exec_server.relay.stream import (
    REORDER_BYTES,
    REORDER_DISTANCE,
    WIDE_REORDER_BYTES,
    Stream,
    StreamFailed,
)

__all__ = ["Conditions", "Outcome", "Simulation", "random_conditions"]

ROOM = 4 * 1024 * 1024
"""What the connection takes at once."""


@dataclass
class Conditions:
    """How bad it is. Times are seconds."""

    seed: int = 0
    acked: bool = True
    wide: bool = False
    loss: float = 0.0
    doubling: float = 0.0
    delay: tuple[float, float] = (0.001, 0.02)
    cuts: list[tuple[float, float, str]] = field(default_factory=list)
    """When a connection breaks, for how long it is gone, and whose: "a", "b" or "router" for both."""
    messages: tuple[list[bytes], list[bytes]] = ((), ())  # type: ignore[assignment]  # filled by whoever makes it
    spacing: float = 0.01
    """Between messages that are sent."""
    stalls: list[tuple[float, float, str]] = field(default_factory=list)
    """When an end stops taking messages, and for how long."""


@dataclass
class Outcome:
    """What arrived where, and how the streams ended."""

    received: dict[str, list[bytes]]
    failed: dict[str, str]
    seconds: float
    frames: int


class _End:
    def __init__(self, name: str, stream: Stream) -> None:
        self.name = name
        self.stream = stream
        self.up = True
        self.taking = True
        self.epoch = 0
        """Of its connection; frames of an earlier one are gone."""
        self.planned: float | None = None
        self.received: list[bytes] = []
        self.failed: str | None = None


class Simulation:
    """Run it once."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self._random = random.Random(conditions.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.now = 0.0
        self.frames = 0
        keys = self._random.randbytes(32), self._random.randbytes(32)

        def end(name: str, mine: bytes, theirs: bytes) -> _End:
            acked, wide = conditions.acked, conditions.wide
            return _End(name, Stream("s", Sealer(mine), Opener(theirs), acked=acked, now=0.0, wide=wide))

        self.a, self.b = end("a", *keys), end("b", *reversed(keys))
        self.sealed: dict[tuple[str, int], bytes] = {}

    def run(self, limit: float = 3600.0) -> Outcome:
        """Until nothing happens any more that matters, or for so many seconds of virtual time."""
        conditions = self.conditions
        for end, messages in zip((self.a, self.b), conditions.messages, strict=True):
            for index, message in enumerate(messages):
                self._at(index * conditions.spacing, self._sender(end, message))
        for when, length, who in conditions.cuts:
            for end in self._ends(who):
                self._at(when, self._cutter(end))
                self._at(when + length, self._mender(end))
        for when, length, who in conditions.stalls:
            for end in self._ends(who):
                self._at(when, self._staller(end, True))
                self._at(when + length, self._staller(end, False))
        while self._events and not self._finished():
            when, _, event = heapq.heappop(self._events)
            if when > limit:
                break
            self.now = when
            event()
        failed = {end.name: end.failed for end in (self.a, self.b) if end.failed is not None}
        received = {end.name: end.received for end in (self.a, self.b)}
        return Outcome(received, failed, self.now, self.frames)

    def _finished(self) -> bool:
        a, b = self.a, self.b
        if a.failed is not None and b.failed is not None:
            return True
        counts = len(self.conditions.messages[1]), len(self.conditions.messages[0])
        arrived = (len(a.received), len(b.received)) == counts
        return arrived and (not self.conditions.acked or (a.stream.drained and b.stream.drained))

    def _ends(self, who: str) -> Iterator[_End]:
        for end in (self.a, self.b):
            if who in (end.name, "router"):
                yield end

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    # What happens --------------------------------------------------------------------------------

    def _sender(self, end: _End, message: bytes) -> Callable[[], None]:
        def event() -> None:
            if end.failed is None:
                half = len(message) // 2
                end.stream.send(message[:half], message[half:])
                self._pump(end)

        return event

    def _cutter(self, end: _End) -> Callable[[], None]:
        def event() -> None:
            end.up = False
            end.epoch += 1
            end.stream.path_lost()

        return event

    def _mender(self, end: _End) -> Callable[[], None]:
        def event() -> None:
            if not end.up:
                end.up = True
                if end.failed is None:
                    end.stream.resume(self.now)
                    self._pump(end)

        return event

    def _staller(self, end: _End, stalled: bool) -> Callable[[], None]:
        def event() -> None:
            end.taking = not stalled
            self._take(end)
            self._pump(end)

        return event

    def _waker(self, end: _End, when: float) -> Callable[[], None]:
        def event() -> None:
            if end.planned == when:
                end.planned = None
                self._pump(end)

        return event

    def _pump(self, end: _End) -> None:
        if end.failed is not None:
            return
        stream = end.stream
        try:
            if stream.silent(self.now):
                stream.resume(self.now)
            for message in stream.frames(self.now, ROOM):
                self._carry(end, message)
        except StreamFailed as error:
            self._fail(end, str(error))
            return
        wake = stream.wake_at()
        if wake is not None and (end.planned is None or wake < end.planned):
            when = max(wake, self.now)
            end.planned = when
            self._at(when, self._waker(end, when))

    def _fail(self, end: _End, reason: str) -> None:
        """A reset tells the other end; it gets through at last, since whoever gives up says so again."""
        end.failed = reason
        other = self.b if end is self.a else self.a
        if other.failed is None:

            def event() -> None:
                if other.failed is None:
                    other.failed = "reset"

            self._at(self.now + 1.0, event)

    def _carry(self, end: _End, message: bytes) -> None:
        self.frames += 1
        assert len(message) <= MAX_FRAME_BYTES
        self._inspect(end, decode(message))
        other = self.b if end is self.a else self.a
        copies = 1 + (self._random.random() < self.conditions.doubling)
        for _ in range(copies):
            if self._random.random() < self.conditions.loss:
                continue
            delay = self._random.uniform(*self.conditions.delay)
            epochs = end.epoch, other.epoch
            self._at(self.now + delay, self._arrival(end, other, epochs, message))

    def _inspect(self, end: _End, frame: Frame) -> None:
        """What no peer may ever see: a record sealed twice, a plain end that acknowledges."""
        if not self.conditions.acked:
            assert not frame.acknowledges
        if isinstance(frame.body, Data):
            payload = bytes(frame.body.payload)
            assert self.sealed.setdefault((end.name, frame.body.seq), payload) == payload
        elif isinstance(frame.body, Ack):
            assert self.conditions.acked

    def _arrival(
        self, sender: _End, end: _End, epochs: tuple[int, int], message: bytes
    ) -> Callable[[], None]:
        def event() -> None:
            if end.failed is not None or not end.up or (sender.epoch, end.epoch) != epochs:
                return
            try:
                end.stream.receive(decode(message), self.now)
                self._take(end)
                # The bounds of the reference's receiver, and so of ours.
                assert len(end.stream._held) <= REORDER_DISTANCE + 1
                most = WIDE_REORDER_BYTES if self.conditions.wide else REORDER_BYTES
                assert end.stream._held_bytes <= most
            except StreamFailed as error:
                self._fail(end, str(error))
            self._pump(end)

        return event

    def _take(self, end: _End) -> None:
        while end.taking and end.failed is None and (message := end.stream.take()) is not None:
            end.received.append(message)


def random_conditions(seed: int) -> Conditions:
    """Anything from quiet to terrible."""
    rng = random.Random(f"conditions {seed}")

    def messages() -> list[bytes]:
        sizes = [rng.choice((1, 30, 500, 61436, 61437, 200_000)) for _ in range(rng.randint(0, 30))]
        return [rng.randbytes(16)[: max(1, size)] + bytes(max(0, size - 16)) for size in sizes]

    cuts = [
        (rng.uniform(0, 5), rng.choice((0.0, 0.1, 1.0, 4.0, 20.0)), rng.choice(("a", "b", "router")))
        for _ in range(rng.choice((0, 0, 1, 2, 4)))
    ]
    return Conditions(
        seed=seed,
        loss=rng.choice((0.0, 0.01, 0.1, 0.3)),
        doubling=rng.choice((0.0, 0.1, 0.3)),
        delay=rng.choice(((0.0, 0.0), (0.001, 0.01), (0.01, 0.3), (0.0, 1.5))),
        cuts=cuts,
        messages=(messages(), messages()),
        spacing=rng.choice((0.0, 0.01, 0.2)),
        wide=rng.random() < 0.5,
    )


def verdict(conditions: Conditions, outcome: Outcome) -> str | None:
    """None when every message arrived once and in order, or both ends know that not; else what is wrong."""
    for name, sent in (("b", conditions.messages[0]), ("a", conditions.messages[1])):
        received = outcome.received[name]
        if received != sent[: len(received)]:
            return f"{name} received something else than was sent"
        if len(received) < len(sent) and len(outcome.failed) < 2:
            return f"{name} received {len(received)} of {len(sent)} and nobody said so: {outcome.failed}"
    return None


def main(runs: int) -> None:
    """Many seeds; the first that goes wrong is named."""
    resets = 0
    for seed in range(runs):
        conditions = random_conditions(seed)
        outcome = Simulation(conditions).run()
        problem = verdict(conditions, outcome)
        if problem is not None:
            sys.exit(f"seed {seed}: {problem}")
        resets += bool(outcome.failed)
    sys.stdout.write(
        f"{runs} runs, {resets} ended in a reset that both ends saw, nothing lost, doubled or reordered\n"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
