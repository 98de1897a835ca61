"""The embedded store: keys, registrations, and what may be used only once."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from exec_server.rendezvous.store import ApiKey, EmbeddedStore, KeyExists, Registered, digest_of, new_secret


def registered(name: str = "env", number: str = "1", tenant: str = "t") -> Registered:
    return Registered(number, tenant, name, {"suite": "s"}, f"digest-{number}", 1.0)


def test_keys_are_kept_as_hashes(tmp_path: Path) -> None:
    async def main() -> None:
        store = EmbeddedStore(str(tmp_path / "new"))
        secret = new_secret()
        key = ApiKey("laptop", "me", "harness", digest_of(secret), 5.0)
        await store.add_key(key)
        with pytest.raises(KeyExists):
            await store.add_key(key)
        assert await store.key(digest_of(secret)) == key
        assert await store.key(digest_of("other")) is None
        assert await store.keys() == [key]
        await store.close()
        again = EmbeddedStore(str(tmp_path / "new"))
        assert await again.revoke_key("laptop")
        assert not await again.revoke_key("laptop")
        found = await again.key(digest_of(secret))
        assert found is not None
        assert found.revoked is not None
        await again.close()
        for file in (tmp_path / "new").iterdir():
            assert secret.encode() not in file.read_bytes()
        assert stat.S_IMODE((tmp_path / "new" / "rendezvous.sqlite3").stat().st_mode) == 0o600

    asyncio.run(main())


def test_a_key_added_by_another_process_counts_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        running, other = EmbeddedStore(str(tmp_path)), EmbeddedStore(str(tmp_path))
        await other.add_key(ApiKey("k", "t", "any", digest_of("secret"), 0.0))
        assert await running.key(digest_of("secret")) is not None
        await running.close()
        await other.close()

    asyncio.run(main())


def test_registrations_replace_only_what_they_have_seen() -> None:
    async def main() -> None:
        store = EmbeddedStore(None)
        first, second = registered(number="1"), registered(number="2")
        assert await store.put_registration(first, None)
        assert not await store.put_registration(second, None)
        assert await store.put_registration(second, first)
        assert not await store.put_registration(registered(number="3"), first)
        assert await store.registration("t", "env") == second
        assert await store.registration("other", "env") is None
        assert await store.registration_by_id("2") == second
        assert await store.registration_by_id("1") is None
        assert await store.put_registration(registered("env", "9", tenant="other"), None)
        assert (await store.count("t"), await store.count("nobody")) == (1, 0)
        assert [found.id for found in await store.registrations()] == ["9", "2"]
        await store.close()

    asyncio.run(main())


def test_once_is_once_until_it_is_forgotten() -> None:
    now = 1000.0

    async def main() -> None:
        nonlocal now
        store = EmbeddedStore(None, clock=lambda: now)
        assert await store.use_once("n", 1060.0)
        assert not await store.use_once("n", 1060.0)
        now = 1200.0
        assert await store.use_once("other", 1260.0)
        assert await store.use_once("n", 1260.0)  # swept: whatever carried it has long expired
        await store.close()

    asyncio.run(main())


def test_the_signing_secret_stays(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = EmbeddedStore(str(tmp_path)), EmbeddedStore(str(tmp_path))
        secret = await one.signing_secret()
        assert len(secret) == 32
        assert await two.signing_secret() == secret
        other = EmbeddedStore(None)
        assert await other.signing_secret() != secret
        await other.close()
        await one.close()
        await two.close()

    asyncio.run(main())


def test_a_file_of_an_earlier_version(tmp_path: Path) -> None:
    """Its keys are as good as they were, and new ones may have what it did not know of."""
    with closing(sqlite3.connect(tmp_path / "rendezvous.sqlite3")) as old:
        old.execute(
            "CREATE TABLE keys (name TEXT PRIMARY KEY, tenant TEXT NOT NULL, role TEXT NOT NULL,"
            " digest BLOB NOT NULL UNIQUE, created REAL NOT NULL, revoked REAL) STRICT"
        )
        old.execute("INSERT INTO keys VALUES ('old', 't', 'any', x'01', 1.0, NULL)")
        old.commit()

    async def main() -> None:
        bounded = ApiKey("new", "t", "any", b"2", 2.0, None, ("a", "b"), 9.0)
        for _ in range(2):
            store = EmbeddedStore(str(tmp_path))
            if len(await store.keys()) == 1:
                await store.add_key(bounded)
            assert await store.keys() == [ApiKey("old", "t", "any", b"\1", 1.0), bounded]
            await store.close()
        assert (bounded.is_good(8.9), bounded.is_good(9.0)) == (True, False)

    asyncio.run(main())
