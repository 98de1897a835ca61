"""What the model is told, to the character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.agent.buffer import HeadTailBuffer
from exec_server.agent.unified_text import Policy, ToolOutput, Unit, truncate


def output(data: bytes, capacity: int = 1024 * 1024, **fields: object) -> ToolOutput:
    buffer = HeadTailBuffer(capacity)
    buffer.push(data)
    return ToolOutput(wall_time=0.0, buffer=buffer, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "budget", "unit", "shown"),
    [
        ("0123456789", 10, "bytes", "0123456789"),
        ("0123456789", 6, "bytes", "012…4 chars truncated…789"),
        ("0123456789", 5, "bytes", "01…5 chars truncated…789"),
        ("0123456789", 6, "tokens", "012…1 tokens truncated…789"),
        ("0123456789", 0, "bytes", "…10 chars truncated…"),
        ("0123456789", 0, "tokens", "…3 tokens truncated…"),
        ("ééééé", 5, "bytes", "é…3 chars truncated…é"),
        ("aéb€c", 4, "bytes", "a…3 chars truncated…c"),
        ("🎉🎉", 3, "bytes", "…2 chars truncated…"),
    ],
)
def test_truncation(text: str, budget: int, unit: Unit, shown: str) -> None:
    assert truncate(text, budget, unit) == shown


@given(
    st.text(st.characters(exclude_categories=("Cs",))),
    st.integers(0, 40),
    st.sampled_from(["bytes", "tokens"]),
)
def test_any_truncation(text: str, budget: int, unit: Unit) -> None:
    shown = truncate(text, budget, unit)
    if len(text.encode()) <= budget:
        assert shown == text
    else:
        head = shown.partition("…")[0]
        assert text.startswith(head)
        assert len(shown.encode()) <= budget + len("…99999 tokens truncated…".encode())


def test_the_example_of_the_reference() -> None:
    told = output(b"hi\n", chunk_id="b749bb", exit_code=0).text()
    assert told == (
        "Chunk ID: b749bb\nWall time: 0.0000 seconds\nProcess exited with code 0\n"
        "Original token count: 1\nOutput:\nhi\n"
    )


def test_what_is_unknown_is_not_told() -> None:
    assert output(b"").text() == "Wall time: 0.0000 seconds\nOriginal token count: 0\nOutput:\n"
    running = output(b"x", session_id=1234, chunk_id="abcdef")
    assert "Process running with session ID 1234\n" in running.text()
    assert running.structured() == {
        "chunk_id": "abcdef",
        "wall_time_seconds": 0.0,
        "session_id": 1234,
        "original_token_count": 1,
        "output": "x",
    }


def test_a_budget_of_tokens() -> None:
    data = b"x" * 80_000
    told = output(data, max_output_tokens=100).text()
    assert told.endswith(
        "Warning: truncated output (original token count: 20000)\nTotal output lines: 1\n\n"
        + "x" * 200 + "…19900 tokens truncated…" + "x" * 200
    )  # fmt: skip


@pytest.mark.parametrize(("text", "lines"), [("a\n" * 6000, 6000), ("a\n" * 6000 + "b", 6001)])
def test_lines_are_counted(text: str, lines: int) -> None:
    assert f"\nTotal output lines: {lines}\n\n" in output(text.encode()).text()


def test_what_the_buffer_dropped_is_told_first() -> None:
    data = b"".join(b"%07d\n" % number for number in range(400_000))
    told = output(data, exit_code=0, chunk_id="c0ffee").text()
    header, _, shown = told.partition("Output:\n")
    assert "Original token count: 800000\n" in header
    assert shown.startswith(
        "Warning: truncated output (original token count: 800000)\n... 2151424 bytes omitted ...\n\n0000000\n"
    )
    assert "…1038607 chars truncated…" in shown
    kept = shown.partition("\n\n")[2].split("…1038607 chars truncated…")
    assert [len(part) for part in kept] == [5000, 5000]


def test_a_marker_that_is_in_view_is_not_moved() -> None:
    told = output(b"x" * 100, capacity=20).text()
    assert told.endswith("Output:\n" + "x" * 10 + "\n... 80 bytes omitted ...\n" + "x" * 10)
    cut = output(b"x" * 60_000, capacity=20_000, max_output_tokens=2000).text()
    assert "\n... 40000 bytes omitted ...\n\nxxx" in cut


def test_the_model_has_the_last_word() -> None:
    small = output(b"x" * 5000).text(Policy("bytes", 1000))
    assert len(small.encode()) <= 1200
    assert "chars truncated" in small
    assert output(b"x" * 50, max_output_tokens=10).text(Policy("bytes", 1000)).count("tokens truncated") == 1
    assert "…5000 chars truncated…" in output(b"x" * 5000).text(Policy("bytes", 50)), (
        "there is no room at all"
    )
    tokens = output(b"x" * 50_000).text(Policy("tokens", 1000))
    assert len(tokens.encode()) <= 4800
    assert "tokens truncated" in tokens


def test_bytes_that_are_no_text() -> None:
    assert output(b"a\xffb").text().endswith("a\ufffdb")
