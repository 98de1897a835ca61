"""The registry's three calls and the tickets they hand out. Knows no HTTP and no sockets."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, Final
from urllib.parse import parse_qsl
from uuid import uuid4

from msgspec import Struct
from msgspec.structs import replace

from .. import log
from ..loop import Loop
from ..relay.keys import BadKey, PublicKey
from ..relay.registry import SECURITY_PROFILE
from .audit import Journal
from .health import Health
from .quota import make_room
from .revocation import Revocations
from .router import Router
from .store import (
    ALL_TENANTS,
    SUPERSEDED_KEPT,
    ApiKey,
    Registered,
    Role,
    Store,
    StoreUnavailable,
    digest_of,
)
from .throttle import Throttle
from .tickets import BadTicket, EnvironmentTicket, HarnessTicket, Signer, Untimely, key_digest

__all__ = ["Presence", "Refused", "Rendezvous", "Settings"]

ENVIRONMENT_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
MAX_AUTHORIZATION_CHARACTERS: Final = 4096

WRONG_TOKENS_PER_SECOND: Final = 1.0
WRONG_TOKENS_AT_ONCE: Final = 20.0
"""From one address. Beyond, tokens that were never right are not even looked up."""

RIGHT_TOKENS_KEPT: Final = 20_000
"""Digests of tokens that were right, which an address full of wrong ones does not hold up."""

SEEN_SECONDS: Final = 60.0
"""How exact it is when an environment was seen; it is written down."""

TROUBLE_SECONDS: Final = 60.0
"""Between two lines in the log about the same trouble."""

UNAVAILABLE: Final = "the rendezvous cannot reach what it remembers; try again"


class Settings(Struct, frozen=True, kw_only=True):
    """What one service allows."""

    environments_per_tenant: int = 10_000
    calls_per_second: float = 50.0
    """Of one key, on average."""
    calls_at_once: float = 200.0
    """Of one key, in a burst."""


class Refused(Exception):
    """The answer is no: an HTTP status, a code for programs and a sentence for people."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        """`retry_after`: seconds until asking again makes sense."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after


