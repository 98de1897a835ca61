"""How runs are shown: every recording in every text form, and the rules that hold for all of them.

The expected texts are in rendered/. After a change that is meant, write them anew with
`UPDATE_RENDERED=1 pytest tests/events/test_render.py` and read the difference.
"""

from __future__ import annotations

import io
import json
import os
import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.events.full import Full, answer_text
from exec_server.events.markdown import Markdown, code, fenced
from exec_server.events.minimal import Minimal, Options
from exec_server.events.reader import read_events
from exec_server.events.reducer import Reducer
from exec_server.events.render import Sink, exit_code, show
from support.streams import GARBAGE, MANIFEST, NAMES, stream

FORMS: dict[str, type[Minimal]] = {"minimal": Minimal, "full": Full, "markdown": Markdown}
FOLDER = Path(__file__).parent / "rendered"
FROM_FILE = Options(timed=False, cwd="$CWD")


def rendered(
    data: bytes, form: type[Minimal] = Full, options: Options = FROM_FILE, colour: bool = False
) -> str:
    file = io.StringIO()
    show(read_events([data]), form(options), Sink(file, colour))
    return file.getvalue()


@cache
def expected(form: str) -> dict[str, str]:
    path = FOLDER / f"{form}.txt"
    if os.environ.get("UPDATE_RENDERED"):
        shown = {name: rendered(stream(name), FORMS[form]) for name in NAMES}
        path.write_text("".join(f"=== {name}\n{text}" for name, text in shown.items()))
    parts = re.split(r"^=== (\w+)\n", path.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_every_recording_in_every_form(name: str, form: str) -> None:
    assert rendered(stream(name), FORMS[form]) == expected(form)[name]


@pytest.mark.parametrize("name", NAMES)
def test_exit_codes(name: str) -> None:
    reducer = Reducer()
    for record in read_events([stream(name)]):
        reducer.feed(record)
    produced = MANIFEST[name]["exit_code"]
    outcomes = {"completed": 0, "none": 0, "failed": 1, "incomplete": 3}
    assert exit_code(reducer) == outcomes[reducer.run.outcome]
    assert (exit_code(reducer) == 0) == (produced == 0)


def test_exit_code_of_nothing() -> None:
    assert exit_code(Reducer()) == 4


@given(data=GARBAGE, form=st.sampled_from(sorted(FORMS)))
def test_nothing_can_drive_the_terminal(data: bytes, form: str) -> None:
    shown = rendered(data, FORMS[form])
    assert not [char for char in shown if unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t"]
    shown.encode()


@pytest.mark.parametrize("name", ["command_binary_output", "command_failure", "file_change", "todo_list"])
def test_the_layout_does_not_depend_on_colour(name: str) -> None:
    coloured = rendered(stream(name), colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9]+m", "", coloured) == rendered(stream(name))
    assert all(line.count("\x1b[") in (0, 2) for line in coloured.split("\n")), "every line ends its colour"


# Details -------------------------------------------------------------------------------------------------

THREAD = {"type": "thread.started", "thread_id": "t"}
TURN = {"type": "turn.started"}
DONE: dict[str, Any] = {"type": "turn.completed", "usage": {"input_tokens": 5}}


def event(phase: str, kind: str, item_id: str = "item_0", **fields: Any) -> dict[str, Any]:
    return {"type": f"item.{phase}", "item": {"id": item_id, "type": kind, **fields}}


def command(
    phase: str, text: str = "make", output: str = "", code: int | None = 0, **more: Any
) -> dict[str, Any]:
    over = phase == "completed"
    status = ("completed" if code == 0 else "failed") if over else "in_progress"
    fields = {
        "command": text,
        "aggregated_output": output,
        "exit_code": code if over else None,
        "status": status,
    }
    return event(phase, "command_execution", **{**fields, **more})


def lines(*events: Any, form: type[Minimal] = Full, options: Options = FROM_FILE) -> list[str]:
    data = b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in events)
    return rendered(data, form, options).splitlines()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/bin/bash -lc 'echo hi'", "echo hi"),
        ("sh -c 'a\nb\n'", "a⏎b"),
        ("/usr/bin/zsh -c \"x 'y'\"", "x 'y'"),
        ("/bin/bash -lic 'echo hi'", "/bin/bash -lic 'echo hi'"),
        ("python -c 'print(1)'", "python -c 'print(1)'"),
        ("bash -lc a b", "bash -lc a b"),
        ("bash -lc 'unclosed", "bash -lc 'unclosed"),
        ("echo \x1b]0;owned\x07\x1b[2Jx", "echo x"),
        ("x" * 300, "x" * 117 + "…"),
    ],
)
def test_commands(text: str, shown: str) -> None:
    assert lines(command("started", text), form=Minimal) == [f"$ {shown}"]


