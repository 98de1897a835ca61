"""From blocks of bytes to lines. Nothing but LF ends a line, and a line may be of any length.

Pure: it is given blocks and gives lines. Text tools that also break at U+2028, U+0085, VT or FF cut valid
events in two, and readers with a limit of 64 KiB fail on the output of one command.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Final

from msgspec import Struct

__all__ = ["MAX_LINE_BYTES", "Line", "LineSplitter", "split_lines", "split_lines_async"]

MAX_LINE_BYTES: Final = 64 * 1024 * 1024
"""Longest line that is parsed. A safety net: command output makes lines of 1 MiB, images larger ones."""

KEPT_OF_OVERLONG_BYTES: Final = 256
"""How much of a longer line is kept, to say what it was."""

_BOM: Final = b"\xef\xbb\xbf"


class Line(Struct, frozen=True):
    """A line without its end. `size` is more than `data` holds only if the line was too long."""

    number: int
    data: bytes
    size: int
    terminated: bool = True
    """False for what stands at the end of input without an LF: it may have been cut off."""

    @property
    def overlong(self) -> bool:
        return self.size > len(self.data)


class LineSplitter:
    """Feed it blocks; it holds at most one unfinished line. Blank lines are counted, not given."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max = max_line_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._number = 0

    def feed(self, block: bytes) -> Iterator[Line]:
        """The lines that end in this block."""
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            self._hold(block[start:end])
            start = end + 1
            line = self._take(terminated=True)
            if line is not None:
                yield line
        self._hold(block[start:])

    def end(self) -> Iterator[Line]:
        """No more blocks: what is left is one last line."""
        if self._size:
            line = self._take(terminated=False)
            if line is not None:
                yield line

    def _hold(self, part: bytes) -> None:
        if not part:
            return
        self._size += len(part)
        if self._size <= self._max:
            self._parts.append(part)
        elif self._size - len(part) <= self._max:
            beginning = b"".join(self._parts) + part
            self._parts = [beginning[: min(KEPT_OF_OVERLONG_BYTES, self._max)]]

    def _take(self, terminated: bool) -> Line | None:
        data, size = b"".join(self._parts), self._size
        self._parts, self._size = [], 0
        self._number += 1
        if size <= self._max:
            if self._number == 1:
                data = data.removeprefix(_BOM)
            data = data.removesuffix(b"\r")
            size = len(data)
            if not data or data.isspace():
                return None
        return Line(self._number, data, size, terminated)


def split_lines(blocks: Iterable[bytes], max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """The lines of any blocks: a file opened in binary mode, chunks of a pipe, a list."""
    splitter = LineSplitter(max_line_bytes)
    for block in blocks:
        yield from splitter.feed(block)
    yield from splitter.end()


async def split_lines_async(
    blocks: AsyncIterable[bytes], max_line_bytes: int = MAX_LINE_BYTES
) -> AsyncIterator[Line]:
    """The same for blocks that have to be waited for."""
    splitter = LineSplitter(max_line_bytes)
    async for block in blocks:
        for line in splitter.feed(block):
            yield line
    for line in splitter.end():
        yield line
