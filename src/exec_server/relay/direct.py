"""The direct transport: no relay frames and no Noise, only a WebSocket that the served machine opens.

Registration and upgrade are signed for AWS; the service on the other side is the client of the protocol and
speaks first. What protects it is TLS, so other machines are only dialled with it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct

from .. import log
from ..limits import Limits
from ..transport import websocket
from ..transport.channel import Receiver
from .environment import FIRST_DELAY, MAX_DELAY, STABLE_SECONDS, RegistrationFailed
from .registry import MAX_ANSWER_BYTES, TIMEOUT, RegistryError, checked_base, is_loopback, read_answer
from .sigv4 import AwsCredentials, sign
from .streams import Accept

__all__ = ["DirectEnvironment", "DirectOptions"]

TRANSPORT: Final = "direct_jsonrpc_v1"


class DirectOptions(Struct, frozen=True, kw_only=True):
    """How to sign."""

    credentials: AwsCredentials
    region: str
    service: str = "execute-api"


class DirectEnvironment:
    """This machine, offered to a service that dials nobody."""

    def __init__(
        self, base_url: str, environment_id: str, options: DirectOptions, accept: Accept, *, ssl: Any = None
    ) -> None:
        self._base = checked_base(base_url)
        self._id = environment_id.strip()
        self._options = options
        self._accept = accept
        self._ssl = ssl
        self._channel: websocket.WebSocketChannel | None = None
        self.on_connected: Callable[[], object] = lambda: None

    async def run(self) -> None:
        """Serve until cancelled; RegistrationFailed when the service does not want us."""
        try:
            url = await self._register()
            delay = FIRST_DELAY
            while True:
                if await self._serve(url) >= STABLE_SECONDS:
                    delay = FIRST_DELAY
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311  # spreads load
                delay = min(2 * delay, MAX_DELAY)
        finally:
            if self._channel is not None:
                self._channel.abort()

    def _sign(self, method: str, url: str, headers: dict[str, str], body: bytes) -> dict[str, str]:
        options = self._options
        return sign(
            options.credentials, options.region, options.service, method, url, headers, body, time.time()
        )

    async def _register(self) -> str:
        import aiohttp
        from yarl import URL

        url = f"{self._base}/cloud/environment/{quote(self._id, safe='')}/direct/register"
        body = msgspec.json.encode({"transport": TRANSPORT})
        headers = self._sign("POST", url, {"content-type": "application/json"}, body)
        try:
            async with (
                asyncio.timeout(TIMEOUT),
                aiohttp.ClientSession(skip_auto_headers=("User-Agent",)) as session,
                session.post(
                    URL(url, encoded=True),
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    ssl=True if self._ssl is None else self._ssl,
                ) as response,
            ):
                content = await response.content.read(MAX_ANSWER_BYTES + 1)
                answer = read_answer("direct/register", response.status, content, True)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            text = str(error) or type(error).__name__
            raise RegistrationFailed(f"the service cannot be reached: {text}") from None
        except RegistryError as error:
            raise RegistrationFailed(str(error)) from None
        found = answer.get("url")
        if answer.get("environment_id") != self._id or answer.get("transport") != TRANSPORT:
            raise RegistrationFailed("the service's answer is for another environment or transport")
        if not isinstance(found, str) or not str(answer.get("registration_id") or "").strip():
            raise RegistrationFailed("the service's answer has no url or no registration_id")
        parts = urlsplit(found)
        if parts.scheme != "wss" and not (parts.scheme == "ws" and is_loopback(parts.hostname or "")):
            raise RegistrationFailed("the service names a WebSocket without TLS on another machine")
        return found

    async def _serve(self, url: str) -> float:
        """One connection, until it ends; how long it lasted."""
        early = _Early()
        loop = asyncio.get_running_loop()
        try:
            channel = await websocket.connect(
                url, early, Limits(), headers=self._sign_upgrade(url), timeout=TIMEOUT, ssl=self._ssl
            )
        except websocket.ConnectFailed as error:
            if error.status is not None and 400 <= error.status < 500:
                raise RegistrationFailed(f"the service refuses the connection: HTTP {error.status}") from None
            log.warning("cannot connect to the service, trying again", status=error.status)
            return 0.0
        opened = loop.time()
        self._channel = channel
        ended = _Ended(self._accept(channel))
        channel.attach(ended)
        early.hand_on(ended)
        self.on_connected()
        await ended.event.wait()
        self._channel = None
        return loop.time() - opened

    def _sign_upgrade(self, url: str) -> dict[str, str]:
        return self._sign("GET", url, {}, b"")


class _Early:
    """Takes what arrives before there is somebody to take it."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, tuple[Any, ...]]] = []

    def message_received(self, message: bytes) -> None:
        self._calls.append(("message_received", (message,)))

    def binary_received(self, message: bytes) -> None:
        self._calls.append(("binary_received", (message,)))

    def writing_paused(self) -> None:
        """Nothing was written yet."""

    def writing_resumed(self) -> None:
        """Nothing was written yet."""

    def channel_closed(self, reason: str) -> None:
        self._calls.append(("channel_closed", (reason,)))

    def hand_on(self, receiver: Receiver) -> None:
        for name, arguments in self._calls:
            getattr(receiver, name)(*arguments)


class _Ended:
    """A receiver that also says when it is over."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.event = asyncio.Event()
        self.message_received = receiver.message_received
        self.binary_received = receiver.binary_received
        self.writing_paused = receiver.writing_paused
        self.writing_resumed = receiver.writing_resumed

    def channel_closed(self, reason: str) -> None:
        if not self.event.is_set():
            self.event.set()
            self._receiver.channel_closed(reason)