@pytest.mark.parametrize(
    ("code", "more", "shown"),
    [
        (0, {}, "ok"),
        (3, {}, "exit 3"),
        (3, {"status": "completed"}, "exit 3"),
        (128, {}, "exit 128"),
        (137, {}, "exit 137 (signal 9)"),
        (193, {}, "exit 193"),
        (-1, {"output": "Failed to create unified exec process: No such file"}, "not started"),
        (-1, {"output": "half of it\nthe connection was lost"}, "lost, no exit code"),
        (-1, {}, "lost, no exit code"),
        (None, {"status": "declined"}, "declined"),
        (None, {"status": "failed"}, "failed"),
        (None, {"status": "odd"}, "odd"),
    ],
)
def test_results(code: int | None, more: dict[str, Any], shown: str) -> None:
    assert lines(command("started"), command("completed", code=code, **more), form=Minimal)[1] == f"  {shown}"
    assert lines(command("completed", code=code, **more), form=Minimal) == [f"$ make: {shown}"]


def test_how_much_output() -> None:
    output = "".join(f"{number}\n" for number in range(30))
    shown = lines(command("started"), command("completed", output=output))
    assert shown[2] == "  … 10 lines hidden"
    assert shown[3:] == [f"  │ {number}" for number in range(10, 30)]
    every = Options(timed=False, output_lines=None)
    assert len(lines(command("completed", output=output), options=every)) == 31
    none = Options(timed=False, output_lines=0)
    assert lines(command("completed", output=output), options=none) == ["$ make: ok"]
    cut = lines(command("completed", output="a\n...(truncated)"))
    assert cut == ["$ make: ok", "  (output truncated by the producer)", "  │ a", "  │ ...(truncated)"]


def test_raw_output_on_request() -> None:
    options = Options(timed=False, raw_output=True)
    painted = command("completed", "e\x1b[1mcho", "\x1b[31mred\x1b[0m\n")
    assert lines(painted, options=options) == ["$ echo: ok", "  │ \x1b[31mred\x1b[0m"]


def test_durations_are_measured_or_taken_from_the_producer() -> None:
    times: Iterator[float] = iter([0.0, 1.0, 2.0, 66.5, 66.5, 70.0, 70.0, 71.0])
    renderer = Full(Options(), clock=lambda: next(times))
    shown: list[str] = []
    for one in (THREAD, TURN, command("started"), command("completed"), DONE):
        for record in read_events([json.dumps(one).encode()]):
            shown += [text for _, text in renderer.feed(record)]
    assert shown[2] == "  ok (1m 04s)"
    assert shown[3].endswith("thread total · 1m 09s")
    said = command("completed") | {"ext": {"duration_ms": 1500}}
    assert lines(said) == ["$ make: ok (1.5s)"]
    assert lines(command("completed") | {"ext": {"duration_ms": "soon"}}) == ["$ make: ok"]


def test_remarks_and_the_answer() -> None:
    def said(text: str, item_id: str) -> dict[str, Any]:
        return event("completed", "agent_message", item_id, text=text)

    turn = (said("one", "a"), said("two", "b"), command("started"), command("completed"))
    assert lines(*turn, said("answer", "c"), TURN, DONE)[:2] == ["says: one", "says: two"]
    done = lines(
        THREAD,
        TURN,
        said("one", "a"),
        said("answer", "b"),
        event("completed", "error", "w", message="w"),
        DONE,
    )
    assert done == [
        "thread t",
        "says: one",
        "warning: w",
        "answer",
        "done · tokens in 5 out 0 — thread total",
    ]
    structured = lines(TURN, said('{"ok":true,"esc":"\\u001b[2J"}', "a"), DONE)
    assert structured[0] == "{"
    assert structured[1:3] == ['  "ok": true,', '  "esc": "\\u001b[2J"']
    failed = {"type": "turn.failed", "error": {"message": "no"}}
    assert lines(TURN, said("so far", "a"), failed) == ["says: so far", "failed: no"]


