"""A database that others hold, delete or replace, and tenants that have many environments."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exec_server.rendezvous import node as node_module
from exec_server.rendezvous.store import FILE_NAME, EmbeddedStore, Registered

from .test_service import HARNESS, REGISTER, Registry, code, play


def registered(name: str, *, tenant: str = "t", created: float = 1.0, seen: float = 0.0) -> Registered:
    return Registered(f"id-{tenant}-{name}", tenant, name, {"suite": "s"}, "d", created, seen=seen)


async def longest_gap(until: asyncio.Event) -> float:
    """For how long the loop did nothing else."""
    loop = asyncio.get_running_loop()
    longest, last = 0.0, loop.time()
    while not until.is_set():
        await asyncio.sleep(0.005)
        longest, last = max(longest, loop.time() - last), loop.time()
    return longest


def test_a_locked_database_holds_up_only_what_has_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "STORE_PATIENCE", 0.8)

    async def scenario(registry: Registry) -> None:
        assert (await registry.call("register", REGISTER))[0] == 200
        done = asyncio.Event()
        watching = asyncio.ensure_future(longest_gap(done))
        with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            answers = await asyncio.gather(*(registry.get("/healthz") for _ in range(20)))
            assert {status for status, _ in answers} == {503}
            assert "locked" in answers[0][1]
            # Nobody waits again for what was found locked, and what is only read goes on.
            assert (await registry.call("register", REGISTER, environment="other"))[0] == 502
            assert (await registry.call("register", REGISTER))[0] == 200
            assert code(await registry.call("connect", {"harness_public_key": HARNESS}))[0] == 409
            other.execute("ROLLBACK")
        done.set()
        assert await watching < 0.6
        assert (await registry.call("register", REGISTER, environment="other"))[0] == 200

    play(tmp_path, scenario)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_database_that_is_gone_is_noticed(tmp_path: Path, replaced: bool) -> None:
    """A key revoked in the new one would not be in the old, so nothing is answered from that."""

    async def scenario(registry: Registry) -> None:
        assert (await registry.get("/healthz")) == (200, "ok")
        (tmp_path / FILE_NAME).rename(tmp_path / "away")
        if replaced:
            (tmp_path / FILE_NAME).write_bytes((tmp_path / "away").read_bytes())
        service = registry.node._service
        assert service is not None
        service.forget_health()
        status, text = await registry.get("/healthz")
        assert status == 503
        assert ("was replaced" if replaced else "was deleted") in text
        assert (await registry.call("connect", {"harness_public_key": HARNESS}))[0] == 503
        os.replace(tmp_path / "away", tmp_path / FILE_NAME)
        service.forget_health()
        assert (await registry.get("/healthz")) == (200, "ok")

    play(tmp_path, scenario)


def test_what_is_kept_is_on_the_disk_before_it_is_answered(tmp_path: Path) -> None:
    async def main() -> None:
        store = EmbeddedStore(str(tmp_path))
        assert await store._db.one("PRAGMA synchronous") == (2,), "FULL"
        await store.close()

    asyncio.run(main())


def test_a_tenant_that_is_full_costs_only_what_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a refusal nor a page reads what is of others, nor all that is its own."""

    async def scenario(registry: Registry) -> None:
        store: Any = registry.node._store
        for name in ("a", "b", "c"):
            assert (await registry.call("register", REGISTER, environment=name))[0] == 200

        async def all_of_them() -> list[Registered]:
            raise AssertionError("everything is read")

        monkeypatch.setattr(store, "registrations", all_of_them)
        assert code(await registry.call("register", REGISTER, environment="d")) == (403, "quota_exceeded")
        await registry.add_key("looks", "admin", "t")
        await registry.add_key("elsewhere", "admin", "other")
        assert (await registry.get("/admin/environments", "elsewhere"))[1] == '{"environments":[]}'
        status, text = await registry.get("/admin/environments?limit=2", "looks")
        page = msgspec.json.decode(text)
        assert [found["environment"] for found in page["environments"]] == ["a", "b"]
        status, text = await registry.get(f"/admin/environments?limit=2&after={page['next']}", "looks")
        assert [found["environment"] for found in msgspec.json.decode(text)["environments"]] == ["c"]
        assert "next" not in msgspec.json.decode(text)
        for wrong in ("limit=0", "limit=x", "limit=1001", "after=x"):
            status, _ = await registry.get(f"/admin/environments?{wrong}", "looks")
            assert status == 400

    play(tmp_path, scenario, environments_per_tenant=3)


