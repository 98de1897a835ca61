"""Nothing from the stream can drive a terminal."""

from __future__ import annotations

import unicodedata

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.events.printable import cut, one_line, printable, width_of


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[38;2;1;2;3mred\x1b[m \x1b[?25l", "red "),
        ("\x9b31mred", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$q\x1b\\text", "text"),
        ("\x1b]0;no end\ntext", "0;no end\ntext"),
        ("\x1b(B\x1b7\x1bctext", "text"),
        ("bell\x07 back\x08space nul\x00 del\x7f", "bell backspace nul del"),
        ("\x1b\x1b[31m[31m", "[31m"),
        ("a\r\nb\r\r\nc", "a\nb\nc"),
        ("10%\r50%\r100%\ndone", "100%\ndone"),
        ("100%\r", "100%"),
        ("a\u2028b\u2029c\x85d", "a\nb\nc\nd"),
        ("a\x0bb\x0cc", "abc"),
        ("evil\u202etxt.exe\u2066", "eviltxt.exe"),
        ("half \ud800", "half \ufffd"),
        ("Grüße 日本 🎉", "Grüße 日本 🎉"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


NASTY = st.text(st.sampled_from("\x1b[]\\P;0m\x07\r\n\t\x9b\x9c\x85\u2028aAÿ\u202e\ud800\x00日")) | st.text()


@given(NASTY)
def test_no_control_is_left(text: str) -> None:
    shown = printable(text)
    assert not [char for char in shown if unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t"]
    assert printable(shown) == shown
    assert "\n" not in one_line(text)


@settings(max_examples=50)
@given(NASTY)
def test_a_terminal_that_shows_it_stays_where_it_was(text: str) -> None:
    screen = pyte.Screen(100, 90)  # more lines than there are characters: nothing scrolls away
    pyte.Stream(screen).feed("before\r\n" + printable(text).replace("\n", "\r\n")[:80])
    assert "".join(screen.buffer[0][column].data for column in range(6)) == "before"
    assert screen.title == ""


@given(st.text(), st.integers(0, 40))
def test_cutting(text: str, width: int) -> None:
    short = cut(one_line(text), width)
    assert width_of(short) <= width
    if short != one_line(text):
        assert short.endswith("…") or width == 0


def test_wide_characters_take_two_columns() -> None:
    assert width_of("日本e\u0301") == 5
    assert cut("日本語", 5) == "日本…"
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "ab…"
