"""What a rendezvous remembers: who may use it, and which environments there are. Embedded: SQLite in a file.

Keys are kept as their SHA-256 only. Authorizations and URLs are not kept at all: they are signed
(tickets.py), and only those that were used are remembered, until they would have expired anyway.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from .database import IN_MEMORY, Database, StoreUnavailable

__all__ = [
    "ALL_TENANTS",
    "ApiKey",
    "EmbeddedStore",
    "KeyExists",
    "Registered",
    "Role",
    "Store",
    "StoreUnavailable",
    "new_secret",
]

Role = Literal["any", "environment", "harness", "admin"]
"""What a key may be used for: serve, use, both, or look at what there is and remove it."""

ALL_TENANTS: Final = "*"
"""The tenant of an admin's key that is for all of them."""

FILE_NAME: Final = "rendezvous.sqlite3"

SUPERSEDED_KEPT: Final = 8
"""Replaced keys of an environment that are remembered, so that an old machine does not come back."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS keys (
    name TEXT PRIMARY KEY, tenant TEXT NOT NULL, role TEXT NOT NULL, digest BLOB NOT NULL UNIQUE,
    created REAL NOT NULL, revoked REAL, environments TEXT, expires REAL
) STRICT;
CREATE TABLE IF NOT EXISTS registrations (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, environment TEXT NOT NULL, content BLOB NOT NULL,
    UNIQUE (tenant, environment)
) STRICT;
CREATE TABLE IF NOT EXISTS used (nonce TEXT PRIMARY KEY, until REAL NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS registrations_by_age ON registrations (tenant, {seen}, {created});
"""

SEEN: Final = "coalesce(json_extract(CAST(content AS TEXT), '$.seen'), 0.0)"
CREATED: Final = "json_extract(CAST(content AS TEXT), '$.created')"
"""Of a registration, in the words of the index: what is asked in others would read every one of them."""

FORGET_SECONDS: Final = 60.0
"""How often nonces that have expired are forgotten."""

AT_ONCE: Final = 500
"""Values in one statement."""

ADDED_COLUMNS: Final = ("environments TEXT", "expires REAL")
"""Of keys, in the order in which later versions came to have them."""


class KeyExists(Exception):
    """There is a key of that name already."""


class ApiKey(msgspec.Struct, frozen=True):
    """A key, without the key itself."""

    name: str
    tenant: str
    role: Role
    digest: bytes
    created: float
    revoked: float | None = None
    environments: tuple[str, ...] = ()
    """The only environments it is for; none are all of its tenant."""
    expires: float | None = None

    def is_good(self, now: float) -> bool:
        """Neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)

    @property
    def id(self) -> str:
        """How what is bound to the key names it: a hash of 256 random bits, which gives nothing away."""
        return self.digest.hex()


class Registered(msgspec.Struct, frozen=True):
    """The current registration of an environment."""

    id: str
    tenant: str
    environment: str
    key: dict[str, str]
    """The executor's public-key object."""
    key_digest: str
    created: float
    superseded: tuple[str, ...] = ()
    """Digests of keys this environment was registered under before."""
    api_key: str = ""
    """The id of the API key that it was registered with last: when that is revoked, this is over."""
    seen: float = 0.0
    """When its environment connected last or was known to be there, more or less; 0 if it never has."""


class Store(Protocol):
    """What the service asks of whatever remembers."""

    async def signing_secret(self) -> bytes: ...
    async def rotate_secret(self) -> None:
        """Another signing secret in place of the one there is. Nodes that run find out by themselves."""

    async def key(self, digest: bytes) -> ApiKey | None: ...
    async def keys(self) -> list[ApiKey]: ...
    async def add_key(self, key: ApiKey) -> None: ...
    async def revoke_key(self, name: str) -> bool: ...
    async def revoked(self) -> frozenset[str]:
        """The ids of all keys that are."""

    async def registration(self, tenant: str, environment: str) -> Registered | None: ...
    async def registration_by_id(self, registration_id: str) -> Registered | None: ...
    async def put_registration(self, new: Registered, old: Registered | None) -> bool:
        """Put the new one in the place of the old; False if that is no longer the current one."""

    async def remove_registration(self, old: Registered) -> bool:
        """False if that is no longer the current one."""

    async def registrations(self) -> list[Registered]: ...
    async def page(self, tenant: str | None, after: tuple[str, str] | None, limit: int) -> list[Registered]:
        """In order, of one tenant or of all, those behind a tenant and an environment."""

    async def current(self, ids: Collection[str]) -> set[str]:
        """Those of them that are registered."""

    async def count(self, tenant: str) -> int: ...
    async def idle(self, tenant: str, never_since: float, since: float, limit: int) -> list[Registered]:
        """Those that were not seen for longest: never, and made before `never_since`, or not `since`."""

    async def touch(self, found: Sequence[Registered], now: float) -> None:
        """They are there, and so they are seen."""

    async def use_once(self, nonce: str, until: float) -> bool:
        """True the first time; the nonce is forgotten after `until`, and what has expired counts as used."""

    async def was_edited(self) -> bool:
        """Whether somebody else has changed something since the last time, without telling."""

    async def check(self) -> None:
        """StoreUnavailable unless it can be read and written."""

    async def close(self) -> None: ...


