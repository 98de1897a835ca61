"""Lines of a rollout: kept as they are, read as far as we understand them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.agent.record import BadRecord, HistoryBase, Record, SessionMeta
from exec_server.environments.roots import SelectedRoot

P = SelectedRoot.select("plugin@1", "worker", "/plugins/demo")

SCALARS = [
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
]
JSON = st.recursive(
    st.one_of(SCALARS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.text(), st.dictionaries(st.text(max_size=8), JSON, max_size=4), JSON)
def test_t2_unknown_types_and_members_survive(kind: str, members: dict[str, Any], payload: Any) -> None:
    value = {**members, "type": kind, "payload": payload}
    line = json.dumps(value, indent=None).encode()
    record = Record.decode(line)
    assert record.line == line, "a line that is only passed on is the same bytes"
    assert json.loads(record.line) == value
    renumbered = json.loads(record.numbered(7).line)
    assert renumbered == {**value, "ordinal": 7}
    assert "ordinal" not in json.loads(record.numbered(None).line)


NO_RECORDS = [b"", b"{", b"[]", b"5", b"{}", b'{"type": 5}', b'{"type": "x"', b"\xff", b"[" * 10**5]


@pytest.mark.parametrize("line", NO_RECORDS)
def test_what_is_no_record(line: bytes) -> None:
    with pytest.raises(BadRecord):
        Record.decode(line)


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"text": "a\udc80b"}, "text that is not Unicode cannot be kept"),
        ({"a": [1, float("nan")]}, r"payload.a\[1\] is nan, which JSON does not have"),
        ({"a": float("-inf")}, "payload.a is -inf"),
        ({"a": b"bytes"}, "payload.a is of type bytes"),
        ({"a": {1: 2}}, "payload.a has 1 for a name; JSON has only text"),
        ({"a": 2**64}, "payload.a is a number that JSON readers do not keep"),
        ({"a": {1, 2}}, "payload.a is of type set"),
        ({"a": deep(200)}, "nested more than 100 levels deep"),
        ({"a": deep(100_000)}, "nested more than 100 levels deep"),
    ],
    ids=["surrogate", "nan", "inf", "bytes", "key", "large", "set", "deep", "deeper"],
)
def test_what_json_cannot_carry_is_refused(payload: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRecord, match=said):
        Record({"type": "x", "payload": payload})


@given(JSON)
def test_what_is_written_is_read_back(value: Any) -> None:
    record = Record({"type": "x", "payload": {"value": value}})
    assert Record.decode(record.line).value == record.value


def test_selections_that_cannot_be_read_are_counted() -> None:
    good = {"id": "a", "location": {"type": "environment", "environmentId": "w", "path": "file:///p"}}
    for written, found, left_out in (([good, {"id": "b"}, 5], 1, 2), ("x", 0, 1), (None, 0, 0), ([], 0, 0)):
        meta = SessionMeta({"id": "t", "selected_capability_roots": written})
        assert (len(meta.selected_capability_roots), meta.unreadable_roots) == (found, left_out)


def test_what_is_missing_has_its_default() -> None:
    record = Record.decode(b'{"type": "x"}')
    assert (record.payload, record.ordinal) == ({}, None)
    assert Record.decode(b'{"type": "x", "ordinal": true}').ordinal is None


META = {
    "id": "t1",
    "timestamp": "2026-01-02T03:04:05.678Z",
    "cwd": "/",
    "originator": "o",
    "cli_version": "1",
}


def test_t4_t5_members_that_older_records_do_not_have() -> None:
    meta = SessionMeta(META)
    assert (meta.id, meta.session_id) == ("t1", "t1")
    assert meta.selected_capability_roots == []
    assert not meta.paginated
    assert meta.history_base is None
    assert (meta.forked_from_id, meta.parent_thread_id, meta.source) == (None, None, "")


def test_members_that_are_there() -> None:
    base = {"thread_id": "p", "end_ordinal_exclusive": 3, "end_byte_offset": 99, "more": 1}
    meta = SessionMeta(
        {
            **META,
            "session_id": "s",
            "source": {"subagent": {"x": 1}},
            "history_mode": "paginated",
            "history_base": base,
            "selected_capability_roots": [P.to_json()],
        }
    )
    assert (meta.session_id, meta.source, meta.paginated) == ("s", "subagent", True)
    assert meta.history_base == HistoryBase("p", 3, 99)
    assert meta.selected_capability_roots == [P]


def test_a_selection_of_a_kind_that_we_do_not_know_is_left_out_and_stays() -> None:
    future = {"id": "r", "location": {"type": "cloud", "bucket": "b"}}
    meta = SessionMeta({**META, "selected_capability_roots": [future, P.to_json()]})
    assert meta.selected_capability_roots == [P]
    assert meta.payload["selected_capability_roots"][0] == future
    assert SessionMeta({**META, "selected_capability_roots": None}).selected_capability_roots == []


@pytest.mark.parametrize("payload", [{}, {"id": ""}, {"id": 5}])
def test_a_thread_has_an_id(payload: dict[str, Any]) -> None:
    with pytest.raises(BadRecord):
        SessionMeta(payload)


def test_a_history_base_that_is_none() -> None:
    with pytest.raises(BadRecord):
        _ = SessionMeta({**META, "history_base": {"thread_id": 5}}).history_base


def test_r15_r18_a_new_one() -> None:
    facts = {"timestamp": "T", "cwd": "/w", "originator": "o", "cli_version": "1", "source": "exec"}
    with_roots = SessionMeta.new("t", roots=[P], more={"base_instructions": {"text": "x"}}, **facts)
    assert with_roots.payload["selected_capability_roots"] == [P.to_json()]
    assert with_roots.payload["base_instructions"] == {"text": "x"}
    assert "selected_capability_roots" not in SessionMeta.new("t", **facts).payload
