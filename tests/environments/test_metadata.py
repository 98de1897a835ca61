"""What is known of roots: asked once, whatever happens to handles. R25 to R28, and chapter 2.7."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from exec_server.client.client import ConnectOptions
from exec_server.environments.connect import IN_PROCESS, connect
from exec_server.environments.environment import Environment
from exec_server.environments.handle import Handle
from exec_server.environments.metadata import MetadataCache
from exec_server.environments.roots import SelectedRoot
from exec_server.testing.faults import Faults
from exec_server.testing.still import StillLoop, until
from support.openers import Gate, settle
from support.scripted_server import ScriptedServer

DISCOVER = "capabilityRoots/discoverV1"
P = SelectedRoot.select("plugin@1", "worker", "/plugins/demo")
READ_ONLY = {"permissions": {"type": "managed"}}
FULL_ACCESS = {"permissions": {"type": "disabled"}}

Json = dict[str, Any]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(main())


def run_still(scenario: Callable[[StillLoop], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        await scenario(loop)

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(main())


def nothing_found(root: Json) -> Json:
    """The answer for an empty root."""
    empty: Json = {"plugin": None, "skills": [], "namespaceManifests": [], "warnings": [], "error": None}
    return {"id": root["id"], "path": root["path"], **empty}


class Machine:
    """A scripted server that discovers, and a handle to it."""

    def __init__(self, discover: Callable[[Json], Json | None] | None = None, *flags: str) -> None:
        info = {"capabilities": dict.fromkeys(flags, True)}
        self.server = ScriptedServer(
            {
                "initialize": lambda *_: {"sessionId": "s", "environmentInfo": info},
                DISCOVER: lambda _, params: (discover or self.discover)(params),
            }
        )
        self.faults = Faults()
        self.handle = Handle("worker", self._open)

    async def _open(self) -> Environment:
        environment = Environment(ConnectOptions(), "scripted", remote=True)
        await environment.open(self.faults.wrap(self.server.dial))
        return environment

    @staticmethod
    def discover(params: Json) -> Json:
        return {"roots": [nothing_found(root) for root in params["roots"]]}

    def __call__(self, name: str) -> Handle | None:
        return self.handle if name == "worker" else None

    @property
    def calls(self) -> list[Json]:
        return self.server.sent(DISCOVER)


def test_r25_a_real_machine_is_asked_once_whatever_its_handle(tmp_path: Path) -> None:
    (tmp_path / "skill").mkdir()
    (tmp_path / "skill" / "SKILL.md").write_text("---\nname: x\n---\n")
    root = SelectedRoot.select("r", "worker", str(tmp_path))

    async def opener() -> Environment:
        return await connect(IN_PROCESS)

    async def scenario() -> None:
        cache = MetadataCache()
        a, b = Handle("worker", opener), Handle("worker", Gate())
        (found,) = await cache.get([root], lambda _: a)
        assert found.error is None
        assert found.found is not None
        assert [skill.instructions.contents for skill in found.found.skills] == ["---\nname: x\n---\n"]
        # A fresh handle for the same id: nobody looks again, nobody even starts it.
        (again,) = await cache.get([root], lambda _: b)
        assert again is found
        assert not b.startup_finished()
        # Not even when there is no handle at all at this moment.
        assert await cache.get([root], lambda _: None) == [found]
        assert not cache.take_recovered(root)
        await a.close()

    run(scenario)


def test_r26_what_could_not_be_reached_is_asked_again_and_says_so_once() -> None:
    async def scenario() -> None:
        cache = MetadataCache()
        machine = Machine()
        machine.faults.refuse()
        (failed,) = await cache.get([P], machine)
        assert failed.found is None
        assert failed.error == "refused by a test"
        assert not cache.take_recovered(P)
        machine.faults.allow()
        (found,) = await cache.get([P], machine)
        assert found.error is None
        assert len(machine.calls) == 1
        assert cache.take_recovered(P)
        assert not cache.take_recovered(P)
        assert await cache.get([P], machine) == [found]
        assert len(machine.calls) == 1

    run(scenario)


def test_an_environment_that_is_missing_is_looked_for_again() -> None:
    async def scenario() -> None:
        cache = MetadataCache()
        (failed,) = await cache.get([P], lambda _: None)
        assert failed.error == "environment `worker` is unavailable"
        machine = Machine()
        (found,) = await cache.get([P], machine)
        assert found.error is None
        assert cache.take_recovered(P)

    run(scenario)


def test_r27_lost_during_the_call_and_back_in_two_seconds() -> None:
    async def scenario(loop: StillLoop) -> None:
        answers: list[Callable[[Json], Json | None]] = [lambda _: machine.faults.cut(), Machine.discover]
        machine = Machine(lambda params: answers.pop(0)(params))
        await machine.handle.environment()
        machine.faults.refuse()
        asking = asyncio.ensure_future(MetadataCache().get([P], machine))
        await until(lambda: machine.faults.refused == 1, "the first attempt to come back")
        for _ in range(20):
            loop.advance(0.1)
            await until(lambda: True)
        assert not asking.done()
        machine.faults.allow()
        loop.advance(0.1)
        (found,) = await asking
        assert found.error is None
        assert len(machine.calls) == 2

    run_still(scenario)


def test_lost_during_the_call_and_not_back_in_time_is_the_first_error() -> None:
    async def scenario(loop: StillLoop) -> None:
        machine = Machine(lambda _: machine.faults.cut())
        await machine.handle.environment()
        machine.faults.refuse()
        cache = MetadataCache()
        asking = asyncio.ensure_future(cache.get([P], machine))
        await until(lambda: machine.faults.refused == 1, "the first attempt to come back")
        loop.advance(7.9)
        await until(lambda: True)
        assert not asking.done()
        loop.advance(0.2)
        (failed,) = await asking
        assert "transport disconnected" in str(failed.error)
        assert len(machine.calls) == 1
        await machine.handle.close()

    run_still(scenario)


def test_r28_many_roots_go_in_batches_and_come_back_in_order() -> None:
    async def scenario() -> None:
        machine = Machine()
        roots = [SelectedRoot.select(f"r{number}", "worker", f"/{number}") for number in range(200)]
        found = await MetadataCache().get([*reversed(roots), roots[0]], machine)
        assert [entry.root for entry in found] == [*reversed(roots), roots[0]]
        assert [len(call["roots"]) for call in machine.calls] == [128, 72]
        assert machine.calls[0]["roots"][0] == {"id": "r199", "path": "file:///199", "sandbox": None}

    run(scenario)


def test_environments_are_asked_side_by_side() -> None:
    async def scenario() -> None:
        other = SelectedRoot.select("q", "stuck", "/q")
        stuck = Handle("stuck", Gate())
        machine = Machine()
        cache = MetadataCache()
        handles = {"stuck": stuck, "worker": machine.handle}
        asking = asyncio.ensure_future(cache.get([other, P], handles.get))
        await settle()
        assert len(machine.calls) == 1
        assert not asking.done()
        # And what is known already does not wait for what is not.
        assert (await cache.get([P], machine))[0].error is None
        asking.cancel()
        await settle()
        await stuck.close()

    run(scenario)


def test_those_who_ask_at_the_same_time_share_the_answer() -> None:
    async def scenario() -> None:
        machine = Machine()
        cache = MetadataCache()
        answers = await asyncio.gather(*(cache.get([P], machine) for _ in range(20)))
        assert len({id(answer[0]) for answer in answers}) == 1
        assert len(machine.calls) == 1

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([], "exec-server returned 0 capability roots for 1 requests"),
        (
            [nothing_found({"id": "x", "path": P.path})],
            "exec-server returned mismatched capability root `x` at file:///plugins/demo",
        ),
        (
            [nothing_found({"id": P.id, "path": "file:///y"})],
            "exec-server returned mismatched capability root `plugin@1` at file:///y",
        ),
    ],
)
def test_a_machine_that_answers_something_else(answer: list[Json], error: str) -> None:
    async def scenario() -> None:
        cache = MetadataCache()
        machine = Machine(lambda _: {"roots": answer})
        for _ in range(2):
            (failed,) = await cache.get([P], machine)
            assert (failed.found, failed.error) == (None, error)
        assert len(machine.calls) == 1, "that is what it is, and asking again does not help"

    run(scenario)


def test_a_root_the_machine_cannot_look_at_stays_that_way() -> None:
    async def scenario() -> None:
        cache = MetadataCache()
        text = "failed to inspect capability root file:///plugins/demo: No such file"
        machine = Machine(lambda params: {"roots": [{**nothing_found(params["roots"][0]), "error": text}]})
        for _ in range(2):
            (failed,) = await cache.get([P], machine)
            assert failed.error == text
        assert len(machine.calls) == 1

    run(scenario)


def test_another_sandbox_asks_again() -> None:
    async def scenario() -> None:
        cache = MetadataCache()
        machine = Machine(None, "capabilityDiscoverySandbox")
        for sandbox in (None, READ_ONLY, READ_ONLY, FULL_ACCESS):
            sandboxes = {} if sandbox is None else {"worker": sandbox}
            await cache.get([P], machine, sandboxes)
        assert [call["roots"][0]["sandbox"] for call in machine.calls] == [None, READ_ONLY, FULL_ACCESS]

    run(scenario)


def test_a_sandbox_that_cannot_be_enforced_sends_nothing() -> None:
    async def scenario() -> None:
        cache = MetadataCache()
        machine = Machine()
        (failed,) = await cache.get([P], machine, {"worker": READ_ONLY})
        assert failed.error == "exec-server does not support sandboxed capability discovery"
        assert machine.calls == []
        (found,) = await cache.get([P], machine, {"worker": FULL_ACCESS})
        assert found.error is None

    run(scenario)
