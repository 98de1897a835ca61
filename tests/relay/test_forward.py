"""Forward mode: streams to WebSockets, whatever they carry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import serve

from exec_server.relay.forward import BadDestination, forward_to
from support.wait import eventually_async

from .stage import stage
from .support import Remembering


@asynccontextmanager
async def destination(handle: Any) -> AsyncIterator[str]:
    server = await serve(handle, "127.0.0.1", 0, max_size=None)
    try:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/path?query=1"
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("acks", [True, False])
def test_every_stream_has_a_connection_of_its_own(tmp_path: Path, acks: bool) -> None:
    requests: list[str] = []
    kinds: list[type] = []

    async def handle(socket: Any) -> None:
        requests.append(socket.request.path)
        async for message in socket:
            kinds.append(type(message))
            await socket.send(message)

    async def main() -> None:
        async with asyncio.timeout(50), destination(handle) as url, stage(tmp_path) as ready:
            ready.start_environment(forward_to(url))
            await ready.connected.wait()
            receivers = [Remembering(), Remembering()]
            large = b'"' + b"x" * 2_000_000 + b'"'
            for receiver in receivers:
                channel = await ready.harness(acks=acks).connect(receiver)
                channel.send(b"not JSON, but not binary either? [{")
                channel.send(large)
            for receiver in receivers:
                await eventually_async(
                    lambda receiver=receiver: len(receiver.messages) + len(receiver.binary) == 2  # type: ignore[misc]
                )
                assert large in receiver.messages

    asyncio.run(main())
    assert requests == ["/path?query=1"] * 2
    assert kinds == [bytes] * 4


def test_what_the_destination_said_last_arrives(tmp_path: Path) -> None:
    async def handle(socket: Any) -> None:
        await socket.recv()
        for number in range(50):
            await socket.send(f"[{number}]")

    async def main() -> None:
        async with asyncio.timeout(50), destination(handle) as url, stage(tmp_path) as ready:
            ready.start_environment(forward_to(url))
            await ready.connected.wait()
            receiver = Remembering()
            channel = await ready.harness().connect(receiver)
            channel.send(b"go")
            await eventually_async(lambda: receiver.closed)
            assert receiver.messages == [b"[%d]" % number for number in range(50)]

    asyncio.run(main())


def test_the_destination_is_dropped_with_the_stream(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def handle(socket: Any) -> None:
        await socket.wait_closed()
        ended.set()

    async def main() -> None:
        async with asyncio.timeout(50), destination(handle) as url, stage(tmp_path) as ready:
            ready.start_environment(forward_to(url))
            await ready.connected.wait()
            channel = await ready.harness().connect(Remembering())
            channel.send(b"{}")
            channel.close()
            await ended.wait()

    asyncio.run(main())


def test_nobody_at_the_destination(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(50), stage(tmp_path) as ready:
            ready.start_environment(forward_to("ws://127.0.0.1:9/"))
            await ready.connected.wait()
            receiver = Remembering()
            await ready.harness().connect(receiver)
            await eventually_async(lambda: receiver.closed)

    asyncio.run(main())


@pytest.mark.parametrize("url", ["http://host", "ws://", "host:1", ""])
def test_destinations_that_are_none(url: str) -> None:
    with pytest.raises(BadDestination):
        forward_to(url)
