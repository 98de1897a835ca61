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


def test_what_a_user_has_for_every_agent(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    for place, text in {
        "tidy": "---\nname: tidy\ndescription: Keeps things tidy.\n---\nSweep.\n",
        "deep/er": "---\ndescription: 'Digs.'\n---\n",
        "headless": "Says nothing of itself.",
        ".system/theirs": "---\nname: theirs\ndescription: For other tools.\n---\n",
    }.items():
        (home / "skills" / place).mkdir(parents=True)
        (home / "skills" / place / "SKILL.md").write_text(text)
    (home / "skills/deep/up").symlink_to("..")
    (home / "AGENTS.md").write_text("Be polite.\n")
    work.mkdir()
    (work / "AGENTS.md").write_text("Be kind.\n")
    said = play(tmp_path, "ok", home=str(home)).model.said_to()
    own = "# AGENTS.md instructions\n\n<INSTRUCTIONS>\nBe polite.\n</INSTRUCTIONS>"
    assert said.index(own) < said.index("Be kind.") < said.index("<environment_context>")
    assert f"- tidy: Keeps things tidy. (file: {home}/skills/tidy/SKILL.md)" in said
    assert f"- er: Digs. (file: {home}/skills/deep/er/SKILL.md)" in said
    assert said.count("SKILL.md") == 2

    (home / "AGENTS.override.md").write_text(" \n")
    assert "Be polite." in play(tmp_path, "ok", home=str(home)).model.said_to()
    (home / "AGENTS.override.md").write_text("Be brief.")
    said = play(tmp_path, "ok", home=str(home)).model.said_to()
    assert "Be brief." in said
    assert "Be polite." not in said


def test_skills_of_a_user_are_not_on_another_machine(tmp_path: Path, server: RunningServer) -> None:
    skill = tmp_path / "home/skills/tidy"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: tidy\ndescription: Keeps things tidy.\n---\n")
    (tmp_path / "home/AGENTS.md").write_text("Be polite.")
    far = NamedEnvironment("far", WebsocketTransport(url=server.url))
    there = Configuration(environments=(far,), include_local=False, default="far")
    done = play(tmp_path, "ok", configuration=there, environment_ids=("far",), home=str(tmp_path / "home"))
    assert "Be polite." in done.model.said_to()
    assert "tidy" not in done.model.said_to()


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
