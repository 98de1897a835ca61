"""The harness's end: from `relay+https://REGISTRY/ENVIRONMENT` to a Channel like any other.

Every attempt asks the registry for a new bundle and opens a new WebSocket with one stream on it. With an
environment of ours a lost WebSocket is replaced by another under the same stream, and nobody above notices;
with one of the reference the channel ends, and the session is resumed on the next.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4

from .. import log
from ..transport.channel import Channel, Receiver
from ..transport.websocket import ConnectFailed
from .channel import RelayChannel
from .credentials import Bearer, CredentialError
from .frame import NOTHING_RECEIVED, WIDE, BadFrame, Data, Frame, Handshake, Reset, Resume, decode, encode
from .keys import Identity, KeyFileError, load_or_create
from .link import UpgradeFailed, WebSocketLink, open_link
from .noise import HandshakeFailed, Initiator, prologue
from .reasons import explain, is_passing
from .registry import BadRegistryUrl, Bundle, Registry, RegistryError, retry_delay
from .stream import PROTOCOL_ERROR, Stream

__all__ = ["SCHEMES", "Harness", "dialer"]

SCHEMES: Final = ("relay+https", "relay+http")
"""Of the URLs this file understands."""

FIRST_HANDSHAKE_SECONDS: Final = 5.0
HANDSHAKE_SECONDS: Final = 10.0
"""For the environment's answer. A frame may get lost on the way, so there is a second try, which has as long
as the reference's only one."""

REQUEST_SECONDS: Final = 6.0
RETRIES: Final = 4
RETRY_SECONDS: Final = 14.0
"""For a first bundle: one request, how many more, and all of them together; as the reference does it."""

RECOVERY_REQUEST_SECONDS: Final = 10.0
RECOVERY_SECONDS: Final = 25.0
"""For another connection under the same stream."""


@cache
def process_identity() -> Identity:
    """Who we are while this process lives; made on first use and never stored."""
    return Identity.generate()


def dialer(
    url: str, *, token: str | None = None, ssl: Any = None
) -> Callable[[Receiver], Awaitable[Channel]]:
    """What opens a channel to `relay+https://HOST[:PORT][/PATH]/ENVIRONMENT`, each time anew.

    `?acks=off` does without acknowledgements; `?executor=FINGERPRINT` takes no other key of the environment,
    whatever the registry says. EXEC_SERVER_RELAY_KEY_FILE names a key of ours that stays the same.
    """
    base, environment_id, acks, pin = parse_url(url)
    if token is None:
        raise ConnectFailed(
            f"`{url}` needs a token, because the registry asks who you are: name a file with an API key in it"
            " (--token-file or EXEC_SERVER_TOKEN_FILE; in Python `token=`)"
        )
    try:
        registry = Registry(base, environment_id, Bearer(token), ssl=ssl)
    except (BadRegistryUrl, CredentialError) as error:
        raise ConnectFailed(str(error)) from None
    wss = ssl if base.startswith("https:") else None
    key_file = os.environ.get("EXEC_SERVER_RELAY_KEY_FILE")
    try:
        identity = process_identity() if not key_file else load_or_create(key_file)
    except KeyFileError as error:
        raise ConnectFailed(str(error)) from None
    return Harness(registry, identity, acks=acks, ssl=wss, pin=pin).connect


def parse_url(url: str) -> tuple[str, str, bool, str | None]:
    """The registry's base URL, the environment's id, whether to offer acknowledgements, and the pinned key.

    Several nodes of one service may be named, separated by commas.
    """
    parts = urlsplit(url)
    path, _, last = parts.path.rpartition("/")
    query = parse_qs(parts.query, keep_blank_values=True)
    acks = query.pop("acks", ["auto"])
    pin = query.pop("executor", [""])[-1]
    known = parts.scheme in SCHEMES and parts.hostname and last and not query
    if not known or acks not in (["auto"], ["off"]) or (pin and not re.fullmatch("[0-9a-f]{64}", pin)):
        raise ConnectFailed(
            f"`{url}` is not the address of an environment behind a relay;"
            " expected relay+https://REGISTRY/ENVIRONMENT, perhaps with ?acks=off or ?executor=FINGERPRINT"
        )
    scheme = parts.scheme.removeprefix("relay+")
    base = ",".join(f"{scheme}://{host}{path}" for host in parts.netloc.split(","))
    return base, unquote(last), acks == ["auto"], pin or None


