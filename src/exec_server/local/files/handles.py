"""Open files of one connection: read and written block by block, at any offset.

Whether a handle exists is decided when a call has its turn, not when it arrives: a client may send
open, read and close in one go. A handle that is closed while a block of it is still being read keeps
its descriptor until that block is done.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from threading import Lock
from typing import Final

from ...wire.binary import FilePart
from ...wire.envelope import Encoded
from ...wire.errors import NOT_FOUND, RpcError, invalid_params, invalid_request
from ...wire.files import BadBase64, OpenMode, OpenResult, block_result, decode_base64
from .content import LARGE_BYTES, MAX_BLOCK_BYTES, encoded_bytes, read_at
from .errors import os_error
from .lane import ALONE, ANSWERS, Turn
from .paths import lossy, real_path
from .read import MAX_OFFSET, open_for_reading
from .write import PINS, WRITE, write_all_at

__all__ = [
    "MAX_BLOCK_BYTES",
    "MAX_HANDLES",
    "MAX_ID_BYTES",
    "Handles",
    "handle_path",
    "open_file",
    "open_part",
]

MAX_HANDLES: Final = 128
"""Of one connection, reading and writing together."""

MAX_ID_BYTES: Final = 32
"""Of a handle's id, in UTF-8."""

_PART: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

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

    def open(
        self,
        handle_id: str,
        path: bytes,
        mode: OpenMode,
        turn: Turn = ALONE,
        *,
        opener: Callable[[bytes, OpenMode, Turn], int] | None = None,
    ) -> OpenResult:
        """Open a regular file; to write, it is created or emptied at once.

        `opener` gives its descriptor, where somebody else has to open it.
        """
        _check_id(handle_id)
        if handle_id in self._handles:
            raise invalid_request(f"file handle `{handle_id}` already exists")
        if len(self._handles) >= MAX_HANDLES:
            raise invalid_request(f"at most {MAX_HANDLES} file handles may be open per connection")
        descriptor = open_file(path, mode) if opener is None else opener(path, mode, turn)
        handle = _Handle(descriptor, writes=mode != "read")
        with self._lock:
            if not self._ended:
                self._handles[handle_id] = handle
                return OpenResult(handle_id)
        handle.close()
        return OpenResult(handle_id)

    def read(
        self, handle_id: str, offset: int, length: int, binary: bool = False, turn: Turn = ALONE
    ) -> Encoded | FilePart:
        """A block, as it is or in JSON; any error of the operating system closes the handle."""
        _check_id(handle_id)
        if not 1 <= length <= MAX_BLOCK_BYTES:
            raise invalid_request(f"file read block length must be between 1 and {MAX_BLOCK_BYTES}")
        handle = self._take(handle_id)
        try:
            if offset > MAX_OFFSET:
                raise os_error(errno.EINVAL)
            if length > LARGE_BYTES:
                turn.leave(handle.path)
                turn.admit(ANSWERS, encoded_bytes(length))
            data = read_at(handle.descriptor, length, offset)
            eof = len(data) < length
            if binary:
                return FilePart(data, eof, os.fstat(handle.descriptor).st_size)
            return block_result(data, eof)
        except OSError:
            self._forget(handle_id, handle)
            raise
        finally:
            self._give_back(handle)

    def write(self, handle_id: str, offset: int, chunk: str | bytes, turn: Turn = ALONE) -> dict[str, str]:
        """A block, in place; an error leaves the handle open."""
        _check_id(handle_id)
        try:
            data = chunk if isinstance(chunk, bytes) else decode_base64(chunk)
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


def open_file(path: bytes, mode: OpenMode) -> int:
    """A descriptor of a regular file, emptied if it is to be written."""
    return open_for_reading(path) if mode == "read" else _open_emptied(path)


def open_part(path: bytes, *, keep: bool) -> int:
    """A descriptor of what a transfer writes to before it gets its name: locked, and surely ours.

    It is opened through no link, and refused if somebody else could have put it there or writes to it: where
    others may write to the directory, they must not choose what is overwritten.
    """
    made = True
    try:
        descriptor = os.open(path, _PART | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        made = False
        try:
            descriptor = os.open(path, _PART)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
                raise _not_ours(path) from None
            raise
    try:
        info = os.fstat(descriptor)
        ours = made or (info.st_uid == os.geteuid() and info.st_nlink == 1)
        if not stat.S_ISREG(info.st_mode) or not ours:
            raise _not_ours(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"another transfer writes to `{lossy(path)}`; wait for it, or end it"
            raise invalid_request(text) from None
        if not os.path.samestat(os.lstat(path), info):
            raise os_error(errno.ENOENT)  # it got its name just now
        if info.st_size and not keep:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _not_ours(path: bytes) -> RpcError:
    text = f"`{lossy(path)}` is not a plain file of the server's user, so nothing is written to it; remove it"
    return invalid_request(text)


def _check_id(handle_id: str) -> None:
    if len(handle_id.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        raise invalid_request(f"file handle ID must not exceed {MAX_ID_BYTES} bytes")


def _open_emptied(path: bytes) -> int:
    descriptor = os.open(path, WRITE | os.O_CREAT, 0o666)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise invalid_request(f"path `{lossy(path)}` is not a file")
        if info.st_size:
            # Not for new files: ext4 writes a file that was once emptied to the disk when it is closed.
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
