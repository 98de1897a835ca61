"""Open files of one connection: read and written block by block, at any offset.

Whether a handle exists is decided when a call has its turn, not when it arrives: a client may send
open, read and close in one go. A handle that is closed while a block of it is still being read keeps
its descriptor until that block is done.
"""

from __future__ import annotations

import errno
import os
import stat
from threading import Lock
from typing import Final

from msgspec import Raw

from ...wire.errors import NOT_FOUND, RpcError, invalid_params, invalid_request
from ...wire.files import BadBase64, OpenMode, OpenResult, block_result, decode_base64
from .content import LARGE_BYTES, fill
from .errors import os_error
from .lane import ALONE, Turn
from .paths import lossy, real_path
from .read import MAX_OFFSET, open_for_reading
from .write import PINS, WRITE, write_all_at

__all__ = ["MAX_BLOCK_BYTES", "MAX_HANDLES", "MAX_ID_BYTES", "Handles", "handle_path"]

MAX_HANDLES: Final = 128
"""Of one connection, reading and writing together."""

MAX_ID_BYTES: Final = 32
"""Of a handle's id, in UTF-8."""

MAX_BLOCK_BYTES: Final = 1024 * 1024
"""Read or written in one call."""

_NAME_PREFIX: Final = b"\0handle\0"


def handle_path(handle_id: str) -> bytes:
    """What a handle is called where the lane compares what calls touch."""
    return _NAME_PREFIX + handle_id.encode("utf-8", "surrogatepass")


class _Handle:
    """One open file, and how many calls are using it."""

    __slots__ = ("closed", "descriptor", "path", "pinned", "users")

    def __init__(self, descriptor: int, writes: bool) -> None:
        self.descriptor = descriptor
        self.path = real_path(descriptor)
        self.pinned = os.fstat(descriptor) if writes else None
        self.users = 0
        self.closed = False
        if self.pinned is not None:
            PINS.add(self.pinned)

    def close(self) -> None:
        if self.pinned is not None:
            PINS.remove(self.pinned)
        os.close(self.descriptor)


class Handles:
    """The open files of a connection."""

    def __init__(self) -> None:
        self._handles: dict[str, _Handle] = {}
        self._lock = Lock()
        self._ended = False

    def __len__(self) -> int:
        return len(self._handles)

    def where(self, name: bytes) -> bytes | None:
        """The file that a name made by `handle_path` stands for now."""
        handle = self._handles.get(name[len(_NAME_PREFIX) :].decode("utf-8", "surrogatepass"))
        return None if handle is None else handle.path

    def open(self, handle_id: str, path: bytes, mode: OpenMode, turn: Turn = ALONE) -> OpenResult:
        """Open a regular file; to write, it is created or emptied at once."""
        del turn
        _check_id(handle_id)
        if handle_id in self._handles:
            raise invalid_request(f"file handle `{handle_id}` already exists")
        if len(self._handles) >= MAX_HANDLES:
            raise invalid_request(f"at most {MAX_HANDLES} file handles may be open per connection")
        if mode == "read":
            handle = _Handle(open_for_reading(path), writes=False)
        else:
            handle = _Handle(_open_emptied(path), writes=True)
        with self._lock:
            if not self._ended:
                self._handles[handle_id] = handle
                return OpenResult(handle_id)
        handle.close()
        return OpenResult(handle_id)

    def read(self, handle_id: str, offset: int, length: int, turn: Turn = ALONE) -> Raw:
        """A block; any error of the operating system closes the handle."""
        _check_id(handle_id)
        if not 1 <= length <= MAX_BLOCK_BYTES:
            raise invalid_request(f"file read block length must be between 1 and {MAX_BLOCK_BYTES}")
        handle = self._take(handle_id)
        try:
            if offset > MAX_OFFSET:
                raise os_error(errno.EINVAL)
            if length > LARGE_BYTES:
                turn.leave(handle.path)
            return _read_block(handle.descriptor, offset, length)
        except OSError:
            self._forget(handle_id, handle)
            raise
        finally:
            self._give_back(handle)

    def write(self, handle_id: str, offset: int, chunk: str, turn: Turn = ALONE) -> dict[str, str]:
        """A block, in place; an error leaves the handle open."""
        _check_id(handle_id)
        try:
            data = decode_base64(chunk)
        except BadBase64 as error:
            raise invalid_params(str(error)) from None
        if not 1 <= len(data) <= MAX_BLOCK_BYTES:
            raise invalid_request(f"file write block length must be between 1 and {MAX_BLOCK_BYTES}")
        if offset + len(data) > MAX_OFFSET:
            raise invalid_request("file write range exceeds the signed 64-bit file offset limit")
        handle = self._take(handle_id)
        try:
            if len(data) > LARGE_BYTES:
                turn.leave(handle.path)
            write_all_at(handle.descriptor, data, offset)
        finally:
            self._give_back(handle)
        return {}

    def close(self, handle_id: str, turn: Turn = ALONE) -> dict[str, str]:
        """Close; an id that is not open is fine."""
        del turn
        _check_id(handle_id)
        handle = self._handles.get(handle_id)
        if handle is not None:
            self._forget(handle_id, handle)
        return {}

    def end(self) -> None:
        """Close all, and whatever is still being opened."""
        with self._lock:
            self._ended = True
            handles = list(self._handles.items())
        for handle_id, handle in handles:
            self._forget(handle_id, handle)

    def _take(self, handle_id: str) -> _Handle:
        with self._lock:
            handle = self._handles.get(handle_id)
            if handle is None:
                raise RpcError(NOT_FOUND, f"unknown file handle `{handle_id}`")
            handle.users += 1
            return handle

    def _give_back(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            unused = handle.closed and not handle.users
        if unused:
            handle.close()

    def _forget(self, handle_id: str, handle: _Handle) -> None:
        with self._lock:
            if self._handles.get(handle_id) is not handle:
                return
            del self._handles[handle_id]
            handle.closed = True
            unused = not handle.users
        if unused:
            handle.close()


def _check_id(handle_id: str) -> None:
    if len(handle_id.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        raise invalid_request(f"file handle ID must not exceed {MAX_ID_BYTES} bytes")


def _read_block(descriptor: int, offset: int, length: int) -> Raw:
    data = os.pread(descriptor, length, offset)
    if 0 < len(data) < length:
        # The end of the file, unless somebody interrupted us.
        view = memoryview(bytearray(length - len(data)))
        data += view[: fill(descriptor, view, offset + len(data))]
    return block_result(data, len(data) < length)


def _open_emptied(path: bytes) -> int:
    descriptor = os.open(path, WRITE | os.O_CREAT, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise invalid_request(f"path `{lossy(path)}` is not a file")
        os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
