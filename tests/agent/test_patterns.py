"""Ways to work with a machine that is not this one, as docs/exec.md describes them: each for real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exec_server.agent.runner import Runner
from exec_server.environments.config import Configuration
from exec_server.environments.connect import connect
from exec_server.environments.environment import Environment
from exec_server.environments.handle import Handle
from exec_server.environments.manager import EnvironmentManager
from exec_server.testing.faults import Faults
from support.agent import Played, play
from support.model_server import Play, Say, call
from support.server import RunningServer
from support.wait import eventually_async

NOTHING_HERE = Configuration(default=None, include_local=False)


def on(server: RunningServer, folder: Path, *script: Play, **options: Any) -> Played:
    """An agent whose one machine is a server's."""
    faults: Faults | None = options.pop("faults", None)

    async def opened() -> Environment:
        return await connect(server.url, wrap_dialer=faults.wrap if faults is not None else None)

    def manage(manager: EnvironmentManager) -> None:
        manager.replace(Handle("machine", opened))

    settings = {"environment_ids": ("machine",), "configuration": NOTHING_HERE, "manage": manage, **options}
    return play(folder, *script, **settings)


class Told:
    """Counts what is told. The third line is that a command was started; its own traces may overtake that."""

    def __init__(self) -> None:
        self.lines = 0

    def __call__(self, _: Runner, lines: int) -> None:
        self.lines = lines

    async def begin(self) -> None:
        await eventually_async(lambda: self.lines >= 3, "the command to be told")


def run(cmd: str) -> Say:
    return Say([call("exec_command", {"cmd": cmd, "login": False, "yield_time_ms": 30_000})])


def test_steps_of_a_pipeline_share_one_server(server: RunningServer, tmp_path: Path) -> None:
    """Each is a process and a thread of its own; what one has built is there for the next."""
    build = on(server, tmp_path, run("echo built > artifact"), "Built.")
    check = on(server, tmp_path, run("cat artifact"), "Checked.")
    assert build.thread_id != check.thread_id
    assert check.items("command_execution")[0]["aggregated_output"] == "built\n"


def test_a_laptop_that_sleeps(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    """The connection goes and comes back; the command has gone on, and nothing of it is lost."""
    faults = Faults()
    work = tmp_path / "work"
    told = Told()

    async def sleep_and_wake(_: Runner, __: EnvironmentManager) -> None:
        await told.begin()
        faults.refuse()
        faults.cut()
        (work / "asleep").touch()
        await eventually_async((work / "went-on").exists, "the command to go on meanwhile")
        faults.allow()

    wait = "until [ -e asleep ]; do sleep 0.02; done; echo went on; touch went-on; sleep 0.3; echo end"
    options = {"faults": faults, "during": sleep_and_wake, "on_event": told}
    done = on(start_server(), tmp_path, run(wait), "Slept well.", **options)
    (command,) = done.items("command_execution")
    assert (command["aggregated_output"], command["exit_code"]) == ("went on\nend\n", 0)
    notices = [event["message"] for event in done.events if event["type"] == "error"]
    assert notices == ["Reconnecting... 1/1 (the connection to environment `machine` was lost)"]
    assert faults.cuts == 1
    assert done.outcome.answer == "Slept well."


def test_a_machine_that_does_not_come_back(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    """The command is told as lost, and the model is told, too: it may know what to do."""
    server = start_server()
    told = Told()

    async def pull_the_plug(_: Runner, __: EnvironmentManager) -> None:
        await told.begin()
        server.process.kill()

    async def opened() -> Environment:
        return await connect(server.url, recovery_timeout=0.3)

    def manage(manager: EnvironmentManager) -> None:
        manager.replace(Handle("machine", opened))

    done = play(
        tmp_path,
        run("sleep 1000"),
        "It is gone.",
        environment_ids=("machine",),
        configuration=NOTHING_HERE,
        manage=manage,
        during=pull_the_plug,
        on_event=told,
    )
    (command,) = done.items("command_execution")
    assert command["status"] == "failed"
    assert command["exit_code"] in (-1, None)
    assert done.output().startswith("exec_command failed: Unified exec process failed: ")
    assert done.outcome.answer == "It is gone."


def test_an_agent_works_and_a_person_watches(server: RunningServer, tmp_path: Path) -> None:
    """Two clients of one server: the other sees the command and the files, and can take part."""
    work = tmp_path / "work"
    seen: list[list[str]] = []

    async def watch(_: Runner, __: EnvironmentManager) -> None:
        async with connect(server.url) as person:
            await eventually_async((work / "question").exists, "the question")
            seen.extend(one.argv for one in await person.list(everybody=True))
            asked = (await person.files.read(str(work / "question"))).decode()
            await person.files.write(str(work / "answer"), f"{asked.strip()} yes\n".encode())

    ask = "echo sure? > question; until [ -s answer ]; do sleep 0.02; done; cat answer"
    done = on(server, tmp_path, run(ask), "They are sure.", during=watch)
    assert any("question" in " ".join(argv) for argv in seen)
    assert done.items("command_execution")[0]["aggregated_output"] == "sure? yes\n"


def test_both_at_once(server: RunningServer, tmp_path: Path) -> None:
    """Two agents on one machine wait for each other: neither could if they took turns."""

    async def both() -> tuple[Played, Played]:
        def one(name: str, other: str) -> Played:
            meet = f"touch {tmp_path}/{name}; until [ -e {tmp_path}/{other} ]; do sleep 0.02; done; echo met"
            (tmp_path / f"of-{name}").mkdir()
            return on(server, tmp_path / f"of-{name}", run(meet), "Met.")

        return await asyncio.gather(asyncio.to_thread(one, "a", "b"), asyncio.to_thread(one, "b", "a"))

    for done in asyncio.run(both()):
        assert done.items("command_execution")[0]["aggregated_output"] == "met\n"
