"""A key that is revoked ends what it has begun: on this node and on others, at once and for good."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from exec_server.client.errors import SessionLost
from exec_server.client.recovery import State
from exec_server.relay import environment as environment_module
from exec_server.relay import harness as harness_module
from exec_server.relay.environment import RegistrationFailed
from exec_server.rendezvous import revocation
from exec_server.rendezvous.node import open_store
from exec_server.rendezvous.store import ApiKey, digest_of
from exec_server.transport.websocket import ConnectFailed
from relay.stage import KEY, Stage, stage
from support.wait import eventually_async

from .test_service import HARNESS, REGISTER, Registry, play

NAME = "t-any-" + KEY[-6:]
"""What `relay.stage` calls its key."""


@pytest.fixture
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what happens every second."""
    monkeypatch.setattr(revocation, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(environment_module, "FIRST_DELAY", 0.02)


def on_stage(tmp_path: Path, scenario: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(50), stage(tmp_path) as ready:
            await scenario(ready)

    asyncio.run(main())


async def revoke(data: Path, name: str) -> None:
    store = await open_store(str(data), None)
    assert await store.revoke_key(name)
    await store.close()


async def add(data: Path, name: str, secret: str) -> None:
    store = await open_store(str(data), None)
    await store.add_key(ApiKey(name, "t", "any", digest_of(secret), 0.0))
    await store.close()


@pytest.mark.usefixtures("attentive")
def test_an_environment_key_takes_its_machine_along(tmp_path: Path) -> None:
    """Also one that never asks the registry anything again, but has the URL of its socket."""

    async def scenario(registry: Registry) -> None:
        await registry.add_key("serves", "environment")
        await registry.add_key("uses", "harness")
        _, registered = await registry.call("register", REGISTER, "serves")
        socket = await registry.upgrade(registered["url"])
        status, bundle = await registry.call("connect", {"harness_public_key": HARNESS}, "uses")
        assert status == 200
        harness = await registry.upgrade(bundle["url"])
        await registry.revoke("serves")
        message = await socket.receive(timeout=20)
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1008)
        assert await registry.refused_upgrade(registered["url"]) == 401
        status, _ = await registry.call("connect", {"harness_public_key": HARNESS}, "uses")
        assert status == 409
        await harness.close()
        # The same machine with another key is welcome.
        status, again = await registry.call("register", REGISTER)
        assert status == 200
        socket = await registry.upgrade(again["url"])
        assert (await registry.call("connect", {"harness_public_key": HARNESS}, "uses"))[0] == 200
        await socket.close()

    play(tmp_path, scenario)


@pytest.mark.usefixtures("attentive")
def test_what_a_harness_key_was_given_is_worth_nothing_any_more(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        await registry.add_key("uses", "harness")
        _, registered = await registry.call("register", REGISTER)
        socket = await registry.upgrade(registered["url"])
        _, bundle = await registry.call("connect", {"harness_public_key": HARNESS}, "uses")
        _, used = await registry.call("connect", {"harness_public_key": HARNESS}, "uses")
        open_one = await registry.upgrade(used["url"])
        await registry.revoke("uses")
        message = await open_one.receive(timeout=20)
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1008)
        assert await registry.refused_upgrade(bundle["url"]) == 401
        question = {
            "executor_registration_id": registered["executor_registration_id"],
            "harness_public_key": HARNESS,
            "harness_key_authorization": bundle["harness_key_authorization"],
        }
        assert await registry.call("validate", question) == (200, {"valid": False})
        await socket.close()

    play(tmp_path, scenario)


@pytest.mark.usefixtures("attentive")
@pytest.mark.parametrize("acks", [True, False])
def test_open_streams_of_a_harness_key_are_cut_and_others_go_on(tmp_path: Path, acks: bool) -> None:
    async def scenario(stage: Stage) -> None:
        await add(tmp_path, "other", "esk_other")
        stage.start_environment()
        await stage.connected.wait()
        revoked = await stage.client(acks=acks, key="esk_other")
        kept = await stage.client(acks=acks)
        assert (await revoked.run(["echo", "hi"])).stdout == b"hi\n"
        await revoke(tmp_path, "other")
        router = stage.node.router
        assert router is not None
        await eventually_async(lambda: router.stream_count == 1, "the end of one stream")
        # It does not try for as long as it could.
        await eventually_async(lambda: revoked.state is State.FAILED, "the end of its session")
        with pytest.raises(SessionLost, match="unknown or was revoked"):
            await revoked.run(["echo", "hi"])
        with pytest.raises(ConnectFailed, match="401"):
            await stage.client(acks=acks, key="esk_other")
        assert (await kept.run(["echo", "still"])).stdout == b"still\n"
        await asyncio.gather(kept.close(), revoked.close())

    on_stage(tmp_path, scenario)


@pytest.mark.usefixtures("attentive")
def test_an_honest_environment_ends_and_says_why(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        task = stage.start_environment()
        await stage.connected.wait()
        await revoke(tmp_path, NAME)
        with pytest.raises(RegistrationFailed, match="unknown or was revoked"):
            await task

    on_stage(tmp_path, scenario)


def test_so_does_one_that_finds_out_because_of_a_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry that only refuses calls leaves the connection as it is."""
    monkeypatch.setattr(revocation, "LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(harness_module, "is_passing", lambda reason: False)

    async def scenario(stage: Stage) -> None:
        await add(tmp_path, "other", "esk_other")
        task = stage.start_environment()
        await stage.connected.wait()
        environment = stage.environment
        assert environment is not None
        registry = environment._registry
        ask = registry.validate

        async def ask_with_a_dead_key(*question: object) -> bool:
            await revoke(tmp_path, NAME)
            return await ask(*question)  # type: ignore[arg-type]  # as they are

        monkeypatch.setattr(registry, "validate", ask_with_a_dead_key)
        with pytest.raises(ConnectFailed, match="could not ask the registry"):
            await stage.client(key="esk_other")
        with pytest.raises(RegistrationFailed, match="unknown or was revoked"):
            await task

    on_stage(tmp_path, scenario)


@pytest.mark.usefixtures("attentive")
def test_an_environment_that_is_removed_is_cut_and_comes_back_as_a_new_one(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.start_environment()
        await stage.connected.wait()
        (before,) = await stage.node.registrations()
        store = await open_store(str(tmp_path), None)
        assert await store.remove_registration(before)
        await store.close()
        router = stage.node.router
        assert router is not None
        await eventually_async(
            lambda: router.online == 1 and not router.is_online(before.id), "another registration"
        )

    on_stage(tmp_path, scenario)
