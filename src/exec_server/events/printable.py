"""Text from the stream, made fit for a terminal.

Commands, their output and the model's words are not ours: none of them may move the cursor, set a title,
ring, or make a line read differently from what it says. What leaves this module holds no control
character but LF and TAB.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

__all__ = ["cut", "one_line", "printable", "safe", "safe_to_encode", "width_of"]

_ESCAPES: Final = re.compile(
    # Strings up to their terminator (titles, links, device control), on one line.
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\r\n]*(?:\x07|\x1b\\|\x9c)"
    # Control sequences: parameters, intermediates, one final letter.
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    # Anything else that starts with ESC.
    r"|\x1b[ -/]*[0-~]"
)

_BREAKS: Final = re.compile("\r+\n|[\u2028\u2029\x85]")

_CONTROLS: Final = re.compile(
    # C0 and C1 without TAB, LF and CR, DEL, and the marks that turn the direction of what follows.
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)

_SURROGATES: Final = re.compile("[\ud800-\udfff]")
"""Halves of characters, which no terminal and no file takes."""

_OVERWRITTEN: Final = re.compile(r"^[^\n]*\r(?=[^\r\n])", re.MULTILINE)
"""What a bare CR lets the rest of the line replace: progress bars, mostly."""

_SIMPLE: Final = re.compile(r"[\t\n -~]*")


def printable(text: str) -> str:
    """The text without anything that could drive a terminal; lines end in LF."""
    if _SIMPLE.fullmatch(text):
        return text
    text = _ESCAPES.sub("", text)
    text = _BREAKS.sub("\n", text)
    text = _CONTROLS.sub("", text)
    if "\r" in text:
        text = _OVERWRITTEN.sub("", text)
    return safe(text)


def safe(text: str) -> str:
    """Only what is dangerous is taken out; nothing is tidied."""
    return safe_to_encode(_CONTROLS.sub("", text).replace("\r", ""))


def safe_to_encode(text: str) -> str:
    """Every character as it is, but halves of characters, which cannot be written anywhere."""
    return _SURROGATES.sub("\ufffd", text)


def one_line(text: str) -> str:
    """The text on one line, with a mark where lines ended."""
    return printable(text).strip("\n").replace("\n", "⏎").replace("\t", " ")


def width_of(text: str) -> int:
    """Columns the text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(_cells(char) for char in text)


def cut(text: str, width: int) -> str:
    """The text in at most so many columns, ending in … if it had to be cut."""
    if width_of(text) <= width:
        return text
    used = 0
    for index, char in enumerate(text):
        used += _cells(char)
        if used > width - 1:
            return text[:index] + "…" if width > 0 else ""
    return text


def _cells(char: str) -> int:
    if char < "\x7f":
        return 1
    if unicodedata.combining(char) or unicodedata.category(char) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
