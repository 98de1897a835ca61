"""A wire tap between a client and a server that can also cut the wire.

It copies WebSocket frames from one TCP connection to another without touching them, keeps a record of
every message, and asks a rule about each before passing it on. The rule decides where a connection breaks:
before a certain message got through, or right after. A broken connection is a reset of both sides, as when
a NAT forgets about it, and no close frame is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

__all__ = ["Message", "Proxy", "Rule", "Verdict", "cut_at", "first_reply_to", "nth_message"]

Json = dict[str, Any]
"""A JSON object."""

Direction = Literal["c2s", "s2c"]
"""Client to server, or server to client."""

OPCODE_CLOSE = 0x8
"""The first of the control opcodes; those below carry messages."""

ADMISSION_DEADLINE = 9.0
"""Seconds a new connection is kept waiting at most: less than the 10 s the client gives a connection."""

ADMISSION_INTERVAL = 0.01
"""Seconds between two looks at whether a waiting connection may go on."""

START_DEADLINE = 5.0
"""Seconds for the proxy to be listening, and to end."""


@dataclass(frozen=True)
class Message:
    """One message that reached the proxy, whether or not it was passed on."""

    connection: int
    """1 for the first connection, 2 for the one after it."""
    direction: Direction
    body: Json

    @property
    def method(self) -> str | None:
        """None for a reply."""
        return self.body.get("method")

    @property
    def params(self) -> Json:
        return self.body.get("params") or {}

    def answers(self, request: Message) -> bool:
        """Whether this is the server's reply to that request."""
        is_reply = self.direction == "s2c" and self.method is None
        return is_reply and (self.connection, self.body["id"]) == (request.connection, request.body["id"])


class Verdict(enum.Enum):
    """What a rule wants done about a message."""

    PASS = enum.auto()
    """Pass it on."""
    CUT_BEFORE = enum.auto()
    """Reset the connection; the other side never sees the message."""
    CUT_AFTER = enum.auto()
    """Pass it on, then reset the connection."""


Rule = Callable[[Message], Verdict]
"""Asked about every message, one at a time, in the order they arrive."""

Moment = Callable[[Message], bool]
"""True for one message of a conversation. It counts: show it every message, and use it for one proxy only."""


def nth_message(direction: Direction, method: str, number: int = 1) -> Moment:
    """The moment when the `number`-th message of that method arrives from that side."""
    seen = 0

    def moment(message: Message) -> bool:
        nonlocal seen
        if message.direction != direction or message.method != method:
            return False
        seen += 1
        return seen == number

    return moment


def first_reply_to(method: str) -> Moment:
    """The moment when the server answers the first request of that method."""
    request: Message | None = None

    def moment(message: Message) -> bool:
        nonlocal request
        if request is None and message.direction == "c2s" and message.method == method:
            request = message
        return request is not None and message.answers(request)

    return moment


def cut_at(moment: Moment, verdict: Verdict) -> Rule:
    """Cut at that moment, and let everything else pass."""
    return lambda message: verdict if moment(message) else Verdict.PASS


