"""File contents on their way into and out of messages: base64, in pieces that stay in the processor's cache.

What is large is never held twice where that can be avoided: fresh memory costs more than reading,
encoding and writing together (50 ms of page faults for 64 MB, against 13).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pybase64

from ...wire.envelope import Encoded
from ...wire.files import BadBase64, base64_problem, decode_base64, encoded_content
from .lane import Turn

__all__ = [
    "LARGE_BYTES",
    "MAX_BLOCK_BYTES",
    "MAX_READ_BYTES",
    "PIECE_BYTES",
    "Decoded",
    "encode_content",
    "encoded_bytes",
    "fill",
    "read_at",
]

LARGE_BYTES: Final = 256 * 1024
"""Reading or writing more than this leaves the lane."""

MAX_READ_BYTES: Final = 536_870_912
"""Largest file that is answered in one message. Streams have no such limit."""

MAX_BLOCK_BYTES: Final = 1024 * 1024
"""Read or written in one call of a stream."""

PIECE_BYTES: Final = 3 * 256 * 1024
"""A multiple of three, so that base64 of the pieces is base64 of the whole."""

PIECE_TEXT: Final = PIECE_BYTES // 3 * 4


def encode_content(
    descriptor: int, start: int, most: int, turn: Turn, expected: int | None = None
) -> Encoded:
    """The result of `fs/readFile`: up to `most` bytes from `start` on, read until the file ends.

    `expected` is how many there seem to be: memory is taken for those, and for more only as more comes.
    """
    piece = memoryview(bytearray(min(PIECE_BYTES, most)))
    text = b""
    whole: bytearray | None = None
    total = written = 0
    while total < most:
        turn.check()
        wanted = min(PIECE_BYTES, most - total)
        count = fill(descriptor, piece[:wanted], start + total)
        text = pybase64.b64encode(piece[:count])
        if whole is None:
            if count == most or count < wanted:
                return encoded_content(text)
            whole = bytearray(encoded_bytes(most if expected is None else min(most, expected)))
        end = written + len(text)
        if end > len(whole):
            whole.extend(bytes(max(end, min(2 * len(whole), encoded_bytes(most))) - len(whole)))
        memoryview(whole)[written:end] = text
        written = end
        total += count
        if count < wanted:
            break
    return encoded_content(text if whole is None else memoryview(whole)[:written])


def encoded_bytes(count: int) -> int:
    """What so many bytes are in base64."""
    return (count + 2) // 3 * 4


def fill(descriptor: int, view: memoryview, offset: int) -> int:
    """Read from an offset on until the view is full or the file ends; how much was read."""
    filled = 0
    while filled < len(view):
        count = os.preadv(descriptor, [view[filled:]], offset + filled)
        if not count:
            break
        filled += count
    return filled


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Up to `length` bytes; fewer only where the file ends."""
    data = os.pread(descriptor, length, offset)
    if 0 < len(data) < length:
        # The end of the file, unless somebody interrupted us.
        view = memoryview(bytearray(length - len(data)))
        data += view[: fill(descriptor, view, offset + len(data))]
    return data


class Decoded:
    """The content that a base64 text stands for. BadBase64 when it is made, if the text is none."""

    def __init__(self, text: str | bytes) -> None:
        self._whole: bytes | None = None
        if isinstance(text, bytes):
            self._whole, self.size = text, len(text)
            return  # decoded already
        self._text = text
        if len(text) <= PIECE_TEXT:
            self._whole = decode_base64(text)
            self.size = len(self._whole)
        else:
            # Twice decoded is cheaper than once kept.
            self.size = sum(map(len, self._decode()))

    def pieces(self) -> Iterator[bytes]:
        """All of it, in order."""
        return iter((self._whole,)) if self._whole is not None else self._decode()

    def _decode(self) -> Iterator[bytes]:
        text = self._text
        last = (len(text) - 1) // PIECE_TEXT * PIECE_TEXT
        try:
            for start in range(0, last, PIECE_TEXT):
                piece = pybase64.b64decode(text[start : start + PIECE_TEXT], validate=True)
                if len(piece) != PIECE_BYTES:
                    raise ValueError("padding in the middle")
                yield piece
            yield decode_base64(text[last:])
        except ValueError:
            raise BadBase64(base64_problem(text)) from None
