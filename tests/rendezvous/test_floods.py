"""What one peer sends without end, or does not send at all: it costs that peer, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop

from exec_server import log
from exec_server.relay import link
from exec_server.relay.credentials import Bearer
from exec_server.relay.frame import Frame, Heartbeat, Resume, encode
from exec_server.relay.keys import Identity
from exec_server.relay.registry import Registry, RegistryError
from exec_server.rendezvous import node as nodes
from exec_server.rendezvous import sockets as module
from exec_server.rendezvous.node import Node, NodeOptions
from relay.stage import KEY, add_key
from support.frames import BINARY, CLOSE, PING, PONG, TEXT, UPGRADE, frame
from support.tls import certificate, trusting
from support.wait import eventually_async


class Raw:
    """A WebSocket by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, url: str, ssl: Any) -> Raw:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=ssl)
        lines = [f"GET {parts.path}?{parts.query} HTTP/1.1", *(f"{k}: {v}" for k, v in UPGRADE.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        return cls(reader, writer)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def frame(self) -> tuple[int, bytes]:
        head = await self.reader.readexactly(2)
        assert head[1] < 126
        return head[0] & 15, await self.reader.readexactly(head[1])

    async def close_code(self) -> int:
        """Whatever comes before it is not looked at."""
        while True:
            kind, payload = await self.frame()
            if kind == CLOSE:
                return int.from_bytes(payload[:2], "big")


class Setting:
    """A node and what is registered with it."""

    def __init__(self, node: Node, ssl: Any) -> None:
        self.node = node
        self.registry = Registry(node.url, "env-1", Bearer(KEY), ssl=ssl)
        self._ssl = ssl
        self._raws: list[Raw] = []

    async def environment(self) -> Raw:
        return await self._open((await self.registry.register(Identity.generate().public)).url)

    async def harness(self) -> Raw:
        return await self._open((await self.registry.connect(Identity.generate().public)).url)

    async def _open(self, url: str) -> Raw:
        self._raws.append(await Raw.open(url, self._ssl))
        return self._raws[-1]

    async def close(self) -> None:
        for raw in self._raws:
            raw.writer.transport.abort()
            with contextlib.suppress(OSError):
                await raw.writer.wait_closed()
        await self.registry.close()

    async def is_answered(self, raw: Raw) -> bool:
        """It is still there: a ping comes back."""
        await raw.send(frame(PING, b"still there"))
        while (got := await raw.frame()) != (PONG, b"still there"):
            assert got[0] == BINARY
        return True


@contextlib.asynccontextmanager
async def setting(data: Path, secure: bool) -> AsyncIterator[Setting]:
    await add_key(data)
    options, trust = NodeOptions(data=str(data)), None
    if secure:
        cert, key = certificate(data)
        trust = trusting(cert)
        options = NodeOptions(
            listen="https://127.0.0.1:0", tls_cert=str(cert), tls_key=str(key), data=str(data)
        )
    async with asyncio.timeout(40), Node(options) as node:
        made = Setting(node, trust)
        try:
            yield made
        finally:
            await made.close()


def play(
    data: Path,
    scenario: Callable[[Setting], Awaitable[None]],
    *,
    secure: bool = False,
    run: Callable[..., None] = asyncio.run,
) -> None:
    async def main() -> None:
        async with setting(data, secure) as made:
            await scenario(made)

    run(main())


@pytest.mark.parametrize("role", ["environment", "harness"])
def test_pings_without_end_from_somebody_who_does_not_read(tmp_path: Path, role: str) -> None:
    async def scenario(made: Setting) -> None:
        raw = await made.environment()
        if role == "harness":
            raw = await made.harness()
        sockets = made.node._carrier.sockets  # type: ignore[union-attr]  # it is open
        pings = b"".join(b"\x89\xfd\0\0\0\0" + b"p" * 125 for _ in range(1000))
        for _ in range(120):
            await raw.send(pings)
        await eventually_async(lambda: max(socket.link.taken for socket in sockets) == 120_000)
        assert max(socket.link.unsent() for socket in sockets) < module.FULL_BYTES + 1000

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("role", "kind", "payload"),
    [
        ("environment", BINARY, b""),
        ("environment", BINARY, b"junk"),
        ("environment", TEXT, b"x"),  # of a harness, one is enough
        ("harness", BINARY, b""),
        ("harness", BINARY, b"junk"),
    ],
)
def test_junk_without_end(tmp_path: Path, role: str, kind: int, payload: bytes) -> None:
    """A few messages that are no frames are dropped; with too many of them the socket goes."""

    async def scenario(made: Setting) -> None:
        raw = await made.environment()
        if role == "harness":
            raw = await made.harness()
        junk = frame(kind, payload)
        await raw.send(junk * (module.MAX_JUNK - 1))
        assert await made.is_answered(raw)
        await raw.send(junk)
        assert await raw.close_code() == 1008
        if role == "environment":
            with pytest.raises(RegistryError, match="not connected"):
                await made.registry.connect(Identity.generate().public)

    play(tmp_path, scenario)


def test_junk_now_and_then_is_no_reason_to_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JUNK_SECONDS", -1.0)

    async def scenario(made: Setting) -> None:
        raw = await made.environment()
        for _ in range(3):
            await raw.send(frame(BINARY) * (module.MAX_JUNK - 1))
            assert await made.is_answered(raw)

    play(tmp_path, scenario)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_a_flood_of_frames_leaves_others_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure: bool, run: Any
) -> None:
    """However many frames of one socket there are, only so many of them are handled in a turn of the loop."""

    async def scenario(made: Setting) -> None:
        await made.environment()
        raw = await made.harness()
        await raw.send(frame(BINARY, encode(Frame("s", Resume()))))
        router = made.node.router
        assert router is not None
        handle, handled, per_turn, turn = router.harness_frame, 0, {0: 0}, 0

        def harness_frame(harness: Any, message: bytes | memoryview) -> bool:
            nonlocal handled
            handled += 1
            per_turn[turn] = per_turn.get(turn, 0) + 1
            return handle(harness, message)

        monkeypatch.setattr(router, "harness_frame", harness_frame)
        heartbeats = frame(BINARY, encode(Frame("s", Heartbeat())))
        raw.writer.write(heartbeats * 30_000)
        while handled < 30_000:
            turn += 1
            await asyncio.sleep(0)
        # A turn of uvloop may be two of ours.
        assert max(per_turn.values()) <= 2 * (link.TURN_FRAMES + link.SURPLUS_FRAMES)
        assert await made.is_answered(raw)

    play(tmp_path, scenario, secure=secure, run=run)


