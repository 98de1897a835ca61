"""A screen for those who cannot see one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.agent.screen import BACKLOG_BYTES, Screen


def screen(*pieces: bytes, rows: int = 24, cols: int = 80) -> Screen:
    made = Screen(rows, cols)
    for piece in pieces:
        made.feed(piece)
    return made


def test_rows_cursor_and_title() -> None:
    view = screen(b"one\r\ntwo\x1b]2;my title\x07", rows=5, cols=20).view()
    assert view.rows == ["one", "two", "", "", ""]
    assert view.text == "one\ntwo"
    assert view.cursor == (1, 3)
    assert view.cursor_visible
    assert view.title == "my title"
    assert view.complete


def test_painting() -> None:
    painted = screen(b"\x1b[2J\x1b[3;5Hhere\x1b[1;1H\x1b[31mred\x1b[0m\x1b[?25l").view()
    assert painted.rows[0] == "red"
    assert painted.rows[2] == "    here"
    assert not painted.cursor_visible


def test_a_program_with_a_screen_of_its_own_gives_the_old_one_back() -> None:
    made = screen(b"$ vi\r\n", b"\x1b[?1049h\x1b[H~ text")
    assert made.view().rows[0] == "~ text"
    assert "$ vi" not in made.view().text
    made.feed(b"\x1b[?1049l")
    assert made.view().text == "$ vi"
    assert made.view().cursor == (1, 0)


def test_wide_characters_and_pieces_of_characters() -> None:
    data = "日本 é".encode()
    made = screen(*[data[at : at + 1] for at in range(len(data))])
    assert made.view().rows[0] == "日本 é"


def test_a_cursor_past_the_edge_is_on_it() -> None:
    assert screen(b"x" * 10, cols=10).view().cursor == (0, 9)


def test_resize() -> None:
    made = screen(b"one\r\ntwo")
    made.resize(5, 10)
    made.feed(b"x" * 20)
    assert made.view().rows[:4] == ["one", "twoxxxxxxx", "xxxxxxxxxx", "xxx"]


@pytest.mark.parametrize("piece", [1000, BACKLOG_BYTES * 3])
def test_what_was_printed_unseen_is_bounded_and_told(piece: int) -> None:
    line = b"\x1b[32mline\x1b[0m\r\n"
    data = line * (BACKLOG_BYTES * 3 // len(line)) + b"last"
    made = screen(*[data[at : at + piece] for at in range(0, len(data), piece)])
    assert sum(map(len, made._backlog)) <= BACKLOG_BYTES
    view = made.view()
    assert not view.complete
    assert view.rows[-1] == "last"
    assert set(view.rows[:-1]) == {"line"}
    made.feed(b"!")
    assert made.view().rows[-1] == "last!"


@pytest.mark.parametrize(
    "sequence",
    [
        b"\x1b[>4;2m",
        b"\x1b[?1;2c",
        b"\x1b[>c",
        b"\x1b[=1;1u",
        b"\x1b[99999999999999A",
        b"\x1b[?2026$p",
        b"\x1b[6n",
    ],
)
def test_sequences_nobody_knows_do_no_harm(sequence: bytes) -> None:
    assert screen(b"before" + sequence + b"\r\nafter").view().rows[1].endswith("after")


@settings(max_examples=200)
@given(
    st.lists(st.binary(max_size=40) | st.text("\x1b[]?;0123456789hlmHJKABCDrsu\r\n\x07Px").map(str.encode))
)
def test_any_bytes(pieces: list[bytes]) -> None:
    view = screen(*pieces, rows=5, cols=20).view()
    assert len(view.rows) == 5
    assert 0 <= view.cursor[0] < 5
    assert 0 <= view.cursor[1] < 20
