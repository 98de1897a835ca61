"""Connections that break at every place there is, and a client that notices nothing but the time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

import exec_server
from exec_server import ConnectionLost, RemoteProcess
from exec_server.environments.environment import Environment
from exec_server.testing.faults import (
    Cut,
    Delay,
    Duplicate,
    Fault,
    Faults,
    Hold,
    Refuse,
    Stall,
    random_cuts,
)
from exec_server.transport.channel import Channel, Receiver
from exec_server.transport.memory import MemoryChannel, pair
from support.machine import gone, sleep_forever
from support.server import RunningServer
from support.wait import eventually_async

T = TypeVar("T")

ECHO = "stty -echo 2>/dev/null; echo ready; n=0; while read x; do n=$((n+1)); echo $n:$x; done; exit 5"
"""Numbers what it reads: a line that came twice, or out of order, shows."""

COUNTER = "i=0; while [ $i -lt {} ]; do i=$((i+1)); echo $i; echo $i >&2; done; exit 6"


async def persistently(call: Callable[[], Awaitable[T]]) -> T:
    """What a caller does with a call that is not repeated for it, and may be."""
    while True:
        try:
            return await call()
        except ConnectionLost:
            continue


async def everything(process: RemoteProcess) -> tuple[bytes, bytes, bytes, int]:
    done = await process.communicate()
    assert done.exit_code is not None
    return done.stdout, done.stderr, done.terminal, done.exit_code


async def script(machine: Environment, place: Path, marker: str) -> list[object]:
    """Sixty operations on processes and files, and all that came of them."""
    variable = {"TEST_MARKER": marker, "PATH": "/usr/bin:/bin"}

    def starting(*argv: str, **options: bool) -> Awaitable[RemoteProcess]:
        return persistently(lambda: machine.start([*argv, marker], env=variable, **options))

    pipe = await starting("sh", "-c", ECHO, stdin=True)
    terminal = await starting("sh", "-c", ECHO, tty=True)
    counter = await starting("sh", "-c", COUNTER.format(30))
    reader = terminal.output()
    text = (await anext(reader)).data  # the terminal does not echo any more
    results: list[object] = []
    for number in range(22):
        await pipe.write(b"line %d\n" % number)
        await terminal.write(b"typed %d\n" % number)
        if number % 5 == 0:
            path = f"{place}/{number}"
            await persistently(lambda path=path: machine.files.write(path, path.encode()))  # type: ignore[misc]
            results.append(await persistently(lambda path=path: machine.files.read(path)))  # type: ignore[misc]
    await terminal.close_stdin()
    results.append(await everything(pipe))
    text += b"".join([chunk.data async for chunk in reader])
    results.append((text, (await terminal.wait()).exit_code))
    results.append(await everything(counter))
    results.append((await persistently(lambda: machine.run(["echo", "end"]))).stdout)
    return results


def expected(place: Path) -> list[object]:
    lines = [b"%d:line %d\n" % (number + 1, number) for number in range(22)]
    typed = [b"%d:typed %d\r\n" % (number + 1, number) for number in range(22)]
    counted = b"".join(b"%d\n" % number for number in range(1, 31))
    return [
        *(f"{place}/{number}".encode() for number in range(0, 22, 5)),
        (b"ready\n" + b"".join(lines), b"", b"", 5),
        (b"ready\r\n" + b"".join(typed), 5),
        (counted, counted, b"", 6),
        b"end\n",
    ]


async def attempt(url: str, plan: list[Fault], place: Path, marker: str) -> Faults:
    faults = Faults(plan)
    place.mkdir()
    async with exec_server.connect(url, wrap_dialer=faults.wrap) as machine:
        assert await script(machine, place, marker) == expected(place)
    return faults


def cut(at: int) -> Fault:
    return Cut("either", at, before=at % 2 == 0)


def stall(at: int) -> Fault:
    return Stall("either", at, seconds=0.05)


def half_open(at: int) -> Fault:
    return Cut("either", at, half_open=True, half_open_refusals=1)


@pytest.mark.soak
@pytest.mark.parametrize("fault_at", [cut, stall, half_open])
def test_a_fault_at_every_message_in_turn(
    server: RunningServer, tmp_path: Path, fault_at: Callable[[int], Fault]
) -> None:
    """Every run ends with the same bytes, each write applied once, and nothing left behind."""
    marker = sleep_forever()

    async def main() -> float:
        messages = 0

        def look(direction: str, message: bytes) -> None:
            nonlocal messages
            messages += 1

        clean = Faults()
        clean.observer = look
        (tmp_path / "clean").mkdir()
        async with exec_server.connect(server.url, wrap_dialer=clean.wrap) as machine:
            results = await script(machine, tmp_path / "clean", marker)
        assert results == expected(tmp_path / "clean")
        room = asyncio.Semaphore(8)

        async def cuts(at: int) -> int:
            async with room, asyncio.timeout(50):
                return (await attempt(server.url, [fault_at(at)], tmp_path / str(at), marker)).cuts

        # From the first message after the handshake on: before it there is no session to go back to.
        places = range(4, messages + 1)
        return sum(await asyncio.gather(*map(cuts, places))) / len(places)

    assert asyncio.run(main()) > 0.5  # chunks may come together, and then there are fewer messages
    gone(marker)


@pytest.mark.parametrize("fault", [Duplicate(), Delay(0.002)])
def test_a_fault_at_every_message_at_once(server: RunningServer, tmp_path: Path, fault: Fault) -> None:
    """Whatever comes twice, or late, changes nothing."""
    marker = sleep_forever()
    asyncio.run(attempt(server.url, [fault], tmp_path / "place", marker))
    gone(marker)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_random_cuts(server: RunningServer, tmp_path: Path, seed: int) -> None:
    marker = sleep_forever()

    async def main() -> None:
        async with asyncio.timeout(50):
            plan = [Cut("either", 10), *random_cuts(seed, 20, 12)]
            faults = await attempt(server.url, plan, tmp_path / "place", marker)
            assert faults.cuts >= 5

    asyncio.run(main())
    gone(marker)


def test_a_plan_of_random_cuts_is_the_same_for_a_seed() -> None:
    assert random_cuts(7, 20, 50) == random_cuts(7, 20, 50)
    assert random_cuts(7, 20, 50) != random_cuts(8, 20, 50)


# One fault at a time -----------------------------------------------------------------------------


class Listener:
    """One end, and what it hears."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.ended: str | None = None

    def message_received(self, message: bytes) -> None:
        self.heard.append(message)

    def binary_received(self, message: bytes) -> None:
        self.heard.append(b"binary " + message)

    def writing_paused(self) -> None:
        self.heard.append(b"paused")

    def writing_resumed(self) -> None:
        self.heard.append(b"resumed")

    def channel_closed(self, reason: str) -> None:
        self.ended = reason


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


