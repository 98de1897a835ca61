"""transport/websocket.py: frames, as a client may send them and as it may not."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from exec_server.limits import Limits
from exec_server.transport.channel import Receiver
from exec_server.transport.door import Door
from exec_server.transport.listener import Listener as AcceptingListener
from exec_server.transport.websocket import ConnectFailed, WebSocketChannel
from exec_server.transport.websocket import connect as open_channel
from support.frames import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, UPGRADE, Frame, RawSocket, frame
from support.rpc import WebSocketPeer
from support.server import RunningServer
from support.tls import certificate, trusting
from support.wait import PATIENCE, eventually, eventually_async

MIB = 1024 * 1024
STATUS = b'{"id":1,"method":"no/such"}'


@pytest.fixture
def raw(server: RunningServer) -> Iterator[RawSocket]:
    with RawSocket(server.url) as made:
        yield made.upgrade()


def answered(raw: RawSocket, request_id: Any = 1) -> bool:
    message = raw.message()
    return bool(message["id"] == request_id and message["error"]["code"] == -32601)


def padded(size: int) -> bytes:
    """A request of exactly so many bytes."""
    text = b'{"id":1,"method":"no/such","params":"%b"}'
    return text % (b"x" * (size - len(text) + 2))


# Data --------------------------------------------------------------------------------------------


def test_text_and_binary_are_the_same_to_a_server(raw: RawSocket) -> None:
    raw.send(frame(TEXT, STATUS))
    assert answered(raw)
    raw.send(frame(BINARY, STATUS))
    assert answered(raw)


def test_many_frames_in_one_segment(raw: RawSocket) -> None:
    raw.send(b"".join(frame(TEXT, json.dumps({"id": n, "method": "no/such"}).encode()) for n in range(500)))
    assert [raw.message()["id"] for _ in range(500)] == list(range(500))


def test_a_frame_in_many_segments(raw: RawSocket) -> None:
    for byte in frame(TEXT, STATUS):
        raw.send(bytes([byte]))
    assert answered(raw)


@pytest.mark.parametrize("kind", [TEXT, BINARY])
def test_fragments(raw: RawSocket, kind: int) -> None:
    raw.send(frame(kind, STATUS[:5], fin=False))
    raw.send(frame(CONTINUATION, b"", fin=False))
    raw.send(frame(PING, b"between"))
    raw.send(frame(CONTINUATION, STATUS[5:10], fin=False))
    raw.send(frame(CONTINUATION, STATUS[10:]))
    assert raw.receive() == Frame(PONG, b"between")
    assert answered(raw)


def test_a_fragment_may_be_empty(raw: RawSocket) -> None:
    raw.send(frame(TEXT, b"", fin=False) + frame(CONTINUATION, STATUS, fin=False) + frame(CONTINUATION, b""))
    assert answered(raw)


def test_a_character_may_be_split_between_fragments(raw: RawSocket) -> None:
    text = '{"id":"ü","method":"no/such"}'.encode()
    at = text.index("ü".encode()) + 1
    raw.send(frame(TEXT, text[:at], fin=False) + frame(CONTINUATION, text[at:]))
    assert answered(raw, "ü")


def test_the_largest_frame_and_one_more_byte(server: RunningServer, raw: RawSocket) -> None:
    raw.send(frame(TEXT, padded(16 * MIB)))
    assert answered(raw)
    raw.send(frame(TEXT, b"", length=16 * MIB + 1))
    assert raw.ended()


def test_the_largest_message_and_one_more_byte(raw: RawSocket) -> None:
    parts = [padded(64 * MIB)[at : at + 16 * MIB] for at in range(0, 64 * MIB, 16 * MIB)]
    raw.send(frame(TEXT, parts[0], fin=False))
    for part in parts[1:-1]:
        raw.send(frame(CONTINUATION, part, fin=False))
    raw.send(frame(CONTINUATION, parts[-1]))
    assert answered(raw)
    raw.send(frame(TEXT, parts[0], fin=False))
    for part in parts[1:]:
        raw.send(frame(CONTINUATION, part, fin=False))
    raw.send(frame(CONTINUATION, b"x"))
    assert raw.ended()


def test_a_frame_that_claims_to_be_huge_is_not_waited_for(raw: RawSocket) -> None:
    raw.send(frame(TEXT, b"x", length=100 * MIB))
    assert raw.ended()


def test_a_message_in_very_many_fragments_is_no_larger_than_what_is_in_it() -> None:
    from picows import WSMsgType
    from picows.picows import _make_test_ws_frame

    first = _make_test_ws_frame(WSMsgType.TEXT, b"xy", False, False)
    more = _make_test_ws_frame(WSMsgType.CONTINUATION, b"xy", False, False)
    last = _make_test_ws_frame(WSMsgType.CONTINUATION, b"", True, False)

    async def main() -> None:
        channel = WebSocketChannel("peer", Limits(), server_side=True)
        listener = Listener()
        channel.attach(listener)
        transport: Any = None
        tracemalloc.start()
        try:
            for part in (first, *([more] * 20_000)):
                channel.on_ws_frame(transport, part)
            assert tracemalloc.get_traced_memory()[0] < 200_000
        finally:
            tracemalloc.stop()
        channel.on_ws_frame(transport, last)
        assert listener.texts == [b"xy" * 20_001]

    asyncio.run(main())


# Control -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [b"", b"payload", bytes(125)])
def test_a_ping_is_answered(raw: RawSocket, payload: bytes) -> None:
    raw.send(frame(PING, payload))
    assert raw.receive() == Frame(PONG, payload)


@pytest.mark.parametrize("where", ["server", "unix_server"])
def test_pings_of_a_client_that_does_not_read_do_not_pile_up(
    where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The newest is answered when it reads again."""
    pings = 80_000
    made = tmp_path / "made"
    with RawSocket(request.getfixturevalue(where).url) as raw:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        raw.upgrade()
        raw.send(frame(TEXT, b'{"id":1,"method":"initialize","params":{"clientName":"x"}}'))
        raw.message()
        raw.send(frame(TEXT, b'{"method":"initialized","params":{}}'))
        for start in range(0, pings, 1000):
            raw.send(b"".join(b"\x89\xe4\0\0\0\0%0100d" % n for n in range(start, start + 1000)))
        call = {"id": 2, "method": "fs/createDirectory", "params": {"path": made.as_uri()}}
        raw.send(frame(TEXT, json.dumps(call).encode()))
        eventually(made.exists, "all that was sent being handled")
        answers = 0
        while (got := raw.receive()) is not None and (got.opcode != PONG or int(got.payload) != pings - 1):
            answers += got.opcode == PONG
        assert got is not None
        assert answers < pings - 1


