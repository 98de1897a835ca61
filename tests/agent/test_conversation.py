"""Histories as a model's input: nothing a provider would refuse, whatever is in the file."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exec_server.agent.conversation import ABORTED, conversation, total_usage, usage_record
from exec_server.agent.record import Record
from exec_server.events.model import Usage


def item(kind: str, **members: Any) -> Record:
    return Record({"type": "response_item", "payload": {"type": kind, **members}})


def test_what_is_sent() -> None:
    said = item("message", role="user", content=[], internal_chat_message_metadata_passthrough={"x": 1})
    records = [
        Record({"type": "event_msg", "payload": {"type": "task_started"}}),
        said,
        item("reasoning", summary=[]),
        item("reasoning", summary=[], encrypted_content="x"),
        item("function_call", call_id="a", name="n", arguments="{}"),
        item("custom_tool_call", call_id="b", name="n", input=""),
        item("function_call_output", call_id="a", output="done"),
        item("function_call_output", call_id="nobody", output="?"),
    ]
    assert conversation(records) == [
        {"type": "message", "role": "user", "content": []},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "a", "name": "n", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "b", "name": "n", "input": ""},
        {"type": "custom_tool_call_output", "call_id": "b", "output": ABORTED},
        {"type": "function_call_output", "call_id": "a", "output": "done"},
    ]


KINDS = st.sampled_from(
    ["function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "message"]
)


@given(st.lists(st.tuples(KINDS, st.sampled_from(["a", "b", "c", None]))))
def test_every_call_is_answered_and_every_answer_has_a_call(pairs: list[tuple[str, str | None]]) -> None:
    more: dict[str, Any] = {"name": "n", "role": "user", "content": []}
    sent = conversation([item(kind, call_id=call_id, **more) for kind, call_id in pairs])
    calls = {one.get("call_id") for one in sent if one["type"].endswith("_call")}
    answers = {one.get("call_id") for one in sent if one["type"].endswith("_output")}
    assert calls == answers
    assert [one for one in sent if one["type"] == "message"] == [
        {"type": "message", "call_id": call_id, **more} for kind, call_id in pairs if kind == "message"
    ]


def test_what_is_no_item_is_not_sent() -> None:
    """Some of it is in files of other programs, or of newer ones; it stays there."""
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    odd: list[Any] = [
        5,
        {},
        None,
        {"type": "frobnicate_call", "x": 1},
        {"type": "ghost_snapshot", "ghost_commit": {}},
        {"type": "message", "role": "system", "content": said["content"]},
        {"type": "message", "role": "user"},
        {"type": "function_call", "name": "n", "arguments": "{}"},
        {"type": "function_call", "call_id": "c", "arguments": "{}"},
    ]
    records = [Record({"type": "response_item", "payload": payload}) for payload in [*odd, said]]
    assert conversation([Record({"type": "response_item"}), *records]) == [said]
    instead = Record({"type": "compacted", "payload": {"replacement_history": [*odd, said]}})
    assert conversation([*records, instead]) == [said]


COUNTS = st.builds(Usage, **dict.fromkeys(Usage.__struct_fields__, st.integers(0, 10**9)))


@given(COUNTS, COUNTS)
def test_a_total_is_read_as_it_was_written(total: Usage, last: Usage) -> None:
    records = [Record({"type": "event_msg", "payload": usage_record(one, last)}) for one in (last, total)]
    assert total_usage(records) == total


def test_a_total_that_is_none() -> None:
    for info in (None, 5, {}, {"total_token_usage": 3}, {"total_token_usage": {"input_tokens": "many"}}):
        record = Record({"type": "event_msg", "payload": {"type": "token_count", "info": info}})
        assert total_usage([record]) == Usage()
