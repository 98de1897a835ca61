"""What a step works with: environments that are there or not, roots, and what a project says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exec_server.agent.runner import Runner
from exec_server.agent.thread import Threads
from exec_server.environments.config import LOCAL_ID, Configuration, NamedEnvironment, WebsocketTransport
from exec_server.environments.manager import DISABLED_TEXT, EnvironmentManager
from exec_server.environments.roots import SelectedRoot
from support.agent import play
from support.calls import run
from support.model_server import (
    ModelServer,
    Play,
    Say,
)
from support.server import RunningServer


def test_no_environment_at_all(tmp_path: Path) -> None:
    nothing = Configuration(default=None, include_local=False)
    done = play(tmp_path, Say([run("ls")]), "ok", configuration=nothing, environment_ids=(), cwd=None)
    assert done.output() == DISABLED_TEXT
    assert "<environment_context>" not in done.model.said_to(0)


def test_an_environment_that_cannot_be_reached(tmp_path: Path) -> None:
    there = Configuration(
        environments=(NamedEnvironment("far", WebsocketTransport(url=f"unix://{tmp_path}/nobody")),),
        include_local=False,
        default="far",
    )
    done = play(tmp_path, Say([run("ls")]), "ok", configuration=there, environment_ids=("far",), cwd=None)
    assert done.output() == DISABLED_TEXT
    assert done.items("error")[0]["message"].startswith("environment `far` cannot be used: ")
    assert done.outcome.completed


def test_two_machines(tmp_path: Path, server: RunningServer) -> None:
    far = NamedEnvironment("far", WebsocketTransport(url=server.url))
    both = Configuration(environments=(far,), default=LOCAL_ID)
    calls = [run("echo $PPID"), run("tr '\\0' ' ' < /proc/$PPID/cmdline", "call_2", environment_id="far")]

    async def both_ready(_: Runner, manager: EnvironmentManager) -> None:
        await manager.handles["far"].wait_until_ready()

    def when_far_is_there(model: ModelServer) -> Play:
        """The tools name the second machine as soon as it is ready; perhaps not yet in the first step."""
        if "call_2" in model.outputs():
            return "ok"
        if "environment_id" in str(model.requests[-1]["tools"][0]):
            return Say(calls)
        return Say([run("true", f"call_{len(model.requests)}0", login=False)])

    done = play(
        tmp_path,
        when_far_is_there,
        configuration=both,
        environment_ids=(LOCAL_ID, "far"),
        during=both_ready,
    )
    assert "--listen" in done.output("call_2")
    assert done.outcome.answer == "ok"


def test_skills_of_selected_roots_are_shown(tmp_path: Path) -> None:
    skill = tmp_path / "root/skills/tidy"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: tidy\ndescription: Keeps things tidy.\n---\nSweep.\n")
    root = SelectedRoot.select("root@local", LOCAL_ID, str(tmp_path / "root"))

    def begin(threads: Threads) -> Any:
        return threads.start(str(tmp_path / "work"), roots=[root])

    first = play(tmp_path, "ok", thread=begin)
    assert f"- tidy: Keeps things tidy. (file: {skill}/SKILL.md, environment: local)" in first.model.said_to()
    again = play(tmp_path, "ok", thread=lambda threads: threads.resume(first.thread_id))
    assert "- tidy: " in again.model.said_to(), "the selection is part of the thread"


def test_what_a_project_says_to_agents(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "sub").mkdir(parents=True)
    (work / ".git").mkdir()
    (work / "AGENTS.md").write_text("Be kind.\n")
    (work / "sub/AGENTS.md").write_text("not this\n")
    (work / "sub/AGENTS.override.md").write_text("Be quick.\n")
    said = play(tmp_path, "ok", cwd=str(work / "sub")).model.said_to()
    assert said.index("Be kind.") < said.index("Be quick.") < said.index("<environment_context>")
    assert "not this" not in said