class Presence:
    """Which environments are connected. On one node the router knows; in a cluster the others are asked."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def is_online(self, registration_id: str) -> bool:
        return self._router.is_online(registration_id)

    async def supersede(self, registration_id: str) -> None:
        self._router.supersede(registration_id)

    def trouble(self) -> str | None:
        """What somebody should look at, although this node answers."""
        return None


class Rendezvous:
    """One node's registry."""

    def __init__(
        self,
        loop: Loop,
        store: Store,
        signer: Signer,
        router: Router,
        presence: Presence,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        revocations: Revocations | None = None,
        *,
        ticket_clock: Callable[[], float] | None = None,
    ) -> None:
        """`ticket_clock` says when tickets expire, if it is not the same."""
        self._loop = loop
        self._revocations: Revocations | frozenset[str] = revocations or frozenset()
        self._store = store
        self._signer = signer
        self._presence = presence
        self._settings = settings
        self._clock = clock
        self._ticket_clock = ticket_clock or clock
        self._throttle = Throttle(settings.calls_per_second, settings.calls_at_once)
        self._wrong_tokens = Throttle(WRONG_TOKENS_PER_SECOND, WRONG_TOKENS_AT_ONCE)
        self._right_tokens: set[bytes] = set()
        self._health = Health(loop, store, self.unavailable)
        self._quiet_until = 0.0
        self._untimely_until = 0.0
        self.router = router
        self.closing = False
        self.calls: dict[tuple[str, int], int] = {}
        """How often each call was answered with each status."""
        self.journal = Journal()

    @property
    def keys_revoked(self) -> int:
        return self._revocations.seen if isinstance(self._revocations, Revocations) else 0

    @property
    def cut(self) -> int:
        """Connections that ended with their key."""
        return self._revocations.cut if isinstance(self._revocations, Revocations) else 0

    # Who asks ------------------------------------------------------------------------------------

    async def authenticate(
        self, authorization: str | None, *roles: Role, address: str = "", environment: str | None = None
    ) -> ApiKey:
        """The key behind an Authorization header, if it may do this. `address` is where it comes from,
        `environment` what it is about."""
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Refused(401, "unauthorized", "a bearer token is needed: `exec-server rendezvous key add`")
        digest = digest_of(secret.strip())
        if digest not in self._right_tokens and self._wrong_tokens.empty(address, self._loop.time()):
            raise Refused(429, "rate_limited", "too many wrong tokens from this address; wait a moment", 1)
        key = await self._store.key(digest)
        good = key is not None and hmac.compare_digest(key.digest, digest) and key.is_good(self._clock())
        if key is None or not good:
            self._right_tokens.discard(digest)
            self._wrong_tokens.allow(address, self._loop.time())
            raise Refused(401, "unauthorized", "the bearer token is unknown or was revoked, or has expired")
        if len(self._right_tokens) >= RIGHT_TOKENS_KEPT:
            self._right_tokens.clear()
        self._right_tokens.add(digest)
        if key.role not in roles:
            raise Refused(
                403, "forbidden", f"the key {key.name!r} has the role {key.role}, which may not do this"
            )
        if environment is not None and key.environments and environment not in key.environments:
            raise Refused(403, "forbidden", f"the key {key.name!r} is for other environments than this one")
        if not self._throttle.allow(key.name, self._loop.time()):
            wait = ceil(1 / self._settings.calls_per_second)
            raise Refused(429, "rate_limited", "too many calls with this key; wait a moment", wait)
        return key

    async def _good_key(self, key_id: str) -> ApiKey | None:
        """The key of that id; None when what is bound to it is no longer worth anything."""
        if not key_id or key_id in self._revocations:
            return None
        key = await self._store.key(bytes.fromhex(key_id))
        return key if key is not None and key.is_good(self._clock()) else None

    def unavailable(self, error: StoreUnavailable, operation: str | None = None) -> Refused:
        """What is answered while the store cannot be used; logged now and then while it lasts."""
        self.journal.store_errors += 1
        now = self._loop.time()
        if now >= self._quiet_until:
            log.error("cannot answer calls", reason=str(error))
            self._quiet_until = now + TROUBLE_SECONDS
        if operation == "register":
            # The one answer upon which the reference's executor tries again instead of ending.
            return Refused(502, "authentication_service_unavailable", UNAVAILABLE)
        return Refused(503, "unavailable", UNAVAILABLE)

    async def health(self) -> str | None:
        """What is wrong with us, if anything is."""
        return "closing" if self.closing else await self._health.wrong()

    def forget_health(self) -> None:
        """Look anew when somebody asks."""
        self._health.forget()

    def trouble(self) -> str | None:
        """What does not keep us from answering."""
        return self._presence.trouble()

    # The three calls -----------------------------------------------------------------------------

    async def register(
        self, key: ApiKey, environment: str, body: Any, base: str, continues: str = ""
    ) -> dict[str, Any]:
        """An environment offers itself. The newest key wins. `continues` is the query of the URL that it was
        given before: with it, it is itself that it replaces, and its streams go on."""
        _check_environment(environment)
        if not isinstance(body, dict) or body.get("security_profile") != SECURITY_PROFILE:
            raise Refused(400, "invalid_request", f"the security profile must be {SECURITY_PROFILE}")
        executor = _public_key(body, "executor_public_key")
        digest = key_digest(executor)
        for _ in range(3):
            old = await self._store.registration(key.tenant, environment)
            if old is not None and hmac.compare_digest(old.key_digest, digest):
                bound = replace(old, api_key=key.id)
                if bound == old or await self._store.put_registration(bound, old):
                    return self._registered(bound, base)
                continue
            new = await self._replacement(key, environment, executor, digest, old)
            if await self._store.put_registration(new, old):
                if old is not None:
                    if self._is_owner(environment, continues, old):
                        self.router.retire(old.id, new.id)
                    else:
                        log.info("a registration was superseded", environment=environment, tenant=key.tenant)
                        await self._presence.supersede(old.id)
                return self._registered(new, base)
        raise Refused(409, "registration_conflict", "others register this environment at the same time")

    def _is_owner(self, environment: str, query: str, registration: Registered) -> bool:
        """Whether it is the query of the URL that only the environment of a registration was given."""
        try:
            ticket = self._signer.read_path(environment, dict(parse_qsl(query)), self._ticket_clock())
        except BadTicket:
            return False
        return isinstance(ticket, EnvironmentTicket) and ticket.registration_id == registration.id

    async def _replacement(
        self, key: ApiKey, environment: str, executor: dict[str, str], digest: str, old: Registered | None
    ) -> Registered:
        superseded: tuple[str, ...] = ()
        if old is not None:
            if digest in old.superseded and await self._presence.is_online(old.id):
                raise Refused(
                    409, "registration_conflict", "another machine has taken this environment's place"
                )
            others = (other for other in old.superseded if other != digest)
            superseded = (old.key_digest, *others)[:SUPERSEDED_KEPT]
        else:
            await self._check_quota(key.tenant)
        return Registered(
            str(uuid4()), key.tenant, environment, executor, digest, self._clock(), superseded, key.id
        )

    async def _check_quota(self, tenant: str) -> None:
        most = self._settings.environments_per_tenant
        if await self._store.count(tenant) < most:
            return
        if not await make_room(self._store, self._presence, tenant, self._clock()):
            raise Refused(
                403,
                "quota_exceeded",
                f"this tenant has as many environments as it may have ({most});"
                " `exec-server rendezvous environment rm` removes one",
            )

    def _registered(self, registration: Registered, base: str) -> dict[str, Any]:
        return {
            "environment_id": registration.environment,
            "url": base + self._signer.environment_path(registration.environment, registration.id),
            "security_profile": SECURITY_PROFILE,
            "executor_registration_id": registration.id,
        }

    async def connect(self, key: ApiKey, environment: str, body: Any, base: str) -> dict[str, Any]:
        """A harness asks for one way to an environment."""
        harness = _public_key(body, "harness_public_key")
        registration = None
        if ENVIRONMENT_ID.fullmatch(environment):
            registration = await self._store.registration(key.tenant, environment)
        if registration is None:
            raise Refused(404, "environment_not_found", "there is no such environment")
        online = await self._presence.is_online(registration.id)
        if not online or await self._good_key(registration.api_key) is None:
            raise Refused(409, "environment_offline", "the environment is not connected")
        digest, now = key_digest(harness), self._ticket_clock()
        return {
            "environment_id": environment,
            "url": base + self._signer.harness_path(environment, registration.id, digest, now, key.id),
            "security_profile": SECURITY_PROFILE,
            "executor_registration_id": registration.id,
            "executor_public_key": registration.key,
            "harness_key_authorization": self._signer.authorization(
                registration.tenant, registration.id, digest, now, key.id
            ),
        }

    async def validate(self, key: ApiKey, environment: str, body: Any) -> dict[str, Any]:
        """An environment asks whether a harness is welcome. A bad authorization is no error."""
        harness = _public_key(body, "harness_public_key")
        given, wanted = body.get("harness_key_authorization"), body.get("executor_registration_id")
        if not isinstance(given, str) or not isinstance(wanted, str):
            raise Refused(400, "invalid_request", "the registration id and the authorization are texts")
        if not ENVIRONMENT_ID.fullmatch(environment) or len(given) > MAX_AUTHORIZATION_CHARACTERS:
            return {"valid": False}
        registration = await self._store.registration(key.tenant, environment)
        if registration is None or not hmac.compare_digest(registration.id.encode(), wanted.encode()):
            return {"valid": False}
        try:
            authorization = self._signer.read_authorization(
                given, registration.tenant, registration.id, key_digest(harness), self._ticket_clock()
            )
        except BadTicket as error:
            self._report_untimely(error)
            return {"valid": False}
        if await self._good_key(authorization.caller) is None:
            return {"valid": False}
        return {"valid": await self._store.use_once(f"a:{authorization.nonce}", authorization.expires)}

    # Connections ---------------------------------------------------------------------------------

    async def admit(self, environment: str, query: Mapping[str, str]) -> EnvironmentTicket | HarnessTicket:
        """Whether a WebSocket may be opened with this path and query, and as whom."""
        if self.closing:
            raise Refused(503, "shutting_down", "this node is shutting down")
        try:
            ticket = self._signer.read_path(environment, query, self._ticket_clock())
        except BadTicket as error:
            self._report_untimely(error)
            raise Refused(401, "unauthorized", str(error)) from None
        registration = await self._store.registration_by_id(ticket.registration_id)
        if registration is None:
            raise Refused(409, "superseded", "the registration is no longer current")
        if isinstance(ticket, EnvironmentTicket):
            ticket = replace(ticket, caller=registration.api_key)
        key = await self._good_key(ticket.caller)
        if key is None:
            raise Refused(
                401, "unauthorized", "the key that this URL was given to was revoked, or has expired"
            )
        ticket = replace(
            ticket, until=key.expires, environment=environment, tenant=registration.tenant, key_name=key.name
        )
        if isinstance(ticket, EnvironmentTicket):
            await self._seen(registration)
        elif not await self._store.use_once(f"u:{ticket.nonce}", ticket.expires):
            raise Refused(401, "unauthorized", "the URL was used before")
        if ticket.caller in self._revocations:  # since it was looked up; from here on it is found and cut
            raise Refused(401, "unauthorized", "the key that this URL was given to was revoked")
        return ticket

    def _report_untimely(self, error: BadTicket) -> None:
        """Somebody was refused because of the time, and hears little of it: what we answer has no room."""
        now = self._loop.time()
        if isinstance(error, Untimely) and now >= self._untimely_until:
            log.warning(
                "a ticket was refused", reason=str(error), clocks=self.trouble() or "as far as known good"
            )
            self._untimely_until = now + TROUBLE_SECONDS

    async def _seen(self, registration: Registered) -> None:
        now = self._clock()
        if abs(now - registration.seen) > SEEN_SECONDS:
            await self._store.put_registration(replace(registration, seen=now), registration)

    # Looking -------------------------------------------------------------------------------------

    async def listing(
        self, key: ApiKey, after: tuple[str, str] | None, limit: int
    ) -> tuple[list[dict[str, Any]], tuple[str, str] | None]:
        """Environments an admin's key is for, in order, and their streams on this node. No keys, no tickets.
        With it goes where to go on, if there are more."""
        tenant = None if key.tenant == ALL_TENANTS else key.tenant
        found = await self._store.page(tenant, after, limit + 1)
        page = found[:limit]
        online = await asyncio.gather(*(self._presence.is_online(one.id) for one in page))
        shown = [
            {
                "tenant": registration.tenant,
                "environment": registration.environment,
                "registration": registration.id,
                "created": registration.created,
                "online": there,
                "streams": self.router.streams_of(registration.id),
            }
            for registration, there in zip(page, online, strict=True)
        ]
        more = len(found) > limit
        return shown, (page[-1].tenant, page[-1].environment) if more else None

    async def remove(self, key: ApiKey, tenant: str, environment: str) -> dict[str, Any]:
        """Forget an environment. One that is still there registers again, unless its key is revoked."""
        if key.tenant not in (ALL_TENANTS, tenant):
            raise Refused(403, "forbidden", f"the key {key.name!r} is not for the tenant {tenant!r}")
        registration = await self._store.registration(tenant, environment)
        if registration is None or not await self._store.remove_registration(registration):
            raise Refused(404, "environment_not_found", "there is no such environment")
        await self._presence.supersede(registration.id)
        return {"removed": registration.id}


def _check_environment(environment: str) -> None:
    if not ENVIRONMENT_ID.fullmatch(environment):
        raise Refused(400, "invalid_request", "an environment id is 1 to 128 of A-Z a-z 0-9 _ . -")


def _public_key(body: Any, name: str) -> dict[str, str]:
    if not isinstance(body, dict):
        raise Refused(400, "invalid_request", "the body is not a JSON object")
    try:
        return PublicKey.from_object(body.get(name)).to_object()
    except BadKey as error:
        raise Refused(400, "invalid_request", f"{name}: {error}") from None
