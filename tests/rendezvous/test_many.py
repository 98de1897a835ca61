"""Many environments that do nothing, on one node: they cost little, and nobody waits because of them.

`python -m benchmarks.fleet 10000 10` is the same with ten thousand.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from exec_server.client.client import Client, ConnectOptions
from exec_server.limits import Limits
from exec_server.relay.credentials import Bearer
from exec_server.relay.environment import RemoteEnvironment
from exec_server.relay.harness import Harness
from exec_server.relay.keys import Identity
from exec_server.relay.link import open_link
from exec_server.relay.registry import Registry
from exec_server.server.server import Server
from support.server import COMMAND, server_environment

ENVIRONMENTS = 500
AT_ONCE = 25
BYTES_OF_EACH = 128 * 1024
"""Four times what an environment takes of a node."""


class IdleOwner:
    """Of the connection of an environment that nobody uses."""

    def frame_arrived(self, message: bytes | memoryview) -> None:
        raise AssertionError("a frame for nobody")

    def text_arrived(self) -> None:
        raise AssertionError("a text")

    def link_drained(self) -> None:
        """Nothing was sent."""

    def link_closed(self, reason: str) -> None:
        """At the end of the test."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[str, str, int]]:
    """A node's URL, a key for it, and its process id."""
    data = ["--data", str(tmp_path / "data")]
    key = subprocess.run(
        [COMMAND, "rendezvous", "key", "add", "tests", *data],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=30,
        env=server_environment(),
    ).stdout.strip()
    process = subprocess.Popen(
        [COMMAND, "rendezvous", "--calls-per-second", "10000", *data],
        stdout=subprocess.PIPE,
        text=True,
        env=server_environment(),
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), key, process.pid
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_idle_environments_cost_little_and_nobody_waits_for_them(node: tuple[str, str, int]) -> None:
    url, key, pid = node
    identity = Identity.generate()

    async def scenario(stack: AsyncExitStack) -> None:
        async def idle(number: int) -> None:
            registry = Registry(url, f"idle-{number}", Bearer(key))
            registration = await registry.register(identity.public)
            await registry.close()
            stack.callback((await open_link(registration.url, IdleOwner())).close)

        await asyncio.gather(*(idle(number) for number in range(AT_ONCE)))  # whatever is made once
        before = resident(pid)
        for first in range(AT_ONCE, ENVIRONMENTS, AT_ONCE):
            await asyncio.gather(*(idle(number) for number in range(first, first + AT_ONCE)))
        assert (resident(pid) - before) / (ENVIRONMENTS - AT_ONCE) < BYTES_OF_EACH

        server = Server(asyncio.get_running_loop(), Limits(), tag_trees=False)
        stack.callback(server.close)
        remote = RemoteEnvironment(Registry(url, "busy", Bearer(key)), lambda: identity, server.accept)
        connected = asyncio.Event()
        remote.on_connected = connected.set
        task = asyncio.ensure_future(remote.run())
        stack.callback(task.cancel)
        await connected.wait()
        client = Client(ConnectOptions())
        async with asyncio.timeout(10):
            await client.open(Harness(Registry(url, "busy", Bearer(key)), identity).connect)
            assert (await client.run(["echo", "hi"])).stdout == b"hi\n"
        await client.close()

    async def main() -> None:
        async with asyncio.timeout(55), AsyncExitStack() as stack:
            await scenario(stack)

    asyncio.run(main())
