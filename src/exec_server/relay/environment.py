"""The environment's end: registers, keeps one connection to the rendezvous, and serves every stream on it.

register -> connect -> serve until the connection ends -> wait -> connect -> ...
               '- refused with 4xx: the registration is no longer current -> register
"""

from __future__ import annotations

import asyncio
import random
import secrets
from asyncio import sleep
from collections.abc import Callable
from typing import Any, Final

from .. import log
from ..loop import Pending
from .credentials import Expired
from .keys import Identity, KeyFileError, PublicKey
from .link import UpgradeFailed, WebSocketLink, open_link
from .registry import Registration, Registry, RegistryError, retry_delay
from .retiring import REPLACED_KEY, Retiring
from .streams import Accept, NotTrusted, Streams

__all__ = ["RegistrationFailed", "RemoteEnvironment"]

FIRST_DELAY: Final = 1.0
MAX_DELAY: Final = 30.0
"""Seconds between connection attempts, doubling; each is shortened by up to half, so that not all come back
at once."""

STABLE_SECONDS: Final = 120.0
"""A connection that lasted so long was a good one: the next wait is a short one again."""

KEPT_DELAY: Final = 5.0
"""The longest wait while there are streams that go on with the next connection: they are kept for 30 s."""

REPLACED: Final = "replaced by a newer connection"
"""How a rendezvous of ours says that somebody else has connected with our registration, and so our key."""

REPLACED_SECONDS: Final = 60.0
"""Replaced twice within this time: two of us throw each other out, and one has to go."""


class RegistrationFailed(Exception):
    """The registry does not take us; the program ends."""


