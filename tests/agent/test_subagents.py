"""Agents that work for an agent: what a model can do with them, what is told of it, and how they end."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from exec_server.agent.thread import Threads
from exec_server.environments.config import LOCAL_ID
from exec_server.environments.roots import SelectedRoot
from support import streams
from support.agent import Played, play
from support.calls import run
from support.model_server import ModelServer, Play, Say, Status, call

NOBODY = "00000000-0000-7000-8000-000000000000"

Line = Callable[[ModelServer], Play] | Play


class Family:
    """A script for the parent, and what children say to what they are asked."""

    def __init__(self, parent: Sequence[Line], children: dict[str, Line]) -> None:
        self._parent = list(parent)
        self._children = children
        self._lock = threading.Lock()
        self.children: list[dict[str, Any]] = []
        """What was asked of the model by children."""

    def __call__(self, model: ModelServer) -> Play:
        with self._lock:
            asked = next((text for text in reversed(said_in(model.request)) if text in self._children), None)
            if asked is None:
                return self._parent.pop(0)
            self.children.append(model.request)
            return self._children[asked]


def said_in(request: dict[str, Any]) -> list[str]:
    """What users said in a request."""
    messages = [item for item in request["input"] if item.get("role") == "user"]
    return [part.get("text", "") for item in messages for part in item["content"]]


def agent(model: ModelServer, call_id: str = "call_1") -> str:
    """The id that a spawn was answered with."""
    return str(json.loads(model.outputs()[call_id])["agent_id"])


def told(model: ModelServer, call_id: str) -> Any:
    return json.loads(model.outputs()[call_id])


def spawn(prompt: str, call_id: str = "call_1", **more: Any) -> dict[str, Any]:
    return call("spawn_agent", {"message": prompt, **more}, call_id)


def wait(*targets: str, call_id: str = "call_2") -> dict[str, Any]:
    return call("wait_agent", {"targets": list(targets), "timeout_ms": 60_000}, call_id)


def with_family(folder: Path, family: Family, **options: Any) -> Played:
    return play(folder, family, agents=True, **options)


def shapes(events: Sequence[dict[str, Any]]) -> list[Any]:
    """The events about agents, with ids that are the same in every run."""
    text = json.dumps([event for event in events if event.get("item", {}).get("type") == "collab_tool_call"])
    names: dict[str, str] = {NOBODY: "nobody"}
    for found in re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", text):
        names.setdefault(found, f"agent {len(names)}")
    for found, name in names.items():
        text = text.replace(found, name)
    # The reference warns first, which takes an id.
    return json.loads(re.sub(r'"id": "item_\d+"', '"id": ""', text))


def test_the_stream_is_the_recorded_one(tmp_path: Path) -> None:
    family = Family(
        [
            Say([spawn("CHILD_TASK: count files")]),
            lambda model: Say([wait(agent(model))]),
            lambda model: Say(
                [call("send_input", {"target": agent(model), "message": "CHILD_TASK: again"}, "call_3")]
            ),
            lambda model: Say([wait(agent(model), call_id="call_4")]),
            lambda model: Say([call("close_agent", {"target": agent(model)}, "call_5")]),
            lambda model: Say([call("resume_agent", {"id": agent(model)}, "call_6")]),
            Say([call("close_agent", {"target": NOBODY}, "call_7")]),
            "Delegated.",
        ],
        {"CHILD_TASK: count files": "child: 3 files", "CHILD_TASK: again": "child: still 3"},
    )
    done = with_family(tmp_path, family)
    recorded = [json.loads(line) for line in streams.stream("collab_v1").split(b"\n") if line]
    assert shapes(done.events) == shapes(recorded)
    child = agent(done.model)
    assert told(done.model, "call_2") == {
        "status": {child: {"completed": "child: 3 files"}},
        "timed_out": False,
    }
    assert told(done.model, "call_5") == {"previous_status": {"completed": "child: still 3"}}
    assert told(done.model, "call_6") == {"status": "pending_init"}
    assert done.output("call_7") == f"agent with id {NOBODY} not found"
    assert done.events[-1]["usage"]["input_tokens"] == 8 * 1200, "what agents cost is not in it"
    said = done.model.said_to()
    assert said.count("<subagent_notification>") == 2
    assert [tool["name"] for tool in family.children[0]["tools"] if "agent" in tool["name"]] == []


def test_an_agent_works_on_the_same_machine_with_the_same_selection(tmp_path: Path) -> None:
    skill = tmp_path / "root/skills/tidy"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: tidy\ndescription: Keeps things tidy.\n---\nSweep.\n")
    root = SelectedRoot.select("root@local", LOCAL_ID, str(tmp_path / "root"))
    answers: list[Play] = [Say([run("echo by-the-child > made", "call_8")]), "Made it."]

    def child(_: ModelServer) -> Play:
        return answers.pop(0)

    family = Family(
        [Say([spawn("MAKE")]), lambda model: Say([wait(agent(model))]), "ok"],
        {"MAKE": child},
    )
    # The roots of a thread that is resumed with others than it had are those its agents get.
    first = play(tmp_path, "hello")
    done = with_family(tmp_path, family, thread=lambda threads: threads.resume(first.thread_id, roots=[root]))
    assert (tmp_path / "work/made").read_text() == "by-the-child\n"
    assert done.items("command_execution") == [], "what an agent does is its own stream"
    assert "- tidy: Keeps things tidy." in json.dumps(family.children[0]["input"])
    threads = Threads(str(done.home))
    meta, history = threads.read(agent(done.model))
    assert meta.selected_capability_roots == [root]
    assert meta.parent_thread_id == done.thread_id
    assert meta.source == "subagent"
    assert "hello" not in json.dumps([record.value for record in history])
    assert history[-1].payload["last_agent_message"] == "Made it."


def test_an_agent_that_knows_what_was_said(tmp_path: Path) -> None:
    family = Family(
        [
            Say([run("echo secret-of-a-call", "call_9")]),
            Say([spawn("GO ON", fork_context=True, model="other", reasoning_effort="low")]),
            lambda model: Say([wait(agent(model))]),
            "ok",
        ],
        {"GO ON": "I know."},
    )
    done = with_family(tmp_path, family, prompt="the great plan")
    (request,) = family.children
    assert "the great plan" in json.dumps(request["input"])
    assert "secret-of-a-call" not in json.dumps(request["input"])
    assert (request["model"], request["reasoning"]["effort"]) == ("other", "low")
    assert request["prompt_cache_key"] == agent(done.model)


def test_an_agent_that_fails(tmp_path: Path) -> None:
    family = Family(
        [
            Say([spawn("FAIL"), spawn("WELL", "call_3")]),
            lambda model: Say([wait(agent(model)), wait(agent(model, "call_3"), NOBODY, call_id="call_4")]),
            "ok",
        ],
        {"FAIL": Status(400, "broken child"), "WELL": "fine"},
    )
    done = with_family(tmp_path, family)
    failed, other = (item for item in done.items("collab_tool_call") if item["tool"] == "wait")
    if failed["receiver_thread_ids"] != [agent(done.model)]:
        failed, other = other, failed
    assert failed["status"] == "failed"
    assert failed["agents_states"] == {agent(done.model): {"status": "errored", "message": "broken child"}}
    assert other["status"] == "failed"
    assert other["agents_states"][NOBODY] == {"status": "not_found", "message": None}
    assert done.outcome.completed


def test_calls_about_agents_that_make_no_sense(tmp_path: Path) -> None:
    calls = [
        call("spawn_agent", {}, "call_1"),
        call("spawn_agent", {"message": " "}, "call_2"),
        call("spawn_agent", {"items": [{"type": "image"}]}, "call_3"),
        call("send_input", {"target": "nonsense", "message": "x"}, "call_4"),
        call("send_input", {"target": NOBODY, "message": "x"}, "call_5"),
        call("wait_agent", {"targets": []}, "call_6"),
        call("wait_agent", {"targets": "all"}, "call_7"),
        call("resume_agent", {"id": NOBODY}, "call_8"),
        call("spawn_agent", "{", "call_9"),
    ]
    done = with_family(tmp_path, Family([Say(calls), "ok"], {}))
    outputs = [done.output(f"call_{number}") for number in range(1, 10)]
    assert outputs[0] == "Provide one of: message or items"
    assert outputs[1] == "Empty message can't be sent to an agent"
    assert outputs[2] == "only items of type `text` can be sent to an agent"
    assert outputs[3] == "invalid agent id 'nonsense': it is none that spawn_agent returned"
    assert outputs[4] == f"agent with id {NOBODY} not found"
    assert outputs[5] == "agent ids must be non-empty"
    assert outputs[6].startswith("failed to parse function arguments: ")
    assert outputs[7].startswith(f"agent with id {NOBODY} not found: there is no thread")
    assert outputs[8].startswith("failed to parse function arguments: ")


def test_no_more_agents_than_there_may_be(tmp_path: Path) -> None:
    family = Family(
        [
            Say([spawn("ONE"), spawn("TWO", "call_2")]),
            lambda model: Say([call("close_agent", {"target": agent(model)}, "call_3")]),
            Say([spawn("TWO", "call_4")]),
            "ok",
        ],
        {"ONE": "1", "TWO": "2"},
    )
    done = with_family(tmp_path, family, max_agents=1)
    assert done.output("call_2").startswith("spawn_agent failed: there are 1 agents")
    assert "agent_id" in done.output("call_4")
    statuses = [item["status"] for item in done.items("collab_tool_call")]
    assert statuses == ["completed", "failed", "completed", "completed"]


@pytest.mark.parametrize("how", ["interrupt", "close", "end"])
def test_an_agent_that_is_stopped(tmp_path: Path, how: str) -> None:
    """A command of its own is ended with what it was doing, and nothing of it is left."""
    started = tmp_path / "work/pid"

    def child(request: dict[str, Any]) -> Play:
        if "STOP" in said_in(request):
            return "stopped"
        return Say([run("echo $$ > pid; exec sleep 1000", "call_8", login=False)])

    def parent(request: dict[str, Any], model: ModelServer) -> Play:
        answered = {item.get("call_id") for item in request["input"]}
        if "call_1" not in answered:
            return Say([spawn("WORK")])
        if not started.exists() or not started.read_text().strip():
            return Say([run("sleep 0.05", f"call_w{len(answered)}", login=False)])
        if how != "end" and "call_2" not in answered:
            words: dict[str, Any] = {"target": agent(model)}
            if how == "close":
                return Say([call("close_agent", words, "call_2")])
            return Say([call("send_input", {**words, "message": "STOP", "interrupt": True}, "call_2")])
        if how == "interrupt" and "call_3" not in answered:
            return Say([wait(agent(model), call_id="call_3")])
        return "ok"

    def script(model: ModelServer) -> Play:
        request = model.request
        return child(request) if "WORK" in said_in(request) else parent(request, model)

    done = play(tmp_path, script, agents=True)
    assert done.outcome.answer == "ok"
    pid = int(started.read_text())
    assert not Path(f"/proc/{pid}/exe").exists(), "nothing outlives its owner"
    if how == "interrupt":
        assert told(done.model, "call_3")["status"] == {agent(done.model): {"completed": "stopped"}}
    if how == "close":
        assert told(done.model, "call_2") == {"previous_status": "running"}


def test_the_newest_thread_is_not_an_agent_s(tmp_path: Path) -> None:
    family = Family([Say([spawn("X")]), lambda model: Say([wait(agent(model))]), "ok"], {"X": "x"})
    done = with_family(tmp_path, family)
    begun = [one.id for one in Threads(str(done.home)).list() if one.meta.parent_thread_id is None]
    assert begun == [done.thread_id]
