"""Forward mode: every stream gets a WebSocket of its own to another server, and messages pass as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from .. import log
from ..limits import MAX_FRAME_BYTES, Limits
from ..transport import websocket
from ..transport.channel import Channel, Receiver

__all__ = ["BadDestination", "forward_to"]

CONNECT_SECONDS: Final = 10.0
FRAGMENT_BYTES: Final = MAX_FRAME_BYTES // 2
"""Larger messages go as text, which the transport cuts into several frames."""

EARLY_BYTES: Final = 1024 * 1024
"""What a stream may say before its destination has answered."""


class BadDestination(ValueError):
    """Not a URL that can be forwarded to."""


def forward_to(url: str) -> Callable[[Channel], Receiver]:
    """What serves a stream by passing it on to `ws://` or `wss://`."""
    parts = urlsplit(url)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise BadDestination(f"cannot forward to `{url}`; expected ws://HOST:PORT or wss://HOST:PORT")
    return lambda channel: _Forwarded(channel, url)


class _Forwarded:
    """The receiver of a stream: what arrives goes to the destination."""

    def __init__(self, channel: Channel, url: str) -> None:
        self._channel = channel
        self._url = url
        self._destination: Channel | None = None
        self._early: list[bytes] = []
        self._early_size = 0
        self._ended = False
        self._task = asyncio.ensure_future(self._open())

    async def _open(self) -> None:
        try:
            destination = await websocket.connect(
                self._url, _Backward(self, self._channel), Limits(), headers={}, timeout=CONNECT_SECONDS
            )
        except OSError as error:
            log.warning("the destination cannot be reached", url=self._url, reason=str(error))
            self._channel.abort()
            return
        if self._ended:
            destination.abort()
            return
        self._destination = destination
        early, self._early = self._early, []
        if self._early_size > EARLY_BYTES:
            self._channel.resume_reading()
        for message in early:
            self.message_received(message)

    def message_received(self, message: bytes) -> None:
        if self._destination is None:
            self._early.append(message)
            self._early_size += len(message)
            if self._early_size > EARLY_BYTES:
                self._channel.pause_reading()
        elif len(message) <= FRAGMENT_BYTES:
            self._destination.send_parts(b"", message, b"", binary=True)
        else:
            self._destination.send(message)

    binary_received = message_received

    def writing_paused(self) -> None:
        if self._destination is not None:
            self._destination.pause_reading()

    def writing_resumed(self) -> None:
        if self._destination is not None:
            self._destination.resume_reading()

    def channel_closed(self, reason: str) -> None:
        del reason
        self._ended = True
        if self._destination is not None:
            self._destination.abort()


class _Backward:
    """The receiver of the destination: what arrives goes into the stream."""

    def __init__(self, forward: _Forwarded, channel: Channel) -> None:
        self._forward = forward
        self._channel = channel

    def message_received(self, message: bytes) -> None:
        if message:
            self._channel.send(message)

    binary_received = message_received

    def writing_paused(self) -> None:
        self._channel.pause_reading()

    def writing_resumed(self) -> None:
        self._channel.resume_reading()

    def channel_closed(self, reason: str) -> None:
        """What it said before is still delivered."""
        del reason
        self._channel.close()
