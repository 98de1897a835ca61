"""A terminal's screen for those who cannot see one: rows, cursor and title of a program on a PTY.

pyte does the emulation and is imported when a screen is first looked at. Output is only kept until then:
emulating costs two seconds per megabyte, and most terminals are never looked at.
"""

from __future__ import annotations

import unicodedata
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from .screen_input import ScreenInput

if TYPE_CHECKING:
    import pyte

__all__ = ["Screen", "ScreenUnavailable", "ScreenView"]

DEFAULT_ROWS: Final = 24
DEFAULT_COLS: Final = 80

BACKLOG_BYTES: Final = 64 * 1024
"""Output that may wait to be looked at: a tenth of a second of emulation. A full-screen program repaints
everything in a few KiB."""

_ALTERNATE: Final = frozenset({47, 1047, 1049})
"""Private modes by which full-screen programs ask for a screen of their own, and give it back."""

JOINERS: Final = frozenset("\u200d\ufe0e\ufe0f")
"""Characters without width that make one picture out of several; others of their kind (marks of direction,
breaks nobody sees) are left out."""

MARKS_MOST: Final = 32
"""Most characters in one cell: a family with children and all its joiners is 11."""


class ScreenUnavailable(Exception):
    """There is no screen to look at; the text says why."""


class ScreenView(Struct, frozen=True):
    """What is on the screen now."""

    rows: list[str]
    """Every row, without the blanks at its end."""
    cursor: tuple[int, int]
    """Row and column, the first being 0."""
    cursor_visible: bool
    title: str
    complete: bool
    """False if so much was printed unseen that what was on the screen before is not known."""

    @property
    def text(self) -> str:
        """The rows down to the last that is not empty."""
        return "\n".join(self.rows).rstrip("\n")


class Screen:
    """Feed it the bytes of a PTY, look at it when you like."""

    def __init__(self, rows: int = DEFAULT_ROWS, cols: int = DEFAULT_COLS) -> None:
        self._rows = rows
        self._cols = cols
        self._backlog: deque[bytes] = deque()
        self._size = 0
        self._complete = True
        self._emulator: tuple[pyte.Screen, pyte.Stream] | None = None
        self._input = ScreenInput()

    def feed(self, data: bytes) -> None:
        """More output."""
        self._backlog.append(data)
        self._size += len(data)
        while self._size > BACKLOG_BYTES:
            oldest = self._backlog.popleft()
            excess = self._size - BACKLOG_BYTES
            if len(oldest) > excess:
                self._backlog.appendleft(oldest[excess:])
                oldest = oldest[:excess]
            self._size -= len(oldest)
            self._emulator, self._complete = None, False

    def resize(self, rows: int, cols: int) -> None:
        """The terminal has another size now."""
        self._catch_up()
        self._rows, self._cols = rows, cols
        if self._emulator is not None:
            self._emulator[0].resize(rows, cols)

    def view(self) -> ScreenView:
        """What is on it now."""
        screen = self._catch_up()
        row = min(screen.cursor.y, screen.lines - 1)
        column = min(screen.cursor.x, screen.columns - 1)
        return ScreenView(
            [_row(screen, at) for at in range(screen.lines)],
            (row, column),
            not screen.cursor.hidden,
            screen.title,
            self._complete,
        )

    def _catch_up(self) -> pyte.Screen:
        if self._emulator is None:
            self._emulator = _make_emulator(self._rows, self._cols)
            self._input = ScreenInput()
            if not self._complete and self._backlog:
                # It starts in the middle of something: of a sequence, perhaps, or of a character.
                first = self._backlog[0]
                start = min((at for at in (first.find(b"\x1b"), first.find(b"\n")) if at >= 0), default=0)
                self._backlog[0] = first[start:]
        screen, stream = self._emulator
        while self._backlog:
            stream.feed(self._input.feed(self._backlog.popleft()))
        self._size = 0
        return screen


def _row(screen: pyte.Screen, at: int) -> str:
    line = screen.buffer[at]
    return "".join(line[column].data for column in range(screen.columns)).rstrip()


def _make_emulator(rows: int, cols: int) -> tuple[pyte.Screen, pyte.Stream]:
    try:
        import pyte
        from pyte.modes import DECAWM, IRM
        from wcwidth import wcwidth
    except ImportError:
        raise ScreenUnavailable("looking at a screen needs pyte: install exec-server[screen]") from None

    class Tolerant(pyte.Screen):
        """Three things pyte does not do: a screen of their own for programs that ask for it, staying calm
        about sequences with parameters it did not expect, and printing on behind a character without
        width."""

        saved: tuple[Any, Any] | None = None

        def draw(self, data: str) -> None:
            for char in data:
                width = wcwidth(char)
                if width <= 0:
                    self.add_mark(char)
                    continue
                if self.cursor.x + width > self.columns:
                    if DECAWM in self.mode:
                        self.carriage_return()
                        self.linefeed()
                    else:
                        self.cursor.x = max(self.columns - width, 0)
                if IRM in self.mode:
                    self.insert_characters(width)
                self.put(char, width)
            self.dirty.add(self.cursor.y)

        def put(self, char: str, width: int) -> None:
            """One character at the cursor. A wide one takes two cells, the second of which is empty; what
            is left of one that was there before is a blank."""
            line, column = self.buffer[self.cursor.y], self.cursor.x
            cell = self.cursor.attrs
            if column and line[column].data == "":
                line[column - 1] = cell._replace(data=" ")
            after = column + width
            if after < self.columns and line[after].data == "":
                line[after] = cell._replace(data=" ")
            line[column] = cell._replace(data=char)
            if width == 2 and column + 1 < self.columns:
                line[column + 1] = cell._replace(data="")
            self.cursor.x = min(after, self.columns)

        def add_mark(self, char: str) -> None:
            """A character without a width of its own belongs to the one before it."""
            row, column = self.cursor.y, self.cursor.x
            if not column or (not char.isprintable() and char not in JOINERS):
                return
            line = self.buffer[row]
            column -= 2 if column > 1 and line[column - 1].data == "" else 1
            joined = unicodedata.normalize("NFC", line[column].data + char)
            if len(joined) <= MARKS_MOST:
                line[column] = line[column]._replace(data=joined)

        def set_mode(self, *modes: int, **kwargs: Any) -> None:
            if kwargs.get("private") and _ALTERNATE.intersection(modes) and self.saved is None:
                self.saved = (self.buffer.copy(), (self.cursor.y, self.cursor.x))
                self.buffer.clear()
                self.dirty.update(range(self.lines))
                self.cursor_position()
            super().set_mode(*modes, **kwargs)

        def reset_mode(self, *modes: int, **kwargs: Any) -> None:
            if kwargs.get("private") and _ALTERNATE.intersection(modes) and self.saved is not None:
                buffer, (row, column) = self.saved
                self.saved = None
                self.buffer.clear()
                self.buffer.update(buffer)
                self.dirty.update(range(self.lines))
                self.cursor_position(row + 1, column + 1)
            super().reset_mode(*modes, **kwargs)

    def tolerant(name: str) -> Any:
        method = getattr(Tolerant, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                method(self, *args, **kwargs)
            except (TypeError, ValueError, LookupError, NameError, AttributeError):
                pass  # a sequence nobody here knows; a real terminal would ignore it, too

        return call

    for name in pyte.Stream.events - {"draw"}:
        if hasattr(Tolerant, name):
            setattr(Tolerant, name, tolerant(name))
    screen = Tolerant(cols, rows)
    return screen, pyte.Stream(screen)
