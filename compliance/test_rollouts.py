"""Threads on disk, both ways: we go on with what codex wrote, and codex with what we wrote."""

from __future__ import annotations

from typing import Any

import pytest

from compliance.harness import Codex, Run
from compliance.model import exec_command
from exec_server.agent.history import turn_starts
from exec_server.agent.record import Record
from exec_server.agent.rollout import read_rollout
from exec_server.agent.thread import Thread, Threads
from exec_server.environments.roots import SelectedRoot

PLUGIN = SelectedRoot.select("plugin@1", "worker", "/plugins/demo")


@pytest.fixture
def threads(codex: Codex) -> Threads:
    """The threads in the reference's own home."""
    return Threads(str(codex.home))


def questions(history: list[Record]) -> list[str]:
    """What the user said, turn by turn."""
    return [history[place].payload["content"][0]["text"] for place in turn_starts(history)]


def told(run: Run) -> list[str]:
    """The conversation as the model was given it in its last request, without what the harness adds."""
    said = []
    for item in run.requests[-1]["input"]:
        if item.get("role") in ("user", "assistant"):
            text = "".join(part.get("text", "") for part in item["content"])
            if not text.startswith("<"):
                said.append(text)
    return said


def say(thread: Thread, role: str, text: str) -> None:
    content = [{"type": "input_text" if role == "user" else "output_text", "text": text}]
    thread.append("response_item", {"type": "message", "role": role, "content": content})


def test_we_read_what_codex_wrote(codex: Codex, threads: Threads) -> None:
    run = codex.run([exec_command("echo out; exit 3"), "first answer"], prompt="first question")
    (found,) = threads.list()
    assert found.id == run.thread_id
    assert found.meta.session_id == run.thread_id
    assert found.meta.source == "exec"
    assert found.meta.cwd
    assert found.meta.selected_capability_roots == []

    loaded = read_rollout(found.path)
    assert loaded.skipped == 0
    assert loaded.meta.paginated
    assert [record.ordinal for record in loaded.records] == list(range(len(loaded.records)))
    meta, history = threads.read(run.thread_id)
    assert meta.id == run.thread_id
    assert questions(history) == ["first question"]
    kinds = [record.payload.get("type") for record in history if record.type == "response_item"]
    assert kinds[-3:] == ["function_call", "function_call_output", "message"]
    (command,) = [
        record.payload["item"]
        for record in history
        if record.payload.get("type") == "item_completed"
        and record.payload["item"]["type"] == "CommandExecution"
    ]
    assert (command["exit_code"], command["aggregated_output"]) == (3, "out\n")


def test_we_read_what_codex_resumed_and_forked(codex: Codex, threads: Threads) -> None:
    first = codex.run(["answer 1"], prompt="question 1")
    codex.run(["answer 2"], prompt="question 2", subcommand=["resume", first.thread_id])
    fork = codex.run(["answer 3"], prompt="question 3", subcommand=["fork", first.thread_id])
    codex.run(["answer 4"], prompt="question 4", subcommand=["resume", first.thread_id])

    assert {summary.id for summary in threads.list()} == {first.thread_id, fork.thread_id}
    assert questions(threads.read(first.thread_id)[1]) == ["question 1", "question 2", "question 4"]
    meta, history = threads.read(fork.thread_id)
    assert meta.forked_from_id == first.thread_id
    assert meta.history_base is not None
    # The fork's file has only its own lines; what came before is where it says it is.
    assert questions(history) == ["question 1", "question 2", "question 3"]


def test_codex_goes_on_with_a_thread_that_we_started(codex: Codex, threads: Threads) -> None:
    with threads.start("/", roots=[PLUGIN], model_provider="scripted") as thread:
        turn: dict[str, Any] = {"turn_id": "t1"}
        thread.append("event_msg", {"type": "task_started", **turn, "model_context_window": None})
        say(thread, "user", "our question")
        say(thread, "assistant", "our answer")
        thread.append("event_msg", {"type": "task_complete", **turn, "last_agent_message": "our answer"})

    run = codex.run(["their answer"], prompt="their question", subcommand=["resume", thread.id])
    assert run.thread_id == thread.id
    assert told(run) == ["our question", "our answer", "their question"]
    # And the thread is ours again, with what codex added, its numbers and the selection.
    with threads.resume(thread.id) as resumed:
        assert resumed.roots == (PLUGIN,)
        assert questions(resumed.history()) == ["our question", "their question"]
    loaded = read_rollout(thread.path)
    assert [record.ordinal for record in loaded.records] == list(range(len(loaded.records)))

    fork = codex.run(["x"], prompt="in the fork", subcommand=["fork", thread.id])
    assert threads.read(fork.thread_id)[0].selected_capability_roots == [PLUGIN]


@pytest.mark.parametrize(
    ("turns", "known"),
    [
        (None, ["question 1", "answer 1", "question 2", "answer 2"]),
        (1, ["question 2", "answer 2"]),
    ],
)
def test_codex_goes_on_with_a_fork_that_we_made(
    codex: Codex, threads: Threads, turns: int | None, known: list[str]
) -> None:
    first = codex.run(["answer 1"], prompt="question 1")
    codex.run(["answer 2"], prompt="question 2", subcommand=["resume", first.thread_id])
    with threads.fork(first.thread_id, turns=turns) as child:
        assert child.id != first.thread_id
    run = codex.run(["answer 3"], prompt="question 3", subcommand=["resume", child.id])
    assert run.thread_id == child.id
    assert told(run) == [*known, "question 3"]
    assert questions(threads.read(child.id)[1])[-2:] == ["question 2", "question 3"]
    assert questions(threads.read(first.thread_id)[1]) == ["question 1", "question 2"]


def test_codex_goes_on_after_we_repaired_a_torn_line(codex: Codex, threads: Threads) -> None:
    first = codex.run(["answer 1"], prompt="question 1")
    path = threads.find(first.thread_id)
    assert path is not None
    with open(path, "ab") as file:
        file.write(b'{"timestamp":"2026-01-01T00:00:00.000Z","ordinal":99,"type":"response_item","payl')
    with threads.resume(first.thread_id) as thread:
        assert questions(thread.history()) == ["question 1"]
    run = codex.run(["answer 2"], prompt="question 2", subcommand=["resume", first.thread_id])
    assert told(run) == ["question 1", "answer 1", "question 2"]
    assert read_rollout(path).skipped == 0
