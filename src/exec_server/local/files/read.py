"""Reading whole files, and parts of them."""

from __future__ import annotations

import os
import stat
from typing import Final

from ...wire.binary import FilePart
from ...wire.envelope import Encoded
from ...wire.errors import RpcError, invalid_request
from ...wire.files import content_result, ranged_result
from .content import (
    LARGE_BYTES,
    MAX_BLOCK_BYTES,
    MAX_READ_BYTES,
    encode_content,
    encoded_bytes,
    read_at,
)
from .lane import ALONE, ANSWERS, Turn
from .paths import lossy, parent_without_links, real_path
from .procfs import open_off_proc

__all__ = ["MAX_OFFSET", "READ", "as_it_is", "open_for_reading", "read_file", "read_range"]

MAX_OFFSET: Final = 2**63 - 1
"""What the operating system can address."""

READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""Without waiting: opening a FIFO must not wait for somebody to write to it."""


def read_file(path: bytes, follow: bool, turn: Turn = ALONE, *, off_proc: bool = False) -> Encoded:
    """The content of a regular file, encoded. `off_proc`: or OnProc, if it is in `/proc`."""
    descriptor = open_for_reading(path, follow, off_proc=off_proc)
    try:
        size = os.fstat(descriptor).st_size
        if size > MAX_READ_BYTES:
            raise _too_large()
        if size < LARGE_BYTES:
            data = os.read(descriptor, size + 1)  # one more shows that it grows; much more costs pages
            if len(data) == size:
                return content_result(data)
        turn.leave(real_path(descriptor))
        turn.admit(ANSWERS, encoded_bytes(size))
        result = encode_content(descriptor, 0, size, turn)
        if os.pread(descriptor, 1, size):
            # It grows, or is one of those that do not say how large they are.
            return _read_unmeasured(descriptor, turn)
        return result
    finally:
        os.close(descriptor)


def read_range(
    path: bytes,
    follow: bool,
    offset: int,
    length: int | None,
    binary: bool = False,
    turn: Turn = ALONE,
    *,
    off_proc: bool = False,
) -> Encoded | FilePart:
    """A part of a regular file of any size, and whether the file ends with it: in JSON or, if it is small
    and wanted so, as it is."""
    descriptor = open_for_reading(path, follow, off_proc=off_proc)
    try:
        size = os.fstat(descriptor).st_size
        expected = max(size - offset, 0)
        if length is None and expected > MAX_READ_BYTES:
            raise _too_large()
        # Whoever names a length gets what fits one answer; what follows is another range.
        most = expected if length is None else min(length, MAX_READ_BYTES)
        if most >= LARGE_BYTES:
            turn.leave(real_path(descriptor))
            turn.admit(ANSWERS, encoded_bytes(min(most, expected)))
        bare = as_it_is(length, binary)
        if offset > MAX_OFFSET:
            return FilePart(b"", True, size) if bare else ranged_result(content_result(b""), True)
        if bare:
            # One byte more says whether there is more.
            data = read_at(descriptor, min(most + 1, MAX_OFFSET - offset), offset)
            return FilePart(memoryview(data)[:most], len(data) <= most, size)
        content = encode_content(descriptor, offset, min(most, MAX_OFFSET - offset), turn, expected)
        return ranged_result(content, not os.pread(descriptor, 1, min(offset + most, MAX_OFFSET - 1)))
    finally:
        os.close(descriptor)


def as_it_is(length: int | None, binary: bool) -> bool:
    """Whether a part of this length is sent without base64: blocks are, more would not fit a frame."""
    return binary and length is not None and length <= MAX_BLOCK_BYTES


def open_for_reading(path: bytes, follow: bool = True, *, off_proc: bool = False) -> int:
    """A descriptor of a regular file, and of nothing else. `off_proc`: OnProc if it is in `/proc`."""
    open_it = open_off_proc if off_proc else os.open
    if follow:
        descriptor = open_it(path, READ)
        problem = "path `{}` is not a file"
    else:
        with parent_without_links(path) as (parent, name):
            descriptor = open_it(name, READ | os.O_NOFOLLOW, dir_fd=parent)
        problem = "path is not a regular file"
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise invalid_request(problem.format(lossy(path)))
    return descriptor


def _read_unmeasured(descriptor: int, turn: Turn) -> Encoded:
    os.lseek(descriptor, 0, os.SEEK_SET)
    chunks: list[bytes] = []
    total = 0
    while chunk := os.read(descriptor, LARGE_BYTES):
        turn.check()
        chunks.append(chunk)
        total += len(chunk)
        if total > MAX_READ_BYTES:
            raise _too_large()
    return content_result(b"".join(chunks))


def _too_large() -> RpcError:
    return invalid_request(f"file is too large to read: limit is {MAX_READ_BYTES} bytes")
