"""What `/proc` tells of this server, kept from calls that it does itself under a sandbox.

Under a profile that lets everything be read, reading calls are done here and not in a sandbox: they could
see nothing else there, but for `/proc`. Inside of a sandbox that is a fresh one; here it has the server's
environment and memory, and the open files of every process of its account. So whatever such a call opens
is opened through none of the links by which `/proc` leads to open files (they skip all permissions on the
way), and what was opened is asked whether it is a file of `/proc`. If so, somebody inside has to do the call.
"""

from __future__ import annotations

import errno
import os
import sys

from .kernel import RESOLVE_NO_MAGICLINKS, is_on_proc, open_resolving

__all__ = ["CannotTell", "OnProc", "lies_on_proc", "open_off_proc"]


class OnProc(Exception):
    """It is a file of `/proc`, or is reached through one."""


class CannotTell(OnProc):
    """Or perhaps: this kernel is older than 5.6, or somebody keeps us from asking it."""


def open_off_proc(path: bytes, flags: int, *, dir_fd: int | None = None) -> int:
    """Like `os.open`; OnProc if that leads to `/proc`."""
    if sys.platform != "linux":
        return os.open(path, flags, dir_fd=dir_fd)
    try:
        descriptor = open_resolving(path, flags, RESOLVE_NO_MAGICLINKS, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            raise CannotTell from None
        if error.errno == errno.ELOOP:  # or too many links: whoever does the call instead will say so
            raise OnProc from None
        raise
    if is_on_proc(descriptor):
        os.close(descriptor)
        raise OnProc
    return descriptor


def lies_on_proc(path: bytes) -> bool:
    """Whether a path leads to `/proc` now; for calls that tell names and sizes, and no content."""
    try:
        os.close(open_off_proc(path, os.O_PATH))
    except OnProc:
        return True
    except OSError:
        return False  # whoever does the call will say what is wrong
    return False
