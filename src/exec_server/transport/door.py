"""The front door of a listening socket: reads one HTTP request head and decides who gets the connection.

Small on purpose. A WebSocket upgrade goes on to websocket.py with every byte received so far; anything
else is answered here, from a short list of answers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, NamedTuple

from ..limits import Limits
from .websocket import WebSocketChannel, upgrade

__all__ = ["Answer", "Door", "Head", "Route"]

MAX_HEAD_BYTES: Final = 16 * 1024
"""Longest request head. Browsers and proxies stop at half of this."""

TLS_HANDSHAKE: Final = 0x16
"""What the first byte of a TLS connection is, and of no HTTP request."""

_UPGRADE_HEAD: Final = (
    b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: %b\r\n\r\n"
)

_AUTHORITY = re.compile(r"https?://[^/?#]+", re.IGNORECASE)
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class Head(NamedTuple):
    """The start of a request. Header names are lower case; values are as sent, in order."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    old: bool = False
    """HTTP/1.0, which knows neither upgrades nor connections that stay open."""

    def get(self, name: str) -> str | None:
        """The first header of that name."""
        return next((value for key, value in self.headers if key == name), None)

    def has_word(self, name: str, word: str) -> bool:
        """Whether a comma-separated header holds a word, in any case."""
        return any(
            word == part.strip().lower()
            for key, value in self.headers
            if key == name
            for part in value.split(",")
        )


class Answer(NamedTuple):
    """A whole HTTP response."""

    status: int
    body: str = ""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


Route = Callable[[Head], Answer | None]
"""Decides about a request: an answer, or None to let it become a WebSocket."""

Accept = Callable[[WebSocketChannel], None]
"""Takes a channel that is about to open."""


class Door(asyncio.Protocol):
    """One accepted connection, until it becomes a WebSocket or ends."""

    def __init__(self, route: Route, accept: Accept, limits: Limits, peer_name: str | None = None) -> None:
        self._route = route
        self._accept = accept
        self._limits = limits
        self._peer_name = peer_name
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a listening socket gives transports
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received[0] == TLS_HANDSHAKE:
            # Said in plain, so that whoever speaks TLS notices at once.
            self._reply(Answer(400, "there is no TLS on this port: use ws:// or http://"), None, keep=False)
            return
        while self._transport is not None and self._received:
            end = self._received.find(b"\r\n\r\n")
            if end > MAX_HEAD_BYTES or (end < 0 and len(self._received) > MAX_HEAD_BYTES):
                self._reply(Answer(431, "request head is too long"), None, keep=False)
                return
            if end < 0:
                return
            self._handle(end + 4)

    def _handle(self, end: int) -> None:
        head = _parse_head(bytes(self._received[: end - 4]))
        if head is None:
            self._reply(Answer(400, "malformed HTTP request"), None, keep=False)
            return
        answer = self._route(head)
        if answer is None:
            self._upgrade(head, end)
            return
        has_body = head.get("transfer-encoding") is not None or head.get("content-length") not in (None, "0")
        del self._received[:end]
        # A body nobody reads would be taken for the next request.
        keep = not has_body and not head.old and not head.has_word("connection", "close")
        self._reply(answer, head, keep=keep)

    def _upgrade(self, head: Head, end: int) -> None:
        transport, self._transport = self._transport, None
        self._stop_timer()
        if transport is None:
            return
        channel = WebSocketChannel(self._peer(transport), self._limits, server_side=True)
        self._accept(channel)
        # The route has read the head by the rules; picows is stricter and need not see how it was spelled.
        request = _UPGRADE_HEAD % (head.get("sec-websocket-key") or "").encode("latin-1")
        upgrade(transport, channel, request + self._received[end:])
        self._received.clear()

    def _peer(self, transport: asyncio.Transport) -> str:
        if self._peer_name is not None:
            return self._peer_name
        name = transport.get_extra_info("peername")
        if not isinstance(name, tuple):
            return "unknown"
        host, port = name[0], name[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _reply(self, answer: Answer, head: Head | None, *, keep: bool) -> None:
        transport = self._transport
        if transport is None:
            return
        body = answer.body.encode()
        lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
        if body:
            lines.append(f"content-type: {answer.content_type}")
        lines.extend(f"{name}: {value}" for name, value in answer.headers)
        lines.append(f"content-length: {len(body)}")
        if not keep:
            lines.append("connection: close")
        lines.append(f"date: {formatdate(usegmt=True)}")
        if head is not None and head.method == "HEAD":
            body = b""
        transport.write("\r\n".join((*lines, "\r\n")).encode() + body)
        if keep:
            self._restart_timer()
        else:
            self._transport = None
            transport.close()

    def _restart_timer(self) -> None:
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limits.handshake_timeout, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _parse_head(raw: bytes) -> Head | None:
    request, *lines = raw.split(b"\r\n")
    words = request.split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0") or not _TOKEN.fullmatch(words[0]):
        return None
    headers: list[tuple[str, str]] = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or b"\0" in value or b"\n" in value:
            return None
        headers.append((name.decode().lower(), value.strip(b" \t").decode("latin-1")))
    target = words[1].decode("latin-1")
    authority = _AUTHORITY.match(target)  # proxies are sent the whole address, and a server must take it, too
    if authority is not None:
        target = target[authority.end() :]
    path = target.partition("?")[0]
    if authority is not None and not path:
        path = "/"
    return Head(words[0].decode(), path, headers, old=words[2] == b"HTTP/1.0")
