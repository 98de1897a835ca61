"""System calls that Python has no function for, by way of ctypes. Linux; elsewhere they say ENOSYS."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from functools import lru_cache
from typing import Any, Final

__all__ = [
    "RENAME_NOREPLACE",
    "RESOLVE_CACHED",
    "RESOLVE_NO_XDEV",
    "birth_time_ms",
    "openat2",
    "renameat2",
]

AT_FDCWD: Final = -100
AT_SYMLINK_NOFOLLOW: Final = 0x100
AT_EMPTY_PATH: Final = 0x1000

RESOLVE_NO_XDEV: Final = 0x01
"""Refuse to cross into another mount."""

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
_HOW = struct.Struct("=QQQ")

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc_holding_the_lock: Final = ctypes.PyDLL(None, use_errno=True)
"""For calls that never wait: giving up the interpreter lock for them costs more than they do."""


def _function(name: str, library: Any = _libc) -> Any:
    return getattr(library, name, None)


_syscall: Final = _function("syscall", _libc_holding_the_lock)
_statx: Final = _function("statx")
_renameat2: Final = _function("renameat2")


def openat2(path: bytes, flags: int, resolve: int) -> int:
    """A descriptor of an absolute path. Only for what cannot wait: the interpreter lock is held."""
    descriptor: int = _syscall(_SYS_OPENAT2, AT_FDCWD, path, _how(flags, resolve), _HOW.size)
    if descriptor < 0:
        raise _last_error()
    return descriptor


@lru_cache(maxsize=16)
def _how(flags: int, resolve: int) -> Any:
    return ctypes.create_string_buffer(_HOW.pack(flags | os.O_CLOEXEC, 0, resolve), _HOW.size)


def birth_time_ms(path: bytes, *, dir_fd: int | None = None, follow: bool = True) -> int:
    """When the file was made, in milliseconds since 1970; 0 where the file system does not say."""
    if _statx is None:
        return 0
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    flags = AT_EMPTY_PATH | (0 if follow else AT_SYMLINK_NOFOLLOW)
    if _statx(AT_FDCWD if dir_fd is None else dir_fd, path, flags, _STATX_BTIME, buffer) != 0:
        return 0
    if not _MASK.unpack_from(buffer)[0] & _STATX_BTIME:
        return 0
    seconds, nanoseconds = _BTIME.unpack_from(buffer, _BTIME_OFFSET)
    return int(seconds * 1000 + nanoseconds // 1_000_000)


def renameat2(source_dir: int, source: bytes, target_dir: int, target: bytes, flags: int) -> None:
    """Rename with conditions; EINVAL or ENOSYS where the kernel or file system does not know them."""
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _renameat2(source_dir, source, target_dir, target, flags) != 0:
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
