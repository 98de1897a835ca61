"""Connections that break as told: put one between a client and a server, and see what is lost.

    faults = Faults([Cut("received", 7), Refuse(2), Stall("sent", 3)])
    async with exec_server.connect(url, wrap_dialer=faults.wrap) as machine: ...

Each connection uses up the next fault of the plan, whole; when the plan is through, connections hold. A plan
of random cuts comes from a seed (`random_cuts`), so that what failed once can be had again. Nothing here is
random by itself, and nothing sleeps: delays are timers of the loop, which a test may move by hand.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Literal

from msgspec import Struct

from ..client.client import Dialer
from ..transport.channel import Channel, Receiver

__all__ = [
    "Cut",
    "Delay",
    "Direction",
    "Duplicate",
    "Fault",
    "FaultChannel",
    "Faults",
    "Hold",
    "Refuse",
    "Stall",
    "random_cuts",
]

Direction = Literal["sent", "received", "either"]
"""As the client sees it; with `either` both count."""

REASON: Final = "cut by a test"
"""What the client is told."""


class Cut(Struct, frozen=True):
    """End the connection at a message, both ends at once.

    It is cut when message number `at` (1 is the first) in that direction comes by: `before` it, so that
    the other side never gets it, or else right after. With `at_byte` it is the message in which that byte
    of the direction is; a message is all or nothing, as it is in every transport.
    """

    direction: Direction = "received"
    at: int = 1
    before: bool = True
    at_byte: int | None = None
    when: Callable[[bytes], bool] | None = None
    """Only messages for which this is true count."""
    half_open: bool = False
    """Only the client notices. The server finds out when `Faults.release` is called, or after
    `half_open_refusals` further connections, as when a NAT has forgotten about it."""
    half_open_refusals: int = 0


class Stall(Struct, frozen=True):
    """From that message on nothing arrives any more, and nobody is told until `Faults.release`."""

    direction: Direction = "received"
    at: int = 1
    seconds: float | None = None
    """Or until this time is over: then the connection ends."""


class Delay(Struct, frozen=True):
    """Everything takes this many seconds longer, in order."""

    seconds: float


class Duplicate(Struct, frozen=True):
    """Every message from the server arrives twice."""


class Refuse(Struct, frozen=True):
    """The next `times` connections cannot be made."""

    times: int = 1


class Hold(Struct, frozen=True):
    """A connection without a fault, until `Faults.cut`."""


Fault = Cut | Stall | Delay | Duplicate | Refuse | Hold


class Faults:
    """A plan of faults, and the record of what happened."""

    def __init__(self, plan: Iterable[Fault] = ()) -> None:
        self._plan = deque(plan)
        self._half_open: list[tuple[Channel, int]] = []
        self._current: FaultChannel | None = None
        self._refusals = 0
        self.connections = 0
        """Connections that were made."""
        self.refused = 0
        """Connections that were not."""
        self.cuts = 0
        """Connections that were cut."""
        self.sent: list[bytes] = []
        """Every text message the client sent, on all connections."""
        self.attempted_at: list[float] = []
        """The loop's time of every attempt to connect."""
        self.observer: Callable[[str, bytes], None] | None = None
        """Called with the direction and every message that comes by, cut or not."""

    def add(self, *faults: Fault) -> None:
        """More of them, at the end of the plan."""
        self._plan.extend(faults)

    def wrap(self, dial: Dialer) -> Dialer:
        """The dialer that a client gets instead."""

        async def faulty(receiver: Receiver) -> Channel:
            self.attempted_at.append(asyncio.get_running_loop().time())
            self._refuse_or_go_on()
            fault = self._plan.popleft() if self._plan else Hold()
            between = FaultChannel(self, fault, receiver)
            between.use(await dial(between))
            self.connections += 1
            self._current = between
            return between

        return faulty

    def _refuse_or_go_on(self) -> None:
        self._half_open = [(channel, left - 1) for channel, left in self._half_open]
        for channel, left in self._half_open:
            if left < 0:
                channel.abort()
        self._half_open = [(channel, left) for channel, left in self._half_open if left >= 0]
        if self._plan and isinstance(self._plan[0], Refuse):
            self._refusals = self._plan.popleft().times  # type: ignore[union-attr]  # seen to be one
        if self._refusals > 0:
            self._refusals -= 1
            self.refused += 1
            raise ConnectionRefusedError("refused by a test")

    def refuse(self) -> None:
        """Let nobody connect, until `allow`."""
        self._refusals = 2**31

    def allow(self) -> None:
        """Let connections be made again."""
        self._refusals = 0

    def cut(self, *, half_open: bool = False) -> None:
        """Cut the connection that there is now."""
        if self._current is not None:
            self._current.cut(half_open=half_open)

    def release(self) -> None:
        """Let the server, and a client that was stalled, find out what happened."""
        half_open, self._half_open = self._half_open, []
        for channel, _ in half_open:
            channel.abort()
        if self._current is not None and self._current.stalled:
            self._current.cut()

    def keep_half_open(self, channel: Channel, refusals: int) -> None:
        """The server's end of a connection whose client's end is gone."""
        self._half_open.append((channel, refusals))


