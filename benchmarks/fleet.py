"""Many environments on one rendezvous: what each of them, and each stream, takes of its memory.

    python -m benchmarks.fleet [ENVIRONMENTS [STREAMS]]

The node is a process of its own, started as anybody starts one. Environments and harnesses are the real ones,
all in this process; every environment serves, and every stream is one on which a call was answered.
"""

import asyncio
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from exec_server.limits import Limits
from exec_server.relay.credentials import Bearer
from exec_server.relay.environment import RemoteEnvironment
from exec_server.relay.harness import Harness
from exec_server.relay.keys import Identity
from exec_server.relay.registry import Registry
from exec_server.server.server import Server

from .client import WrongAnswer
from .relay import Rendezvous, Session, run
from .server import kilobytes

__all__ = ["Fleet", "as_json", "lines", "measure_fleet"]

ENVIRONMENTS = STREAMS = 1000
AT_ONCE = 16
"""Environments that register, or streams that are opened, at the same time."""
CALLS = 200
SECONDS = 300
"""For all of it; a thousand of each take about fifteen."""
DESCRIPTORS = 64
"""Of anything but connections."""


@dataclass(frozen=True)
class Fleet:
    """What came out."""

    environments: int
    streams: int
    empty: int
    """Bytes resident in the node before anybody was there."""
    with_environments: int
    with_streams: int
    register_rate: float
    """Environments per second that registered and connected."""
    stream_rate: float
    open_seconds: float
    """To open one more stream while all the others are there."""
    call_seconds: float
    """A call on it, the median."""

    @property
    def per_environment(self) -> float:
        return (self.with_environments - self.empty) / max(1, self.environments)

    @property
    def per_stream(self) -> float:
        return (self.with_streams - self.with_environments) / max(1, self.streams)


def measure_fleet(environments: int = ENVIRONMENTS, streams: int = STREAMS) -> Fleet:
    """All of it; `WrongAnswer` when anything does not answer."""
    _allow_descriptors(environments + streams)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as log,
        _node(Path(folder), log, environments) as node,
    ):
        return run(_measure(node, environments, streams), SECONDS)


def _node(folder: Path, log: BinaryIO, environments: int) -> Rendezvous:
    return Rendezvous(folder, log, "--environments-per-tenant", str(max(1, environments)))


def _allow_descriptors(connections: int) -> None:
    """One for each, here and in the node, which inherits the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + DESCRIPTORS + 4 * AT_ONCE
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise WrongAnswer(f"{wanted} descriptors are needed and {hard} allowed: `ulimit -Hn`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _measure(node: Rendezvous, environments: int, streams: int) -> Fleet:
    server = Server(asyncio.get_running_loop(), Limits(), tag_trees=False)
    identity = Identity.generate()
    async with AsyncExitStack() as stack:
        stack.callback(server.close)

        async def offer(number: int) -> None:
            registry = Registry(node.url, f"e{number}", Bearer(node.key))
            remote = RemoteEnvironment(registry, lambda: identity, server.accept)
            connected = asyncio.Event()
            remote.on_connected = connected.set
            task = asyncio.ensure_future(remote.run())
            stack.push_async_callback(_stop, task)
            await connected.wait()
            await registry.close()  # an idle connection to the registry is not what is measured

        async def open_stream(number: int) -> Session:
            registry = Registry(node.url, f"e{number % environments}", Bearer(node.key))
            session = await Session.open(Harness(registry, identity).connect)
            stack.callback(session.channel.abort)
            return session

        empty = _resident(node)
        register_rate = await _rate(offer, environments)
        with_environments = _resident(node)
        stream_rate = await _rate(open_stream, streams)
        with_streams = _resident(node)
        started = time.perf_counter()
        session = await open_stream(environments // 2)
        open_seconds = time.perf_counter() - started
        samples: list[float] = []
        for _ in range(CALLS):
            started = time.perf_counter()
            await session.call("environment/status", None)
            samples.append(time.perf_counter() - started)
    return Fleet(
        environments,
        streams,
        empty,
        with_environments,
        with_streams,
        register_rate,
        stream_rate,
        open_seconds,
        statistics.median(samples),
    )


async def _stop(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _rate(work: Callable[[int], Awaitable[object]], count: int) -> float:
    """Do it `count` times, AT_ONCE under way; how many in a second."""
    numbers = iter(range(count))

    async def one_after_another() -> None:
        for number in numbers:
            await work(number)

    started = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))
    return count / (time.perf_counter() - started)


def _resident(node: Rendezvous) -> int:
    return kilobytes(f"/proc/{node.process.pid}/status", "VmRSS:")


def lines(fleet: Fleet) -> list[str]:
    """The numbers in sentences."""
    memory = (
        f"{fleet.environments:,} environments and {fleet.streams:,} streams on one rendezvous:"
        f" {fleet.per_environment / 1024:.1f} KiB for an environment,"
        f" {fleet.per_stream / 1024:.1f} KiB for a stream, {fleet.with_streams / 1e6:.0f} MB in all."
    )
    speed = (
        f"{fleet.register_rate:,.0f} environments connected and {fleet.stream_rate:,.0f} streams opened in a"
        f" second; with all of them there, one more stream took {fleet.open_seconds * 1e3:.0f} ms and a call"
        f" on it {fleet.call_seconds * 1e6:.0f} µs."
    )
    return [memory, speed]


def as_json(fleet: Fleet) -> dict[str, float]:
    """The same for machines; bytes and seconds."""
    return {
        "environments": fleet.environments,
        "streams": fleet.streams,
        "bytesEmpty": fleet.empty,
        "bytesPerEnvironment": fleet.per_environment,
        "bytesPerStream": fleet.per_stream,
        "bytesInAll": fleet.with_streams,
        "environmentsPerSecond": fleet.register_rate,
        "streamsPerSecond": fleet.stream_rate,
        "oneMoreStream": fleet.open_seconds,
        "callOnIt": fleet.call_seconds,
    }


def main() -> int:
    """Measure and print."""
    given = [int(word) for word in sys.argv[1:3]]
    environments = given[0] if given else ENVIRONMENTS
    streams = given[1] if len(given) > 1 else min(environments, STREAMS)
    print(*lines(measure_fleet(environments, streams)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
