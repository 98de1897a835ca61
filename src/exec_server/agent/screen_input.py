"""What a program writes to its terminal, put into words the emulator knows.

pyte's parser prints the bodies of sequences it has never heard of, and loses the text behind them. Here every
sequence is read by its form (ECMA-48), whoever invented it: what changes the text on the screen goes on,
colours and everything unknown is dropped whole.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

__all__ = ["ScreenInput"]

TITLE_CHARS: Final = 4096
"""Longest title kept: nobody reads more, and a program need never end one."""

PARAMETER_CHARS: Final = 256
"""Longest list of parameters of a sequence that is still taken for one."""

REPEAT_MOST: Final = 4096
"""Most repetitions of a character by one sequence: more than a large screen's row has columns."""

_TEXT: Final = re.compile("[^\x00\x0e\x0f\x18\x1a\x1b\x7f\x80-\x9f]+")
_C1: Final = {"\x90": "P", "\x98": "X", "\x9b": "[", "\x9d": "]", "\x9e": "^", "\x9f": "_"}
_C1_PLAIN: Final = {"\x84": "D", "\x85": "E", "\x88": "H", "\x8d": "M"}
"""Eight-bit controls, and the letter which after ESC means the same."""

_STRINGS: Final = frozenset("PX^_k")
"""DCS, SOS, PM, APC and the title of GNU screen: everything up to the terminator is for somebody else."""

_KNOWN: Final = frozenset("@ABCDEFGHJKLMPXade`fghlr")
"""Finals of CSI that move text or the cursor; `b`, `s` and `u` are translated."""

_LINES: Final = str.maketrans(
    "_`abcdefghijklmnopqrstuvwxyz{|}~",
    " ◆▒␉␌␍␊°±␤␋┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·",
)
"""DEC's drawing characters, by which older programs paint frames."""


class ScreenInput:
    """Bytes in pieces of any size; text and known sequences out. What is incomplete waits."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state = "text"
        self._held = ""
        self._drawing = [False, False]
        """Whether the character sets G0 and G1 are the drawing characters."""
        self._shift = 0
        self._last = ""
        """The last character printed, for the sequence that repeats it."""

    def feed(self, data: bytes) -> str:
        """What these bytes come to."""
        text = self._decoder.decode(data)
        out: list[str] = []
        at = 0
        while at < len(text):
            if self._state == "text" and (run := _TEXT.match(text, at)):
                out.append(self._print(run[0]))
                at = run.end()
            else:
                out.append(self._step(text[at]))
                at += 1
        return "".join(out)

    def _print(self, text: str) -> str:
        if self._drawing[self._shift]:
            text = text.translate(_LINES)
        if text[-1] >= " ":
            self._last = text[-1]
        return text

    def _step(self, char: str) -> str:
        """One character of a sequence, or one that may begin one."""
        if char == "\x1b":
            done = self._title() if self._state == "osc" else ""
            self._state, self._held = "escape", ""
            return done
        if char in "\x18\x1a":  # CAN and SUB break off whatever there was
            self._state = "text"
            return ""
        if "\x80" <= char <= "\x9f":
            done = self._title() if self._state == "osc" and char == "\x9c" else ""
            self._state = "text"
            return done + self._introduced(_C1[char]) if char in _C1 else done + _plain(_C1_PLAIN.get(char))
        match self._state:
            case "text":
                if char in "\x0e\x0f":
                    self._shift = 1 if char == "\x0e" else 0
                return ""  # NUL and DEL print nothing
            case "escape":
                return self._escape(char)
            case "csi":
                return self._csi(char)
            case "osc":
                if char == "\x07":
                    self._state = "text"
                    return self._title()
                if len(self._held) < TITLE_CHARS:
                    self._held += char
        return ""  # within a string that is for somebody else

    def _introduced(self, letter: str) -> str:
        self._held = ""
        self._state = {"[": "csi", "]": "osc"}.get(letter, "string")
        return ""

    def _escape(self, char: str) -> str:
        if char < " ":
            return char  # controls work in the middle of a sequence
        if " " <= char <= "/":
            self._held += char if len(self._held) < PARAMETER_CHARS else ""
            return ""
        self._state = "text"
        if self._held in ("(", ")"):
            self._drawing[self._held == ")"] = char == "0"
            return ""
        if self._held == "#":
            return f"\x1b#{char}"
        if self._held:
            return ""
        if char in "[]" or char in _STRINGS:
            return self._introduced(char)
        if char == "c":
            self._drawing, self._shift = [False, False], 0
        return _plain(char if char in "cDEMH78" else None)

    def _csi(self, char: str) -> str:
        if char < " " or char == "\x7f":
            return char if char != "\x7f" else ""
        if char < "@":
            self._held += char if len(self._held) < PARAMETER_CHARS else ""
            return ""
        self._state = "text"
        parameters = self._held
        numbers = parameters.removeprefix("?")
        if char > "~" or not all(one in "0123456789;" for one in numbers):
            return ""  # parameters of somebody's invention, or sub-parameters of a colour
        if parameters != numbers:
            return f"\x1b[{parameters}{char}" if char in "hlJK" else ""
        if char == "b":
            return self._last * min(int(numbers.split(";")[0][:9] or 1), REPEAT_MOST)
        if char in "su" and not numbers:
            return "\x1b7" if char == "s" else "\x1b8"
        return f"\x1b[{parameters}{char}" if char in _KNOWN else ""

    def _title(self) -> str:
        code, semicolon, title = self._held.partition(";")
        return f"\x1b]{code};{title}\x07" if semicolon and code in ("0", "1", "2") else ""


def _plain(letter: str | None) -> str:
    return "" if letter is None else f"\x1b{letter}"
