"""System calls that Python has no function for, by way of ctypes. Linux; elsewhere they say ENOSYS."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from functools import lru_cache
from typing import Any, Final, NamedTuple

__all__ = [
    "RENAME_NOREPLACE",
    "RESOLVE_CACHED",
    "RESOLVE_NO_MAGICLINKS",
    "RESOLVE_NO_SYMLINKS",
    "RESOLVE_NO_XDEV",
    "Event",
    "birth_time",
    "birth_time_ms",
    "inotify_add_watch",
    "inotify_create",
    "inotify_read",
    "inotify_remove_watch",
    "is_mount_root",
    "is_on_proc",
    "open_resolving",
    "openat2",
    "renameat2",
]

AT_FDCWD: Final = -100
AT_SYMLINK_NOFOLLOW: Final = 0x100
AT_EMPTY_PATH: Final = 0x1000

RESOLVE_NO_XDEV: Final = 0x01
"""Refuse to cross into another mount."""

RESOLVE_NO_MAGICLINKS: Final = 0x02
"""Refuse (ELOOP) the links of `/proc` that lead to open files, whatever their names say."""

RESOLVE_NO_SYMLINKS: Final = 0x04
"""Refuse (ELOOP) every link on the way."""

RESOLVE_CACHED: Final = 0x20
"""Refuse (EAGAIN) what the kernel cannot look up without waiting."""

RENAME_NOREPLACE: Final = 1
"""Refuse (EEXIST) to replace what is there."""

_SYS_OPENAT2: Final = 437
"""The number on every architecture."""

_STATX_BTIME: Final = 0x800
_STATX_BYTES: Final = 256
_MASK = struct.Struct("=I")
_BTIME = struct.Struct("=qI")
_BTIME_OFFSET: Final = 80
_ATTRIBUTES = struct.Struct("=Q")
_ATTRIBUTES_OFFSET: Final = 8
_ATTRIBUTES_KNOWN_OFFSET: Final = 56
_MOUNT_ROOT: Final = 0x2000
_HOW = struct.Struct("=QQQ")

_STATFS_BYTES: Final = 256
_KIND = struct.Struct("@l")
_PROC_KIND: Final = 0x9FA0

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc_holding_the_lock: Final = ctypes.PyDLL(None, use_errno=True)
"""For calls that never wait: giving up the interpreter lock for them costs more than they do."""


def _function(name: str, library: Any = _libc) -> Any:
    return getattr(library, name, None)


_syscall: Final = _function("syscall", _libc_holding_the_lock)
_waiting_syscall: Final = _function("syscall")
_fstatfs: Final = _function("fstatfs", _libc_holding_the_lock)
_statx: Final = _function("statx")
_renameat2: Final = _function("renameat2")


def openat2(path: bytes, flags: int, resolve: int) -> int:
    """A descriptor of an absolute path. Only for what cannot wait: the interpreter lock is held."""
    descriptor: int = _syscall(_SYS_OPENAT2, AT_FDCWD, path, _how(flags, resolve), _HOW.size)
    if descriptor < 0:
        raise _last_error()
    return descriptor


def open_resolving(path: bytes, flags: int, resolve: int, *, dir_fd: int | None = None) -> int:
    """The same for what may wait, and with a directory to begin in."""
    start = AT_FDCWD if dir_fd is None else dir_fd
    descriptor: int = _waiting_syscall(_SYS_OPENAT2, start, path, _how(flags, resolve), _HOW.size)
    if descriptor < 0:
        raise _last_error()
    return descriptor


def is_on_proc(descriptor: int) -> bool:
    """Whether an open file is one of `/proc`."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _fstatfs(descriptor, buffer) != 0:
        raise _last_error()
    kind: int = _KIND.unpack_from(buffer)[0]
    return kind == _PROC_KIND


@lru_cache(maxsize=16)
def _how(flags: int, resolve: int) -> Any:
    return ctypes.create_string_buffer(_HOW.pack(flags | os.O_CLOEXEC, 0, resolve), _HOW.size)


