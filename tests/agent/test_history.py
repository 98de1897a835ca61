"""Where turns begin, which were taken back, and the last few."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.agent.history import begins_turn, last_turns, turn_starts, without_rolled_back
from exec_server.agent.record import Record


def record(kind: str, **payload: Any) -> Record:
    return Record({"type": kind, "payload": payload})


def said(text: str, role: str = "user", kinds: list[str] | None = None) -> Record:
    more: dict[str, Any] = {}
    if kinds is not None:
        more["internal_chat_message_metadata_passthrough"] = {"content_item_kinds": kinds}
    content = [{"type": "input_text", "text": text}]
    return record("response_item", type="message", role=role, content=content, **more)


def rollback(turns: Any) -> Record:
    return record("event_msg", type="thread_rolled_back", num_turns=turns)


STARTUP = [
    record("session_meta", id="t"),
    said("<environment_context>…</environment_context>"),
    record("turn_context", cwd="/"),
]


@pytest.mark.parametrize(
    ("line", "begins"),
    [
        (said("hello"), True),
        (said("hello", "assistant"), False),
        (said("hello", "developer"), False),
        (said("<environment_context>\n</environment_context>"), False),
        (said("<user_instructions>x"), False),
        (said("\n# AGENTS.md instructions for /x"), False),
        (said("<turn_aborted>"), False),
        # Where the writer says what it is, that counts and not how it begins.
        (said("<environment_context> is what I typed", kinds=["user.text"]), True),
        (said("plain words", kinds=["environments.environment_context"]), False),
        (said("", kinds=["user.image"]), True),
        (record("response_item", type="function_call", name="x"), False),
        (record("event_msg", type="user_message", message="hello"), False),
        (record("inter_agent_communication", trigger_turn=True), True),
        (record("inter_agent_communication", trigger_turn=False), False),
        (record("inter_agent_communication"), False),
        (record("response_item", type="message", role="user", content=None), True),
        (Record({"type": "response_item"}), False),
        (Record({"type": "something new", "payload": 5}), False),
    ],
)
def test_what_begins_a_turn(line: Record, begins: bool) -> None:
    assert begins_turn(line) is begins


def five_turns() -> list[Record]:
    lines = list(STARTUP)
    for number in range(1, 6):
        lines += [said(f"question {number}"), said(f"answer {number}", "assistant")]
    return lines


def texts(lines: list[Record]) -> list[str]:
    return [line.payload["content"][0]["text"] for line in lines if line.type == "response_item"]


def test_r21_the_last_two_of_five() -> None:
    kept = last_turns(five_turns(), 2)
    assert texts(kept) == ["question 4", "answer 4", "question 5", "answer 5"]
    assert len(kept) == 4


def test_r22_the_last_two_of_one_begin_at_the_first() -> None:
    lines = [*STARTUP, said("question"), said("answer", "assistant")]
    assert texts(last_turns(lines, 2)) == ["question", "answer"]


@pytest.mark.parametrize("count", [0, -1])
def test_none_at_all(count: int) -> None:
    assert last_turns(five_turns(), count) == []
    assert last_turns(STARTUP, 3) == []


def test_what_was_taken_back_does_not_count() -> None:
    lines = [*five_turns(), rollback(2), said("question 6"), said("answer 6", "assistant")]
    assert texts(last_turns(lines, 2)) == ["question 3", "answer 3", "question 6", "answer 6"]
    assert texts(without_rolled_back([*five_turns(), rollback(99)])) == [
        STARTUP[1].payload["content"][0]["text"]
    ]
    assert len(without_rolled_back([*five_turns(), rollback("x"), rollback(0)])) == 12


LINES = st.lists(
    st.one_of(
        st.just(said("question")),
        st.just(said("answer", "assistant")),
        st.just(STARTUP[1]),
        st.builds(rollback, st.integers(-1, 4)),
    ),
    max_size=30,
)


@given(LINES, st.integers(0, 6))
def test_the_last_turns_are_the_end_of_what_counts(lines: list[Record], count: int) -> None:
    whole = without_rolled_back(lines)
    kept = last_turns(lines, count)
    assert kept == whole[len(whole) - len(kept) :]
    assert len(turn_starts(kept)) == min(count, len(turn_starts(whole)))
    assert not kept or begins_turn(kept[0])


@given(LINES)
def test_taking_back_is_the_same_as_never_having_said_it(lines: list[Record]) -> None:
    whole = without_rolled_back(lines)
    assert without_rolled_back(whole) == whole
    if turn_starts(whole):
        assert without_rolled_back([*lines, rollback(1)]) == whole[: turn_starts(whole)[-1]]
