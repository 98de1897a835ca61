"""Environments that are announced before they can be reached: the table of chapter 1.7."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.environments.config import Configuration
from exec_server.environments.entries import ConfigurationError
from exec_server.environments.handle import Handle, ObservedStatus
from exec_server.environments.manager import EnvironmentManager
from exec_server.environments.provisioning import (
    MAX_REPORTED_ROOTS,
    EnvironmentUnavailable,
    Provision,
    Stage,
    check_roots,
)
from exec_server.environments.readiness import Readiness
from exec_server.environments.roots import SelectedRoot
from support.openers import Gate, settle

ROOT = SelectedRoot.select("r", "worker", "/plugins/demo")
OTHER = SelectedRoot.select("s", "worker", "/plugins/other")
BAD_ROOTS = "selected capability roots must have unique non-empty IDs and belong to environment `worker`"
TOO_MANY = "environment ready info contains more than 256 selected capability roots"


def run(scenario: Callable[[EnvironmentManager], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            async with EnvironmentManager(Configuration(default=None, include_local=False)) as manager:
                await scenario(manager)

    asyncio.run(main())


def test_announced_and_used_before_it_is_reported() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        gate = Gate()
        handle = manager.materialize_pending("worker", gate)
        assert manager.get_environment("worker") is handle
        assert manager.materialize_pending("worker", Gate()) is handle, "the first way to it stays"
        waiters = [asyncio.ensure_future(handle.environment()) for _ in range(3)]
        await settle()
        assert (handle.state, gate.attempts) == (Readiness.STARTING, 0)
        assert await handle.status() == ObservedStatus("pending")
        assert manager.report_ready("worker", [ROOT], Gate()) is handle
        await settle()
        assert gate.attempts == 1
        await gate.open()
        (machine,) = set(await asyncio.gather(*waiters))
        assert machine.session_id == gate.opened[0].session_id
        assert list(handle.selected_capability_roots()) == [ROOT]

    run(scenario)


def test_a_report_opens_no_connection() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        gate = Gate()
        handle = manager.report_ready("worker", [ROOT], gate)
        assert handle is not None
        manager.report_ready("worker", [OTHER], gate)
        await settle()
        assert (handle.state, gate.attempts) == (Readiness.NOT_STARTED, 0)
        assert list(handle.selected_capability_roots()) == [OTHER], "a later report replaces the roots"
        with pytest.raises(ConfigurationError) as caught:
            manager.report_failed("worker", "too late", gate)
        assert caught.value.reason == (
            "environment `worker` is already ready, but a later provisioning report failed: too late"
        )
        handle.start()
        await settle()
        await gate.open()
        assert handle.readiness() == "ready"

    run(scenario)


@pytest.mark.parametrize("announced", [True, False])
def test_one_that_will_not_come(announced: bool) -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        gate = Gate()
        pending = manager.materialize_pending("worker", gate) if announced else None
        handle = manager.report_failed("worker", "no machine left", gate)
        assert handle is not None
        assert pending is None or handle is pending
        assert manager.report_failed("worker", "another reason", gate) is handle
        with pytest.raises(ConfigurationError) as caught:
            manager.report_ready("worker", [], gate)
        assert caught.value.reason == "environment `worker` provisioning already failed: no machine left"
        for _ in range(2):
            with pytest.raises(EnvironmentUnavailable, match=r"^environment unavailable: no machine left$"):
                await handle.wait_until_ready()
        assert gate.attempts == 0
        assert isinstance(handle.readiness(), EnvironmentUnavailable)
        status = ObservedStatus("disconnected", "environment unavailable: no machine left")
        assert await handle.status() == status

    run(scenario)


def test_those_who_wait_are_told_that_it_will_not_come() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        gate = Gate()
        handle = manager.materialize_pending("worker", gate)
        waiters = [asyncio.ensure_future(handle.environment()) for _ in range(3)]
        await settle()
        manager.report_failed("worker", "no machine left", gate)
        errors = await asyncio.gather(*waiters, return_exceptions=True)
        assert [str(error) for error in errors] == ["environment unavailable: no machine left"] * 3
        assert (handle.state, gate.attempts) == (Readiness.FAILED, 0)

    run(scenario)


def test_ordinary_environments_are_left_alone() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        ordinary = Handle("worker", Gate())
        manager.replace(ordinary)
        with pytest.raises(ConfigurationError) as caught:
            manager.materialize_pending("worker", Gate())
        assert caught.value.reason == (
            "environment `worker` is already registered with a different provisioning mode"
        )
        assert manager.report_ready("worker", [ROOT], Gate()) is None
        assert manager.report_failed("worker", "why", Gate()) is None
        assert manager.get_environment("worker") is ordinary
        assert list(ordinary.selected_capability_roots()) == []

    run(scenario)


@pytest.mark.parametrize(
    ("roots", "message"),
    [
        ([SelectedRoot(" ", "worker", "file:///x")], BAD_ROOTS),
        ([ROOT, SelectedRoot("r", "worker", "file:///y")], BAD_ROOTS),
        ([SelectedRoot("r", "other", "file:///x")], BAD_ROOTS),
        ([SelectedRoot(f"r{number}", "worker", "file:///x") for number in range(257)], TOO_MANY),
    ],
)
def test_roots_that_no_report_may_have(roots: list[SelectedRoot], message: str) -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        with pytest.raises(ConfigurationError) as caught:
            manager.report_ready("worker", roots, Gate())
        assert caught.value.reason == message
        assert manager.get_environment("worker") is None, "what is wrong creates nothing"
        handle = manager.materialize_pending("worker", Gate())
        with pytest.raises(ConfigurationError):
            manager.report_ready("worker", roots, Gate())
        with pytest.raises(EnvironmentUnavailable) as unavailable:
            await handle.wait_until_ready()
        assert str(unavailable.value) == f"environment unavailable: {message}"

    run(scenario)


def test_bad_roots_do_not_fail_what_was_ready() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        handle = manager.report_ready("worker", [ROOT], Gate())
        with pytest.raises(ConfigurationError):
            manager.report_ready("worker", [ROOT, ROOT], Gate())
        assert handle is not None
        assert list(handle.selected_capability_roots()) == [ROOT]
        assert handle.state is Readiness.NOT_STARTED

    run(scenario)


def test_the_most_roots_a_report_may_have() -> None:
    check_roots("w", [SelectedRoot(f"r{number}", "w", "file:///x") for number in range(MAX_REPORTED_ROOTS)])


@given(st.lists(st.tuples(st.sampled_from([Stage.READY, Stage.FAILED]), st.text(max_size=5)), max_size=12))
def test_the_first_report_decides(reports: list[tuple[Stage, str]]) -> None:
    provision = Provision("worker")
    for stage, reason in reports:
        try:
            if stage is Stage.READY:
                provision.report_ready([ROOT])
            else:
                provision.report_failed(reason)
        except ConfigurationError:
            assert stage is not provision.stage
        else:
            assert stage is provision.stage
    assert provision.stage is (reports[0][0] if reports else Stage.PENDING)
    if provision.stage is Stage.FAILED:
        assert str(provision.error) == f"environment unavailable: {reports[0][1]}"
    else:
        assert provision.error is None
