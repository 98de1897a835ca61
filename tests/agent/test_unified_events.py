"""Deltas never split a character, and there is an end to them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exec_server.agent.unified_events import (
    DELTA_BYTES,
    MAX_DELTAS,
    Deltas,
    ExecCommandBegin,
    ExecCommandEnd,
    ExecCommandOutputDelta,
    ExecEvent,
    as_item,
)


def deltas(*pieces: bytes) -> list[bytes]:
    seen: list[ExecEvent] = []
    cutter = Deltas("c", seen.append)
    cutter.open()
    for piece in pieces:
        cutter.push(piece)
    cutter.end()
    return [event.chunk for event in seen if isinstance(event, ExecCommandOutputDelta)]


def test_a_character_at_the_cut_goes_to_the_next() -> None:
    data = b"x" * (DELTA_BYTES - 2) + "🎉".encode() + b"y"
    assert deltas(data) == [b"x" * (DELTA_BYTES - 2), "🎉y".encode()]


def test_half_a_character_waits() -> None:
    party = "🎉".encode()
    assert deltas(b"a" + party[:1], party[1:3], party[3:] + b"b") == [b"a", party + b"b"]
    assert deltas(b"a" + party[:3]) == [b"a", party[:3]], "but not beyond the end"
    assert deltas(b"a\xc3(", b"\x80\x80") == [b"a\xc3(", b"\x80\x80"], "what is no UTF-8 passes as it is"


@given(
    st.lists(st.binary(max_size=50) | st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace")))
)
def test_nothing_is_lost(pieces: list[bytes]) -> None:
    assert b"".join(deltas(*pieces)) == b"".join(pieces)


@given(st.text(max_size=200), st.integers(1, 7))
def test_text_comes_in_whole_characters(text: str, size: int) -> None:
    data = text.encode("utf-8", "replace")
    for chunk in deltas(*[data[start : start + size] for start in range(0, len(data), size)]):
        chunk.decode()


def test_nothing_before_the_announcement() -> None:
    seen: list[ExecEvent] = []
    cutter = Deltas("c", seen.append)
    cutter.push(b"early")
    assert seen == []
    cutter.open()
    assert seen == [ExecCommandOutputDelta(call_id="c", chunk=b"early")]


def test_there_is_an_end_to_them() -> None:
    pieces = deltas(*[b"x"] * (MAX_DELTAS + 500))
    assert len(pieces) == MAX_DELTAS
    assert len(deltas(b"x" * DELTA_BYTES * (MAX_DELTAS + 3))) == MAX_DELTAS


def test_items() -> None:
    begin = ExecCommandBegin(
        call_id="c", process_id=1, command=["/bin/bash", "-lc", "echo hi"], cwd="file:///"
    )
    assert as_item(begin).command == "/bin/bash -lc 'echo hi'"
    assert as_item(begin).status == "in_progress"
    end = ExecCommandEnd(
        call_id="c",
        process_id=1,
        command=begin.command,
        cwd=begin.cwd,
        stdout="o",
        stderr="",
        aggregated_output="o",
        exit_code=3,
        duration=1.0,
        status="failed",
    )
    item = as_item(end)
    assert (item.aggregated_output, item.exit_code, item.status) == ("o", 3, "failed")