class Proxy:
    """Listens on a loopback port and connects whoever comes to `upstream`. Use as a context manager.

    `may_reconnect` is asked for every connection after the first: until it answers yes the connection is
    accepted but led nowhere, so that a test decides what happens while the client is away.
    """

    def __init__(
        self,
        upstream: str,
        rule: Rule = lambda _message: Verdict.PASS,
        may_reconnect: Callable[[], bool] = lambda: True,
    ) -> None:
        address = urlsplit(upstream)
        self._upstream = (address.hostname or "127.0.0.1", address.port or 80)
        self._rule = rule
        self._may_reconnect = may_reconnect
        self.messages: list[Message] = []
        """Everything that arrived, in order, of all connections."""
        self.connections = 0
        """How many connections were made."""
        self.cuts = 0
        """How many of them the rule cut."""
        self.url = ""
        """What a client connects to instead of `upstream`."""
        self._failures: list[BaseException] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="proxy")

    def __enter__(self) -> Proxy:
        self._thread.start()
        if not self._started.wait(START_DEADLINE):
            raise TimeoutError("the proxy did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_DEADLINE)
        if self._failures and error is None:
            raise self._failures[0]

    def sent(self, method: str, direction: Direction = "c2s") -> list[Message]:
        """The messages of that method, in order."""
        return [m for m in self.messages if m.direction == direction and m.method == method]

    def reply_to(self, request: Message) -> Json | None:
        """The reply the server gave, passed on or not; None if it gave none."""
        return next((message.body for message in self.messages if message.answers(request)), None)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            tasks.add(asyncio.create_task(self._serve(self.connections, reader, writer)))

        listener = await asyncio.start_server(accept, "127.0.0.1", 0)
        async with listener:
            self.url = f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            self._started.set()
            await self._stop.wait()
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        self._failures += [end for end in ends if isinstance(end, Exception)]

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to the end of either side."""
        writers = [writer]
        try:
            if number > 1:
                await self._admission()
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
            writers.append(up_writer)
            pumps = {
                asyncio.create_task(self._pump(number, "c2s", reader, up_writer)),
                asyncio.create_task(self._pump(number, "s2c", up_reader, writer)),
            }
            try:
                done, others = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                if others and not any(pump.result() for pump in done):
                    # One side is through; the other hears of it from us and may still have things to say.
                    done, _ = await asyncio.wait(others)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
            if any(pump.result() for pump in done):
                self.cuts += 1
                for each in writers:
                    _reset_on_close(each)
        finally:
            for each in writers:
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _admission(self) -> None:
        async with asyncio.timeout(ADMISSION_DEADLINE):
            while not self._may_reconnect():
                await asyncio.sleep(ADMISSION_INTERVAL)

    async def _pump(
        self, number: int, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Copy until the sender ends, and tell the receiver; whether it was a rule that ended it."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if direction == "s2c" and b" 101 " not in head.split(b"\r\n")[0]:
                raise AssertionError(f"the server refused the WebSocket: {head!r}")
            writer.write(head)
            while True:
                raw, text = await _read_message(reader)
                verdict = Verdict.PASS
                if text is not None:
                    message = Message(number, direction, json.loads(text))
                    self.messages.append(message)
                    verdict = self._rule(message)
                if verdict is not Verdict.CUT_BEFORE:
                    writer.write(raw)
                    await writer.drain()
                if verdict is not Verdict.PASS:
                    return True
        except (asyncio.IncompleteReadError, ConnectionError):
            with contextlib.suppress(OSError):
                writer.write_eof()
            return False


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Make closing the socket a reset, and drop what it has not sent."""
    endpoint: socket.socket = writer.get_extra_info("socket")
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes | None]:
    """The next message as it came, and its text; a control frame comes by itself, without text."""
    raw, text = b"", b""
    while True:
        frame, final, opcode, payload = await _read_frame(reader)
        if opcode >= OPCODE_CLOSE:
            # A control frame may come between the pieces of a message. It goes first, which it may.
            if not raw:
                return frame, None
            raw = frame + raw
            continue
        raw, text = raw + frame, text + payload
        if final:
            return raw, text


async def _read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bool, int, bytes]:
    """One frame (RFC 6455, section 5.2) as it came: its bytes, FIN bit, opcode and unmasked payload."""
    head = await reader.readexactly(2)
    final, opcode = bool(head[0] & 0x80), head[0] & 0x0F
    masked, length = bool(head[1] & 0x80), head[1] & 0x7F
    if length >= 126:
        extended = await reader.readexactly(2 if length == 126 else 8)
        head, length = head + extended, int.from_bytes(extended)
    mask = await reader.readexactly(4) if masked else b""
    body = await reader.readexactly(length)
    return head + mask + body, final, opcode, _unmask(body, mask)


def _unmask(body: bytes, mask: bytes) -> bytes:
    """Undo the masking of a client's frame; as one large number, because a loop over bytes is slow."""
    if not mask or not body:
        return body
    key = (mask * (len(body) // 4 + 1))[: len(body)]
    return (int.from_bytes(body) ^ int.from_bytes(key)).to_bytes(len(body))
