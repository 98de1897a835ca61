"""The store of many nodes: four buckets of JetStream's key-value store, in place of the tables of one."""

from __future__ import annotations

import secrets
import time
from typing import Any, Final

import msgspec
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NoKeysError
from nats.js.kv import KeyValue

from .store import ApiKey, KeyExists, Registered

__all__ = ["ClusterStore"]

REGISTRATION_SECONDS: Final = 7 * 24 * 3600.0
"""How long a registration nobody uses is kept. Nodes refresh those of environments that are connected."""

USED_SECONDS: Final = 120.0
"""How long a nonce is remembered: twice the life of what carries it."""


class ClusterStore:
    """Keys, registrations, nonces and the signing secret, for all nodes alike."""

    def __init__(self, keys: KeyValue, registrations: KeyValue, used: KeyValue, secret: KeyValue) -> None:
        self._keys = keys
        self._registrations = registrations
        self._used = used
        self._secrets = secret

    @classmethod
    async def open(cls, jetstream: JetStreamContext, replicas: int = 1) -> ClusterStore:
        """Make the buckets, or find them."""

        async def bucket(name: str, ttl: float | None = None) -> KeyValue:
            return await jetstream.create_key_value(
                KeyValueConfig(bucket=f"exec_server_{name}", ttl=ttl, history=1, replicas=replicas)
            )

        return cls(
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
        entry = await self._secrets.get("signing")
        return entry.value or b""

    # Keys ----------------------------------------------------------------------------------------

    async def key(self, digest: bytes) -> ApiKey | None:
        name = await _get(self._keys, f"digest.{digest.hex()}")
        if name is None:
            return None
        found = await _get(self._keys, name.decode())
        return None if found is None else msgspec.json.decode(found, type=ApiKey)

    async def keys(self) -> list[ApiKey]:
        found = [await _get(self._keys, name) for name in await _names(self._keys, "name.")]
        keys = [msgspec.json.decode(value, type=ApiKey) for value in found if value is not None]
        return sorted(keys, key=lambda key: (key.created, key.name))

    async def add_key(self, key: ApiKey) -> None:
        try:
            await self._keys.create(_key_name(key.name), msgspec.json.encode(key))
        except KeyWrongLastSequenceError:
            raise KeyExists(key.name) from None
        await self._keys.create(f"digest.{key.digest.hex()}", _key_name(key.name).encode())

    async def revoke_key(self, name: str) -> bool:
        found = await _get(self._keys, _key_name(name))
        key = None if found is None else msgspec.json.decode(found, type=ApiKey)
        if key is None or key.revoked is not None:
            return False
        await self._keys.put(
            _key_name(name), msgspec.json.encode(msgspec.structs.replace(key, revoked=time.time()))
        )
        return True

    # Registrations -------------------------------------------------------------------------------

    async def registration(self, tenant: str, environment: str) -> Registered | None:
        found = await _get(self._registrations, _environment_name(tenant, environment))
        return None if found is None else msgspec.json.decode(found, type=Registered)

    async def registration_by_id(self, registration_id: str) -> Registered | None:
        name = await _get(self._registrations, f"id.{registration_id}")
        found = None if name is None else await _get(self._registrations, name.decode())
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
                if msgspec.json.decode(entry.value or b"null", type=Registered | None) != old:
                    return False
                await self._registrations.update(name, content, last=entry.revision)
        except (KeyWrongLastSequenceError, KeyNotFoundError):
            return False
        if old is not None and old.id != new.id:
            await self._registrations.delete(f"id.{old.id}")
        return True

    async def refresh(self, registration_id: str) -> None:
        """Keep a registration for another while."""
        registered = await self.registration_by_id(registration_id)
        if registered is not None:
            await self.put_registration(registered, registered)

    async def registrations(self) -> list[Registered]:
        found = [await _get(self._registrations, name) for name in await _names(self._registrations, "env.")]
        return [msgspec.json.decode(value, type=Registered) for value in found if value is not None]

    async def count(self, tenant: str) -> int:
        return len(await _names(self._registrations, _environment_name(tenant, "")))

    async def use_once(self, nonce: str, until: float) -> bool:
        del until  # the bucket forgets by itself
        try:
            await self._used.create(nonce.replace(":", "."), b"")
        except KeyWrongLastSequenceError:
            return False
        return True

    async def close(self) -> None:
        """The connection is not ours."""


def _key_name(name: str) -> str:
    return f"name.{name.encode().hex()}"


def _environment_name(tenant: str, environment: str) -> str:
    """Both in letters every key may have."""
    return f"env.{tenant.encode().hex()}.{environment.encode().hex()}"


async def _get(bucket: KeyValue, name: str) -> bytes | None:
    try:
        return (await bucket.get(name)).value
    except KeyNotFoundError:
        return None


async def _names(bucket: KeyValue, prefix: str) -> list[str]:
    try:
        names: list[Any] = await bucket.keys()
    except NoKeysError:
        return []
    return sorted(name for name in names if name.startswith(prefix))
