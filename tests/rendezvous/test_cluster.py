"""Many nodes on a real NATS server: harness here, environment there, and nodes that die."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import pytest

from exec_server.client.client import Client, ConnectOptions
from exec_server.limits import Limits
from exec_server.relay import environment as environment_module
from exec_server.relay.credentials import Bearer
from exec_server.relay.environment import RemoteEnvironment
from exec_server.relay.harness import Harness
from exec_server.relay.keys import Identity
from exec_server.relay.registry import Registry
from exec_server.rendezvous import cluster as cluster_module
from exec_server.rendezvous.node import StartFailed, open_store
from exec_server.rendezvous.store import ApiKey, KeyExists, Registered, digest_of
from exec_server.server.server import Server
from relay.stage import Wire
from support.server import COMMAND, server_environment
from support.wait import eventually

KEY = "esk_cluster"
NATS = os.path.join(os.path.dirname(sys.executable), "nats-server")


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a NATS server with JetStream, with our key in it."""
    folder = tmp_path_factory.mktemp("nats")
    ports = folder / "ports"
    ports.mkdir()
    server = subprocess.Popen(
        [
            NATS,
            "-js",
            "-sd",
            str(folder / "store"),
            "-a",
            "127.0.0.1",
            "-p",
            "-1",
            "--ports_file_dir",
            str(ports),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: any(file.stat().st_size for file in ports.iterdir()), "the NATS server")
        import json

        (file,) = ports.iterdir()
        url = json.loads(file.read_text())["nats"][0]

        async def add_key() -> None:
            store = await open_store(None, url)
            await store.add_key(ApiKey("tests", "t", "any", digest_of(KEY), 0.0))
            await store.close()

        asyncio.run(add_key())
        yield url
    finally:
        server.terminate()
        server.wait(20)


class RunningNode:
    """A rendezvous process."""

    def __init__(self, nats: str) -> None:
        self.process = subprocess.Popen(
            [COMMAND, "rendezvous", "--listen", "http://127.0.0.1:0", "--cluster", nats],
            stdout=subprocess.PIPE,
            text=True,
            env=server_environment(),
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def close(self) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def three(nats: str) -> Iterator[list[RunningNode]]:
    with ThreadPoolExecutor() as pool:
        running = list(pool.map(lambda _: RunningNode(nats), range(3)))
    yield running
    for node in running:
        node.close()


@pytest.fixture(scope="module")
def nodes(nats: str) -> Iterator[list[RunningNode]]:
    """Three of them, which all tests share."""
    yield from three(nats)


@pytest.fixture
def mortal_nodes(nats: str) -> Iterator[list[RunningNode]]:
    """Three of them, for a test that kills some."""
    yield from three(nats)


def addresses(nodes: list[RunningNode], first: int) -> str:
    """All nodes, beginning with that one."""
    return ",".join(node.url for node in nodes[first:] + nodes[:first])


@asynccontextmanager
async def environment(url: str, name: str) -> AsyncIterator[RemoteEnvironment]:
    """This machine, on the first of the nodes."""
    identity = Identity.generate()
    server = Server(asyncio.get_running_loop(), Limits(), tag_trees=False)
    remote = RemoteEnvironment(Registry(url, name, Bearer(KEY)), lambda: identity, server.accept)
    connected = asyncio.Event()
    remote.on_connected = connected.set
    task = asyncio.ensure_future(remote.run())
    try:
        await connected.wait()
        yield remote
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        server.close()


async def open_client(url: str, name: str, *, acks: bool = True) -> Client:
    client = Client(ConnectOptions())
    await client.open(Harness(Registry(url, name, Bearer(KEY)), Identity.generate(), acks=acks).connect)
    return client


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(55):
            await scenario()

    asyncio.run(main())


LINES = 40
COUNTING = [
    "/bin/sh",
    "-c",
    f"i=0; while [ $i -lt {LINES} ]; do echo line $i; i=$((i+1)); sleep 0.03; done",
]


async def count_while(client: Client, happening: Callable[[], Awaitable[None]]) -> None:
    """Run a command, let something happen in the middle of it, and see that nothing is missing."""
    process = await client.start(COUNTING)
    text = b""
    happened = False
    async for chunk in process.output():
        text += chunk.data
        if not happened and text.count(b"\n") >= 10:
            happened = True
            await happening()
    assert text.splitlines() == [b"line %d" % number for number in range(LINES)]
    assert (await process.wait()).exit_code == 0


@pytest.mark.parametrize("acks", [True, False])
def test_harness_here_and_environment_there(nodes: list[RunningNode], acks: bool) -> None:
    async def scenario() -> None:
        async with environment(nodes[0].url, f"across-{acks}"):
            client = await open_client(nodes[1].url, f"across-{acks}", acks=acks)
            done = await client.run(["/bin/sh", "-c", "echo out; exit 3"])
            assert (done.stdout, done.exit_code) == (b"out\n", 3)
            assert (await client.run(["cat"], data=bytes(2_000_000))).stdout == bytes(2_000_000)
            await client.close()

    play(scenario)


def test_nodes_die_under_a_command(mortal_nodes: list[RunningNode], monkeypatch: pytest.MonkeyPatch) -> None:
    """First the environment's, then the harness's; nobody above the relay notices."""
    monkeypatch.setattr(environment_module, "FIRST_DELAY", 0.2)
    nodes = mortal_nodes

    async def scenario() -> None:
        async with environment(addresses(nodes, 0), "survivor"):
            client = await open_client(addresses(nodes, 1), "survivor")

            async def kill_home() -> None:
                await asyncio.to_thread(nodes[0].kill)

            await count_while(client, kill_home)

            async def kill_mine() -> None:
                await asyncio.to_thread(nodes[1].kill)

            await count_while(client, kill_mine)
            await client.close()

    play(scenario)


@pytest.mark.parametrize("harness_on", [0, 1, 2])
def test_an_environment_moves_while_its_old_node_lives(
    nodes: list[RunningNode], monkeypatch: pytest.MonkeyPatch, harness_on: int
) -> None:
    """As behind a load balancer: from node 0 to node 1, with the harness on either or on neither."""
    monkeypatch.setattr(environment_module, "FIRST_DELAY", 0.2)
    name = f"mover-{harness_on}"

    async def scenario() -> None:
        balancer = Wire(nodes[0].url)
        await balancer.open()
        try:
            async with environment(balancer.url, name):
                client = await open_client(nodes[harness_on].url, name)

                async def move() -> None:
                    balancer.target = nodes[1].url
                    assert balancer.cut()

                await count_while(client, move)
                await client.close()
        finally:
            await balancer.close()

    play(scenario)


def test_the_store_of_a_cluster(nats: str) -> None:
    async def scenario() -> None:
        store = await open_store(None, nats)
        key = ApiKey("ünïcode name", "ten ant", "harness", digest_of("s"), 1.0)
        await store.add_key(key)
        with pytest.raises(KeyExists):
            await store.add_key(key)
        assert await store.key(digest_of("s")) == key
        assert await store.key(digest_of("other")) is None
        assert key in await store.keys()
        assert await store.revoke_key(key.name)
        assert not await store.revoke_key(key.name)
        assert not await store.revoke_key("nobody")
        first = Registered("1", "ten ant", "env.1", {"suite": "s"}, "d", 1.0)
        second = Registered("2", "ten ant", "env.1", {"suite": "s"}, "e", 2.0, ("d",))
        assert await store.put_registration(first, None)
        assert not await store.put_registration(second, None)
        assert await store.registration_by_id("1") == first
        assert await store.put_registration(second, first)
        assert not await store.put_registration(first, first)
        assert await store.registration("ten ant", "env.1") == second
        assert await store.registration_by_id("1") is None
        assert await store.registration_by_id("2") == second
        assert await store.count("ten ant") == 1
        assert await store.count("ten") == 0
        assert second in await store.registrations()
        assert await store.use_once("a:nonce-_", 0.0)
        assert not await store.use_once("a:nonce-_", 0.0)
        assert len(await store.signing_secret()) == 32
        assert await store.signing_secret() == await store.signing_secret()
        await store.close()

    play(scenario)


def test_no_nats_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "CONNECT_SECONDS", 0.5)

    async def scenario() -> None:
        with pytest.raises(StartFailed, match="cannot reach NATS"):
            await open_store(None, "nats://127.0.0.1:9")

    play(scenario)