class FaultChannel:
    """Between a client and its channel: a Channel to the one, a Receiver to the other."""

    def __init__(self, faults: Faults, fault: Fault, receiver: Receiver) -> None:
        self._faults = faults
        self._fault = fault
        self._receiver = receiver
        self._channel: Channel | None = None
        self._loop = asyncio.get_running_loop()
        self._counts = {"sent": 0, "received": 0}
        self._bytes = {"sent": 0, "received": 0}
        self._ended = False
        self.stalled = False

    def use(self, channel: Channel) -> None:
        """The channel that is real."""
        self._channel = channel
        self.peer = channel.peer
        self.parse_failure = channel.parse_failure
        self.carries_binary = channel.carries_binary
        self.resumable = channel.resumable

    # As a channel --------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        self._faults.sent.append(message)
        self._pass("sent", message, lambda channel: channel.send(message))

    def send_parts(self, head: bytes, body: bytes | memoryview, tail: bytes, *, binary: bool) -> None:
        whole = b"".join((head, body, tail))
        self._pass("sent", whole, lambda channel: channel.send_parts(whole, b"", b"", binary=binary))

    def unsent(self) -> int:
        return 0 if self._channel is None else self._channel.unsent()

    def pause_reading(self) -> None:
        if self._channel is not None:
            self._channel.pause_reading()

    def resume_reading(self) -> None:
        if self._channel is not None:
            self._channel.resume_reading()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def abort(self) -> None:
        if self._channel is not None:
            self._channel.abort()

    # As a receiver -------------------------------------------------------------------------------

    def message_received(self, message: bytes) -> None:
        self._arrive(message, self._receiver.message_received)

    def binary_received(self, message: bytes) -> None:
        self._arrive(message, self._receiver.binary_received)

    def writing_paused(self) -> None:
        self._receiver.writing_paused()

    def writing_resumed(self) -> None:
        self._receiver.writing_resumed()

    def channel_closed(self, reason: str) -> None:
        if not self._ended and not self.stalled:
            self._ended = True
            self._receiver.channel_closed(reason)

    # The faults ----------------------------------------------------------------------------------

    def cut(self, *, half_open: bool = False, refusals: int = 2**31) -> None:
        """End it now. What is on its way to the client is lost."""
        if self._ended:
            return
        self._ended = True
        self.stalled = False
        self._faults.cuts += 1
        if self._channel is not None:
            if half_open:
                self._faults.keep_half_open(self._channel, refusals)
            else:
                self._channel.abort()
        self._loop.call_soon(self._receiver.channel_closed, REASON)

    def _arrive(self, message: bytes, deliver: Callable[[bytes], None]) -> None:
        times = 2 if isinstance(self._fault, Duplicate) else 1

        def go(channel: Channel) -> None:
            del channel
            for _ in range(times):
                if not self._ended:
                    deliver(message)

        self._pass("received", message, go)

    def _pass(self, direction: str, message: bytes, go: Callable[[Channel], None]) -> None:
        if self._ended or self.stalled or self._channel is None:
            return
        fault = self._fault
        if not isinstance(fault, Cut) or fault.when is None or fault.when(message):
            self._counts[direction] += 1
            self._bytes[direction] += len(message)
            due = isinstance(fault, Cut | Stall) and self._due(fault, direction)
        else:
            due = False
        if self._faults.observer is not None:
            self._faults.observer(direction, message)
        if isinstance(fault, Delay):
            self._loop.call_later(fault.seconds, self._go_late, go)
        elif due and isinstance(fault, Stall):
            self.stalled = True
            if fault.seconds is not None:
                self._loop.call_later(fault.seconds, self.cut)
        elif due and isinstance(fault, Cut):
            if not fault.before:
                go(self._channel)
            self.cut(half_open=fault.half_open, refusals=fault.half_open_refusals)
        else:
            go(self._channel)

    def _go_late(self, go: Callable[[Channel], None]) -> None:
        if not self._ended and self._channel is not None:
            go(self._channel)

    def _due(self, fault: Cut | Stall, direction: str) -> bool:
        if fault.direction not in ("either", direction):
            return False
        both = fault.direction == "either"
        byte = fault.at_byte if isinstance(fault, Cut) else None
        if byte is not None:
            return (sum(self._bytes.values()) if both else self._bytes[direction]) >= byte
        return (sum(self._counts.values()) if both else self._counts[direction]) >= fault.at


def random_cuts(seed: int, count: int, longest: int) -> list[Fault]:
    """`count` cuts at random places, each within `longest` messages of its connection's beginning.

    The same seed gives the same cuts. Some connections are refused in between; each connection lives long
    enough for the handshake.
    """
    chance = random.Random(seed)  # noqa: S311  # a test that can be repeated, not a secret
    plan: list[Fault] = []
    for _ in range(count):
        if chance.random() < 0.2:
            plan.append(Refuse(chance.randint(1, 2)))
        direction: Direction = chance.choice(("sent", "received", "either"))
        plan.append(Cut(direction, chance.randint(3, max(longest, 3)), before=chance.random() < 0.5))
    return plan
