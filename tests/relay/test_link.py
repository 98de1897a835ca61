"""One WebSocket of the relay: pings, limits, and messages in pieces."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import serve

from exec_server.relay import link as module
from exec_server.relay.link import UpgradeFailed, open_link
from support.frames import BINARY, CLOSE, CONTINUATION, PING, PONG, frame
from support.tls import certificate, trusting
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


async def upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    line = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key"))
    accept = hashlib.sha1(line.partition(b": ")[2] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11")
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-accept: %b\r\n\r\n" % base64.b64encode(accept.digest())
    )


@asynccontextmanager
async def raw_peer(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A WebSocket server by hand, after its handshake and a first message of two bytes."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await upgrade(reader, writer)
        await reader.readexactly(8)
        await handle(reader, writer)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        server.close()
        await server.wait_closed()


class Raw:
    """A WebSocket server by hand, which answers pings or does not."""

    def __init__(self, *, polite: bool) -> None:
        self.pings = 0
        self.ended = False
        self._polite = polite

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await upgrade(reader, writer)
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


# What a peer can do to us ------------------------------------------------------------------------


def plain(opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0) -> bytes:
    return frame(opcode, payload, fin=fin, rsv=rsv, masked=False)


def test_pings_of_a_peer_that_does_not_read_do_not_pile_up() -> None:
    """The newest is answered when it reads again."""
    pings = 80_000
    answers: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for start in range(0, pings, 1000):
            writer.write(b"".join(plain(PING, b"%0100d" % number) for number in range(start, start + 1000)))
            await writer.drain()
        writer.write(plain(BINARY, b"done"))
        asked.set()
        await handled.wait()
        while not answers or int(answers[-1]) != pings - 1:
            head = await reader.readexactly(6)
            assert head[0] & 15 == PONG
            masked = await reader.readexactly(head[1] & 127)
            answers.append(bytes(byte ^ head[2 + at % 4] for at, byte in enumerate(masked)))

    async def main() -> None:
        owner = Owner()
        async with raw_peer(handle) as url:
            link = await open_link(url, owner)
            link.send(b"go")
            await asked.wait()
            await eventually_async(lambda: owner.frames)
            assert link.unsent() < module.HIGH_WATER + 1000
            handled.set()
            await eventually_async(lambda: answers and int(answers[-1]) == pings - 1)
            assert answers == sorted(answers)
            assert len(answers) < pings
            link.close()

    asked, handled = asyncio.Event(), asyncio.Event()
    run(main)


def test_what_one_read_brought_takes_several_turns_of_the_loop() -> None:
    """Others have their turns in between, and nothing is lost or out of order, also at the end."""
    count = 20_000
    turn = 0
    turns: list[int] = []

    class Counting(Owner):
        def frame_arrived(self, message: bytes | memoryview) -> None:
            super().frame_arrived(message)
            turns.append(turn)

    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(plain(BINARY, b"%d" % number) for number in range(count)))

    async def main() -> None:
        nonlocal turn
        owner = Counting()
        async with raw_peer(handle) as url:
            (await open_link(url, owner)).send(b"go")
            while owner.closed is None:
                turn += 1
                await asyncio.sleep(0)
        assert owner.frames == [b"%d" % number for number in range(count)]
        most = max(turns.count(number) for number in set(turns))
        assert most <= module.TURN_FRAMES + module.SURPLUS_FRAMES

    run(main)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (plain(BINARY, b"x", rsv=4), 1002),
        (plain(BINARY, b"x", rsv=1), 1002),
        (plain(PING, b"x", rsv=2), 1002),
        (plain(BINARY, b"", fin=False) + plain(CONTINUATION, b"", fin=False) * module.MAX_PIECES, 1008),
    ],
    ids=["reserved bit 1", "reserved bit 3", "reserved bit of a ping", "too many pieces"],
)
def test_violations_are_refused(sent: bytes, code: int) -> None:
    codes: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent + plain(BINARY, b"after"))
        head = await reader.readexactly(8)
        assert head[0] & 15 == CLOSE
        codes.append((head[6] ^ head[2]) << 8 | (head[7] ^ head[3]))

    async def main() -> None:
        owner = Owner()
        async with raw_peer(handle) as url:
            (await open_link(url, owner)).send(b"go")
            await eventually_async(lambda: owner.closed and codes)
            assert owner.frames == []
        assert codes == [code]

    run(main)


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("enough", "the peer closed the connection (4001): enough"),
        ("\x1b[31mred\r\nfake line", "the peer closed the connection (4001): ?[31mred??fake line"),
        ("long " * 24, "the peer closed the connection (4001): " + "long " * 20),
        ("", "the peer closed the connection (4001)"),
    ],
)
def test_what_a_peer_says_at_the_end_is_cleaned(reason: str, shown: str) -> None:
    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(CLOSE, (4001).to_bytes(2, "big") + reason.encode()))

    async def main() -> None:
        owner = Owner()
        async with raw_peer(handle) as url:
            (await open_link(url, owner)).send(b"go")
            await eventually_async(lambda: owner.closed)
            assert owner.closed == shown

    run(main)


def test_a_close_without_a_code() -> None:
    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(CLOSE))

    async def main() -> None:
        owner = Owner()
        async with raw_peer(handle) as url:
            (await open_link(url, owner)).send(b"go")
            await eventually_async(lambda: owner.closed)
            assert owner.closed == "the peer closed the connection (no code)"

    run(main)


@pytest.mark.parametrize("count", [20, 100])
def test_a_paused_link_over_tls_goes_on_with_what_was_read_already(tmp_path: Path, count: int) -> None:
    """The TLS layer keeps what it has read from the socket, where nothing more may ever arrive, and is no
    larger than it is."""
    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    written, gone = asyncio.Event(), asyncio.Event()

    class Pausing(Owner):
        def frame_arrived(self, message: bytes | memoryview) -> None:
            super().frame_arrived(message)
            link.pause_reading()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await upgrade(reader, writer)
        await reader.readexactly(8)
        writer.write(plain(BINARY, bytes(10_000)) * count)
        await writer.drain()
        written.set()
        await gone.wait()
        writer.close()

    async def main() -> None:
        nonlocal link
        owner = Pausing()
        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        link = await open_link(f"wss://127.0.0.1:{port}/", owner, ssl=trusting(cert))
        link.pause_reading()
        link.send(b"go")
        await written.wait()
        for number in range(1, count + 1):
            link.resume_reading()
            await eventually_async(lambda number=number: len(owner.frames) == number)  # type: ignore[misc]
        assert owner.closed is None
        gone.set()
        link.fail("enough")
        await eventually_async(lambda: owner.closed)
        await eventually_async(lambda: len(asyncio.all_tasks()) == 1)
        server.close()
        await server.wait_closed()

    link: Any = None
    run(main)