def test_reserved_bits_are_a_violation(tmp_path: Path) -> None:
    async def scenario(made: Setting) -> None:
        raw = await made.environment()
        await raw.send(frame(BINARY, b"x", rsv=4))
        assert await raw.close_code() == 1002

    play(tmp_path, scenario)


def test_strangers_who_say_nothing_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("warning", False)
    monkeypatch.setattr(nodes, "MAX_GUESTS", 16)

    async def scenario(made: Setting) -> None:
        parts = urlsplit(made.node.url)
        crowd = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(40)]
        environment = await made.environment()
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in crowd]
        await eventually_async(lambda: sum(task.done() for task in ended) >= 40 - 8)
        # Those who have shown a key are no strangers.
        more = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(20)]
        harness = await made.harness()
        assert await made.is_answered(environment)
        assert await made.is_answered(harness)
        for task in ended:
            task.cancel()
        for _, writer in (*crowd, *more):
            writer.transport.abort()

    play(tmp_path, scenario)
    assert capsys.readouterr().err.count("too many connections show no key") == 1


def test_strangers_who_never_begin_with_tls_are_strangers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MAX_GUESTS", 16)

    async def scenario(made: Setting) -> None:
        parts = urlsplit(made.node.url)
        crowd = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(40)]
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in crowd]
        await eventually_async(lambda: sum(task.done() for task in ended) == 40 - 8)
        assert await made.is_answered(await made.environment())
        for task in ended:
            task.cancel()
        for _, writer in crowd:
            writer.transport.abort()

    play(tmp_path, scenario, secure=True)


def test_what_a_peer_says_at_the_end_is_not_logged(
    tmp_path: Path, fresh_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("info", False)

    async def scenario(made: Setting) -> None:
        raw = await made.environment()
        await raw.send(frame(CLOSE, b"\x03\xe8SECRET\x1b[31m\r\nfake line"))
        assert await raw.close_code() == 1000
        await eventually_async(lambda: made.node.router is not None and made.node.router.online == 0)

    play(tmp_path, scenario)
    said = capsys.readouterr().err
    assert "the peer closed the connection (1000)" in said
    assert "SECRET" not in said