def test_fatal_errors_are_told_once() -> None:
    fatal = {"type": "error", "message": "gone"}
    plan = event("completed", "todo_list", items=[])
    same = {"type": "turn.failed", "error": {"message": "gone"}}
    other = {"type": "turn.failed", "error": {"message": "other"}}
    assert lines(TURN, fatal, plan, same, form=Minimal) == ["failed: gone"]
    assert lines(TURN, fatal, other, form=Minimal) == ["error: gone", "failed: other"]
    assert lines(TURN, fatal, form=Minimal) == [
        "error: gone",
        "stopped: stream ended before the turn finished",
    ]
    assert lines(TURN, fatal, command("started"), DONE, form=Minimal)[:2] == ["error: gone", "$ make"]


def test_a_plan_is_printed_when_it_changes() -> None:
    steps = [{"text": "one", "completed": False}]
    same = event("updated", "todo_list", items=steps)
    done = event("completed", "todo_list", items=[{"text": "one", "completed": True}])
    assert lines(same, same, same, done) == ["plan 0/1", "  [ ] one", "plan 1/1", "  [x] one"]


def test_the_delta_of_tokens_is_told_when_it_is_known() -> None:
    twice = lines(
        THREAD, TURN, DONE, TURN, {"type": "turn.completed", "usage": {"input_tokens": 7, "output_tokens": 1}}
    )
    assert twice[-1] == "done · tokens in 7 out 1 — thread total; this turn in 2 out 1"


def test_what_nobody_knows() -> None:
    assert lines(b"log \x1b[31mline\n", {"type": "x", "a": 1}, {"type": "error"}) == [
        "# line 1: log line",
        '? x {"type":"x","a":1}',
        "# line 3: bad error: missing required field `message`",
    ]
    assert lines(b"log\n", {"type": "x"}, {"type": "error"}, form=Minimal) == []


def test_markdown_cannot_be_left() -> None:
    assert code("a") == "`a`"
    assert code("a``b") == "```a``b```"
    assert code("`a`") == "`` `a` ``"
    assert fenced("```\nx") == "````\n```\nx\n````"
    evil = event("completed", "mcp_tool_call", server="s", tool="t", status="failed", arguments=None,
                 error={"message": "<script> [x](y) # z"})  # fmt: skip
    assert lines(evil, form=Markdown)[0] == "- tool s/t: failed: \\<script\\> \\[x\\](y) \\# z"
    heading = event("completed", "error", message="title\n===\n1. one\n- two")
    assert lines(heading, form=Markdown) == [
        *("- warning: title\\", "  \\===\\", "  1\\. one\\", "  \\- two", "")
    ]


def test_the_models_words_in_markdown_stay_its_own() -> None:
    words = "<img src=x> ![p](http://evil/x.png)\n```\nunclosed"
    said = event("completed", "agent_message", text=words)
    shown = lines(THREAD, TURN, said, DONE, form=Markdown)
    quoted = ["> &lt;img src=x> !\\[p](http://evil/x.png)", "> ```", "> unclosed", ""]
    assert shown[2:8] == ["## Answer", "", *quoted]
    assert shown[8].startswith("**done**")
    other = event("completed", "agent_message", "item_1", text="b")
    assert lines(THREAD, TURN, said, other, form=Markdown)[2:6] == quoted


def test_an_answer_that_is_json() -> None:
    assert answer_text('{"a":1}') == '{\n  "a": 1\n}'
    assert answer_text("[not json]\n") == "[not json]"
    assert answer_text("[" * 100_000) == "[" * 100_000


class Closed(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError


def test_reading_goes_on_when_nobody_looks() -> None:
    seen = []

    def records() -> Iterator[Any]:
        for record in read_events([stream("commands_parallel")]):
            seen.append(record)
            yield record

    assert show(records(), Full(FROM_FILE), Sink(Closed(), False)) == 0
    assert len(seen) == 10
