"""Answers that break off, lie, or do not end: what is asked again, and what is given up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.agent import play
from support.calls import failed, patch, run
from support.model_server import (
    Cut,
    Endless,
    ModelServer,
    Play,
    Raw,
    Say,
    Silent,
    Status,
    call,
)

REASON = {"incomplete_details": {"reason": "max_output_tokens"}}


INCOMPLETE = Raw([f"data: {json.dumps({'type': 'response.incomplete', 'response': REASON})}\n\n"])


@pytest.mark.parametrize(
    ("play_once", "detail"),
    [
        (
            Raw(["data: {nonsense\n\n"]),
            "stream disconnected before completion: stream closed before response.completed",
        ),
        (Raw(["data: [1,2]\n\n", "data: 5\n\n"]), "stream disconnected before completion: "),
        (
            Raw(['data: {"type":"response.output_item.done","item":7}\n\n']),
            "stream closed before response.completed",
        ),
        (
            failed("server_error", "Oops"),
            "stream disconnected before completion: Oops",
        ),
        (
            INCOMPLETE,
            "stream disconnected before completion: Incomplete response returned, reason: max_output_tokens",
        ),
        (
            Raw(['event: error\ndata: {"error":{"message":"Broken"}}\n\n']),
            "stream disconnected before completion: Broken",
        ),
        (
            Raw(['data: {"type":"error","code":"x","message":"Bad day"}\n\n']),
            "stream disconnected before completion: Bad day",
        ),
        (Status(500, "<html>"), "unexpected status 500 Internal Server Error: Unknown error, url: http://"),
        (
            Status(429, '{"error":{"code":"rate_limit_exceeded","message":"Slow down"}}'),
            "Reconnecting... 1/5 (exceeded retry limit, last status: 429 Too Many Requests)",
        ),
        (Silent(), "stream disconnected before completion: idle timeout waiting for SSE"),
    ],
)
def test_an_endpoint_that_fails_once_is_asked_again(tmp_path: Path, play_once: Play, detail: str) -> None:
    done = play(
        tmp_path,
        play_once,
        "Fine now.",
        model_settings={"idle_seconds": 1.5 if isinstance(play_once, Silent) else 20},
    )
    assert done.kinds[2:4] == ["error", "agent_message completed"]
    assert detail in done.events[2]["message"]
    assert done.events[2]["message"].startswith("Reconnecting... 1/5 (")


def test_an_endpoint_that_says_when_is_asked_then(tmp_path: Path) -> None:
    came: list[float] = []

    def refuse(_: ModelServer) -> Play:
        came.append(time.monotonic())
        return Status(503, "", (("Retry-After", "0.5"),))

    def answer(_: ModelServer) -> Play:
        came.append(time.monotonic())
        return "Fine now."

    assert play(tmp_path, refuse, answer).outcome.answer == "Fine now."
    assert came[1] - came[0] >= 0.5


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            failed("context_length_exceeded", "x"),
            "context window",
        ),
        (
            failed("insufficient_quota", "No money"),
            "No money",
        ),
        (
            Status(429, '{"error":{"type":"usage_limit_reached","message":"You had enough"}}'),
            "You had enough",
        ),
        (Status(422, "nope"), "nope"),
    ],
)
def test_what_another_try_would_not_mend_fails_at_once(tmp_path: Path, reply: Play, said: str) -> None:
    done = play(tmp_path, reply)
    assert done.kinds == ["thread.started", "turn.started", "error", "turn.failed"]
    assert said in done.events[2]["message"]
    assert done.outcome.error == done.events[3]["error"]["message"] == done.events[2]["message"]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


ITEMS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            [
                "message",
                "reasoning",
                "function_call",
                "custom_tool_call",
                "local_shell_call",
                "web_search_call",
            ]
        )
        | ANYTHING
    },
    optional={
        "name": st.sampled_from(["update_plan", "write_stdin", "apply_patch", "view_image", "dance"])
        | ANYTHING,
        "arguments": st.sampled_from(['{"plan": []}', '{"session_id": 1}', '{"path": "x"}', "{"]) | ANYTHING,
        **dict.fromkeys(["id", "call_id", "role", "content", "summary", "input", "action"], ANYTHING),
    },
)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.lists(ITEMS, max_size=6))
def test_whatever_a_model_says_the_turn_has_an_outcome(
    tmp_path_factory: pytest.TempPathFactory, items: list[dict[str, Any]]
) -> None:
    done = play(tmp_path_factory.mktemp("lies"), Say(items), "ok", model_settings={"max_retries": 0})
    assert done.kinds[-1] in ("turn.completed", "turn.failed")
    assert done.outcome.error is None or not done.outcome.error.startswith("internal error")
    assert not [text for text in done.model.outputs().values() if "internal error" in str(text)]


@pytest.mark.parametrize(
    ("endless", "said"),
    [
        (Endless(), "the answer is longer than 67108864 bytes"),
        (Endless("line"), "a line of the answer is longer than 33554432 bytes"),
        (Endless("comments"), "idle timeout waiting for SSE"),
    ],
)
def test_an_answer_without_end(tmp_path: Path, endless: Endless, said: str) -> None:
    patience = {"max_retries": 0, "idle_seconds": 1.5 if endless.what == "comments" else 60}
    done = play(tmp_path, endless, model_settings=patience)
    assert done.outcome.error == f"stream disconnected before completion: {said}"


def test_a_model_that_never_stops_calling(tmp_path: Path) -> None:
    done = play(tmp_path, Say([call("update_plan", {"plan": []})]), max_steps=5)
    assert done.outcome.error == "gave up after 5 answers of the model in one turn"
    assert len(done.model.requests) == 5


def test_a_call_is_made_once_although_the_answer_broke_off(tmp_path: Path) -> None:
    done = play(tmp_path, Cut([run("echo x >> log")]), "ok")
    assert (tmp_path / "work/log").read_text() == "x\n"
    last = done.model.requests[-1]["input"]
    assert [item["type"] for item in last[-2:]] == ["function_call", "function_call_output"]


def test_nobody_there(tmp_path: Path) -> None:
    with ModelServer("never asked") as model:
        url = model.url
    settings = {"base_url": url, "network_give_up_seconds": 0.002}
    done = play(tmp_path, "x", model_settings=settings)
    notices = [event["message"] for event in done.events if event["type"] == "error"]
    assert notices[0].startswith("Reconnecting... waiting for network (Connection failed: ")
    assert done.outcome.error is not None
    assert done.outcome.error.startswith("Connection failed: ")


def test_calls_without_an_id_of_their_own(tmp_path: Path) -> None:
    nameless = {
        "type": "function_call",
        "id": "fc",
        "name": "exec_command",
        "arguments": '{"cmd": "echo three"}',
    }
    done = play(tmp_path, Say([run("echo one"), run("echo two"), nameless]), Say([run("echo four")]), "ok")
    told = [text.partition("Output:\n")[2] for text in done.model.outputs().values()]
    assert sorted(told) == ["four\n", "one\n", "three\n", "two\n"]


def test_several_commands_run_side_by_side(tmp_path: Path) -> None:
    """Two that wait for each other: one after the other they would never end."""
    calls = [run("mkfifo f; echo one > f"), run("until [ -p f ]; do sleep 0.01; done; cat f", "call_2")]
    done = play(tmp_path, Say(calls), "Both.")
    assert [item["exit_code"] for item in done.items("command_execution")] == [0, 0]
    assert done.outcome.answer == "Both."


def test_an_edit_waits_for_what_came_before_and_is_waited_for(tmp_path: Path) -> None:
    calls = [
        run("sleep 0.3; ls"),
        patch("*** Add File: new", "+x", call_id="call_2"),
        run("cat new", "call_3"),
        run("apply_patch <<'EOF'\n*** Begin Patch\n*** Delete File: new\n*** End Patch\nEOF", "call_4"),
        run("ls", "call_5"),
    ]
    done = play(tmp_path, Say(calls), "ok")
    shown = [item.get("aggregated_output") for item in done.items("command_execution")]
    assert shown == ["", "x\n", ""]
    assert done.output("call_4").startswith("Wall time: ")
    assert "Success. Updated the following files:\nD new\n" in done.output("call_4")
