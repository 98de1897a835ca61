"""A regular expression on one line, for half a second at most.

Python's expressions try again where they fail, and some take a time that grows with the square of a line's
length, or worse. Two things bound that. A clock ticks while the processor works, and raises an error in a
match that goes on for too long; the expression looks for such errors now and then. On a long line that is
too seldom, so long lines are matched in a process of their own, which the clock ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
from types import FrameType

__all__ = ["MAX_LINE_SECONDS", "Matcher"]

MAX_LINE_SECONDS = 0.5
"""Of the processor's time, for one line."""

MORE_BYTES_PER_SECOND = 20_000_000
"""What a long line has besides: reading it once, slowly."""

LONG_LINE_BYTES = 32 * 1024
"""Lines beyond this are matched in a process of their own: it costs a millisecond."""

TICKS = 4
"""Of the clock, within those seconds."""


class _TooSlow(Exception):
    """Raised by the clock, in the middle of a match."""


class Matcher:
    """One per process: it takes the signal of the processor's clock."""

    def __init__(self, regex: re.Pattern[str], most: int) -> None:
        self._regex = regex
        self._most = most
        self._working = False
        self._line = self._line_at_last_tick = self._ticks = 0
        signal.signal(signal.SIGPROF, self._tick)
        signal.setitimer(signal.ITIMER_PROF, MAX_LINE_SECONDS / TICKS, MAX_LINE_SECONDS / TICKS)

    def spans(self, line: bytes) -> list[tuple[int, int]] | None:
        """Where it matches, in bytes: nowhere, or up to the first match that ends beyond `most`. None if that
        would take too long to find out."""
        found: list[tuple[int, int]] = []
        if len(line) > LONG_LINE_BYTES:
            return self._spans_of_long(line)
        self._line += 1
        try:
            self._working = True
            self._find(line, found)
            self._working = False
        except _TooSlow:
            return found or None  # that it matches is known, even if not where else
        return found

    def _find(self, line: bytes, found: list[tuple[int, int]]) -> None:
        text = line.decode("utf-8", "surrogateescape")
        plain = text.isascii()
        for match in self._regex.finditer(text):
            start, end = match.span()
            if not plain:
                start, end = _bytes(text[:start]), _bytes(text[:end])
            found.append((start, end))
            if end > self._most:
                break

    def _spans_of_long(self, line: bytes) -> list[tuple[int, int]] | None:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            self._answer(line, writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        *known, _ = answer.split(b"\n")
        if not known:
            return None
        return [(start, end) for start, end in map(json.loads, known) if start <= end]

    def _answer(self, line: bytes, writer: int) -> None:
        """In the child: what is found, as it is found, and at the end a span that is none."""
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process
            signal.setitimer(signal.ITIMER_PROF, MAX_LINE_SECONDS + len(line) / MORE_BYTES_PER_SECOND)
            found = _Told(writer)
            self._find(line, found)
            found.append((1, 0))
        finally:
            os._exit(0)

    def _tick(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        if self._line != self._line_at_last_tick or not self._working:
            self._line_at_last_tick, self._ticks = self._line, 0
            return
        self._ticks += 1
        if self._ticks >= TICKS:
            self._working = False
            raise _TooSlow


class _Told(list[tuple[int, int]]):
    """What is appended goes to the parent at once: whoever is ended can tell no more."""

    def __init__(self, writer: int) -> None:
        super().__init__()
        self._writer = writer

    def append(self, span: tuple[int, int]) -> None:
        os.write(self._writer, json.dumps(span).encode() + b"\n")


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))