def is_mount_root(name: bytes, dir_fd: int) -> bool | None:
    """Whether something is mounted at a name in a directory, or (with no name) is what was opened; None where
    the kernel does not say."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if _statx is None or _statx(dir_fd, name, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, 0, buffer) != 0:
        return None
    known: int = _ATTRIBUTES.unpack_from(buffer, _ATTRIBUTES_KNOWN_OFFSET)[0]
    if not known & _MOUNT_ROOT:
        return None
    return bool(_ATTRIBUTES.unpack_from(buffer, _ATTRIBUTES_OFFSET)[0] & _MOUNT_ROOT)


def birth_time_ms(path: bytes, *, dir_fd: int | None = None, follow: bool = True) -> int:
    """When the file was made, in milliseconds since 1970; 0 where the file system does not say."""
    return birth_time(path, dir_fd=dir_fd, follow=follow) // 1_000_000


def birth_time(path: bytes, *, dir_fd: int | None = None, follow: bool = True) -> int:
    """The same in nanoseconds."""
    if _statx is None:
        return 0
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    flags = AT_EMPTY_PATH | (0 if follow else AT_SYMLINK_NOFOLLOW)
    if _statx(AT_FDCWD if dir_fd is None else dir_fd, path, flags, _STATX_BTIME, buffer) != 0:
        return 0
    if not _MASK.unpack_from(buffer)[0] & _STATX_BTIME:
        return 0
    seconds, nanoseconds = _BTIME.unpack_from(buffer, _BTIME_OFFSET)
    return int(seconds * 1_000_000_000 + nanoseconds)


def renameat2(source_dir: int, source: bytes, target_dir: int, target: bytes, flags: int) -> None:
    """Rename with conditions; EINVAL or ENOSYS where the kernel or file system does not know them."""
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _renameat2(source_dir, source, target_dir, target, flags) != 0:
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


# inotify -----------------------------------------------------------------------------------------

IN_MODIFY: Final = 0x002
IN_ATTRIB: Final = 0x004
IN_MOVED_FROM: Final = 0x040
IN_MOVED_TO: Final = 0x080
IN_CREATE: Final = 0x100
IN_DELETE: Final = 0x200
IN_DELETE_SELF: Final = 0x400
IN_MOVE_SELF: Final = 0x800
IN_UNMOUNT: Final = 0x2000
IN_Q_OVERFLOW: Final = 0x4000
"""Events were lost. Sent with no watch's number."""
IN_IGNORED: Final = 0x8000
"""The watch is gone."""
IN_EXCL_UNLINK: Final = 0x04000000
"""Say nothing of what happens to files that have no name in the directory any more, or not yet."""
IN_MASK_ADD: Final = 0x20000000
"""Add to what is watched already."""
IN_ISDIR: Final = 0x40000000
"""It happened to a directory."""

_EVENT = struct.Struct("=iIII")
_READ_BYTES: Final = 64 * 1024

_inotify_init1: Final = _function("inotify_init1")
_inotify_add_watch: Final = _function("inotify_add_watch")
_inotify_rm_watch: Final = _function("inotify_rm_watch")


class Event(NamedTuple):
    """Something that happened to what a watch is about, or to the entry `name` in it."""

    watch: int
    mask: int
    name: bytes


def inotify_create() -> int:
    """A descriptor that becomes readable when something happens. Closing it ends its watches."""
    if _inotify_init1 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor: int = _inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise _last_error()
    return descriptor


def inotify_add_watch(descriptor: int, path: bytes, mask: int) -> int:
    """The number of the watch; the same one for the same inode."""
    watch: int = _inotify_add_watch(descriptor, path, mask)
    if watch < 0:
        raise _last_error()
    return watch


def inotify_remove_watch(descriptor: int, watch: int) -> None:
    """Not an error when it is gone already."""
    _inotify_rm_watch(descriptor, watch)


def inotify_read(descriptor: int) -> list[Event]:
    """What happened since the last call."""
    try:
        data = os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return []
    events: list[Event] = []
    position = 0
    while position < len(data):
        watch, mask, _, length = _EVENT.unpack_from(data, position)
        position += _EVENT.size
        events.append(Event(watch, mask, data[position : position + length].rstrip(b"\0")))
        position += length
    return events
