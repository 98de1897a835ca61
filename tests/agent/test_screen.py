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
        b"\x1b[4J",
        b"\x1b[9K",
    ],
)
def test_sequences_nobody_knows_do_no_harm(sequence: bytes) -> None:
    assert screen(b"before" + sequence + b"\r\nafter").view().rows[1].endswith("after")


@pytest.mark.parametrize(
    ("printed", "row"),
    [
        ("⚠️ 3 tests failed", "⚠️ 3 tests failed"),
        ("A\u200bB rest", "AB rest"),
        ("to the right \u200fand on", "to the right and on"),
        ("👨\u200d👩 family", "👨\u200d👩 family"),
        ("日\u0301本 marks", "日\u0301本 marks"),
        ("e\u0301 rest", "é rest"),
        ("\u0301start", "start"),
        ("nul\0mid", "nulmid"),
        ("\x1bPdevice control\x1b\\after", "after"),
        ("\x1b_application\x1b\\after", "after"),
        ("\x1b^private\x1b\\after", "after"),
        ("\x90eight bits\x9cafter", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x07 after", "link after"),
        ("\x1b]52;c;aGk=\x07after", "after"),
        ("\x1b[4:3mcurly\x1b[0m after", "curly after"),
        ("\x1b[38:2::255:0:0mred\x1b[0m after", "red after"),
        ("\x1b[=1;1uafter", "after"),
        ("\x1b[<uafter", "after"),
        ("\x1b[!pafter", "after"),
        ("\x1b[2 qafter", "after"),
        ("\x1b(0lqk\x1b(B frame", "┌─┐ frame"),
        ("-\x1b[9b ten", "---------- ten"),
        ("\x1b[12\x18after", "after"),
    ],
)
@pytest.mark.parametrize("piece", [1, 1000])
def test_no_text_is_lost_and_no_sequence_becomes_text(printed: str, row: str, piece: int) -> None:
    data = printed.encode()
    made = screen(*[data[at : at + piece] for at in range(0, len(data), piece)])
    assert made.view().text == row
    assert made.view().title == ""


def test_a_wide_character_that_does_not_fit_begins_the_next_row() -> None:
    assert screen(("x" * 9 + "中y").encode(), cols=10).view().rows[:2] == ["x" * 9, "中y"]
    assert screen(("中" * 6).encode(), cols=11).view().rows[:2] == ["中" * 5, "中"]


def test_what_is_left_of_a_wide_character_is_a_blank() -> None:
    assert screen("中文\rab".encode()).view().rows[0] == "ab文"
    assert screen("中文\ra".encode()).view().rows[0] == "a 文"
    assert screen("中文\x1b[2Ga".encode()).view().rows[0] == " a文"


def test_only_a_title_is_a_title() -> None:
    assert screen(b"\x1b]0;one\x07\x1b]22;pointer\x07\x1b]2;two\x1b\\x").view().title == "two"
    assert len(screen(b"\x1b]2;" + b"t" * 50_000 + b"\x07").view().title) < 5000


@settings(max_examples=200)
@given(st.text("ab⚠中\u200d\ufe0f\u0301\u200b\x1b[;:?=<>0123456789mhlHJPX_^]\\\x07\x18\x9b\r\n"), st.data())
def test_how_the_bytes_come_makes_no_difference(printed: str, draw: st.DataObject) -> None:
    data = printed.encode()
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=4)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert screen(*pieces, rows=5, cols=20).view() == screen(data, rows=5, cols=20).view()


@settings(max_examples=200)
@given(
    st.lists(st.binary(max_size=40) | st.text("\x1b[]?;0123456789hlmHJKABCDrsu\r\n\x07Px").map(str.encode))
)
def test_any_bytes(pieces: list[bytes]) -> None:
    view = screen(*pieces, rows=5, cols=20).view()
    assert len(view.rows) == 5
    assert 0 <= view.cursor[0] < 5
    assert 0 <= view.cursor[1] < 20
