"""File contents on their way into and out of messages: base64, in pieces that stay in the processor's cache.

Large contents are put together in memory that the kernel hands out in large pages. Filling 64 MB of
ordinary fresh memory costs 50 ms in page faults alone, more than reading and encoding the file does.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

import pybase64
from msgspec import Raw

from ...wire.files import BadBase64, base64_problem, decode_base64
from .lane import Turn

__all__ = ["LARGE_BYTES", "MAX_READ_BYTES", "PIECE_BYTES", "decode_content", "encode_content", "fill"]

LARGE_BYTES: Final = 256 * 1024
"""Reading or writing more than this leaves the lane, and is done in pieces."""

MAX_READ_BYTES: Final = 536_870_912
"""Largest file that is answered in one message. Streams have no such limit."""

PIECE_BYTES: Final = 3 * 256 * 1024
"""A multiple of three, so that base64 of the pieces is base64 of the whole."""

PIECE_TEXT: Final = PIECE_BYTES // 3 * 4

_BEGINNING: Final = b'{"dataBase64":"'
_END: Final = b'"}'


def encode_content(descriptor: int, start: int, most: int, turn: Turn) -> Raw:
    """The result of `fs/readFile`: up to `most` bytes from `start` on, read until the file ends."""
    room = _memory(_encoded_size(most))
    room.write(_BEGINNING)
    piece = memoryview(bytearray(PIECE_BYTES))
    total = 0
    while total < most:
        turn.check()
        wanted = min(PIECE_BYTES, most - total)
        count = fill(descriptor, piece[:wanted], start + total)
        room.write(pybase64.b64encode(piece[:count]))
        total += count
        if count < wanted:
            break
    room.write(_END)
    return Raw(memoryview(room)[: room.tell()])


def _encoded_size(size: int) -> int:
    return len(_BEGINNING) + (size + 2) // 3 * 4 + len(_END)


def fill(descriptor: int, view: memoryview, offset: int) -> int:
    """Read from an offset on until the view is full or the file ends; how much was read."""
    filled = 0
    while filled < len(view):
        count = os.preadv(descriptor, [view[filled:]], offset + filled)
        if not count:
            break
        filled += count
    return filled


def decode_content(text: str) -> bytes | memoryview:
    """The bytes that a base64 text stands for; BadBase64 if it is none."""
    if len(text) <= PIECE_TEXT:
        return decode_base64(text)
    room = _memory(len(text) // 4 * 3 + 3)
    last = (len(text) - 1) // PIECE_TEXT * PIECE_TEXT
    try:
        for start in range(0, last, PIECE_TEXT):
            if room.write(pybase64.b64decode(text[start : start + PIECE_TEXT], validate=True)) != PIECE_BYTES:
                raise ValueError("padding in the middle")
        room.write(decode_base64(text[last:]))
    except ValueError:
        raise BadBase64(base64_problem(text)) from None
    return memoryview(room)[: room.tell()]


def _memory(size: int) -> mmap.mmap:
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        room.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        pass  # ordinary pages, then
    return room
