"""Calls that make no sense: each gets an answer a model can act on."""

from __future__ import annotations

import json
from pathlib import Path

from support.agent import play
from support.model_server import (
    Say,
    call,
)


def test_calls_that_make_no_sense_get_clear_answers(tmp_path: Path) -> None:
    huge = json.dumps({"cmd": "true #" + "x" * 3_000_000})
    calls = [
        call("exec_command", "{bad", "call_1"),
        call("exec_command", '{"command": "ls"}', "call_2"),
        call("exec_command", '{"cmd": 5}', "call_3"),
        call("exec_command", "[" * 100_000, "call_4"),
        call("no_such_tool", "{}", "call_5"),
        call("write_stdin", {"session_id": 5}, "call_6"),
        call("exec_command", huge, "call_7"),
        call("update_plan", {"plan": [{"step": "x", "status": "dancing"}]}, "call_8"),
        call("exec_command", {"cmd": "ls", "environment_id": "moon"}, "call_9"),
        call("exec_command", {"cmd": "ls", "workdir": "file://%"}, "call_10"),
        call("apply_patch", {"input": "not a patch"}, "call_11"),
        call("view_image", {"path": "a\0b"}, "call_12"),
    ]
    done = play(tmp_path, Say(calls), "I am sorry.")
    assert done.outcome.answer == "I am sorry."
    told = done.model.outputs()
    for number in (1, 2, 3, 4, 8):
        assert told[f"call_{number}"].startswith("failed to parse function arguments: "), number
    assert told["call_5"] == "unsupported call: no_such_tool"
    assert told["call_6"] == "write_stdin failed: Unknown process id 5"
    assert "exec_command failed" in told["call_7"] or "exited with code" in told["call_7"]
    assert told["call_9"] == "unknown turn environment id `moon`"
    assert told["call_10"].startswith("exec_command failed: workdir 'file://%'")
    assert told["call_11"].startswith("apply_patch verification failed: ")
    assert told["call_12"].startswith("view_image failed: ")


def test_arguments_longer_than_any_edit(tmp_path: Path) -> None:
    done = play(tmp_path, Say([call("apply_patch", "x" * (16 * 1024 * 1024 + 1))]), "ok")
    assert "longer than 16777216 characters" in done.output()