class RemoteEnvironment:
    """This machine, offered through a rendezvous."""

    def __init__(
        self,
        registry: Registry,
        load_identity: Callable[[], Identity],
        accept: Accept,
        *,
        acks: bool = True,
        ssl: Any = None,
        trusted: Callable[[], frozenset[str]] | None = None,
    ) -> None:
        """`load_identity` is called for every registration, so that a rotated key is taken then. `trusted`
        gives the fingerprints of the only harnesses that get in, whatever the registry says of others."""
        self._trusted = trusted
        self._registry = registry
        self._load_identity = load_identity
        self._accept = accept
        self._acks = acks
        self._ssl = ssl
        self._streams: Streams | None = None
        self._registered_as: tuple[str, PublicKey] | None = None
        self._link: WebSocketLink | None = None
        self._lost: asyncio.Event = asyncio.Event()
        self._validating: set[asyncio.Task[bool]] = set()
        self._asking_again: asyncio.Task[None] | None = None
        self._failure: RegistrationFailed | None = None
        self._replaced_at: float | None = None
        self._current: Registration | None = None
        self._next: tuple[Registration, Identity] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._retiring: set[Retiring] = set()
        self.on_connected: Callable[[], object] = lambda: None
        """Called whenever the environment can be reached."""

    async def run(self) -> None:
        """Serve until cancelled; RegistrationFailed when the registry does not want us."""
        try:
            await self._run()
        finally:
            if self._streams is not None:
                self._streams.close()
            if self._link is not None:
                self._link.close()
            for retiring in self._retiring:
                retiring.close()
            for task in (*self._validating, self._asking_again, self._renewing):
                if task is not None:
                    task.cancel()
            await self._registry.close()

    async def _run(self) -> None:
        registration = await self._register()
        delay, refused = FIRST_DELAY, False
        while True:
            lasted = 0.0
            if self._next is not None:
                registration, refused, delay = self._change(*self._next), False, FIRST_DELAY
            try:
                link = await open_link(
                    registration.url,
                    self,
                    headers={"X-Request-ID": f"req_{secrets.token_hex(16)}"},
                    ssl=self._ssl,
                )
            except UpgradeFailed as error:
                if error.status is not None and 400 <= error.status < 500:
                    log.warning("the registration is no longer current, registering again", reason=str(error))
                    registration = await self._register()
                    if not refused:
                        refused = True
                        continue
                else:
                    log.warning("cannot connect to the rendezvous, trying again", reason=str(error))
                    if error.status is None and self._registry.nodes > 1:
                        # The node is gone; another one knows us, too, and has another address.
                        before, registration = registration, await self._register()
                        if registration.url != before.url and not refused:
                            refused = True
                            continue
            else:
                refused = False
                lasted = await self._serve(link)
                if self._failure is not None:
                    raise self._failure
                if self._next is not None:
                    continue
            if lasted >= STABLE_SECONDS:
                delay = FIRST_DELAY
            if self._streams is not None and len(self._streams):
                delay = min(delay, KEPT_DELAY)
            await sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311  # spreads load, hides nothing
            delay = min(2 * delay, MAX_DELAY)

    async def _serve(self, link: WebSocketLink) -> float:
        """Until the connection ends; how long it lasted."""
        self._link = link
        self._lost.clear()
        if self._streams is not None:
            self._streams.link_found(link)
        log.info("connected to the rendezvous", environment=self._registry.environment_id)
        self.on_connected()
        if self._next is None:
            await self._lost.wait()
        return asyncio.get_running_loop().time() - link.opened_at

    async def _register(self) -> Registration:
        """A registration, and streams for it. Those of an earlier one go on only if it is the same one."""
        attempt = 0
        while True:
            delay = retry_delay(attempt)
            identity = self._load_identity()
            try:
                registration = await self._registry.register(identity.public)
                break
            except Expired as error:
                log.warning("cannot register yet", reason=str(error))
            except RegistryError as error:
                if not error.transient:
                    raise RegistrationFailed(str(error)) from None
                # Whoever has just started it with a wrong address should see that without looking for it.
                say = log.error if self._registered_as is None and attempt == 0 else log.warning
                say("cannot register yet, trying again", reason=str(error))
                delay = max(delay, error.retry_after)
            await sleep(delay)
            attempt += 1
        if (registration.id, identity.public) != self._registered_as:
            if self._streams is not None:
                self._streams.give_up(REPLACED_KEY)
            self._take(registration, identity)
        self._current = registration
        return registration

    def _take(self, registration: Registration, identity: Identity) -> None:
        """Serve under a registration, beginning with no stream."""
        self._registered_as = registration.id, identity.public
        self._streams = Streams(
            asyncio.get_running_loop(),
            identity,
            self._registry.environment_id,
            registration.id,
            accept=self._accept,
            validate=lambda *question: self._validate(registration.id, *question),
            acks=self._acks,
        )
        log.info("registered", environment=self._registry.environment_id, registration=registration.id)

    # Another key ---------------------------------------------------------------------------------

    def renew(self, *, reconnect: bool = False, undo: Callable[[], object] = lambda: None) -> None:
        """Register again, with the key that is in the file now, while streams go on with the one they began
        with. `reconnect` even if it is the same key, because another credential is shown now. If the registry
        does not want it, `undo` is called and all stays as it was."""
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.ensure_future(self._renew(reconnect, undo))

    async def _renew(self, reconnect: bool, undo: Callable[[], object]) -> None:
        if self._registered_as is None:
            return  # it will be registered with what there is now
        try:
            identity = self._load_identity()
            if identity.public == self._registered_as[1] and not reconnect:
                log.info("SIGHUP: the keys are the same as before")
                return
            registration = await self._registry.register(identity.public, self._current)
        except (KeyFileError, RegistryError, Expired) as error:
            undo()
            log.error("this environment goes on as it was", reason=str(error))
            return
        self._next = registration, identity
        self._lost.set()

    def _change(self, registration: Registration, identity: Identity) -> Registration:
        """Go over to what was registered anew."""
        self._next, self._current = None, registration
        link, self._link = self._link, None
        streams = self._streams
        if (registration.id, identity.public) == self._registered_as:
            if streams is not None and link is not None:
                streams.link_lost("another credential is used")
        else:
            self._take(registration, identity)
            if streams is not None and link is not None and len(streams):
                self._retiring.add(Retiring(streams, link, self._retiring.discard))
                return registration
            if streams is not None:
                streams.give_up(REPLACED_KEY)
        if link is not None:
            link.close()
        return registration

    def _validate(
        self, registration_id: str, stream_id: str, key: PublicKey, authorization: str
    ) -> Pending[bool]:
        """Ask the registry in the background, once; but not about those we do not trust ourselves."""
        if self._trusted is not None and key.fingerprint not in self._trusted():
            log.warning("a harness that is not trusted was turned away", fingerprint=key.fingerprint)
            untrusted: Pending[bool] = Pending()
            untrusted.fail(NotTrusted("its key is not among the trusted ones"))
            return untrusted
        task = asyncio.ensure_future(self._registry.validate(registration_id, stream_id, key, authorization))
        self._validating.add(task)
        answer: Pending[bool] = Pending(task.cancel)

        def done(task: asyncio.Task[bool]) -> None:
            self._validating.discard(task)
            if task.cancelled():
                answer.resolve(False)
            elif (error := task.exception()) is not None:
                answer.fail(error)
                if isinstance(error, RegistryError) and error.status in (401, 403):
                    self._ask_again()
            else:
                answer.resolve(task.result())

        task.add_done_callback(done)
        return answer

    def _ask_again(self) -> None:
        """The registry does not know us any more, it seems. If so, nobody gets in: no use in going on."""
        if self._asking_again is None or self._asking_again.done():
            self._asking_again = asyncio.ensure_future(self._registered_still())

    async def _registered_still(self) -> None:
        if self._registered_as is None:
            return
        try:
            await self._registry.register(self._registered_as[1])
        except RegistryError as error:
            if error.status in (401, 403):
                self._failure = RegistrationFailed(str(error))
                self._lost.set()
        except Expired:
            pass  # a new credential is expected, and nobody gets in until it is there

    # From the connection -------------------------------------------------------------------------

    def frame_arrived(self, message: bytes | memoryview) -> None:
        if self._streams is not None:
            self._streams.frame_arrived(message)

    def text_arrived(self) -> None:
        """Nothing of ours; the reference does not mind, either."""

    def link_drained(self) -> None:
        if self._streams is not None:
            self._streams.link_drained()

    def link_closed(self, reason: str) -> None:
        log.warning("the connection to the rendezvous is lost", reason=reason)
        self._link = None
        if reason.endswith(REPLACED):
            self._replaced()
        if self._streams is not None:
            self._streams.link_lost(reason)
        self._lost.set()

    def _replaced(self) -> None:
        """Somebody else is this environment with our key. Once it may be a restart that we have missed."""
        log.error("another process has connected as this environment with the same key")
        now = asyncio.get_running_loop().time()
        before, self._replaced_at = self._replaced_at, now
        if before is not None and now - before < REPLACED_SECONDS:
            self._failure = RegistrationFailed(
                f"another process is the environment {self._registry.environment_id} with the same key file,"
                " and has taken this one's place twice; give each machine an --environment-id and a key of"
                " its own"
            )
