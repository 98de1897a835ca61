"""Lines of a text that comes in pieces. What tools make of it is in test_file_tools.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exec_server.agent.file_lines import MAX_LINE_CHARACTERS, Lines

TEXTS = st.lists(st.sampled_from(["a", "é", "\n", "\r", "\r\n", "x" * 999, "y" * 1001]), max_size=12)


def read(pieces: list[str], first: int, limit: int, column: int) -> str:
    lines = Lines(first, limit, column)
    for piece in pieces:
        if lines.feed(piece):
            return lines.text()
    return lines.end()


@given(TEXTS, st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 900, 2500]))
def test_pieces_make_no_difference(pieces: list[str], first: int, limit: int, column: int) -> None:
    assert read(pieces, first, limit, column) == read(["".join(pieces)], first, limit, column)


@given(TEXTS)
def test_a_text_is_shown_as_it_is(pieces: list[str]) -> None:
    text = "".join(pieces).replace("\r\n", "\n")
    if text and max(map(len, text.split("\n"))) <= MAX_LINE_CHARACTERS:
        assert read([text], 1, 1000, 1).replace("\r\n", "\n") == text.replace("\r\n", "\n")
