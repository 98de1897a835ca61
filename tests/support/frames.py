"""WebSocket frames by hand, for what a library would never send, and plain HTTP on the same port."""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from .wait import PATIENCE

__all__ = [
    "BINARY",
    "CLOSE",
    "CONTINUATION",
    "PING",
    "PONG",
    "TEXT",
    "Frame",
    "RawSocket",
    "Response",
    "frame",
]

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10

UPGRADE = {
    "Host": "localhost",
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


class Frame(NamedTuple):
    opcode: int
    payload: bytes
    fin: bool = True


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    fin: bool = True,
    masked: bool = True,
    rsv: int = 0,
    length: int | None = None,
) -> bytes:
    """One frame of a client; `length` may lie."""
    size = len(payload) if length is None else length
    head = bytearray([fin << 7 | rsv << 4 | opcode])
    mask_bit = masked << 7
    if size < 126:
        head.append(mask_bit | size)
    elif size < 65536:
        head += struct.pack("!BH", mask_bit | 126, size)
    else:
        head += struct.pack("!BQ", mask_bit | 127, size)
    if not masked:
        return bytes(head) + payload
    mask = os.urandom(4) if len(payload) <= 4096 else bytes(4)  # zeroes are allowed, and fast
    return (
        bytes(head)
        + mask
        + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload[:4096]))
        + payload[4096:]
    )


class RawSocket:
    """A connection to the port of a server."""

    def __init__(self, url: str, context: ssl.SSLContext | None = None) -> None:
        if url.startswith("unix://"):
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.settimeout(PATIENCE)
            self.socket.connect(url.removeprefix("unix://"))
        else:
            parts = urlsplit(url)
            self.socket = socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE)
            if context is not None:
                self.socket = context.wrap_socket(self.socket, server_hostname=parts.hostname)
        self._received = bytearray()

    # HTTP ----------------------------------------------------------------------------------------

    def ask(self, method: str = "GET", path: str = "/", headers: dict[str, str] | None = None) -> Response:
        """One request and its answer."""
        lines = [
            f"{method} {path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        self.send("\r\n".join([*lines, "", ""]).encode("latin-1"))
        return self.response(head_only=method == "HEAD")

    def response(self, head_only: bool = False) -> Response:
        while b"\r\n\r\n" not in self._received:
            self._more()
        head, _, rest = bytes(self._received).partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        self._received = bytearray(rest)
        size = 0 if head_only else int(headers.get("content-length", "0"))
        while len(self._received) < size:
            self._more()
        body = bytes(self._received[:size]).decode()
        del self._received[:size]
        return Response(int(status.split()[1]), headers, body)

    def upgrade(self, **headers: str) -> Self:
        answer = self.ask(headers={**UPGRADE, **headers})
        assert answer.status == 101, answer
        return self

    # Frames --------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> Frame | None:
        """The next frame; None at the end."""
        try:
            while True:
                head = self._whole()
                if head is not None:
                    return head
                self._more()
        except (ConnectionError, EOFError):
            return None

    def message(self) -> Any:
        """The next data frame, as JSON."""
        while (got := self.receive()) is not None and got.opcode in (PING, PONG):
            pass
        assert got is not None, "the connection ended"
        assert got.opcode == TEXT
        assert got.fin
        return json.loads(got.payload)

    def ended(self) -> bool:
        """Whether the server ends the connection, and says nothing more, but perhaps why it closes."""
        while (got := self.receive()) is not None:
            assert got.opcode in (CLOSE, PING), got
        return True

    def _whole(self) -> Frame | None:
        data = self._received
        if len(data) < 2:
            return None
        assert not data[1] & 0x80, "a server does not mask"
        assert not data[0] & 0x70, "no extension was agreed on"
        size, start = data[1], 2
        if size == 126:
            start = 4
            size = int.from_bytes(data[2:4], "big")
        elif size == 127:
            start = 10
            size = int.from_bytes(data[2:10], "big")
        if len(data) < start or len(data) < start + size:
            return None
        got = Frame(data[0] & 15, bytes(data[start : start + size]), bool(data[0] & 0x80))
        del data[: start + size]
        return got

    def _more(self) -> None:
        data = self.socket.recv(1 << 20)
        if not data:
            raise EOFError
        self._received += data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