def new_secret() -> str:
    """A new API key: 256 bits, and a beginning by which scanners of leaked secrets know it."""
    return f"esk_{secrets.token_urlsafe(32)}"


def digest_of(secret: str) -> bytes:
    """How a key is kept. It has 256 random bits, so a fast hash is as good as a slow one."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


class EmbeddedStore:
    """SQLite in one file, or in memory."""

    def __init__(
        self,
        directory: str | None,
        clock: Callable[[], float] = time.time,
        *,
        must_exist: bool = False,
        patience: float = 10.0,
    ) -> None:
        """`must_exist` is for those who only look: where there is nothing, nothing is made. `patience` is for
        others who write at the same time."""
        path = IN_MEMORY
        if directory is not None:
            path = os.path.join(directory, FILE_NAME)
            if not must_exist:
                os.makedirs(directory, 0o700, exist_ok=True)
            elif not os.path.exists(path):
                raise FileNotFoundError(errno.ENOENT, "no rendezvous has kept anything here", path)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self.clock = clock
        self.forgotten_until = 0.0
        """Nonces of before may be forgotten: what carries one of them is not good any more."""
        self._version: int | None = None
        self._db = Database(path, patience, self._prepare)

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.executescript(SCHEMA.format(seen=SEEN, created=CREATED))
        _add_columns(db)
        forgotten = db.execute("SELECT value FROM secrets WHERE name = 'forgotten'").fetchone()
        self.forgotten_until = 0.0 if forgotten is None else float(bytes(forgotten[0]))

    async def signing_secret(self) -> bytes:
        await self._db.change(
            "INSERT OR IGNORE INTO secrets VALUES ('signing', ?)", (secrets.token_bytes(32),)
        )
        row = await self._db.one("SELECT value FROM secrets WHERE name = 'signing'")
        return b"" if row is None else bytes(row[0])

    async def rotate_secret(self) -> None:
        await self._db.change(
            "INSERT OR REPLACE INTO secrets VALUES ('signing', ?)", (secrets.token_bytes(32),)
        )

    # Keys ----------------------------------------------------------------------------------------

    async def key(self, digest: bytes) -> ApiKey | None:
        row = await self._db.one("SELECT * FROM keys WHERE digest = ?", (digest,))
        return None if row is None else _key(row)

    async def keys(self) -> list[ApiKey]:
        return await self._db.all("SELECT * FROM keys ORDER BY created, name", (), _key)

    async def add_key(self, key: ApiKey) -> None:
        try:
            await self._db.change(
                "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(key.name, key.tenant, key.role, key.digest, key.created, key.revoked),
                    msgspec.json.encode(key.environments).decode() if key.environments else None,
                    key.expires,
                ),
            )
        except sqlite3.IntegrityError:
            raise KeyExists(key.name) from None

    async def revoke_key(self, name: str) -> bool:
        changed = await self._db.change(
            "UPDATE keys SET revoked = ? WHERE name = ? AND revoked IS NULL", (self.clock(), name)
        )
        return changed == 1

    async def revoked(self) -> frozenset[str]:
        found = await self._db.all(
            "SELECT digest FROM keys WHERE revoked IS NOT NULL", (), lambda row: bytes(row[0]).hex()
        )
        return frozenset(found)

    # Registrations -------------------------------------------------------------------------------

    async def registration(self, tenant: str, environment: str) -> Registered | None:
        return await self._one("tenant = ? AND environment = ?", tenant, environment)

    async def registration_by_id(self, registration_id: str) -> Registered | None:
        return await self._one("id = ?", registration_id)

    async def _one(self, where: str, *values: str) -> Registered | None:
        row = await self._db.one(f"SELECT content FROM registrations WHERE {where}", values)  # noqa: S608  # constants of this file
        return None if row is None else _registered(row)

    async def put_registration(self, new: Registered, old: Registered | None) -> bool:
        if old is not None:
            return await self._db.transact(lambda db: _replace(db, new, old))
        changed = await self._db.change(
            "INSERT OR IGNORE INTO registrations VALUES (?, ?, ?, ?)",
            (new.id, new.tenant, new.environment, msgspec.json.encode(new)),
        )
        return changed == 1

    async def remove_registration(self, old: Registered) -> bool:
        return await self._db.change("DELETE FROM registrations WHERE id = ?", (old.id,)) == 1

    async def registrations(self) -> list[Registered]:
        return await self._all("ORDER BY tenant, environment")

    async def page(self, tenant: str | None, after: tuple[str, str] | None, limit: int) -> list[Registered]:
        if tenant is None:
            return await self._all(
                "WHERE (tenant, environment) > (?, ?) ORDER BY tenant, environment LIMIT ?",
                *(after or ("", "")),
                limit,
            )
        return await self._all(
            "WHERE tenant = ? AND environment > ? ORDER BY environment LIMIT ?",
            *(tenant, after[1] if after else "", limit),
        )

    async def _all(self, rest: str, *values: Any) -> list[Registered]:
        return await self._db.all(f"SELECT content FROM registrations {rest}", values, _registered)  # noqa: S608  # constants of this file

    async def current(self, ids: Collection[str]) -> set[str]:
        found: set[str] = set()
        wanted = list(ids)
        for start in range(0, len(wanted), AT_ONCE):
            some = wanted[start : start + AT_ONCE]
            marks = ", ".join("?" * len(some))
            statement = f"SELECT id FROM registrations WHERE id IN ({marks})"  # noqa: S608  # marks only
            found.update(await self._db.all(statement, tuple(some), lambda row: str(row[0])))
        return found

    async def count(self, tenant: str) -> int:
        row = await self._db.one("SELECT count(*) FROM registrations WHERE tenant = ?", (tenant,))
        return 0 if row is None else int(row[0])

    async def idle(self, tenant: str, never_since: float, since: float, limit: int) -> list[Registered]:
        never = await self._all(
            f"WHERE tenant = ? AND {SEEN} = 0.0 AND {CREATED} < ? ORDER BY {CREATED} LIMIT ?",
            *(tenant, never_since, limit),
        )
        away = await self._all(
            f"WHERE tenant = ? AND {SEEN} > 0.0 AND {SEEN} < ? ORDER BY {SEEN} LIMIT ?",
            *(tenant, since, limit),
        )
        return sorted(never + away, key=lambda found: found.seen or found.created)[:limit]

    async def touch(self, found: Sequence[Registered], now: float) -> None:
        def work(db: sqlite3.Connection) -> None:
            for old in found:
                _replace(db, msgspec.structs.replace(old, seen=now), old)

        await self._db.transact(work)

    # The rest ------------------------------------------------------------------------------------

    async def use_once(self, nonce: str, until: float) -> bool:
        now = self.clock()
        if now - self.forgotten_until > FORGET_SECONDS:
            await self._db.transact(lambda db: _forget(db, now))
            self.forgotten_until = now
        if until < self.forgotten_until:
            return False
        return await self._db.change("INSERT OR IGNORE INTO used VALUES (?, ?)", (nonce, until)) == 1

    async def was_edited(self) -> bool:
        row = await self._db.one("PRAGMA data_version")
        before, self._version = self._version, None if row is None else int(row[0])
        return before is not None and before != self._version

    async def check(self) -> None:
        # A file system without room shows only when something is written.
        await self._db.change("INSERT OR REPLACE INTO used VALUES ('check', ?)", (self.clock(),))

    async def close(self) -> None:
        self._db.close()


def _replace(db: sqlite3.Connection, new: Registered, old: Registered) -> bool:
    row = db.execute("SELECT content FROM registrations WHERE id = ?", (old.id,)).fetchone()
    if row is None or _registered(row) != old:
        return False
    values = (new.id, msgspec.json.encode(new), old.id)
    return db.execute("UPDATE registrations SET id = ?, content = ? WHERE id = ?", values).rowcount == 1


def _forget(db: sqlite3.Connection, now: float) -> None:
    """What has expired. That this was done is kept, for a clock that is set back."""
    db.execute("DELETE FROM used WHERE until < ?", (now,))
    db.execute("INSERT OR REPLACE INTO secrets VALUES ('forgotten', ?)", (str(now).encode(),))


def _add_columns(db: sqlite3.Connection) -> None:
    """What an earlier version has made lacks them. Others may add them at the same time."""
    there = {name for _, name, *_ in db.execute("PRAGMA table_info(keys)")}
    for column in ADDED_COLUMNS:
        if column.split()[0] not in there:
            try:
                db.execute(f"ALTER TABLE keys ADD COLUMN {column}")
            except sqlite3.OperationalError as error:
                if "duplicate column" not in str(error):
                    raise


def _registered(row: tuple[Any, ...]) -> Registered:
    return msgspec.json.decode(row[0], type=Registered)


def _key(row: tuple[Any, ...]) -> ApiKey:
    name, tenant, role, digest, created, revoked, environments, expires = row
    only = () if environments is None else msgspec.json.decode(environments, type=tuple[str, ...])
    return ApiKey(name, tenant, role, bytes(digest), created, revoked, only, expires)
