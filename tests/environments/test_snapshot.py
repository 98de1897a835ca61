"""Steps and turns: the scenarios R1 to R14, R24, R29 to R34, and no interleaving that mixes two handles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.client.client import ConnectOptions
from exec_server.client.errors import ProtocolError
from exec_server.environments.config import Configuration
from exec_server.environments.connect import connect
from exec_server.environments.environment import Environment
from exec_server.environments.handle import Handle
from exec_server.environments.manager import EnvironmentManager
from exec_server.environments.readiness import Readiness
from exec_server.environments.roots import ResolvedRoot, SelectedRoot
from exec_server.environments.snapshot import (
    ReadyEnvironment,
    Selection,
    StartingEnvironment,
    Step,
    ThreadEnvironments,
    capture,
)
from exec_server.services import Shell
from exec_server.testing.faults import Faults
from support.openers import Gate, settle
from support.scripted_server import ScriptedServer
from support.server import RunningServer
from support.wait import eventually_async

P = SelectedRoot.select("plugin@1", "worker", "/plugins/demo")
Q = SelectedRoot.select("q", "other", "/q")
REFUSED = ConnectionRefusedError("connection refused")
WORKER = Selection("worker")


def run(scenario: Callable[[EnvironmentManager], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            async with EnvironmentManager(Configuration(default=None, include_local=False)) as manager:
                await scenario(manager)

    asyncio.run(main())


def add(manager: EnvironmentManager, name: str = "worker", **options: Any) -> tuple[Handle, Gate]:
    """What `environment/add` does: a fresh handle under the id, connecting at once unless it is lazy."""
    gate = Gate()
    handle = Handle(name, gate, **options)
    manager.replace(handle)
    return handle, gate


async def ready(manager: EnvironmentManager, name: str = "worker") -> Handle:
    handle, gate = add(manager, name)
    await settle()
    await gate.open()
    return handle


def pairs(resolved: list[ResolvedRoot[Handle]]) -> list[tuple[SelectedRoot, Handle]]:
    return [(entry.root, entry.handle) for entry in resolved]


def selections(step: Step) -> list[Selection]:
    return [entry.selection for entry in step.environments]


# Resolution --------------------------------------------------------------------------------------


def test_r1_what_was_starting_is_not_in_the_step() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        _, gate = add(manager)
        step = await capture(manager, ["worker"])
        assert step.captured == {"worker": None}
        assert await step.resolve_roots(manager, [P]) == []
        # It stays so for the whole step, even when the handle becomes ready meanwhile.
        await gate.open()
        assert await step.resolve_roots(manager, [P]) == []
        assert gate.attempts == 1

    run(scenario)


def test_r2_to_r4_a_step_is_pinned_to_the_handle_it_captured() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        a = await ready(manager)
        step = await capture(manager, ["worker"])
        assert step.captured == {"worker": a}
        assert pairs(await step.resolve_roots(manager, [P])) == [(P, a)]
        b, gate = add(manager)
        assert manager.get_environment("worker") is b
        assert pairs(await step.resolve_roots(manager, [P])) == [(P, a)]
        await settle()
        assert (b.state, gate.attempts) == (Readiness.STARTING, 1)

    run(scenario)


def test_r6_what_nobody_knows_is_left_out() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        assert await Step(()).resolve_roots(manager, [P]) == []

    run(scenario)


def test_r7_to_r9_a_lazy_environment_is_asked_to_start_once() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        handle, gate = add(manager, lazy=True)
        second = SelectedRoot.select("plugin@2", "worker", "/plugins/more")
        await settle()
        assert gate.attempts == 0
        for _ in range(3):
            assert await Step(()).resolve_roots(manager, [P, second]) == []
            await settle()
        assert gate.attempts == 1
        await gate.open()
        assert pairs(await Step(()).resolve_roots(manager, [P, second])) == [(P, handle), (second, handle)]

    run(scenario)


def test_r10_one_that_failed_for_good() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        _, gate = add(manager, reconnects=False)
        await settle()
        await gate.fail(REFUSED)
        assert await Step(()).resolve_roots(manager, [P]) == []
        assert gate.attempts == 1

    run(scenario)


def test_r11_one_that_failed_for_now_is_tried_once_more() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        handle, gate = add(manager)
        await settle()
        await gate.fail(REFUSED)
        resolving = asyncio.ensure_future(Step(()).resolve_roots(manager, [P]))
        await settle()
        assert gate.attempts == 2
        await gate.open()
        assert pairs(await resolving) == [(P, handle)]
        # And if it fails again, it is left out.
        other, gate = add(manager)
        await settle()
        await gate.fail(REFUSED)
        resolving = asyncio.ensure_future(Step(()).resolve_roots(manager, [P]))
        await settle()
        await gate.fail(REFUSED)
        assert await resolving == []
        assert other.state is Readiness.UNREACHABLE

    run(scenario)


def test_r12_one_failure_is_nobody_elses() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        handle = await ready(manager)
        _, gate = add(manager, "other", reconnects=False)
        await settle()
        await gate.fail(REFUSED)
        step = await capture(manager, ["worker"])
        assert pairs(await step.resolve_roots(manager, [Q, P])) == [(P, handle)]

    run(scenario)


def test_r13_the_order_is_kept() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        worker, other = await ready(manager), await ready(manager, "other")
        missing = SelectedRoot.select("x", "missing", "/x")
        assert pairs(await Step(()).resolve_roots(manager, [Q, missing, P])) == [(Q, other), (P, worker)]

    run(scenario)


def test_r14_nothing_is_read_by_any_of_it() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        server = ScriptedServer({"initialize": lambda *_: {"sessionId": "s", "environmentInfo": {}}})
        manager.replace(Handle("worker", lambda: _scripted(server)))
        step = await capture(manager, ["worker"], wait=True)
        assert len(await step.resolve_roots(manager, [P])) == 1
        assert len(await Step(()).resolve_roots(manager, [P])) == 1
        assert manager.inspect_selected_capability_roots([P])[1] == []
        assert [message["method"] for message in server.received] == ["initialize", "initialized"]

    run(scenario)


async def _scripted(server: ScriptedServer) -> Environment:
    environment = Environment(ConnectOptions(), "scripted", remote=True)
    await environment.open(server.dial)
    return environment


def test_one_that_hangs_delays_nobody_who_does_not_need_it() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        add(manager, "other")
        handle = await ready(manager)
        assert pairs(await Step(()).resolve_roots(manager, [Q, P])) == [(P, handle)]

    run(scenario)


# Steps -------------------------------------------------------------------------------------------


def test_a_step_says_what_there_is() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        add(manager, "slow")
        handle = await ready(manager)
        failed, gate = add(manager, "failed")
        await settle()
        await gate.fail(ProtocolError("nonsense"))
        step = await capture(manager, ["slow", "worker", "failed", "nobody", "worker"])
        assert selections(step) == [Selection("slow"), WORKER]
        starting, there = step.environments
        assert isinstance(starting, StartingEnvironment)
        assert isinstance(there, ReadyEnvironment)
        assert (there.handle, step.primary, step.ready) == (handle, there, [there])
        assert isinstance(there.shell, Shell)
        assert step.captured == {"slow": None, "worker": handle}
        assert failed.state is Readiness.FAILED
        with pytest.raises(TypeError):
            step.captured["worker"] = None  # type: ignore[index]
        assert Step(()).primary is None

    run(scenario)


def test_waiting_lets_everybody_have_their_say() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        a, first = add(manager)
        b, second = add(manager, "other")
        add(manager, "failed")[1]
        capturing = asyncio.ensure_future(capture(manager, ["worker", "other"], wait=True))
        await settle()
        await first.open()
        assert not capturing.done()
        await second.fail(REFUSED)
        step = await capturing
        assert step.captured == {"worker": a}
        assert b.state is Readiness.UNREACHABLE

    run(scenario)


def test_this_machine_is_ready_without_being_started(tmp_path: Path) -> None:
    async def main() -> None:
        async with EnvironmentManager() as manager:
            step = await capture(manager, ["local"])
            assert step.primary is not None
            assert step.primary.handle is manager.try_local_environment()
            assert step.primary.shell is not None
            assert step.primary.handle.state is Readiness.NOT_STARTED
            selected = SelectedRoot.select("r", "local", str(tmp_path))
            (resolved,) = await step.resolve_roots(manager, [selected])
            machine = await resolved.handle.environment()
            assert await machine.files.exists(str(tmp_path))

    asyncio.run(main())


def test_r24_one_turn_of_a_thread() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        a, gate = add(manager)
        turn = ThreadEnvironments(manager).begin_turn([WORKER])
        first = await turn.capture(wait=False)
        assert await first.resolve_roots(manager, [P]) == []
        await gate.open()
        second = await turn.capture(wait=False)
        assert pairs(await second.resolve_roots(manager, [P])) == [(P, a)]
        await ready(manager)
        assert pairs(await second.resolve_roots(manager, [P])) == [(P, a)]
        third = await turn.capture(wait=False)
        assert pairs(await third.resolve_roots(manager, [P])) == [(P, a)]
        assert await first.resolve_roots(manager, [P]) == []

    run(scenario)


def test_r24_bare_steps_take_what_is_registered() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        a, gate = add(manager)
        first = await capture(manager, ["worker"])
        await gate.open()
        second = await capture(manager, ["worker"])
        b, gate = add(manager)
        third = await capture(manager, ["worker"])
        await gate.open()
        fourth = await capture(manager, ["worker"])
        steps = [await step.resolve_roots(manager, [P]) for step in (first, second, third, fourth)]
        assert [pairs(step) for step in steps] == [[], [(P, a)], [], [(P, b)]]

    run(scenario)


def test_r5_a_changed_selection_gets_the_handle_of_now() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        thread = ThreadEnvironments(manager)
        a = await ready(manager)
        assert (await thread.begin_turn([WORKER]).capture()).captured == {"worker": a}
        b = await ready(manager)
        # The same selection keeps the way it had; another one, or one that failed, looks again.
        assert (await thread.begin_turn([WORKER]).capture()).captured == {"worker": a}
        changed = Selection("worker", workspace_roots=("file:///w",))
        step = await thread.begin_turn([changed]).capture()
        assert step.captured == {"worker": b}
        assert pairs(await step.resolve_roots(manager, [P])) == [(P, b)]
        assert (await thread.begin_turn([WORKER]).capture()).captured == {"worker": b}

    run(scenario)


def test_what_failed_is_left_out_for_the_turn_and_looked_up_in_the_next() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        thread = ThreadEnvironments(manager)
        _, gate = add(manager, reconnects=False)
        turn = thread.begin_turn([WORKER])
        await settle()
        await gate.fail(REFUSED)
        assert (await turn.capture()).environments == ()
        b = await ready(manager)
        assert (await turn.capture()).environments == (), "a turn never picks up a newer handle"
        assert (await thread.begin_turn([WORKER]).capture()).captured == {"worker": b}

    run(scenario)


def test_a_verdict_is_final_for_the_turn() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        a, gate = add(manager)
        other, other_gate = add(manager, "other")
        turn = ThreadEnvironments(manager).begin_turn([WORKER, Selection("other")])
        await gate.open()
        await other_gate.fail(REFUSED)
        assert (await turn.capture(wait=False)).captured == {"worker": a}
        # What was ready and is lost is for its handle to bring back; what failed may come back without us.
        await gate.opened[0].close()
        assert a.state is Readiness.UNREACHABLE
        other.start()
        await other_gate.open()
        assert other.state is Readiness.READY
        step = await turn.capture(wait=False)
        assert step.captured == {"worker": a}
        assert step.ready[0].shell is not None, "and it is known what was known"

    run(scenario)


def test_a_selection_that_is_still_starting_stays_with_its_handle() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        thread = ThreadEnvironments(manager)
        a, gate = add(manager)
        thread.begin_turn([WORKER])
        await ready(manager)
        turn = thread.begin_turn([WORKER])
        assert (await turn.capture(wait=False)).captured == {"worker": None}
        await gate.open()
        assert (await turn.capture(wait=False)).captured == {"worker": a}

    run(scenario)


def test_a_thread_is_told_of_connections_from_its_selection_on() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        told: list[tuple[str, bool]] = []
        thread = ThreadEnvironments(manager, lambda name, connected: told.append((name, connected)))
        await ready(manager, "other")
        _, gate = add(manager)
        for _ in range(2):
            thread.begin_turn([WORKER, Selection("other")])
        assert told == [], "what is so already is not told"
        await gate.open()
        assert told == [("worker", True)]
        # A fresh handle is nobody's news, as long as the thread stays with the one it has.
        await ready(manager)
        thread.begin_turn([WORKER, Selection("other")])
        await gate.opened[0].close()
        assert told == [("worker", True), ("worker", False)]
        thread.begin_turn([Selection("other")])
        await ready(manager)
        thread.close()
        other = manager.get_environment("other")
        assert other is not None
        await other.close()
        assert len(told) == 2, "nor is what is not selected any more"

    run(scenario)


def test_r32_to_r34_roots_that_an_environment_reports() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        elsewhere = SelectedRoot.select(P.id, "worker", "/elsewhere")
        more = SelectedRoot.select("more", "worker", "/more")
        gate = Gate()
        handle = manager.report_ready("worker", [elsewhere, more], gate)
        assert handle is not None
        for by_thread, kept in ((False, P), (True, elsewhere)):
            selection = Selection("worker", configured_by_thread=by_thread)
            turn = ThreadEnvironments(manager).begin_turn([selection])
            await settle()
            await gate.open()
            step = await turn.capture()
            assert pairs(await step.resolve_roots(manager, [P])) == [(kept, handle), (more, handle)]
            assert pairs(await step.resolve_roots(manager, [])) == [(elsewhere, handle), (more, handle)]

    run(scenario)


# Looking without touching ------------------------------------------------------------------------


def test_r30_r31_inspecting_starts_nothing() -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        handle, gate = add(manager, lazy=True, reconnects=False)
        lost = SelectedRoot.select("lost", "nobody", "/x")
        gone = "selected capability root `lost` references unavailable environment `nobody`"
        assert manager.inspect_selected_capability_roots([P, lost, lost]) == ([], [gone, gone])
        await settle()
        assert gate.attempts == 0
        handle.start()
        await settle()
        assert manager.inspect_selected_capability_roots([P]) == ([], [])
        await gate.fail(REFUSED)
        second = SelectedRoot.select("p2", "worker", "/y")
        failed = "selected capability environment `worker` is unavailable: connection refused"
        assert manager.inspect_selected_capability_roots([P, second, lost]) == ([], [gone, failed])

    run(scenario)


def test_r29_a_repair_makes_a_root_disappear_for_a_while(server: RunningServer) -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        faults = Faults()

        async def opener() -> Environment:
            return await connect(server.url, wrap_dialer=faults.wrap)

        handle = Handle("worker", opener)
        manager.replace(handle)
        await handle.wait_until_ready()
        assert manager.inspect_selected_capability_roots([P]) == ([ResolvedRoot(P, handle)], [])
        faults.refuse()
        faults.cut()
        await eventually_async(lambda: not handle.connected, "the loss to be noticed")
        assert manager.inspect_selected_capability_roots([P]) == ([], [])
        faults.allow()
        await handle.wait_until_connected()
        assert manager.inspect_selected_capability_roots([P]) == ([ResolvedRoot(P, handle)], [])

    run(scenario)


# Every interleaving ------------------------------------------------------------------------------

NAMES = ("u", "v")
ROOTS = [
    SelectedRoot.select(f"{name}{number}", name, f"/{name}/{number}") for name in NAMES for number in "12"
]

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("open"), st.sampled_from(NAMES), st.integers(0, 3)),
        st.tuples(st.just("fail"), st.sampled_from(NAMES), st.integers(0, 3)),
        st.tuples(st.just("fail for good"), st.sampled_from(NAMES), st.integers(0, 3)),
        st.tuples(st.just("lose"), st.sampled_from(NAMES), st.integers(0, 3)),
        st.tuples(st.just("turn"), st.sampled_from(NAMES), st.integers(0, 1)),
        st.tuples(st.just("step"), st.just(""), st.just(0)),
        st.tuples(st.just("bare step"), st.just(""), st.just(0)),
        st.tuples(st.just("resolve"), st.just(""), st.integers(0, 5)),
        st.tuples(st.just("resolve at once"), st.just(""), st.integers(0, 5)),
    ),
    min_size=1,
    max_size=25,
)


class World:
    """A manager, a thread, and for every handle what has really happened to it."""

    def __init__(self, manager: EnvironmentManager) -> None:
        self.manager = manager
        self.thread = ThreadEnvironments(manager)
        self.turn = self.thread.begin_turn([])
        self.made: dict[str, list[tuple[Handle, Gate]]] = {name: [] for name in NAMES}
        self.steps: list[tuple[Step, dict[str, Handle | None]]] = []
        self.resolving: list[tuple[Step, asyncio.Future[list[ResolvedRoot[Handle]]]]] = []

    async def act(self, action: str, name: str, number: int) -> None:
        if action == "add":
            self.made[name].append(add(self.manager, name, lazy=bool(number)))
            return
        if action == "turn":
            cwds = {other: f"file:///{number if other == name else 0}" for other in NAMES}
            self.turn = self.thread.begin_turn([Selection(other, cwds[other]) for other in NAMES])
        elif action == "step":
            self.keep(await self.turn.capture(wait=False))
        elif action == "bare step":
            self.keep(await capture(self.manager, NAMES))
        elif action.startswith("resolve") and self.steps:
            step, _ = self.steps[number % len(self.steps)]
            self.resolving.append((step, asyncio.ensure_future(step.resolve_roots(self.manager, ROOTS))))
        elif name and self.made[name]:
            _, gate = self.made[name][number % len(self.made[name])]
            if action == "open":
                await gate.open()
            elif action == "fail":
                await gate.fail(REFUSED)
            elif action == "fail for good":
                await gate.fail(ProtocolError("nonsense"))
            elif action == "lose":
                for environment in gate.opened:
                    await environment.close()
        if action != "resolve at once":
            await settle()

    def keep(self, step: Step) -> None:
        for name, handle in step.captured.items():
            if handle is not None:
                assert self.was_ready(name, handle), "captured as ready, but it never was"
        self.steps.append((step, dict(step.captured)))

    def was_ready(self, name: str, handle: Handle) -> bool:
        """Whether this very handle has been attached to, ever: the gate it alone goes through knows."""
        (gate,) = [gate for other, gate in self.made[name] if other is handle]
        return bool(gate.opened)

    def check(self) -> None:
        for step, before in self.steps:
            assert dict(step.captured) == before, "a step changed"
        for step, future in self.resolving:
            if not future.done():
                continue
            resolved = future.result()
            assert [entry.root for entry in resolved] == [
                root for root in ROOTS if root in {entry.root for entry in resolved}
            ]
            for entry in resolved:
                name = entry.root.environment_id
                assert entry.handle.id == name
                assert self.was_ready(name, entry.handle), "`ready` of one handle with another"
                if name in step.captured:
                    assert entry.handle is step.captured[name], "not the handle that was captured"
            # All of an environment's roots or none of them.
            names = [entry.root.environment_id for entry in resolved]
            assert all(names.count(name) in (0, 2) for name in NAMES)


@settings(max_examples=300)
@given(ACTIONS)
def test_no_interleaving_pairs_one_handles_readiness_with_another(
    actions: list[tuple[str, str, int]],
) -> None:
    async def scenario(manager: EnvironmentManager) -> None:
        world = World(manager)
        for action, name, number in actions:
            await world.act(action, name, int(number))
            world.check()
        for handle, gate in [entry for made in world.made.values() for entry in made]:
            del handle
            await gate.open()
        await settle()
        world.check()
        for _, future in world.resolving:
            assert future.done(), "whoever resolves is answered"
        # Whatever has happened, one attempt at a time: nobody was started twice for the same thing.
        for made in world.made.values():
            for handle, gate in made:
                assert not gate.waiting or handle.state in (Readiness.STARTING, Readiness.RETRYING)

    run(scenario)
