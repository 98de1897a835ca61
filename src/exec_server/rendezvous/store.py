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
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

import msgspec

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
    created REAL NOT NULL, revoked REAL
) STRICT;
CREATE TABLE IF NOT EXISTS registrations (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, environment TEXT NOT NULL, content BLOB NOT NULL,
    UNIQUE (tenant, environment)
) STRICT;
CREATE TABLE IF NOT EXISTS used (nonce TEXT PRIMARY KEY, until REAL NOT NULL) STRICT;
"""


class KeyExists(Exception):
    """There is a key of that name already."""


class StoreUnavailable(Exception):
    """What is remembered cannot be read or written; the text says where and why."""


class ApiKey(msgspec.Struct, frozen=True):
    """A key, without the key itself."""

    name: str
    tenant: str
    role: Role
    digest: bytes
    created: float
    revoked: float | None = None

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
    """When its environment connected last, more or less; 0 if it never has."""


class Store(Protocol):
    """What the service asks of whatever remembers."""

    async def signing_secret(self) -> bytes: ...
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
    async def count(self, tenant: str) -> int: ...
    async def use_once(self, nonce: str, until: float) -> bool:
        """True the first time; the nonce is forgotten after `until`."""

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
    """SQLite in one file, or in memory. Everything is one short statement, done in place."""

    def __init__(
        self, directory: str | None, clock: Callable[[], float] = time.time, *, must_exist: bool = False
    ) -> None:
        """`must_exist` is for those who only look: where there is nothing, nothing is made."""
        self._path = ":memory:"
        if directory is not None:
            self._path = os.path.join(directory, FILE_NAME)
            if not must_exist:
                os.makedirs(directory, 0o700, exist_ok=True)
            elif not os.path.exists(self._path):
                raise FileNotFoundError(errno.ENOENT, "no rendezvous has kept anything here", self._path)
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._clock = clock
        self._swept = 0.0
        self._version: int | None = None
        try:
            self._db = sqlite3.connect(self._path, timeout=10.0, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise self._unavailable(error) from None

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            raise self._unavailable(error) from None

    def _rows(self, statement: str) -> list[tuple[Any, ...]]:
        """All at once: a broken file may show only at a later row."""
        try:
            return self._db.execute(statement).fetchall()
        except sqlite3.Error as error:
            raise self._unavailable(error) from None

    def _unavailable(self, error: sqlite3.Error) -> StoreUnavailable:
        advice = ""
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            advice = "; restore it from a backup, or move it away and make the keys anew"
        return StoreUnavailable(f"the database {self._path} cannot be used: {error}{advice}")

    async def signing_secret(self) -> bytes:
        self._execute("INSERT OR IGNORE INTO secrets VALUES ('signing', ?)", (secrets.token_bytes(32),))
        (value,) = self._execute("SELECT value FROM secrets WHERE name = 'signing'").fetchone()
        return bytes(value)

    # Keys ----------------------------------------------------------------------------------------

    async def key(self, digest: bytes) -> ApiKey | None:
        row = self._execute("SELECT * FROM keys WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else _key(row)

    async def keys(self) -> list[ApiKey]:
        return [_key(row) for row in self._rows("SELECT * FROM keys ORDER BY created, name")]

    async def add_key(self, key: ApiKey) -> None:
        try:
            self._execute(
                "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?)",
                (key.name, key.tenant, key.role, key.digest, key.created, key.revoked),
            )
        except sqlite3.IntegrityError:
            raise KeyExists(key.name) from None

    async def revoke_key(self, name: str) -> bool:
        done = self._execute(
            "UPDATE keys SET revoked = ? WHERE name = ? AND revoked IS NULL", (self._clock(), name)
        )
        return done.rowcount == 1

    async def revoked(self) -> frozenset[str]:
        rows = self._rows("SELECT digest FROM keys WHERE revoked IS NOT NULL")
        return frozenset(bytes(digest).hex() for (digest,) in rows)

    # Registrations -------------------------------------------------------------------------------

    async def registration(self, tenant: str, environment: str) -> Registered | None:
        return self._one("tenant = ? AND environment = ?", tenant, environment)

    async def registration_by_id(self, registration_id: str) -> Registered | None:
        return self._one("id = ?", registration_id)

    def _one(self, where: str, *values: str) -> Registered | None:
        row = self._execute(f"SELECT content FROM registrations WHERE {where}", values).fetchone()  # noqa: S608  # constants of this file
        return None if row is None else msgspec.json.decode(row[0], type=Registered)

    async def put_registration(self, new: Registered, old: Registered | None) -> bool:
        content = msgspec.json.encode(new)
        if old is None:
            done = self._execute(
                "INSERT OR IGNORE INTO registrations VALUES (?, ?, ?, ?)",
                (new.id, new.tenant, new.environment, content),
            )
        else:
            done = self._execute(
                "UPDATE registrations SET id = ?, content = ? WHERE id = ?", (new.id, content, old.id)
            )
        return done.rowcount == 1

    async def remove_registration(self, old: Registered) -> bool:
        return self._execute("DELETE FROM registrations WHERE id = ?", (old.id,)).rowcount == 1

    async def registrations(self) -> list[Registered]:
        rows = self._rows("SELECT content FROM registrations ORDER BY tenant, environment")
        return [msgspec.json.decode(content, type=Registered) for (content,) in rows]

    async def count(self, tenant: str) -> int:
        (number,) = self._execute("SELECT count(*) FROM registrations WHERE tenant = ?", (tenant,)).fetchone()
        return int(number)

    async def use_once(self, nonce: str, until: float) -> bool:
        now = self._clock()
        if now - self._swept > 60.0:
            self._swept = now
            self._execute("DELETE FROM used WHERE until < ?", (now,))
        done = self._execute("INSERT OR IGNORE INTO used VALUES (?, ?)", (nonce, until))
        return done.rowcount == 1

    async def was_edited(self) -> bool:
        (version,) = self._execute("PRAGMA data_version").fetchone()
        before, self._version = self._version, version
        return before is not None and before != version

    async def check(self) -> None:
        # A file system without room shows only when something is written.
        self._execute("INSERT OR REPLACE INTO used VALUES ('check', ?)", (self._clock(),))

    async def close(self) -> None:
        self._db.close()


def _key(row: tuple[Any, ...]) -> ApiKey:
    name, tenant, role, digest, created, revoked = row
    return ApiKey(name, tenant, role, bytes(digest), created, revoked)