class Harness:
    """One environment, as seen by one identity."""

    def __init__(
        self,
        registry: Registry,
        identity: Identity,
        *,
        acks: bool = True,
        ssl: Any = None,
        pin: str | None = None,
    ) -> None:
        """`pin` is the fingerprint of the only key that the environment may have."""
        self._pin = pin
        self.registry = registry
        self.identity = identity
        self.acks = acks
        self.ssl = ssl

    async def connect(self, receiver: Receiver) -> Channel:
        """A new stream; ConnectFailed when there is none to be had."""
        try:
            channel = await self._open()
        except (RegistryError, UpgradeFailed) as error:
            unwanted = isinstance(error, RegistryError) and error.status in (401, 403)
            raise (Unwanted if unwanted else ConnectFailed)(str(error), error.status) from None
        finally:
            await self.registry.close()
        channel.attach(receiver)
        return channel

    async def _open(self) -> RelayChannel:
        """A stream that is refused for something that passes is tried again, while there is time; one that
        nobody answers, once."""
        loop = asyncio.get_running_loop()
        end = loop.time() + RETRY_SECONDS
        attempt = 0
        patience = FIRST_HANDSHAKE_SECONDS
        while True:
            try:
                return await _HarnessStream(self).open(patience)
            except NotAnswered as error:
                if patience == HANDSHAKE_SECONDS:
                    raise
                log.info("trying another stream", reason=str(error))
                patience = HANDSHAKE_SECONDS
            except StreamRefused as error:
                left = end - loop.time()
                if not error.passing or left <= 0:
                    raise
                log.info("the environment does not take us yet", reason=str(error))
                await asyncio.sleep(min(retry_delay(attempt), left))
                attempt += 1

    async def bundle(self) -> Bundle:
        """A bundle, with the patience of a first attempt."""
        loop = asyncio.get_running_loop()
        end = loop.time() + RETRY_SECONDS
        attempt = 0
        while True:
            try:
                return await self.ask(min(REQUEST_SECONDS, end - loop.time()))
            except RegistryError as error:
                delay = max(retry_delay(attempt), error.retry_after)
                if not error.transient or attempt >= RETRIES or loop.time() + delay >= end:
                    raise
                log.info("the environment cannot be reached yet", reason=str(error))
                await asyncio.sleep(delay)
                attempt += 1

    async def ask(self, timeout: float) -> Bundle:
        """One bundle, if there is one at once."""
        bundle = await self.registry.connect(self.identity.public, timeout)
        if self._pin is not None and not hmac.compare_digest(self._pin, bundle.executor_key.fingerprint):
            raise RegistryError(
                "the registry names another key for this environment than the one that is pinned:"
                f" {bundle.executor_key.fingerprint}. Either the key was rotated, or somebody is in between.",
                403,
            )
        return bundle


class Unwanted(ConnectFailed):
    """The registry does not know us, or not as one who may do this: it is no use to ask again."""

    retryable = False


class StreamRefused(UpgradeFailed):
    """The stream was reset before it was one."""

    def __init__(self, reason: str) -> None:
        super().__init__(explain(reason))
        self.passing = is_passing(reason)


class NotAnswered(UpgradeFailed):
    """Nothing came back from the environment."""


