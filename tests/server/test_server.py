"""server/server.py: a server without a socket, inside this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from exec_server.limits import Limits
from exec_server.server.server import CAPABILITIES, Server
from exec_server.transport.memory import MemoryChannel, pair
from support.machine import gone, sleep_forever
from support.rpc import PATH
from support.wait import eventually_async


class Client:
    """The other end of a channel in memory."""

    def __init__(self, server: Server) -> None:
        self.channel, theirs = pair(1024 * 1024)
        self.received: list[dict[str, Any]] = []
        self.ended = False
        self.connection = server.accept(theirs)
        theirs.attach(self.connection)
        self.channel.attach(self)

    def message_received(self, message: bytes) -> None:
        self.received.append(json.loads(message))

    def binary_received(self, message: bytes) -> None:
        self.received.append({"binary": message})

    def writing_paused(self) -> None: ...
    def writing_resumed(self) -> None: ...

    def channel_closed(self, reason: str) -> None:
        self.ended = True

    async def call(self, method: str, params: Any = None) -> Any:
        self.channel.send(json.dumps({"id": method, "method": method, "params": params}).encode())
        answer = await eventually_async(
            lambda: next((m for m in self.received if m.get("id") == method), None), f"an answer to {method}"
        )
        self.received.remove(answer)
        return answer

    async def begin(self, **more: Any) -> Any:
        answer = await self.call("initialize", {"clientName": "x", **more})
        self.channel.send(b'{"method":"initialized"}')
        return answer["result"]


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[Server]:
    server = Server(asyncio.get_running_loop(), Limits(**limits))
    try:
        yield server
    finally:
        server.close()


def start(*argv: str, **more: Any) -> dict[str, Any]:
    return {
        "processId": "p",
        "argv": list(argv),
        "cwd": "file:///",
        "env": {"PATH": PATH},
        "tty": False,
        **more,
    }


def test_a_channel_in_memory_is_a_channel() -> None:
    async def run() -> None:
        async with serving() as server:
            client = Client(server)
            result = await client.begin(binaryOutput=True)
            assert result["binaryOutput"] is True
            assert result["environmentInfo"]["capabilities"] == CAPABILITIES
            assert "result" in await client.call("process/start", start("echo", "x"))
            methods = await eventually_async(
                lambda: [m.get("method", "binary") for m in client.received][2:] and client.received,
                "the close",
            )
            await eventually_async(
                lambda: any(m.get("method") == "process/closed" for m in client.received), "the close"
            )
            assert methods[0]["binary"].endswith(b"x\n")

    asyncio.run(run())


def test_a_session_in_memory_ends_with_its_channel() -> None:
    async def run() -> None:
        async with serving() as server:
            client = Client(server)
            await client.begin()
            marker = sleep_forever()
            assert "result" in await client.call("process/start", start("sleep", marker))
            client.channel.close()
            await asyncio.to_thread(gone, marker)
            await eventually_async(lambda: server.sessions.all() == [], "the session ending")
            assert server.metrics.connections == 0

    asyncio.run(run())


def test_closing_ends_everything() -> None:
    marker = sleep_forever()

    async def run() -> None:
        async with serving() as server:
            clients = [Client(server) for _ in range(3)]
            for client in clients:
                await client.begin()
                assert "result" in await client.call("process/start", start("sleep", marker))
        await eventually_async(lambda: all(client.ended for client in clients), "everybody being told")

    asyncio.run(run())
    gone(marker)


def test_the_first_dialect_does_not_gather_what_has_ended() -> None:
    async def run() -> None:
        async with serving() as server:
            client = Client(server)
            await client.begin()
            before = len(client.connection.on_end)
            params = {"processId": "p", "argv": ["true"], "cwd": "/", "env": {}, "tty": False}
            for _ in range(5):
                assert "result" in await client.call("command/exec", params)
                await eventually_async(
                    lambda: any(m.get("method") == "command/exec/exited" for m in client.received), "the exit"
                )
                client.received.clear()
            assert "error" in await client.call("command/exec", {**params, "argv": ["/no/such"]})
            assert len(client.connection.on_end) == before

    asyncio.run(run())


def test_facts_are_gathered_once() -> None:
    async def run() -> None:
        async with serving() as server:
            assert server.environment_info is server.environment_info
            client = Client(server)
            result = await client.begin()
            answer = (await client.call("environment/info"))["result"]
            assert answer.pop("sandbox")
            assert answer == result["environmentInfo"]

    asyncio.run(run())


@pytest.mark.usefixtures("fresh_log")
def test_a_fault_in_a_method_is_an_error_and_not_the_end() -> None:
    async def run() -> None:
        async with serving() as server:
            client = Client(server)
            await client.begin()
            server.machine.guard.start = lambda: 1 // 0  # type: ignore[method-assign]
            answer = await client.call("process/start", start("true"))
            assert answer["error"]["code"] == -32603
            assert answer["error"]["message"].startswith("internal error: ZeroDivisionError")
            assert (await client.call("environment/status"))["result"] == {"status": "ready"}

    asyncio.run(run())


def test_channels_say_what_they_can() -> None:
    assert (MemoryChannel.carries_binary, MemoryChannel.resumable) == (True, False)
