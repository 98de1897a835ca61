"""From events to a state."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from exec_server.events.model import TodoList, Usage
from exec_server.events.notice import Notice
from exec_server.events.reader import StreamError, read_events
from exec_server.events.reducer import REMEMBERED_IDS, Keep, Reducer
from exec_server.events.summary import summary_of
from support.streams import GARBAGE, MANIFEST, NAMES, stream


def reduced(*lines: str | bytes, keep: Keep = Keep.EVERYTHING, **options: Any) -> Reducer:
    reducer = Reducer(keep, **options)
    blocks = [line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines]
    for at, record in enumerate(read_events(blocks)):
        reducer.feed(record, float(at))
    return reducer


def message(item_id: str, text: str, phase: str | None = None) -> str:
    item = {"id": item_id, "type": "agent_message", "text": text} | ({"phase": phase} if phase else {})
    return json.dumps({"type": "item.completed", "item": item})


THREAD = '{"type":"thread.started","thread_id":"t"}'
TURN = '{"type":"turn.started"}'
DONE = '{"type":"turn.completed","usage":{"input_tokens":1}}'
FATAL = '{"type":"error","message":"x"}'
FAILED = '{"type":"turn.failed","error":{"message":"f"}}'


@pytest.mark.parametrize("name", NAMES)
def test_success_needs_the_outcome_and_the_exit_code(name: str) -> None:
    run = reduced(stream(name)).run
    code = MANIFEST[name]["exit_code"]
    assert (run.outcome in ("completed", "none")) == (code == 0)


@pytest.mark.parametrize("name", NAMES)
def test_recordings_have_no_diagnostics(name: str) -> None:
    reducer = reduced(stream(name), strict=True)
    assert reducer.diagnostics.count == reducer.noise.count == reducer.malformed == 0


def test_resumed_runs_are_told_apart() -> None:
    parts = [stream(name) for name in ("resume_1_first", "resume_2_by_id", "resume_3_last")]
    reducer = reduced(*parts, new_threads=True)
    assert [len(run.items) for run in reducer.runs] == [2, 2, 1], "ids start over with every run"
    assert reducer.diagnostics.count == 0
    deltas = [run.turns[0].usage_delta for run in reducer.runs]
    assert [delta and delta.input_tokens for delta in deltas] == [2400, 3200, 1200]
    assert reduced(*parts).runs[0].turns[0].usage_delta is None, (
        "a first total may be that of a resumed thread"
    )
    alone = reduced(parts[1]).run.turn
    assert alone is not None
    assert alone.usage_delta is None
    assert alone.usage == Usage(
        input_tokens=5600, cached_input_tokens=2400, output_tokens=180, reasoning_output_tokens=29
    )


def test_several_turns_in_one_run() -> None:
    reducer = reduced(THREAD, TURN, message("a", "one"), DONE, TURN, message("b", "two"), FAILED, TURN, FATAL)
    run = reducer.run
    assert [turn.outcome for turn in run.turns] == ["completed", "failed", None]
    assert [turn.answer for turn in run.turns] == ["one", "two", None]
    assert (run.outcome, run.error, run.answer) == ("incomplete", "x", None)
    assert list(run.messages) == ["one", "two"]


def test_a_turn_that_starts_over_leaves_the_one_before_incomplete() -> None:
    run = reduced(THREAD, TURN, TURN, DONE).run
    assert [turn.outcome for turn in run.turns] == ["incomplete", "completed"]


def test_a_message_marked_as_final_is_the_answer() -> None:
    final = reduced(
        THREAD, TURN, message("a", "yes", "final_answer"), message("b", "bye", "commentary"), DONE
    )
    assert final.run.answer == "yes"
    last = reduced(THREAD, TURN, message("a", "x"), message("b", "", "commentary"), DONE)
    assert last.run.answer == "", "an empty one is an answer, too"


def test_what_a_producer_should_not_do_is_a_diagnostic() -> None:
    reducer = reduced(THREAD, TURN, message("a", "1"), message("a", "2"), DONE, FAILED, message("b", "late"))
    assert list(reducer.diagnostics) == [
        "line 4: item.completed for a, which was completed; the first result counts",
        "line 6: a second outcome, turn.failed; the first one counts",
        "line 7: item.completed after the outcome of the turn",
    ]
    assert list(reducer.run.messages) == ["1", "late"], "what is late is applied"
    assert (reducer.run.outcome, reducer.run.answer) == ("completed", "1")
    for lines in (
        (THREAD, TURN, message("a", "1"), message("a", "2")),
        (THREAD, TURN, DONE, FAILED),
        (DONE,),
    ):
        with pytest.raises(StreamError):
            reduced(*lines, strict=True)


def test_phases_need_no_beginning() -> None:
    plan = '{"type":"item.updated","item":{"id":"p","type":"todo_list","items":[]}}'
    run = reduced(plan).run
    assert run.items["p"].phases == ["updated"]
    assert [state.id for state in run.open_items] == ["p"]
    assert run.outcome == "none"


def test_while_it_goes_on() -> None:
    reducer = Reducer()
    seen: list[tuple[Notice | None, int]] = []
    for record in read_events([stream("reconnect_then_ok")]):
        reducer.feed(record)
        seen.append((reducer.run.retrying, len(reducer.run.open_items)))
    assert seen[2][0] is not None, "told by a notice"
    assert seen[-2][0] is None, "and over with the next event"
    plan = reduced(stream("todo_list"))
    assert isinstance(plan.run.todo, TodoList)
    assert sum(step.completed for step in plan.run.todo.items) == 4
    assert plan.run.items["item_1"].first_at == 4.0
    assert plan.run.items["item_1"].last_at == 5.0


def test_the_unknown_is_counted() -> None:
    reducer = reduced("log", '{"type":"x"}', '{"type":"x"}', '{"type":"error"}',
                      '{"type":"item.started","item":{"id":"i","type":"dance"}}')  # fmt: skip
    assert reducer.unknown_events == {"x": 2}
    assert reducer.unknown_items == {"dance": 1}
    assert (reducer.malformed, reducer.noise.count, reducer.events) == (1, 1, 1)
    assert [state.type for state in reducer.run.open_items] == ["dance"], "its phases are tracked as usual"


def test_what_goes_on_takes_constant_memory() -> None:
    reducer = Reducer(Keep.OPEN)
    count = REMEMBERED_IDS + 100
    lines = [message(f"item_{number}", "x").encode() + b"\nnoise\n" for number in range(count)]
    for record in read_events([THREAD.encode() + b"\n", TURN.encode() + b"\n", *lines]):
        reducer.feed(record)
    assert reducer.run.items == {}
    assert len(reducer._finished) == REMEMBERED_IDS
    assert reducer.run.messages.count == reducer.noise.count == count
    assert len(list(reducer.run.messages)) == len(list(reducer.noise)) == 100
    assert not reducer.feed(next(read_events([lines[-1]]))), "what was completed lately is still known"


def test_an_outline_keeps_no_output() -> None:
    reducer = reduced(stream("command_huge_output"), keep=Keep.OUTLINE)
    assert [state.item for state in reducer.run.items.values()] == [None, None]
    assert reducer.run.answer is not None


@given(GARBAGE)
def test_nothing_makes_it_raise(data: bytes) -> None:
    for keep in Keep:
        reducer = Reducer(keep)
        for at, record in enumerate(read_events([data])):
            reducer.feed(record, float(at))
        assert json.dumps(summary_of(reducer))
        assert reducer.run.outcome in ("completed", "failed", "incomplete", "none")
