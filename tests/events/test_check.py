"""The rules of the stream, each broken once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exec_server.events.check import check
from exec_server.events.reader import read_events
from support.streams import NAMES, stream

THREAD = {"type": "thread.started", "thread_id": "t"}
TURN = {"type": "turn.started"}
USAGE = dict.fromkeys(
    [
        "input_tokens",
        "cached_input_tokens",
        "cache_write_input_tokens",
        "output_tokens",
        "reasoning_output_tokens",
    ],
    1,
)
DONE = {"type": "turn.completed", "usage": USAGE}
NOTHING = {"type": "turn.completed", "usage": dict.fromkeys(USAGE, 0)}
FATAL = {"type": "error", "message": "x"}


def failed(message: str = "x") -> dict[str, Any]:
    return {"type": "turn.failed", "error": {"message": message}}


def item(phase: str, number: int, kind: str = "agent_message", **fields: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"text": "x"} if kind in ("agent_message", "reasoning") else {}
    if kind == "todo_list":
        defaults = {"items": []}
    if kind == "error":
        defaults = {"message": "w"}
    if kind == "command_execution":
        status = "completed" if phase == "completed" else "in_progress"
        defaults = {"command": "c", "aggregated_output": "", "exit_code": None, "status": status}
    if kind == "file_change":
        defaults = {"changes": [], "status": "completed" if phase == "completed" else "in_progress"}
    return {"type": f"item.{phase}", "item": {"id": f"item_{number}", "type": kind, **defaults, **fields}}


def broken(*lines: Any, ours: bool = False) -> list[str]:
    data = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return [violation.rule for violation in check(read_events([data]), ours=ours)]


@pytest.mark.parametrize("name", NAMES)
def test_every_recording_keeps_the_rules_of_the_reference(name: str) -> None:
    assert [str(violation) for violation in check(read_events([stream(name)]))] == []


@pytest.mark.parametrize(
    ("lines", "rules"),
    [
        ((TURN, DONE), ["I1"]),
        ((THREAD, THREAD, TURN, DONE), ["I1"]),
        ((THREAD, TURN, DONE, TURN, DONE), ["I2"]),
        ((THREAD, item("completed", 0), TURN, DONE), ["I3"]),
        ((THREAD, item("completed", 0, "error"), TURN, DONE), []),
        ((THREAD, TURN, DONE, DONE), ["I4"]),
        ((THREAD, TURN, DONE, item("completed", 0)), ["I4"]),
        ((THREAD, TURN, item("completed", 0), item("completed", 0), DONE), ["I6"]),
        ((THREAD, TURN, item("started", 0), item("started", 0), DONE), ["I6"]),
        ((THREAD, TURN, item("completed", 1), DONE), ["ids"]),
        ((THREAD, TURN, FATAL, failed()), []),
        ((THREAD, TURN, FATAL, failed("y")), ["I9"]),
        ((THREAD, TURN, FATAL, DONE), ["I9"]),
        ((THREAD, TURN, FATAL), ["I9"]),
        (
            (
                THREAD,
                TURN,
                item("started", 0, "todo_list"),
                FATAL,
                item("completed", 0, "todo_list"),
                failed(),
            ),
            [],
        ),
        ((THREAD, b"log", TURN, b'{"type":"error"}', DONE), ["format", "format"]),
        ((THREAD, TURN, item("started", 0)), []),
    ],
)
def test_rules_of_the_reference(lines: tuple[Any, ...], rules: list[str]) -> None:
    assert broken(*lines) == rules


@pytest.mark.parametrize(
    ("lines", "rules"),
    [
        ((THREAD, TURN, DONE, TURN, failed()), []),
        ((THREAD, TURN), ["E2"]),
        ((THREAD, TURN, TURN, DONE), ["E2"]),
        ((THREAD, DONE), ["E2"]),
        ((THREAD, TURN, item("started", 0, "command_execution"), DONE), ["E3"]),
        ((THREAD, TURN, item("started", 0), item("completed", 0), DONE), ["E4"]),
        ((THREAD, TURN, item("completed", 0, "todo_list"), DONE), ["E4"]),
        ((THREAD, TURN, item("completed", 0, "dance"), DONE), ["E4", "E4"]),
        (
            (THREAD, TURN, item("started", 0, "file_change"), item("updated", 0, "file_change"),
             item("completed", 0, "file_change"), DONE),
            ["E5"],
        ),
        ((THREAD, TURN, item("completed", 3), DONE), ["E6"]),
        ((THREAD, TURN, {"type": "turn.completed", "usage": {"input_tokens": 1}}), ["E8"]),
        ((THREAD, TURN, DONE, TURN, NOTHING), ["E8"] * 5),
        ((THREAD, TURN, FATAL, failed("y")), ["E10"]),
        ((THREAD, TURN, DONE, item("completed", 0)), ["E11"]),
        ((THREAD, {"type": "dance"}, TURN, DONE), ["format"]),
    ],
)  # fmt: skip
def test_our_own_rules(lines: tuple[Any, ...], rules: list[str]) -> None:
    assert broken(*lines, ours=True) == rules


def test_fields_and_paths() -> None:
    start = item("started", 0, "command_execution")
    end = item("completed", 0, "command_execution")
    del end["item"]["exit_code"]
    assert broken(THREAD, TURN, start, end, DONE, ours=True) == ["E7"]
    changes = [{"path": "b", "kind": "add"}, {"path": "/a", "kind": "add"}]
    start, end = (item(phase, 0, "file_change", changes=changes) for phase in ("started", "completed"))
    assert set(broken(THREAD, TURN, start, end, DONE, ours=True)) == {"E12"}
    end["item"]["status"] = "in_progress"
    assert "E3" in broken(THREAD, TURN, start, end, DONE, ours=True)


def test_a_violation_says_where() -> None:
    data = json.dumps(TURN).encode() + b"\n" + json.dumps(FATAL).encode()
    assert [str(violation) for violation in check(read_events([data]))] == [
        "line 1: I1: the first event is turn.started, not thread.started",
        "end of input: I9: a fatal error without turn.failed",
    ]