def test_a_server_that_does_not_read_its_own_pongs() -> None:
    """The same at the other end."""
    seen = asyncio.Event()

    async def handle(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        for _ in range(60_000):
            connection.transport.write(b"\x89\x7d" + bytes(125))
        while connection.transport.get_write_buffer_size():
            await asyncio.sleep(0.001)
        connection.transport.write(b"\x82\x04done")
        await seen.wait()
        connection.transport.abort()

    async def main() -> None:
        listener = Listener()
        async with serve(handle, "127.0.0.1", 0, ping_interval=None) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            channel = await open_channel(
                f"ws://127.0.0.1:{port}", listener, Limits(), headers={}, timeout=PATIENCE
            )
            await eventually_async(lambda: listener.binaries)
            assert channel.unsent() < 2 * Limits().outgoing_high_water
            seen.set()
            await listener.ended.wait()

    asyncio.run(main())


def test_pongs_nobody_asked_for_are_ignored(raw: RawSocket) -> None:
    raw.send(frame(PONG, b"x") + frame(TEXT, STATUS))
    assert answered(raw)


@pytest.mark.parametrize("payload", [b"", b"\x03\xe8", b"\x03\xe8bye"])
def test_a_close_ends_the_connection(raw: RawSocket, payload: bytes) -> None:
    raw.send(frame(CLOSE, payload) + frame(TEXT, STATUS))
    frames = []
    while (got := raw.receive()) is not None:
        frames.append(got.opcode)
    assert frames in ([], [CLOSE])  # what came behind the close is not answered


def test_what_was_asked_before_the_close_is_answered(raw: RawSocket) -> None:
    raw.send(frame(TEXT, STATUS) * 3 + frame(CLOSE, b"\x03\xe8"))
    for _ in range(3):
        assert answered(raw)
    assert raw.ended()


def test_what_was_asked_before_the_end_is_answered(raw: RawSocket) -> None:
    raw.send(frame(TEXT, STATUS) * 3)
    raw.socket.shutdown(socket.SHUT_WR)
    for _ in range(3):
        assert answered(raw)
    assert raw.ended()


def test_the_server_pings() -> None:
    # The interval is a fact of the protocol, so it is shortened where a channel is made.
    async def run() -> Frame:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: Door(lambda _: None, lambda channel: None, Limits(ping_interval=0.01)), "127.0.0.1", 0
        )
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        await reader.readuntil(b"\r\n\r\n")
        first, second = await reader.readexactly(2), await reader.readexactly(2)
        assert first == second
        writer.close()
        await writer.wait_closed()
        listener.close()
        await listener.wait_closed()
        return Frame(first[0] & 15, b"")

    assert asyncio.run(run()).opcode == PING


