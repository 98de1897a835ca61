"""Commands of a model: by rule, by question, in a sandbox or out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from exec_server.agent.approvals import Question
from exec_server.agent.policy import Policy, Rule
from exec_server.agent.runner import Runner
from exec_server.environments.config import LOCAL_ID
from support.agent import play
from support.calls import run
from support.model_server import (
    Say,
)


def test_rules_and_questions(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    async def ask(question: Question) -> bool:
        asked.append((question.what, question.why))
        return "yes" in question.what

    policy = Policy(
        (Rule(("rm",), "forbid", "nothing is removed here"), Rule(("touch",), "ask", "it leaves a trace"))
    )
    calls = [run("rm -rf x"), run("touch yes", "call_2"), run("echo ok; touch no", "call_3")]
    done = play(tmp_path, Say(calls), "ok", policy=policy, approvals="on-request", ask=ask)
    by_command = {item["command"].partition("-lc ")[2]: item for item in done.items("command_execution")}
    assert by_command["'rm -rf x'"]["status"] == "declined"
    assert by_command["'rm -rf x'"]["exit_code"] is None
    assert "nothing is removed here" in by_command["'rm -rf x'"]["aggregated_output"]
    assert by_command["'touch yes'"]["status"] == "completed"
    assert by_command["'echo ok; touch no'"]["status"] == "declined"
    assert sorted(asked) == [("echo ok; touch no", "it leaves a trace"), ("touch yes", "it leaves a trace")]
    assert done.output() == "exec_command failed: rejected by the policy: nothing is removed here"
    assert done.output("call_3") == "exec_command failed: rejected by user"


@pytest.mark.parametrize("approvals", ["never", "on-request"])
def test_a_way_out_of_the_sandbox(tmp_path: Path, needs_bubblewrap: None, approvals: str) -> None:
    async def ask(question: Question) -> bool:
        return (question.what, question.why) == ("touch out", "because")

    wanted = {"sandbox_permissions": "require_escalated", "justification": "because"}
    calls = [run("touch in"), run("touch out", "call_2", **wanted)]
    done = play(tmp_path, Say(calls), "ok", mode="read-only", approvals=approvals, ask=ask)
    items = {item["command"].partition("-lc ")[2]: item for item in done.items("command_execution")}
    assert items["'touch in'"]["status"] == "failed"
    assert not (tmp_path / "work/in").exists()
    assert (tmp_path / "work/out").exists() == (approvals == "on-request")
    assert items["'touch out'"]["status"] == ("completed" if approvals == "on-request" else "declined")


# What is told ----------------------------------------------------------------------------------------------


def test_extras_of_a_command(tmp_path: Path) -> None:
    policy = Policy((Rule(("rm",), "forbid", "never"),))
    calls = [run("printf x%.0s $(seq 70000)"), run("rm x", "call_2")]
    done = play(tmp_path, Say(calls), "ok", ext=True, policy=policy)
    about = {
        (event["type"], event["item"]["command"].partition("-lc ")[2]): event["ext"]
        for event in done.events
        if event.get("item", {}).get("type") == "command_execution"
    }
    began = about["item.started", "'printf x%.0s $(seq 70000)'"]
    assert (began["cwd"], began["environment_id"]) == (f"{tmp_path}/work", LOCAL_ID)
    ended = about["item.completed", "'printf x%.0s $(seq 70000)'"]
    assert (ended["output_bytes"], ended["truncated"]) == (70_000, True)
    assert "never" in about["item.completed", "'rm x'"]["reason"]
    assert done.events[-1]["ext"]["turn_usage"]["input_tokens"] == 2400


def test_output_while_it_runs(tmp_path: Path) -> None:
    """Each part is waited for: the snapshot before the next is there, however slow the machine is."""

    def look(_: Runner, lines: int) -> None:
        if lines == 4:
            (tmp_path / "work/go").touch()

    cmd = "echo one; until [ -e go ]; do sleep 0.01; done; echo two"
    done = play(tmp_path, Say([run(cmd, login=False)]), "ok", live_output=True, on_event=look)
    seen = [event["item"]["aggregated_output"] for event in done.events if event["type"] == "item.updated"]
    assert seen[0] == "one\n"
    assert done.items("command_execution")[0]["aggregated_output"] == "one\ntwo\n"
