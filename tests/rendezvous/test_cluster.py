"""Many nodes on a real NATS server: harness here, environment there, and nodes that die."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest

from exec_server.client.client import Client, ConnectOptions, State
from exec_server.limits import Limits
from exec_server.relay import environment as environment_module
from exec_server.relay.credentials import Bearer
from exec_server.relay.environment import RegistrationFailed, RemoteEnvironment
from exec_server.relay.harness import Harness
from exec_server.relay.keys import Identity
from exec_server.relay.registry import Registry
from exec_server.rendezvous import cluster_connection
from exec_server.rendezvous.node import Node, NodeOptions, StartFailed, open_store
from exec_server.rendezvous.store import ApiKey, KeyExists, Registered, digest_of
from exec_server.server.server import Server
from exec_server.transport.channel import Channel, Receiver
from relay.stage import Wire
from relay.support import Remembering
from support.server import COMMAND, server_environment
from support.wait import eventually, eventually_async

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
async def environment(
    url: str, name: str, accept: Callable[[Channel], Receiver] | None = None
) -> AsyncIterator[RemoteEnvironment]:
    """This machine, or whatever `accept` does with a stream, on the first of the nodes."""
    identity = Identity.generate()
    server = Server(asyncio.get_running_loop(), Limits(), tag_trees=False)
    remote = RemoteEnvironment(Registry(url, name, Bearer(KEY)), lambda: identity, accept or server.accept)
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


@pytest.mark.parametrize("acks", [True, False])
def test_an_environment_takes_another_key_while_streams_go_on(nodes: list[RunningNode], acks: bool) -> None:
    """Through whichever nodes they go: the environment is on two of them for a while."""

    async def scenario() -> None:
        name = f"renewed-{acks}"
        async with environment(addresses(nodes, 0), name) as remote:
            client = await open_client(nodes[1].url, name, acks=acks)
            process = await client.start(["cat"], stdin=True)
            states: list[State] = []
            client.on_state(states.append)
            new, connected = Identity.generate(), asyncio.Event()
            remote._load_identity = lambda: new
            remote.on_connected = connected.set
            remote._registry._try_next()
            remote.renew()
            await connected.wait()
            later = await open_client(nodes[2].url, name, acks=acks)
            assert (await later.run(["echo", "new"])).stdout == b"new\n"
            await process.write(b"old\n")
            await process.close_stdin()
            assert b"".join([chunk.data async for chunk in process.output()]) == b"old\n"
            assert states == []
            for one in (client, later):
                await one.close()

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


# Those who do not read ---------------------------------------------------------------------------

MEBIBYTE = 1 << 20
MUCH = 48 * MEBIBYTE
"""Several times what a node keeps for a socket."""

NODE_GROWTH = 80 * MEBIBYTE
"""More than a node ever keeps for one end that does not read, and much less than what it is sent in vain."""


def resident(node: RunningNode) -> int:
    with open(f"/proc/{node.process.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def wire_to(node: RunningNode) -> AsyncIterator[Wire]:
    wire = Wire(node.url)
    await wire.open()
    try:
        yield wire
    finally:
        await wire.close()


class Counting(Remembering):
    """A receiver that forgets what it has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.progress = asyncio.Event()

    def message_received(self, message: bytes) -> None:
        self.bytes += len(message)
        self.progress.set()

    def channel_closed(self, reason: str) -> None:
        super().channel_closed(reason)
        self.progress.set()

    async def reach(self, size: int) -> None:
        while self.bytes < size:
            assert self.closed is None, f"{self.closed}, after {self.bytes} bytes of {size}"
            self.progress.clear()
            await self.progress.wait()


class Pausing(Remembering):
    """A receiver with which one can wait for room."""

    def __init__(self) -> None:
        super().__init__()
        self.room = asyncio.Event()
        self.room.set()

    def writing_paused(self) -> None:
        super().writing_paused()
        self.room.clear()

    def writing_resumed(self) -> None:
        super().writing_resumed()
        self.room.set()