def test_pages_and_who_has_been_away_for_longest(tmp_path: Path) -> None:
    async def main() -> None:
        store = EmbeddedStore(str(tmp_path))
        every = [
            registered("never", created=50.0),
            registered("never-later", created=95.0),
            registered("once", created=1.0, seen=20.0),
            registered("twice", created=1.0, seen=10.0),
            registered("lately", created=1.0, seen=99.0),
            registered("theirs", tenant="u", created=2.0),
        ]
        for one in every:
            assert await store.put_registration(one, None)
        names = sorted(one.environment for one in every[:5])
        assert [one.environment for one in await store.page("t", None, 3)] == names[:3]
        assert [one.environment for one in await store.page("t", ("t", names[2]), 3)] == names[3:]
        assert [one.environment for one in await store.page(None, ("t", "twice"), 3)] == ["theirs"]
        away = await store.idle("t", never_since=90.0, since=30.0, limit=10)
        assert [one.environment for one in away] == ["twice", "once", "never"]
        assert [one.environment for one in await store.idle("t", 90.0, 30.0, 1)] == ["twice"]
        await store.touch(away[:1], 100.0)
        assert [one.environment for one in await store.idle("t", 90.0, 30.0, 1)] == ["once"]
        found = await store.registration("t", "twice")
        assert found is not None
        assert found.seen == 100.0
        assert await store.current(["id-t-never", "nobody"]) == {"id-t-never"}
        await store.close()

    asyncio.run(main())


def test_environments_that_are_there_are_not_looked_at_again_and_again(tmp_path: Path) -> None:
    """They have connected long ago, so they are the first to be asked about; then they have been seen."""

    async def scenario(registry: Registry) -> None:
        _, answer = await registry.call("register", REGISTER)
        socket = await registry.upgrade(answer["url"])
        service, store = registry.node._service, registry.node._store
        assert service is not None
        assert store is not None
        now = service._clock() + 25 * 3600
        service._clock = lambda: now
        assert code(await registry.call("register", REGISTER, environment="d")) == (403, "quota_exceeded")
        assert await store.idle("t", now - 60, now - 24 * 3600, 10) == []
        await socket.close()

    play(tmp_path, scenario, environments_per_tenant=1)


def test_other_methods_and_when_to_ask_again(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        async def ask(method: str, path: str, key: str = "key") -> tuple[int, Any]:
            url, headers = registry.node.url + path, {"Authorization": f"Bearer {key}"}
            async with registry.session.request(method, url, headers=headers) as response:
                return response.status, response.headers

        for method, path, allowed in (
            ("GET", "/cloud/environment/e/register", "POST"),
            ("POST", "/healthz", "GET"),
            ("PUT", "/admin/environments", "GET"),
            ("GET", "/admin/environments/t/e", "DELETE"),
        ):
            status, headers = await ask(method, path)
            assert (status, headers["Allow"]) == (405, allowed)
        assert (await ask("GET", "/cloud/environment/e/nothing"))[0] == 404
        assert (await ask("POST", "/cloud/environment/e/connect"))[0] == 400
        status, headers = await ask("POST", "/cloud/environment/e/connect")
        assert (status, headers["Retry-After"]) == (429, "5")

    play(tmp_path, scenario, calls_per_second=0.2, calls_at_once=0.8)