# Violations --------------------------------------------------------------------------------------

VIOLATIONS = {
    "unmasked": frame(TEXT, STATUS, masked=False),
    "reserved bit 1": frame(TEXT, STATUS, rsv=4),
    "reserved bit 2": frame(TEXT, STATUS, rsv=2),
    "reserved bit 3": frame(TEXT, STATUS, rsv=1),
    "reserved data opcode": frame(3, STATUS),
    "reserved control opcode": frame(11, b""),
    "stray continuation": frame(CONTINUATION, STATUS),
    "a message inside a message": frame(TEXT, b"{", fin=False) + frame(TEXT, STATUS),
    "bad UTF-8": frame(TEXT, b'{"id":1,"method":"\xff"}'),
    "bad UTF-8 over fragments": frame(TEXT, b'{"\xc3', fin=False) + frame(CONTINUATION, b'":1}'),
    "a surrogate": frame(TEXT, b'{"id":1,"method":"\xed\xa0\x80"}'),
    "fragmented ping": frame(PING, b"x", fin=False),
    "long ping": frame(PING, bytes(126)),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violations_end_the_connection_without_an_answer(raw: RawSocket, name: str) -> None:
    raw.send(VIOLATIONS[name] + frame(TEXT, b'{"id":"after","method":"no/such"}'))
    assert raw.ended()


def test_bad_utf8_in_a_binary_message_is_only_malformed(raw: RawSocket) -> None:
    raw.send(frame(BINARY, b'{"id":1,"method":"\xff"}'))
    message = raw.message()
    assert (message["id"], message["error"]["code"]) == (-1, -32600)
    host, port = raw.socket.getsockname()
    prefix = f"failed to parse websocket JSON-RPC message from exec-server websocket {host}:{port}: "
    assert message["error"]["message"].startswith(prefix)
    raw.send(frame(TEXT, STATUS))
    assert answered(raw)


def test_an_empty_message_is_only_malformed(raw: RawSocket) -> None:
    raw.send(frame(TEXT, b"") + frame(TEXT, STATUS))
    assert raw.message()["id"] == -1
    assert answered(raw)


def test_a_session_survives_a_violation(server: RunningServer, connect: Callable[..., WebSocketPeer]) -> None:
    with RawSocket(server.url) as raw:
        raw.upgrade()
        raw.send(frame(TEXT, b'{"id":1,"method":"initialize","params":{"clientName":"x"}}'))
        session = raw.message()["result"]["sessionId"]
        raw.send(VIOLATIONS["unmasked"])
        assert raw.ended()
    peer = connect()
    assert peer.initialize(resumeSessionId=session)["sessionId"] == session


# The handshake's answer --------------------------------------------------------------------------


def test_the_answer_to_an_upgrade(server: RunningServer) -> None:
    with RawSocket(server.url) as raw:
        answer = raw.ask(
            path="/?query=ignored",
            headers={
                **UPGRADE,
                "Sec-WebSocket-Protocol": "one, two",
                "Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits",
            },
        )
        assert answer.status == 101
        assert answer.headers["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        assert answer.headers["upgrade"].lower() == "websocket"
        assert answer.headers["connection"].lower() == "upgrade"
        assert "sec-websocket-protocol" not in answer.headers
        assert "sec-websocket-extensions" not in answer.headers
        raw.send(frame(TEXT, STATUS))
        assert answered(raw)


def test_frames_may_follow_the_request_at_once(server: RunningServer) -> None:
    with RawSocket(server.url) as raw:
        head = "\r\n".join(["GET / HTTP/1.1", *(f"{n}: {v}" for n, v in UPGRADE.items()), "", ""])
        requests = [json.dumps({"id": n, "method": "no/such"}).encode() for n in range(3000)]
        raw.send(head.encode() + b"".join(frame(TEXT, request) for request in requests))
        assert raw.response().status == 101
        assert [raw.message()["id"] for _ in range(3000)] == list(range(3000))


def test_nothing_is_ever_compressed_or_fragmented(connect: Callable[..., WebSocketPeer]) -> None:
    # The library would refuse a compressed frame, as none was agreed on.
    peer = connect(compression="deflate")
    peer.initialize()
    assert peer.raw.protocol.extensions == []
    assert len(peer.run("head", "-c", "1000000", "/dev/zero").stdout) == 1_000_000


def test_only_what_is_too_long_for_a_frame_is_fragmented(raw: RawSocket) -> None:
    request = b'{"id":1,"method":"%b"}'
    raw.send(frame(TEXT, request % (b"x" * (12 * MIB))))
    answer = raw.receive()
    assert answer is not None
    assert (answer.opcode, answer.fin, len(answer.payload) > 12 * MIB) == (TEXT, True, True)
    raw.send(frame(TEXT, request % (b"x" * (16 * MIB - len(request)))))  # the answer has some words more
    parts = [part for part in (raw.receive(), raw.receive(), raw.receive()) if part is not None]
    assert [(part.opcode, part.fin) for part in parts[:2]] == [(TEXT, False), (CONTINUATION, False)]
    assert parts[2].opcode == CONTINUATION
    assert parts[2].fin
    assert all(len(part.payload) <= 16 * MIB for part in parts)
    assert len(b"".join(part.payload for part in parts)) > 16 * MIB
    raw.send(frame(TEXT, STATUS))
    assert answered(raw)


# As a client -------------------------------------------------------------------------------------


class Listener:
    """Keeps what comes."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.binaries: list[bytes] = []
        self.ended = asyncio.Event()

    def message_received(self, message: bytes) -> None:
        self.texts.append(message)

    def binary_received(self, message: bytes) -> None:
        assert type(message) is bytes
        self.binaries.append(message)

    def writing_paused(self) -> None:
        """Little is sent."""

    def writing_resumed(self) -> None:
        """See above."""

    def channel_closed(self, reason: str) -> None:
        del reason
        self.ended.set()


class Onlooker(Listener):
    """Takes binary messages where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.views = 0

    def view_received(self, message: memoryview) -> None:
        assert type(message) is memoryview
        self.views += 1
        self.binaries.append(bytes(message))


@pytest.mark.parametrize("kind", [Listener, Onlooker])
def test_what_a_client_receives_and_sends(kind: type[Listener]) -> None:
    large = bytes(range(256)) * 8192
    heard: list[str | bytes] = []

    async def scenario() -> None:
        async def talk(connection: ServerConnection) -> None:
            await connection.send("text")
            heard.append(await connection.recv())  # sent by somebody who listens by now
            await connection.send(b"")
            await connection.send(large)
            await connection.send([b"in ", b"fragments"])
            heard.extend([await connection.recv() for _ in range(3)])

        async with serve(talk, "127.0.0.1", 0, max_size=None) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            listener: Receiver = kind()
            channel = await open_channel(f"ws://127.0.0.1:{port}", listener, Limits(), headers={}, timeout=10)
            channel.send_parts(b"a", large, b"z", binary=True)
            channel.send_parts(b"a", memoryview(large), b"", binary=True)
            channel.send_parts(b"", b"", b"", binary=True)
            channel.send_parts(b"<", b"text" * 1000, b">", binary=False)
            assert isinstance(listener, Listener)
            await asyncio.wait_for(listener.ended.wait(), 20)
            assert listener.texts == [b"text"]
            assert listener.binaries == [b"", large, b"in fragments"]
            if isinstance(listener, Onlooker):
                assert listener.views == 2

    asyncio.run(scenario())
    assert heard == [b"a" + large + b"z", b"a" + large, b"", "<" + "text" * 1000 + ">"]


@pytest.mark.parametrize("reads", [False, True])
def test_a_peer_that_hangs_up_instead_of_an_answer(reads: bool) -> None:
    """As a load balancer without a server behind it does: the next attempt need not wait for a timeout."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if reads:
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as listener:
            url = f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            with pytest.raises(ConnectFailed, match="closed the connection before it answered"):
                await open_channel(url, Listener(), Limits(), headers={}, timeout=300)

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def test_a_server_without_tls_says_so_at_once(server: RunningServer) -> None:
    async def run() -> None:
        with pytest.raises(
            ConnectFailed, match=r"there is no TLS on that port; does its address begin with ws"
        ):
            await open_channel(
                server.url.replace("ws:", "wss:"), Listener(), Limits(), headers={}, timeout=20
            )

    asyncio.run(run())


def test_a_peer_that_ends_a_tls_handshake_makes_no_noise(capsys: pytest.CaptureFixture[str]) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write_eof()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        over.set()

    over = asyncio.Event()

    async def run() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            with pytest.raises(ConnectFailed, match="there is no TLS on that port"):
                await open_channel(f"wss://127.0.0.1:{port}", Listener(), Limits(), headers={}, timeout=20)
            await over.wait()

    asyncio.run(run())
    assert capsys.readouterr() == ("", "")


def test_what_tls_has_read_already_arrives_after_a_pause(tmp_path: Path) -> None:
    """Also when nothing more comes from the socket, and when there is no room for more."""
    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    count = 60

    class Pausing(Listener):
        channel: Any = None

        def binary_received(self, message: bytes) -> None:
            super().binary_received(message)
            self.channel.pause_reading()

    async def main() -> None:
        receiver = Pausing()

        def accept(channel: WebSocketChannel) -> None:
            receiver.channel = channel
            channel.attach(receiver)

        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        door = AcceptingListener(sock, lambda: Door(lambda _: None, accept, Limits()), context)
        channel = await open_channel(
            f"wss://127.0.0.1:{door.port}",
            Listener(),
            Limits(),
            headers={},
            timeout=PATIENCE,
            ssl=trusting(cert),
        )
        receiver.channel.pause_reading()
        for _ in range(count):
            channel.send_parts(b"", bytes(10_000), b"", binary=True)
        await eventually_async(lambda: channel.unsent() == 0)
        while len(receiver.binaries) < count:
            before = len(receiver.binaries)
            receiver.channel.resume_reading()
            await eventually_async(lambda before=before: len(receiver.binaries) > before)  # type: ignore[misc]
        receiver.channel.resume_reading()
        channel.abort()
        await receiver.ended.wait()
        door.close()

    asyncio.run(main())