@pytest.mark.parametrize("acks", [True, False])
def test_a_harness_that_does_not_read_costs_only_itself(nodes: list[RunningNode], acks: bool) -> None:
    """It is on another node than its environment; an acked stream waits for it and loses nothing."""
    name = f"unread-{acks}"

    async def scenario() -> None:
        async with environment(nodes[0].url, name), wire_to(nodes[1]) as wire:
            before = [resident(node) for node in nodes]
            stuck = await open_client(wire.url, name, acks=acks)
            process = await stuck.start(["head", "-c", str(4 * MUCH), "/dev/zero"])
            chunks = process.output()
            arrived = len((await anext(chunks)).data)
            wire.flowing.clear()
            other = await open_client(nodes[1].url, name, acks=acks)
            for _ in range(10):
                assert (await other.run(["echo", "hi"])).stdout == b"hi\n"
            await other.close()
            assert max(resident(node) - was for node, was in zip(nodes, before, strict=True)) < NODE_GROWTH
            wire.flowing.set()
            if acks:
                async for chunk in chunks:
                    arrived += len(chunk.data)
                assert arrived == 4 * MUCH
            await stuck.close()

    play(scenario)


def test_a_plain_harness_that_reads_slowly_loses_nothing(nodes: list[RunningNode]) -> None:
    """Its environment is made to wait, on another node: what is sent is many times what may be dropped."""
    sent = asyncio.Event()

    def accept(channel: Channel) -> Receiver:
        class Sender(Remembering):
            def writing_resumed(self) -> None:
                self.paused = False
                send_on()

        sender, left = Sender(channel), [MUCH // MEBIBYTE]

        def send_on() -> None:
            while left[0] and not sender.paused:
                left[0] -= 1
                channel.send(b"1" * MEBIBYTE)
            if not left[0]:
                sent.set()

        asyncio.get_running_loop().call_soon(send_on)
        return sender

    async def scenario() -> None:
        async with environment(nodes[0].url, "slowly", accept), wire_to(nodes[1]) as wire:
            wire.delay = 0.001
            receiver = Counting()
            registry = Registry(wire.url, "slowly", Bearer(KEY))
            channel = await Harness(registry, Identity.generate(), acks=False).connect(receiver)
            await receiver.reach(MUCH)
            channel.abort()

    play(scenario)


def test_an_environment_that_does_not_read_makes_its_harnesses_wait(nodes: list[RunningNode]) -> None:
    """The harness is on another node, its stream is plain, and nothing is lost; other environments go on."""
    receiver = Counting()

    async def scenario() -> None:
        async with (
            wire_to(nodes[0]) as wire,
            environment(wire.url, "deaf", lambda channel: receiver),
            environment(nodes[0].url, "hearing"),
        ):
            before = [resident(node) for node in nodes]
            sender = Pausing()
            registry = Registry(nodes[1].url, "deaf", Bearer(KEY))
            channel = await Harness(registry, Identity.generate(), acks=False).connect(sender)
            wire.flowing.clear()
            size = 0
            with suppress(TimeoutError):
                while size < 4 * MUCH:
                    channel.send(b"1" * MEBIBYTE)
                    size += MEBIBYTE
                    await asyncio.wait_for(sender.room.wait(), 1.0)
            assert sender.closed is None
            assert 4 * MEBIBYTE < size < 2 * MUCH, "what the sockets and the nodes take before it has to wait"
            other = await open_client(nodes[1].url, "hearing")
            assert (await other.run(["echo", "hi"])).stdout == b"hi\n"
            await other.close()
            assert max(resident(node) - was for node, was in zip(nodes, before, strict=True)) < NODE_GROWTH
            wire.flowing.set()
            await receiver.reach(size)
            assert sender.closed is None
            channel.abort()

    play(scenario)


def test_when_the_way_to_nats_breaks_plain_streams_end_and_acked_ones_go_on(
    nats: str, nodes: list[RunningNode]
) -> None:
    """What was on its way is lost, and only acked ends send it again."""

    async def scenario() -> None:
        wire = Wire(nats.replace("nats:", "http:"))
        await wire.open()
        try:
            options = NodeOptions(cluster=wire.url.replace("http:", "nats:"))
            async with Node(options) as node, environment(nodes[0].url, "cut-off"):
                plain = Counting()
                registry = Registry(node.url, "cut-off", Bearer(KEY))
                await Harness(registry, Identity.generate(), acks=False).connect(plain)
                acked = await open_client(node.url, "cut-off")
                assert wire.cut()
                with pytest.raises(AssertionError, match=r"ended the stream|closed"):
                    await plain.reach(1)
                assert (await acked.run(["echo", "hi"])).stdout == b"hi\n"
                await acked.close()
        finally:
            await wire.close()

    play(scenario)


def test_a_revoked_key_is_cut_on_every_node(nats: str, nodes: list[RunningNode]) -> None:
    """Its stream, which it could resume, at the node of the harness; and its environment at another."""

    async def scenario() -> None:
        store = await open_store(None, nats)
        for secret in ("esk_uses", "esk_serves"):
            await store.add_key(ApiKey(secret, "t", "any", digest_of(secret), 0.0))
        identity = Identity.generate()
        registry = Registry(nodes[2].url, "served", Bearer("esk_serves"))
        remote = RemoteEnvironment(registry, lambda: identity, lambda _: Remembering())
        connected = asyncio.Event()
        remote.on_connected = connected.set
        task = asyncio.ensure_future(remote.run())
        await connected.wait()
        async with environment(nodes[0].url, "used") as used:
            heard = Remembering()
            registry = Registry(nodes[1].url, "used", Bearer("esk_uses"))
            await Harness(registry, Identity.generate()).connect(heard)
            streams = used._streams
            assert streams is not None
            assert len(streams) == 1
            await store.revoke_key("esk_uses")
            await eventually_async(lambda: heard.closed is not None, "the end at the harness")
            await eventually_async(lambda: len(streams) == 0, "the end at the environment")
        await store.revoke_key("esk_serves")
        with pytest.raises(RegistrationFailed, match="revoked"):
            await task
        await store.close()

    play(scenario)


def test_a_node_that_has_lost_nats_says_so(
    nats: str, capfd: pytest.CaptureFixture[str], fresh_log: None
) -> None:
    async def scenario() -> None:
        wire = Wire(nats.replace("nats:", "http:"))
        await wire.open()
        try:
            options = NodeOptions(cluster=wire.url.replace("http:", "nats:"))
            async with Node(options) as node, aiohttp.ClientSession() as session:

                async def ask(path: str, body: Any = None) -> tuple[int, str]:
                    headers = {"Authorization": f"Bearer {KEY}"}
                    method = "GET" if body is None else "POST"
                    async with session.request(
                        method, node.url + path, json=body, headers=headers
                    ) as response:
                        return response.status, await response.text()

                assert await ask("/healthz") == (200, "ok")
                wire.refusing = True
                assert wire.cut()
                service = node._service
                assert service is not None
                await eventually_async(lambda: not node._cluster._nats.is_connected, "the loss")
                service.forget_health()
                assert await ask("/healthz") == (503, "there is no connection to NATS")
                status, text = await ask("/cloud/environment/e/connect", {})
                assert (status, "unavailable" in text) == (503, True)
                status, text = await ask("/cloud/environment/e/register", {})
                assert (status, "authentication_service_unavailable" in text) == (502, True)
                wire.refusing = False
                await eventually_async(lambda: node._cluster._nats.is_connected, "NATS again")
                service.forget_health()
                assert await ask("/healthz") == (200, "ok")
        finally:
            await wire.close()

    play(scenario)
    said = "".join(capfd.readouterr())
    assert "Traceback" not in said
    assert said.count("there is no connection to NATS") <= 2


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
        assert key.id in await store.revoked()
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
        assert not await store.remove_registration(first)
        assert await store.remove_registration(second)
        assert await store.registration_by_id("2") is None
        assert await store.count("ten ant") == 0
        await store.check()
        assert await store.use_once("a:nonce-_", 0.0)
        assert not await store.use_once("a:nonce-_", 0.0)
        assert len(await store.signing_secret()) == 32
        assert await store.signing_secret() == await store.signing_secret()
        await store.close()

    play(scenario)


def test_no_nats_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_connection, "CONNECT_SECONDS", 0.5)

    async def scenario() -> None:
        with pytest.raises(StartFailed, match="cannot reach NATS"):
            await open_store(None, "nats://127.0.0.1:9")

    play(scenario)
