"""A whole relay in one process, on real sockets: a rendezvous, environments, harnesses, and wires to cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from exec_server.client.client import Client, ConnectOptions
from exec_server.limits import Limits
from exec_server.relay.credentials import Bearer
from exec_server.relay.environment import RemoteEnvironment
from exec_server.relay.harness import Harness
from exec_server.relay.keys import Identity
from exec_server.relay.registry import Registry
from exec_server.rendezvous.node import Node, NodeOptions
from exec_server.rendezvous.store import ApiKey, EmbeddedStore, digest_of
from exec_server.server.server import Server
from exec_server.transport.channel import Channel, Receiver

__all__ = ["KEY", "Stage", "Wire", "add_key", "stage"]

KEY = "esk_for-tests"
"""A key that may do everything but administer."""


async def add_key(directory: Path, secret: str = KEY, role: Any = "any", tenant: str = "t") -> None:
    store = EmbeddedStore(str(directory))
    await store.add_key(ApiKey(f"{tenant}-{role}-{secret[-6:]}", tenant, role, digest_of(secret), 0.0))
    await store.close()


class Wire:
    """A TCP connection to the rendezvous that can be cut, held up and refused."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.url = ""
        self.refusing = False
        self.delay = 0.0
        """Seconds that each piece takes."""
        self.flowing = asyncio.Event()
        """Cleared, nothing is taken from either end."""
        self.flowing.set()
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    def cut(self) -> int:
        """Every connection is gone, without a word."""
        cut = 0
        for writer in list(self._writers):
            writer.transport.abort()
            cut += 1
        self._writers.clear()
        return cut

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        try:
            if self.refusing:
                return
            host, port = self.target.removeprefix("http://").split(":")
            their_reader, their_writer = await asyncio.open_connection(host, int(port))
            self._writers |= {writer, their_writer}
            await asyncio.gather(self._pass(reader, their_writer), self._pass(their_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self.flowing.wait()
                if self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)


class Stage:
    """What a test plays on."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.node = Node(NodeOptions(data=str(data)))
        self.environment_wire = Wire("")
        self.harness_wire = Wire("")
        self.identity = Identity.generate()
        self.harness_identity = Identity.generate()
        self.server: Server | None = None
        self.environment: RemoteEnvironment | None = None
        self.task: asyncio.Task[None] | None = None
        self.connected = asyncio.Event()

    async def open(self) -> None:
        await add_key(self.data)
        await self.node.__aenter__()
        for wire in (self.environment_wire, self.harness_wire):
            wire.target = self.node.url
            await wire.open()

    def start_environment(
        self, accept: Callable[[Channel], Receiver] | None = None, **options: Any
    ) -> asyncio.Task[None]:
        """Serve this machine as `env-1`, or whatever `accept` does with a stream."""
        if accept is None:
            self.server = Server(asyncio.get_running_loop(), Limits(detach_ttl=20.0), tag_trees=False)
            accept = self.server.accept
        registry = Registry(self.environment_wire.url, "env-1", Bearer(KEY))
        identity = self.identity
        self.environment = RemoteEnvironment(registry, lambda: identity, accept, **options)
        self.connected = asyncio.Event()
        self.environment.on_connected = self.connected.set
        self.task = asyncio.ensure_future(self.environment.run())
        return self.task

    async def restart_node(self) -> None:
        """The rendezvous is gone, and another takes its place with what was on disk."""
        await self.node.__aexit__()
        self.node = Node(NodeOptions(data=str(self.data)))
        await self.node.__aenter__()
        for wire in (self.environment_wire, self.harness_wire):
            wire.target = self.node.url

    def harness(self, *, acks: bool = True, key: str = KEY) -> Harness:
        registry = Registry(self.harness_wire.url, "env-1", Bearer(key))
        return Harness(registry, self.harness_identity, acks=acks)

    async def client(self, *, acks: bool = True, key: str = KEY) -> Client:
        client = Client(ConnectOptions())
        await client.open(self.harness(acks=acks, key=key).connect)
        return client

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self.task
        if self.server is not None:
            self.server.close()
        for wire in (self.environment_wire, self.harness_wire):
            await wire.close()
        await self.node.__aexit__()


@asynccontextmanager
async def stage(data: Path) -> AsyncIterator[Stage]:
    """Everything but the environment, which the test starts; gone afterwards."""
    made = Stage(data)
    try:
        await made.open()
        yield made
    finally:
        await made.close()
