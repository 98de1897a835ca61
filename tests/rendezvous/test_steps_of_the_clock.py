"""What was used once stays used, whatever is done to the clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from exec_server.rendezvous import node as node_module
from exec_server.rendezvous.clock import SteadyClock
from exec_server.rendezvous.store import EmbeddedStore

from .test_service import HARNESS, REGISTER, Registry, play


def test_a_used_url_is_used_also_after_the_clock_went_forward_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = 0.0

    class Stepped(SteadyClock):
        def __init__(self, at_least: float = 0.0) -> None:
            import time

            super().__init__(at_least, wall=lambda: time.time() + offset)

    monkeypatch.setattr(node_module, "SteadyClock", Stepped)

    async def scenario(registry: Registry) -> None:
        nonlocal offset
        _, registered = await registry.call("register", REGISTER)
        environment = await registry.upgrade(registered["url"])

        async def bundle() -> str:
            _, found = await registry.call("connect", {"harness_public_key": HARNESS})
            return str(found["url"])

        used = await bundle()
        assert await registry.refused_upgrade(used) == 101
        offset = 200.0
        assert await registry.refused_upgrade(await bundle()) == 101  # what has expired is forgotten here
        offset = 0.0
        assert await registry.refused_upgrade(used) == 401
        assert await registry.refused_upgrade(await bundle()) == 101
        offset = -100_000.0
        assert await registry.refused_upgrade(await bundle()) == 101
        await environment.close()

    play(tmp_path, scenario)


def test_nor_does_a_restart_make_it_good_again(tmp_path: Path) -> None:
    async def main() -> None:
        now = 1000.0
        store = EmbeddedStore(str(tmp_path), clock=lambda: now)
        assert await store.use_once("n", 1060.0)
        now = 1300.0
        assert await store.use_once("other", 1360.0)
        await store.close()
        now = 1010.0
        again = EmbeddedStore(str(tmp_path), clock=lambda: now)
        assert again.forgotten_until == 1300.0
        assert not await again.use_once("n", 1060.0)
        assert await again.use_once("new", 1370.0)
        await again.close()

    asyncio.run(main())