Talk = Callable[[Faults, Channel, Listener, MemoryChannel, Listener], Awaitable[None]]


def between(plan: list[Fault], talk: Talk) -> None:
    """A client and a server in one room, with the plan between them."""

    async def main() -> None:
        client, server = Listener(), Listener()
        ends: list[MemoryChannel] = []

        async def dial(receiver: Receiver) -> Channel:
            ours, theirs = pair(1 << 20)
            theirs.attach(server)
            ours.attach(receiver)
            ends.append(theirs)
            return ours

        faults = Faults(plan)
        channel = await faults.wrap(dial)(client)
        await talk(faults, channel, client, ends[0], server)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "to_server", "to_client", "cut"),
    [
        (Hold(), [b"a", b"b", b"c"], [b"x", b"y", b"z"], False),
        (Cut("sent", 2), [b"a"], [], True),
        (Cut("sent", 2, before=False), [b"a", b"b"], [], True),
        (Cut("received", 2), [b"a", b"b", b"c"], [b"x"], True),
        (Cut("received", 2, before=False), [b"a", b"b", b"c"], [b"x", b"y"], True),
        (Cut("either", 5), [b"a", b"b", b"c"], [b"x"], True),
        (Cut("sent", at_byte=3), [b"a", b"b"], [], True),
        (Cut("received", 1, when=lambda message: message == b"z"), [b"a", b"b", b"c"], [b"x", b"y"], True),
        (Cut("received", 2, half_open=True), [b"a", b"b", b"c"], [b"x"], True),
        (Stall("received", 2), [b"a", b"b", b"c"], [b"x"], False),
        (Stall("sent", 2), [b"a"], [], False),
        (Duplicate(), [b"a", b"b", b"c"], [b"x", b"x", b"y", b"y", b"z", b"z"], False),
    ],
)
def test_what_gets_through(fault: Fault, to_server: list[bytes], to_client: list[bytes], cut: bool) -> None:
    async def talk(
        faults: Faults, channel: Channel, client: Listener, far: MemoryChannel, server: Listener
    ) -> None:
        for message in (b"a", b"b", b"c"):
            channel.send(message)
        await settle()
        for message in (b"x", b"y", b"z"):
            far.send(message)
        await settle()
        assert (server.heard, client.heard) == (to_server, to_client)
        assert client.ended == ("cut by a test" if cut else None)
        half_open = isinstance(fault, Cut) and fault.half_open
        assert (server.ended is not None) == (cut and not half_open)
        faults.release()
        await settle()
        assert (server.ended is not None) == (cut or isinstance(fault, Stall))
        assert (client.ended is not None) == (cut or isinstance(fault, Stall))

    between([fault], talk)


def test_a_delay_keeps_the_order() -> None:
    async def talk(
        faults: Faults, channel: Channel, client: Listener, far: MemoryChannel, server: Listener
    ) -> None:
        channel.send_parts(b"1", b"2", b"3", binary=True)
        channel.send(b"later")
        await settle()
        assert server.heard == []
        await eventually_async(lambda: server.heard == [b"binary 123", b"later"])
        channel.close()
        await settle()
        assert server.ended is not None

    between([Delay(0.01)], talk)


def test_refusals_are_counted() -> None:
    async def main() -> None:
        faults = Faults([Refuse(2), Hold()])

        async def dial(receiver: Receiver) -> Channel:
            ours, _ = pair(1 << 20)
            return ours

        for _ in range(2):
            with pytest.raises(ConnectionRefusedError, match="refused by a test"):
                await faults.wrap(dial)(Listener())
        await faults.wrap(dial)(Listener())
        faults.refuse()
        with pytest.raises(ConnectionRefusedError):
            await faults.wrap(dial)(Listener())
        faults.allow()
        await faults.wrap(dial)(Listener())
        assert (faults.refused, faults.connections, len(faults.attempted_at)) == (3, 2, 5)

    asyncio.run(main())
