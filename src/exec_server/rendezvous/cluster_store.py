"""The store of many nodes: four buckets of JetStream's key-value store, in place of the tables of one."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
from nats.aio.client import Client as Nats
from nats.errors import Error as NatsError
from nats.js.api import KeyValueConfig
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NoKeysError
from nats.js.kv import KeyValue

from .store import ApiKey, KeyExists, Registered, StoreUnavailable

__all__ = ["ClusterStore"]

REGISTRATION_SECONDS: Final = 7 * 24 * 3600.0
"""How long a registration nobody uses is kept. Nodes refresh those of environments that are connected."""

USED_SECONDS: Final = 120.0
"""How long a nonce is remembered: twice the life of what carries it."""

REVOKED_SECONDS: Final = 15.0
"""How often a node looks which keys are revoked, in case that it was not told."""

WORK_SECONDS: Final = 5.0
FLUSH_SECONDS: Final = 2
"""For one thing that NATS is asked, and for it to have heard what it was told."""

T = TypeVar("T")


class ClusterStore:
    """Keys, registrations, nonces and the signing secret, for all nodes alike."""

    def __init__(
        self,
        connection: Nats,
        keys: _Bucket,
        registrations: _Bucket,
        used: _Bucket,
        secret: _Bucket,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._registrations = registrations
        self._used = used
        self._secrets = secret
        self._revoked: frozenset[str] = frozenset()
        self._revoked_until = 0.0

    @classmethod
    async def open(cls, connection: Nats, replicas: int = 1) -> ClusterStore:
        """Make the buckets, or find them."""
        jetstream = connection.jetstream()

        async def bucket(name: str, ttl: float | None = None) -> _Bucket:
            return _Bucket(
                connection,
                await jetstream.create_key_value(
                    KeyValueConfig(bucket=f"exec_server_{name}", ttl=ttl, history=1, replicas=replicas)
                ),
            )

        return cls(
            connection,
            await bucket("keys"),
            await bucket("registrations", REGISTRATION_SECONDS),
            await bucket("used", USED_SECONDS),
            await bucket("secrets"),
        )

    async def signing_secret(self) -> bytes:
        try:
            await self._secrets.create("signing", secrets.token_bytes(32))
        except KeyWrongLastSequenceError:
            pass  # another node was first
        found = await self._secrets.get("signing")
        return (found and found.value) or b""

    # Keys ----------------------------------------------------------------------------------------

    async def key(self, digest: bytes) -> ApiKey | None:
        name = await self._keys.value(f"digest.{digest.hex()}")
        if name is None:
            return None
        found = await self._keys.value(name.decode())
        return None if found is None else msgspec.json.decode(found, type=ApiKey)

    async def keys(self) -> list[ApiKey]:
        found = [await self._keys.value(name) for name in await self._keys.names("name.")]
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
            names = await self._keys.names("revoked.")
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
            raise _unavailable(error) from None

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
            await self._registrations.delete(f"id.{old.id}")
        return True

    async def remove_registration(self, old: Registered) -> bool:
        name = _environment_name(old.tenant, old.environment)
        entry = await self._registrations.get(name)
        if entry is None or _registered(entry.value) != old:
            return False
        try:
            await self._registrations.delete(name, entry.revision)
        except KeyWrongLastSequenceError:
            return False
        await self._registrations.delete(f"id.{old.id}")
        await self._tell(f"es.gone.{old.id}")
        return True

    async def refresh(self, registration_id: str) -> None:
        """Keep a registration for another while."""
        registered = await self.registration_by_id(registration_id)
        if registered is not None:
            await self.put_registration(registered, registered)

    async def registrations(self) -> list[Registered]:
        found = [await self._registrations.value(name) for name in await self._registrations.names("env.")]
        return [msgspec.json.decode(value, type=Registered) for value in found if value is not None]

    async def count(self, tenant: str) -> int:
        return len(await self._registrations.names(_environment_name(tenant, "")))

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
        await self._secrets.get("signing")

    async def close(self) -> None:
        """The connection is not ours."""


class _Bucket:
    """A bucket, and what goes wrong with it in words that every store uses."""

    def __init__(self, connection: Nats, bucket: KeyValue) -> None:
        self._connection = connection
        self._bucket = bucket

    async def _do(self, work: Callable[[], Awaitable[T]]) -> T:
        if not self._connection.is_connected:
            # It would be tried for seconds, with somebody waiting.
            raise StoreUnavailable("there is no connection to NATS")
        try:
            async with asyncio.timeout(WORK_SECONDS):
                return await work()
        except (KeyNotFoundError, KeyWrongLastSequenceError, NoKeysError):
            raise
        except (NatsError, OSError, TimeoutError) as error:
            raise _unavailable(error) from None

    async def get(self, name: str) -> KeyValue.Entry | None:
        try:
            return await self._do(lambda: self._bucket.get(name))
        except KeyNotFoundError:
            return None

    async def value(self, name: str) -> bytes | None:
        entry = await self.get(name)
        return None if entry is None else entry.value

    async def names(self, prefix: str) -> list[str]:
        try:
            names: list[Any] = await self._do(lambda: self._bucket.keys())
        except NoKeysError:
            return []
        return sorted(name for name in names if name.startswith(prefix))

    async def put(self, name: str, value: bytes) -> None:
        await self._do(lambda: self._bucket.put(name, value))

    async def create(self, name: str, value: bytes) -> None:
        await self._do(lambda: self._bucket.create(name, value))

    async def update(self, name: str, value: bytes, revision: int | None) -> None:
        await self._do(lambda: self._bucket.update(name, value, last=revision))

    async def delete(self, name: str, revision: int | None = None) -> None:
        await self._do(lambda: self._bucket.delete(name, last=revision))


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"NATS does not do what it is asked: {str(error) or type(error).__name__}")


def _registered(value: bytes | None) -> Registered | None:
    return msgspec.json.decode(value or b"null", type=Registered | None)


def _key_name(name: str) -> str:
    return f"name.{name.encode().hex()}"


def _environment_name(tenant: str, environment: str) -> str:
    """Both in letters every key may have."""
    return f"env.{tenant.encode().hex()}.{environment.encode().hex()}"
