"""The store of many nodes: four buckets of JetStream's key-value store, in place of the tables of one."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec
from nats.aio.client import Client as Nats
from nats.errors import Error as NatsError
from nats.js.errors import KeyWrongLastSequenceError

from .. import log
from .cluster_bucket import Bucket, unavailable
from .store import ApiKey, KeyExists, Registered, StoreUnavailable

__all__ = ["ClusterStore"]

REGISTRATION_SECONDS: Final = 7 * 24 * 3600.0
"""How long a registration nobody uses is kept. Nodes refresh those of environments that are connected."""

USED_SECONDS: Final = 120.0
"""How long a nonce is remembered: twice the life of what carries it."""

REVOKED_SECONDS: Final = 15.0
"""How often a node looks which keys are revoked, in case that it was not told."""

FLUSH_SECONDS: Final = 2
"""For NATS to have heard what it was told."""

AGES_SECONDS: Final = 60.0
"""For how long it is good who has been away for how long: it is only known after reading all of a tenant."""

AGES_KEPT: Final = 100
"""Tenants of which it is known."""

LOST_SECONDS: Final = 3.0
"""Without the signing secret in NATS, after which a node begins anew with its own."""

LOST: Final = "NATS has lost what it kept: keys and registrations are gone; restore it, or make the keys anew"
REPLACED: Final = (
    "NATS lost what it kept, and other nodes have begun anew; this one takes their signing secret"
)


class ClusterStore:
    """Keys, registrations, nonces and the signing secret, for all nodes alike."""

    def __init__(self, connection: Nats) -> None:
        self._connection = connection
        self._keys = Bucket(connection, "keys")
        self._registrations = Bucket(connection, "registrations", REGISTRATION_SECONDS)
        self._used = Bucket(connection, "used", USED_SECONDS)
        self._secrets = Bucket(connection, "secrets")
        self._buckets = (self._keys, self._registrations, self._used, self._secrets)
        self._revoked: frozenset[str] = frozenset()
        self._revoked_until = 0.0
        self._ages: dict[str, tuple[float, list[tuple[float, bool, str]]]] = {}
        self._reading_ages = asyncio.Lock()
        self._secret: bytes | None = None
        self._missing_since: float | None = None
        self.was_lost = False
        """Whether NATS has begun anew while we were here: what is connected may be registered nowhere."""
        self._replicas: int | None = None
        self.on_secret: Callable[[bytes], object] = lambda _: None
        """Called when the nodes have another signing secret than the one that was given out here."""

    @classmethod
    async def open(cls, connection: Nats, replicas: int | None = None) -> ClusterStore:
        """Make the buckets, or find them. Errors are NATS's own."""
        store = cls(connection)
        store._replicas = replicas
        await store._make()
        return store

    async def _make(self) -> None:
        for bucket in self._buckets:
            await bucket.make(self._replicas)

    async def set_replicas(self) -> None:
        """As many copies as were asked for, or as there are servers for by now. Errors are NATS's own."""
        for bucket in self._buckets:
            await bucket.set_replicas(self._replicas)

    async def signing_secret(self) -> bytes:
        await self._offer_secret(secrets.token_bytes(32))
        self._secret = await self._secrets.value("signing") or b""
        return self._secret

    async def rotate_secret(self) -> None:
        secret = secrets.token_bytes(32)
        # Said before it is done: a node that finds another secret must know that nothing was lost.
        await self._secrets.put("rotated", _mark(secret))
        await self._secrets.put("signing", secret)

    async def _offer_secret(self, secret: bytes) -> None:
        try:
            await self._secrets.create("signing", secret)
        except KeyWrongLastSequenceError:
            pass  # another node was first

    # Keys ----------------------------------------------------------------------------------------

    async def key(self, digest: bytes) -> ApiKey | None:
        name = await self._keys.value(f"digest.{digest.hex()}")
        if name is None:
            return None
        found = await self._keys.value(name.decode())
        return None if found is None else msgspec.json.decode(found, type=ApiKey)

    async def keys(self) -> list[ApiKey]:
        found = await self._keys.values(await self._keys.names("name.*"))
        keys = [msgspec.json.decode(value, type=ApiKey) for value in found if value is not None]
        return sorted(keys, key=lambda key: (key.created, key.name))

    async def add_key(self, key: ApiKey) -> None:
        try:
            await self._keys.create(_key_name(key.name), msgspec.json.encode(key))
        except KeyWrongLastSequenceError:
            raise KeyExists(key.name) from None
        await self._keys.create(f"digest.{key.digest.hex()}", _key_name(key.name).encode())

    async def revoke_key(self, name: str) -> bool:
        found = await self._keys.value(_key_name(name))
        key = None if found is None else msgspec.json.decode(found, type=ApiKey)
        if key is None or key.revoked is not None:
            return False
        await self._keys.put(
            _key_name(name), msgspec.json.encode(msgspec.structs.replace(key, revoked=time.time()))
        )
        await self._keys.put(f"revoked.{key.id}", b"")
        await self._tell("es.revoked")
        return True

    async def revoked(self) -> frozenset[str]:
        """Read now and then, and after `forget_revoked`: listing a bucket is not for every second."""
        now = time.monotonic()
        if now >= self._revoked_until:
            names = await self._keys.names("revoked.*")
            self._revoked = frozenset(name.removeprefix("revoked.") for name in names)
            self._revoked_until = now + REVOKED_SECONDS
        return self._revoked

    def forget_revoked(self) -> None:
        self._revoked_until = 0.0

    async def _tell(self, subject: str) -> None:
        """Tell every node; those that do not hear it now find it out by themselves later."""
        try:
            await self._connection.publish(subject, b"")
            await self._connection.flush(FLUSH_SECONDS)
        except (NatsError, OSError, TimeoutError) as error:
            raise unavailable(error) from None

    # Registrations -------------------------------------------------------------------------------

    async def registration(self, tenant: str, environment: str) -> Registered | None:
        found = await self._registrations.value(_environment_name(tenant, environment))
        return None if found is None else msgspec.json.decode(found, type=Registered)

    async def registration_by_id(self, registration_id: str) -> Registered | None:
        name = await self._registrations.value(f"id.{registration_id}")
        found = None if name is None else await self._registrations.value(name.decode())
        if found is None:
            return None
        registered = msgspec.json.decode(found, type=Registered)
        return registered if registered.id == registration_id else None

    async def put_registration(self, new: Registered, old: Registered | None) -> bool:
        name = _environment_name(new.tenant, new.environment)
        content = msgspec.json.encode(new)
        # The way from the id to the entry is there before the entry: nobody may see only half.
        await self._registrations.put(f"id.{new.id}", name.encode())
        try:
            if old is None:
                await self._registrations.create(name, content)
            else:
                entry = await self._registrations.get(name)
                if entry is None or _registered(entry.value) != old:
                    return False
                await self._registrations.update(name, content, entry.revision)
        except KeyWrongLastSequenceError:
            return False
        if old is not None and old.id != new.id:
            await self._registrations.remove(f"id.{old.id}")
        return True

    async def remove_registration(self, old: Registered) -> bool:
        name = _environment_name(old.tenant, old.environment)
        entry = await self._registrations.get(name)
        if entry is None or _registered(entry.value) != old:
            return False
        if not await self._registrations.remove(name, entry.revision):
            return False
        await self._registrations.remove(f"id.{old.id}")
        await self._tell(f"es.gone.{old.id}")
        return True

    async def refresh(self, registration_id: str) -> None:
        """Keep a registration for another while."""
        registered = await self.registration_by_id(registration_id)
        if registered is not None:
            await self.put_registration(registered, registered)

    async def registrations(self) -> list[Registered]:
        return await self._read(await self._registrations.names("env.*.*"))

    async def _read(self, names: Sequence[str]) -> list[Registered]:
        values = await self._registrations.values(names)
        return [msgspec.json.decode(value, type=Registered) for value in values if value is not None]

    async def page(self, tenant: str | None, after: tuple[str, str] | None, limit: int) -> list[Registered]:
        names = await self._registrations.names("env.*.*" if tenant is None else _environments_of(tenant))
        start = 0 if after is None else bisect_right(names, _environment_name(tenant or after[0], after[1]))
        found: list[Registered] = []
        while len(found) < limit and start < len(names):
            more = limit - len(found)
            found += await self._read(names[start : start + more])
            start += more
        return found

    async def current(self, ids: Collection[str]) -> set[str]:
        return {one for one in ids if await self.registration_by_id(one) is not None}

    async def count(self, tenant: str) -> int:
        return await self._registrations.count(_environments_of(tenant))

    async def idle(self, tenant: str, never_since: float, since: float, limit: int) -> list[Registered]:
        ages = await self._ages_of(tenant)
        found: list[Registered] = []
        place = 0
        while place < len(ages) and len(found) < limit:
            last, never, name = ages[place]
            if last >= (never_since if never else since):
                place += 1
                continue
            # It may have changed since it was read. Then it is not the next one to go, and not for long.
            for one in await self._read((name,)):
                if (one.seen or one.created) < (since if one.seen else never_since):
                    found.append(one)
                    place += 1
                    break
            else:
                del ages[place]
        return found

    async def _ages_of(self, tenant: str) -> list[tuple[float, bool, str]]:
        """When each was last seen, or made if it never was, and its name; the oldest first."""
        async with self._reading_ages:
            now = time.monotonic()
            until, ages = self._ages.pop(tenant, (0.0, []))
            if now >= until:
                every = await self._read(await self._registrations.names(_environments_of(tenant)))
                ages = sorted(
                    (one.seen or one.created, not one.seen, _environment_name(tenant, one.environment))
                    for one in every
                )
                until = time.monotonic() + AGES_SECONDS
            while len(self._ages) >= AGES_KEPT:
                del self._ages[next(iter(self._ages))]
            self._ages[tenant] = until, ages
            return ages

    async def touch(self, found: Sequence[Registered], now: float) -> None:
        await asyncio.gather(
            *(self.put_registration(msgspec.structs.replace(old, seen=now), old) for old in found)
        )

    # The rest ------------------------------------------------------------------------------------

    async def use_once(self, nonce: str, until: float) -> bool:
        del until  # the bucket forgets by itself
        try:
            await self._used.create(nonce.replace(":", "."), b"")
        except KeyWrongLastSequenceError:
            return False
        return True

    async def was_edited(self) -> bool:
        """Nodes are told."""
        return False

    async def check(self) -> None:
        """Whether the nodes still have one secret between them. Where NATS has lost what it kept, this node
        gives its own back; where there is another by now, it takes that."""
        found = await self._secrets.value("signing")
        if self._secret is None or found == self._secret:
            self._missing_since = None
            # Each bucket has a server of its own that answers for it, and only writing shows a lack of room.
            await asyncio.gather(
                self._keys.value("check"), self._registrations.value("check"), self._used.put("check", b"")
            )
            return
        if found is not None:
            self._secret, self._missing_since = found, None
            self.on_secret(found)
            if await self._secrets.value("rotated") == _mark(found):
                log.warning("the signing secret was rotated")
                return
            self.was_lost = True
            log.error(REPLACED)
            raise StoreUnavailable(REPLACED)
        now = time.monotonic()
        if self._missing_since is None:
            self._missing_since = now
            log.error(LOST)
        if now - self._missing_since >= LOST_SECONDS:
            try:
                await self._make()
            except (NatsError, OSError, TimeoutError) as error:
                raise unavailable(error) from None
            await self._offer_secret(self._secret)
            self.was_lost = True
        raise StoreUnavailable(LOST)

    async def close(self) -> None:
        """The connection is not ours."""


def _mark(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _registered(value: bytes | None) -> Registered | None:
    return msgspec.json.decode(value or b"null", type=Registered | None)


def _key_name(name: str) -> str:
    return f"name.{name.encode().hex()}"


def _environment_name(tenant: str, environment: str) -> str:
    """Both in letters every key may have."""
    return f"env.{tenant.encode().hex()}.{environment.encode().hex()}"


def _environments_of(tenant: str) -> str:
    return f"env.{tenant.encode().hex()}.*"
