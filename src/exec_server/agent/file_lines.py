"""Some lines of a text that comes in pieces: bounded, however long the text or one of its lines is. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_READ_BYTES", "Lines", "cut"]

MAX_READ_BYTES: Final = 256 * 1024
"""Most of a file in one answer: some 64,000 tokens."""

MAX_LINE_CHARACTERS: Final = 2000
"""Longer lines are cut: minified code, data."""

MAX_REST_CHARACTERS: Final = 64 * 1024
"""Most of a line of which somebody wants more."""


def cut(line: str) -> str:
    """A line as it is shown where nobody could ask for more of it."""
    if len(line) <= MAX_LINE_CHARACTERS:
        return line
    return f"{line[:MAX_LINE_CHARACTERS]}… [{len(line) - MAX_LINE_CHARACTERS} more characters]"


class Lines:
    """`limit` lines from `first` on, the first of them from `column` on. `feed` it until it has enough."""

    def __init__(self, first: int, limit: int, column: int = 1) -> None:
        self._first = first
        self._limit = limit
        self._column = column
        self._number = 1
        """Of the line that is being read."""
        self._length = 0
        self._window = ""
        """What is to be shown of it, as far as it has come."""
        self._returns = False
        """Whether what has come of it ends with a carriage return."""
        self._shown: list[str] = []
        self._size = 0
        self._last = ""
        """What comes after the last line that is shown."""

    def feed(self, text: str) -> bool:
        """Take the next piece; True if what there is to show is whole, and more follows."""
        begin = 0
        while begin < len(text):
            if len(self._shown) >= self._limit or self._size >= MAX_READ_BYTES:
                self._last = f"\n[more follows; continue with line {self._number}]"
                return True
            end = text.find("\n", begin)
            self._take(text[begin:] if end < 0 else text[begin:end])
            if end < 0:
                break
            self._finish("\n")
            begin = end + 1
        return False

    def text(self) -> str:
        """What is shown."""
        return "\n".join(self._shown) + self._last

    def end(self) -> str:
        """The same, when nothing follows."""
        if self._length:
            self._finish("")
        count = self._number - 1
        if count and count < self._first:
            return f"[the file has only {count} lines]"
        return self.text() if self._shown else "[the file is empty]"

    @property
    def _start(self) -> int:
        return self._column - 1 if self._number == self._first else 0

    def _take(self, piece: str) -> None:
        most = MAX_REST_CHARACTERS if self._start else MAX_LINE_CHARACTERS
        if self._number >= self._first and len(self._window) < most:
            begin = self._start + len(self._window) - self._length
            self._window += piece[begin : begin + most - len(self._window)]
        self._length += len(piece)
        self._returns = piece.endswith("\r") if piece else self._returns

    def _finish(self, last: str) -> None:
        """The line is whole."""
        if self._number >= self._first:
            length = self._length - (1 if last and self._returns else 0)
            line = self._window[: max(length - self._start, 0)]
            seen = self._start + len(line)
            if seen < length:
                rest = (
                    f"{length - seen} more characters; continue with line {self._number}, column {seen + 1}"
                )
                line += f"… [{rest}]"
            elif self._start and not line:
                line = f"[line {self._number} has only {length} characters]"
            self._shown.append(line)
            self._size += len(line.encode()) + 1
            self._last = last
        self._number += 1
        self._length = 0
        self._window = ""
        self._returns = False
