"""One WebSocket of the relay: pings, limits, and messages in pieces."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.server import serve

from exec_server.relay import link as module
from exec_server.relay.link import UpgradeFailed, open_link
from support.wait import eventually_async


class Owner:
    """Remembers what a link says."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.texts = 0
        self.closed: str | None = None

    def frame_arrived(self, message: bytes | memoryview) -> None:
        self.frames.append(bytes(message))

    def text_arrived(self) -> None:
        self.texts += 1

    def link_drained(self) -> None:
        pass

    def link_closed(self, reason: str) -> None:
        self.closed = reason


@asynccontextmanager
async def peer(handle: Any, **options: Any) -> AsyncIterator[str]:
    server = await serve(handle, "127.0.0.1", 0, max_size=None, ping_interval=None, **options)
    try:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/"
    finally:
        server.close()
        await server.wait_closed()


def run(main: Any) -> None:
    async def timed() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(timed())


def test_frames_and_texts_and_pieces() -> None:
    async def handle(socket: Any) -> None:
        await socket.send(b"whole")
        await socket.send([b"in ", b"pie", b"ces"])
        await socket.send("text")
        await socket.send(bytes(262_144))
        assert await socket.recv() == b"there"
        await socket.close(1000, "enough")

    async def main() -> None:
        owner = Owner()
        async with peer(handle) as url:
            link = await open_link(url, owner)
            await eventually_async(lambda: len(owner.frames) == 3)
            assert owner.frames[:2] == [b"whole", b"in pieces"]
            assert (len(owner.frames[2]), owner.texts) == (262_144, 1)
            link.send(b"there")
            await eventually_async(lambda: owner.closed)
            assert "enough" in (owner.closed or "")
            link.send(b"nowhere")
            assert link.unsent() == 0

    run(main)


@pytest.mark.parametrize("giant", [bytes(262_145), bytes(3_000_000), [bytes(200_000), bytes(200_000)]])
def test_giants_are_refused(giant: Any) -> None:
    async def handle(socket: Any) -> None:
        await socket.send(giant)
        await socket.wait_closed()

    async def main() -> None:
        owner = Owner()
        async with peer(handle) as url:
            await open_link(url, owner)
            await eventually_async(lambda: owner.closed)
            assert owner.frames == []

    run(main)


class Raw:
    """A WebSocket server by hand, which answers pings or does not."""

    def __init__(self, *, polite: bool) -> None:
        self.pings = 0
        self.ended = False
        self._polite = polite

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key"))
        accept = hashlib.sha1(line.partition(b": ")[2] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11")
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-accept: %b\r\n\r\n" % base64.b64encode(accept.digest())
        )
        while data := await reader.read(6):  # an empty ping, masked
            if data.startswith(b"\x89\x80"):
                self.pings += 1
                if self._polite:
                    writer.write(b"\x8a\x00")
        writer.close()
        self.ended = True


@pytest.mark.parametrize("polite", [True, False])
def test_pings_are_sent_one_at_a_time_and_must_be_answered(
    monkeypatch: pytest.MonkeyPatch, polite: bool
) -> None:
    monkeypatch.setattr(module, "PING_INTERVAL", 0.02)
    monkeypatch.setattr(module, "PONG_LIMIT", 10.0 if polite else 0.3)

    async def main() -> None:
        raw = Raw(polite=polite)
        server = await asyncio.start_server(raw.handle, "127.0.0.1", 0)
        owner = Owner()
        link = await open_link(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/", owner)
        if polite:
            await eventually_async(lambda: raw.pings >= 5)
            assert owner.closed is None
            link.close()
        else:
            await eventually_async(lambda: owner.closed)
            assert "no ping was answered" in (owner.closed or "")
            assert raw.pings == 1
        await eventually_async(lambda: raw.ended)
        server.close()
        await server.wait_closed()

    run(main)


def test_upgrades_that_fail() -> None:
    async def refuse(connection: Any, request: Any) -> Any:
        return connection.respond(409, "superseded\n")

    async def nothing(socket: Any) -> None:
        pass

    async def main() -> None:
        async with peer(nothing, process_request=refuse) as url:
            with pytest.raises(UpgradeFailed) as caught:
                await open_link(f"{url}?sig=secret", Owner())
            assert caught.value.status == 409
            assert "secret" not in str(caught.value)

        async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        silent = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        cut = f"ws://127.0.0.1:{silent.sockets[0].getsockname()[1]}/"
        for bad in (cut, "ws://127.0.0.1:9/", "nonsense", "http://127.0.0.1:9/", ""):
            with pytest.raises(UpgradeFailed) as caught:
                await open_link(bad, Owner())
            assert caught.value.status is None
        silent.close()

    run(main)


def test_a_closed_link_says_nothing_more() -> None:
    async def handle(socket: Any) -> None:
        await socket.wait_closed()

    async def main() -> None:
        owner = Owner()
        async with peer(handle) as url:
            link = await open_link(url, owner)
            link.close(1000, "bye")
            await asyncio.sleep(0)
        assert owner.closed is None

    run(main)


def test_a_paused_link_keeps_what_one_read_brought() -> None:
    """A single read may hold megabytes of frames; a pause in the middle of them holds."""

    async def handle(socket: Any) -> None:
        for number in range(200):
            await socket.send(b"%d" % number)
        await socket.wait_closed()

    class Pausing(Owner):
        def frame_arrived(self, message: bytes | memoryview) -> None:
            super().frame_arrived(message)
            if len(self.frames) % 7 == 0:
                link.pause_reading()

    async def main() -> None:
        nonlocal link
        owner = Pausing()
        async with peer(handle) as url:
            link = await open_link(url, owner)
            for step in range(1, 29):
                await eventually_async(lambda step=step: len(owner.frames) == 7 * step)  # type: ignore[misc]
                await asyncio.sleep(0)
                assert len(owner.frames) == 7 * step
                link.resume_reading()
            await eventually_async(lambda: len(owner.frames) == 200)
            assert owner.frames == [b"%d" % number for number in range(200)]
            link.close()

    link: Any = None
    run(main)
