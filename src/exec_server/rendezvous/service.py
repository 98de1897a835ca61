"""The registry's three calls and the tickets they hand out. Knows no HTTP and no sockets."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import uuid4

from msgspec import Struct
from msgspec.structs import replace

from .. import log
from ..loop import Loop
from ..relay.keys import BadKey, PublicKey
from ..relay.registry import SECURITY_PROFILE
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
from .tickets import BadTicket, EnvironmentTicket, HarnessTicket, Signer, key_digest

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

NEVER_CONNECTED_SECONDS: Final = 60.0
OFFLINE_SECONDS: Final = 24 * 3600.0
"""Since when a registration that is not connected makes room for a new one, when its tenant has no more: it
never was connected, or it was."""

TROUBLE_SECONDS: Final = 60.0
"""Between two lines in the log about the same trouble."""

HEALTH_SECONDS: Final = 1.0
"""For how long the answer about our health is good; asking for it costs a write."""


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

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Presence:
    """Which environments are connected. On one node the router knows; in a cluster the others are asked."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def is_online(self, registration_id: str) -> bool:
        return self._router.is_online(registration_id)

    async def supersede(self, registration_id: str) -> None:
        self._router.supersede(registration_id)


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
    ) -> None:
        self._loop = loop
        self._revocations: Revocations | frozenset[str] = revocations or frozenset()
        self._store = store
        self._signer = signer
        self._presence = presence
        self._settings = settings
        self._clock = clock
        self._throttle = Throttle(settings.calls_per_second, settings.calls_at_once)
        self._wrong_tokens = Throttle(WRONG_TOKENS_PER_SECOND, WRONG_TOKENS_AT_ONCE)
        self._right_tokens: set[bytes] = set()
        self._health: tuple[float, str | None] = (0.0, None)
        self._quiet_until = 0.0
        self.router = router
        self.closing = False
        self.calls: dict[tuple[str, int], int] = {}
        """How often each call was answered with each status."""

    # Who asks ------------------------------------------------------------------------------------

    async def authenticate(self, authorization: str | None, *roles: Role, address: str = "") -> ApiKey:
        """The key behind an Authorization header, if it may do this. `address` is where it comes from."""
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Refused(401, "unauthorized", "a bearer token is needed: `exec-server rendezvous key add`")
        digest = digest_of(secret.strip())
        if digest not in self._right_tokens and self._wrong_tokens.empty(address, self._loop.time()):
            raise Refused(429, "rate_limited", "too many wrong tokens from this address; wait a moment")
        key = await self._store.key(digest)
        if key is None or not hmac.compare_digest(key.digest, digest) or key.revoked is not None:
            self._right_tokens.discard(digest)
            self._wrong_tokens.allow(address, self._loop.time())
            raise Refused(401, "unauthorized", "the bearer token is unknown or was revoked")
        if len(self._right_tokens) >= RIGHT_TOKENS_KEPT:
            self._right_tokens.clear()
        self._right_tokens.add(digest)
        if key.role not in roles:
            raise Refused(
                403, "forbidden", f"the key {key.name!r} has the role {key.role}, which may not do this"
            )
        if not self._throttle.allow(key.name, self._loop.time()):
            raise Refused(429, "rate_limited", "too many calls with this key; wait a moment")
        return key

    async def _is_revoked(self, key_id: str) -> bool:
        """Whether what is bound to the key of that id is no longer worth anything."""
        if not key_id or key_id in self._revocations:
            return True
        key = await self._store.key(bytes.fromhex(key_id))
        return key is None or key.revoked is not None

    def unavailable(self, error: StoreUnavailable, operation: str | None = None) -> Refused:
        """What is answered while the store cannot be used; logged now and then while it lasts."""
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
        if self.closing:
            return "closing"
        now = self._loop.time()
        if now >= self._health[0]:
            try:
                await self._store.check()
            except StoreUnavailable as error:
                self.unavailable(error)
                self._health = now + HEALTH_SECONDS, str(error)
            else:
                self._health = now + HEALTH_SECONDS, None
        return self._health[1]

    # The three calls -----------------------------------------------------------------------------

    async def register(self, key: ApiKey, environment: str, body: Any, base: str) -> dict[str, Any]:
        """An environment offers itself. The newest key wins."""
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
                    log.info("a registration was superseded", environment=environment, tenant=key.tenant)
                    await self._presence.supersede(old.id)
                return self._registered(new, base)
        raise Refused(409, "registration_conflict", "others register this environment at the same time")

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
        elif await self._store.count(key.tenant) >= self._settings.environments_per_tenant:
            await self._make_room(key.tenant)
        return Registered(
            str(uuid4()), key.tenant, environment, executor, digest, self._clock(), superseded, key.id
        )

    async def _make_room(self, tenant: str) -> None:
        """Forget the environment of a tenant that has been away for longest, if it has been away for long."""
        now = self._clock()
        of_tenant = [found for found in await self._store.registrations() if found.tenant == tenant]
        for old in sorted(of_tenant, key=lambda found: found.seen or found.created):
            since, patience = (
                (old.seen, OFFLINE_SECONDS) if old.seen else (old.created, NEVER_CONNECTED_SECONDS)
            )
            if now - since <= patience or await self._presence.is_online(old.id):
                continue
            if await self._store.remove_registration(old):
                log.info("a registration made room for another", environment=old.environment, tenant=tenant)
                return
        raise Refused(
            403,
            "quota_exceeded",
            f"this tenant has as many environments as it may have ({len(of_tenant)});"
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
        if not online or await self._is_revoked(registration.api_key):
            raise Refused(409, "environment_offline", "the environment is not connected")
        digest, now = key_digest(harness), self._clock()
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
                given, registration.tenant, registration.id, key_digest(harness), self._clock()
            )
        except BadTicket:
            return {"valid": False}
        if await self._is_revoked(authorization.caller):
            return {"valid": False}
        return {"valid": await self._store.use_once(f"a:{authorization.nonce}", authorization.expires)}

    # Connections ---------------------------------------------------------------------------------

    async def admit(self, environment: str, query: Mapping[str, str]) -> EnvironmentTicket | HarnessTicket:
        """Whether a WebSocket may be opened with this path and query, and as whom."""
        if self.closing:
            raise Refused(503, "shutting_down", "this node is shutting down")
        try:
            ticket = self._signer.read_path(environment, query, self._clock())
        except BadTicket as error:
            raise Refused(401, "unauthorized", str(error)) from None
        registration = await self._store.registration_by_id(ticket.registration_id)
        if registration is None:
            raise Refused(409, "superseded", "the registration is no longer current")
        if isinstance(ticket, EnvironmentTicket):
            ticket = replace(ticket, caller=registration.api_key)
        if await self._is_revoked(ticket.caller):
            raise Refused(401, "unauthorized", "the key that this URL was given to was revoked")
        if isinstance(ticket, EnvironmentTicket):
            await self._seen(registration)
        elif not await self._store.use_once(f"u:{ticket.nonce}", ticket.expires):
            raise Refused(401, "unauthorized", "the URL was used before")
        if ticket.caller in self._revocations:  # since it was looked up; from here on it is found and cut
            raise Refused(401, "unauthorized", "the key that this URL was given to was revoked")
        return ticket

    async def _seen(self, registration: Registered) -> None:
        now = self._clock()
        if abs(now - registration.seen) > SEEN_SECONDS:
            await self._store.put_registration(replace(registration, seen=now), registration)

    # Looking -------------------------------------------------------------------------------------

    async def listing(self, key: ApiKey) -> list[dict[str, Any]]:
        """Every environment an admin's key is for, and its streams on this node. No keys, no tickets."""
        streams = self.router.streams()
        return [
            {
                "tenant": registration.tenant,
                "environment": registration.environment,
                "registration": registration.id,
                "created": registration.created,
                "online": await self._presence.is_online(registration.id),
                "streams": streams.get(registration.id, []),
            }
            for registration in await self._store.registrations()
            if key.tenant in (ALL_TENANTS, registration.tenant)
        ]

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
