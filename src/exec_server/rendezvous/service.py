"""The registry's three calls and the tickets they hand out. Knows no HTTP and no sockets."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import uuid4

from msgspec import Struct

from .. import log
from ..loop import Loop
from ..relay.keys import BadKey, PublicKey
from ..relay.registry import SECURITY_PROFILE
from .router import Router
from .store import SUPERSEDED_KEPT, ApiKey, Registered, Role, Store, digest_of
from .throttle import Throttle
from .tickets import BadTicket, EnvironmentTicket, HarnessTicket, Signer, key_digest

__all__ = ["Presence", "Refused", "Rendezvous", "Settings"]

ENVIRONMENT_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
MAX_AUTHORIZATION_CHARACTERS: Final = 4096


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
    ) -> None:
        self._loop = loop
        self._store = store
        self._signer = signer
        self._presence = presence
        self._settings = settings
        self._clock = clock
        self._throttle = Throttle(settings.calls_per_second, settings.calls_at_once)
        self.router = router
        self.closing = False
        self.calls: dict[tuple[str, int], int] = {}
        """How often each call was answered with each status."""

    # Who asks ------------------------------------------------------------------------------------

    async def authenticate(self, authorization: str | None, *roles: Role) -> ApiKey:
        """The key behind an Authorization header, if it may do this."""
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Refused(401, "unauthorized", "a bearer token is needed: `exec-server rendezvous key add`")
        digest = digest_of(secret.strip())
        key = await self._store.key(digest)
        if key is None or not hmac.compare_digest(key.digest, digest) or key.revoked is not None:
            raise Refused(401, "unauthorized", "the bearer token is unknown or was revoked")
        if key.role not in roles:
            raise Refused(
                403, "forbidden", f"the key {key.name!r} has the role {key.role}, which may not do this"
            )
        if not self._throttle.allow(key.name, self._loop.time()):
            raise Refused(429, "rate_limited", "too many calls with this key; wait a moment")
        return key

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
                return self._registered(old, base)
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
            raise Refused(403, "quota_exceeded", "this tenant has as many environments as it may have")
        return Registered(str(uuid4()), key.tenant, environment, executor, digest, self._clock(), superseded)

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
        if not await self._presence.is_online(registration.id):
            raise Refused(409, "environment_offline", "the environment is not connected")
        digest, now = key_digest(harness), self._clock()
        return {
            "environment_id": environment,
            "url": base + self._signer.harness_path(environment, registration.id, digest, now),
            "security_profile": SECURITY_PROFILE,
            "executor_registration_id": registration.id,
            "executor_public_key": registration.key,
            "harness_key_authorization": self._signer.authorization(
                registration.tenant, registration.id, digest, now
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
        if isinstance(ticket, HarnessTicket) and not await self._store.use_once(
            f"u:{ticket.nonce}", ticket.expires
        ):
            raise Refused(401, "unauthorized", "the URL was used before")
        return ticket

    # Looking -------------------------------------------------------------------------------------

    async def listing(self) -> list[dict[str, Any]]:
        """Every environment and its streams on this node. No keys, no tickets."""
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
        ]


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