class _HarnessStream:
    """One stream and the connection it is on."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._loop = asyncio.get_running_loop()
        self._id = str(uuid4())
        self._registration_id = ""
        self._link: WebSocketLink | None = None
        self._initiator: Initiator | None = None
        self._opened: asyncio.Future[RelayChannel] = self._loop.create_future()
        self._channel: RelayChannel | None = None
        self._recovery: asyncio.Task[None] | None = None

    async def open(self, seconds: float) -> RelayChannel:
        """The handshake, within its time."""
        bundle, link = await self._reach()
        self._link = link
        self._registration_id = bundle.registration_id
        where = prologue(self._harness.registry.environment_id, bundle.registration_id, self._id)
        try:
            self._initiator = Initiator(self._harness.identity, bundle.executor_key, where)
            message = self._initiator.write(bundle.authorization.encode())
            ack = NOTHING_RECEIVED if self._harness.acks else 0
            link.send(encode(Frame(self._id, Resume(), ack)))
            link.send(encode(Frame(self._id, Handshake(message), ack, WIDE if ack else 0)))
            async with asyncio.timeout(seconds):
                return await self._opened
        except TimeoutError:
            self._abandon("closed")
            raise NotAnswered(f"the environment did not answer the handshake within {seconds:g} s") from None
        except HandshakeFailed as error:
            self._abandon(PROTOCOL_ERROR)
            raise UpgradeFailed(f"the handshake with the environment failed: {error}") from None
        except BaseException:
            self._abandon("closed")
            raise

    async def _reach(self) -> tuple[Bundle, WebSocketLink]:
        """A bundle and a connection; a connection that needs another bundle gets one more."""
        bundle = await self._harness.bundle()
        try:
            return bundle, await open_link(bundle.url, self, ssl=self._harness.ssl)
        except UpgradeFailed as error:
            if error.status != 401:
                raise
        bundle = await self._harness.bundle()
        return bundle, await open_link(bundle.url, self, ssl=self._harness.ssl)

    def _abandon(self, reason: str) -> None:
        if self._link is not None:
            self._link.send(encode(Frame(self._id, Reset(reason))))
            self._link.close()
            self._link = None

    # From the connection -------------------------------------------------------------------------

    def frame_arrived(self, message: bytes | memoryview) -> None:
        try:
            frame = decode(message)
        except BadFrame as error:
            if error.stream_id in ("", self._id):
                self._violated(f"the rendezvous sent a bad frame: {error}")
            return
        if frame.stream_id != self._id:
            return
        body, channel = frame.body, self._channel
        if channel is None:
            if type(body) is Handshake:
                self._handshake(frame, body.payload)
            elif type(body) is Reset:
                self._fail_opening(StreamRefused(body.reason))
            elif type(body) is Data:
                self._fail_opening(UpgradeFailed("the environment sent data before its handshake"))
        elif type(body) is Reset:
            channel.reset_received()
        elif type(body) is Handshake:
            self._violated("a second handshake")
        else:
            channel.frame_received(frame)

    def _handshake(self, frame: Frame, payload: bytes) -> None:
        initiator, link = self._initiator, self._link
        if initiator is None or link is None or self._opened.done():
            return
        try:
            sealer, opener = initiator.read(payload)
        except HandshakeFailed as error:
            self._fail_opening(error)
            return
        acked = self._harness.acks and frame.acknowledges
        stream = Stream(
            self._id, sealer, opener, acked=acked, now=self._loop.time(), wide=acked and frame.wide
        )
        self._channel = RelayChannel(
            self._loop,
            stream,
            link,
            peer=f"environment {self._harness.registry.environment_id}",
            on_end=self._ended,
            on_silence=lambda: self._violated("the environment is not heard from any more"),
            # An acked environment is made to wait by the stream itself; any other, by not reading.
            on_reading=None if acked else self._read,
        )
        self._opened.set_result(self._channel)

    def _fail_opening(self, error: Exception) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # whoever gave up waiting must not be warned about it

    def _read(self, reading: bool) -> None:
        if self._link is not None:
            (self._link.resume_reading if reading else self._link.pause_reading)()

    def text_arrived(self) -> None:
        self._violated("the rendezvous sent text")

    def link_drained(self) -> None:
        if self._channel is not None:
            self._channel.link_drained()

    def _violated(self, reason: str) -> None:
        if self._link is not None:
            self._link.fail(reason)

    def link_closed(self, reason: str) -> None:
        self._link = None
        channel = self._channel
        if channel is None:
            self._fail_opening(UpgradeFailed(reason))
            return
        channel.link_lost(reason)
        if channel.stream.acked and self._recovery is None:
            self._recovery = self._loop.create_task(self._recover(channel, reason))

    # Going on ------------------------------------------------------------------------------------

    async def _recover(self, channel: RelayChannel, reason: str) -> None:
        """Another connection for the same stream; when there is none in time, the channel ends."""
        log.info("the connection to the rendezvous is lost, looking for another", reason=reason)
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                link = await self._find_link()
        except (RegistryError, UpgradeFailed, TimeoutError) as error:
            self._recovery = None
            channel.give_up(str(error) or reason)
        else:
            self._recovery = None
            self._link = link
            channel.link_found(link)
        finally:
            await self._harness.registry.close()

    async def _find_link(self) -> WebSocketLink:
        attempt = 0
        while True:
            try:
                bundle = await self._harness.ask(RECOVERY_REQUEST_SECONDS)
                if bundle.registration_id != self._registration_id:
                    raise RegistryError(
                        "the environment has registered again and knows no earlier stream", 409
                    )
                return await open_link(bundle.url, self, ssl=self._harness.ssl)
            except RegistryError as error:
                if not error.transient:
                    raise
            except UpgradeFailed:
                pass  # the next bundle has another address
            await asyncio.sleep(retry_delay(attempt))
            attempt += 1

    def _ended(self) -> None:
        """The channel is over, whoever ended it."""
        if self._recovery is not None:
            self._recovery.cancel()
        link, self._link = self._link, None
        if link is not None:
            link.close()
