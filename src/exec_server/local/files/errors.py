"""What the operating system says when it refuses, in the protocol's codes and words.

The texts are those of the C library that other servers of this protocol are linked with, so that two
servers on one machine say the same.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from ...wire.errors import INTERNAL_ERROR, INVALID_REQUEST, NOT_FOUND, RpcError

__all__ = ["failure", "os_error", "text"]

_TEXTS: Final = {
    errno.EPERM: "Operation not permitted",
    errno.ENOENT: "No such file or directory",
    errno.EINTR: "Interrupted system call",
    errno.EIO: "I/O error",
    errno.ENXIO: "No such device or address",
    errno.EBADF: "Bad file descriptor",
    errno.EAGAIN: "Resource temporarily unavailable",
    errno.ENOMEM: "Out of memory",
    errno.EACCES: "Permission denied",
    errno.EBUSY: "Resource busy",
    errno.EEXIST: "File exists",
    errno.EXDEV: "Cross-device link",
    errno.ENODEV: "No such device",
    errno.ENOTDIR: "Not a directory",
    errno.EISDIR: "Is a directory",
    errno.EINVAL: "Invalid argument",
    errno.ENFILE: "Too many open files in system",
    errno.EMFILE: "No file descriptors available",
    errno.ETXTBSY: "Text file busy",
    errno.EFBIG: "File too large",
    errno.ENOSPC: "No space left on device",
    errno.EROFS: "Read-only file system",
    errno.EMLINK: "Too many links",
    errno.ENAMETOOLONG: "Filename too long",
    errno.ENOSYS: "Function not implemented",
    errno.ENOTEMPTY: "Directory not empty",
    errno.ELOOP: "Symbolic link loop",
    errno.EOVERFLOW: "Value too large for data type",
    errno.ENOTSUP: "Not supported",
    errno.ESTALE: "Stale file handle",
    errno.EDQUOT: "Quota exceeded",
}

_CODES: Final = {
    errno.EPERM: INVALID_REQUEST,
    errno.EACCES: INVALID_REQUEST,
    errno.EINVAL: INVALID_REQUEST,
    errno.ENOENT: NOT_FOUND,
}
"""Every other error is an internal one."""


def text(number: int) -> str:
    """The message of an errno."""
    return f"{_TEXTS.get(number) or os.strerror(number)} (os error {number})"


def failure(error: OSError) -> RpcError:
    """The answer that an operating-system error becomes."""
    number = error.errno
    if number is None:
        return RpcError(INTERNAL_ERROR, str(error))
    return RpcError(_CODES.get(number, INTERNAL_ERROR), text(number))


def os_error(number: int) -> OSError:
    """An error as if the operating system had said it."""
    return OSError(number, os.strerror(number))
