"""Guards for the time of one call: names that must not be made, covered in a view of the caller's own.

What covers a missing name has to exist on the host for as long as it covers it, and a warm helper lives
longer than anybody should see that. So a helper whose plan has such names starts without the covers, does
nothing itself, and forks for each call: the child makes a user and a mount namespace inside of its
sandbox, covers the names there, gives up every right it got by that, and only then does the call.

No user is mapped into that namespace (root could not be): to the child every file seems to be nobody's,
and files it makes are still its real user's. Calls that have to keep a file's owner go another way.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["CannotNest", "Guard", "end_with", "stand"]

_NEW_USER: Final = 0x10000000
_NEW_MOUNTS: Final = 0x00020000
_READ_ONLY: Final = 0x1
_NO_SETUID: Final = 0x2
_NO_DEVICES: Final = 0x4
_NO_EXEC: Final = 0x8
_PR_SET_PDEATHSIG: Final = 1
_PR_CAPBSET_DROP: Final = 24
_CAPABILITY_V3: Final = 0x20080522
_CAPSET: Final = {"x86_64": 126, "aarch64": 91}

_libc = ctypes.CDLL(None, use_errno=True)


class Guard(NamedTuple):
    """A directory to stand where there must be nothing, or nothing new."""

    path: bytes
    mode: int


class CannotNest(Exception):
    """Nobody inside of a sandbox gets namespaces of his own: not now, or not at all on this machine."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.for_good = number in _NEVER


_NEVER: Final = frozenset({errno.EPERM, errno.EINVAL, errno.ENOSYS})
"""Answers of a kernel that will not change. It may also be short of memory, or of namespaces, just now."""


def stand(guards: Sequence[Guard]) -> None:
    """Cover the names for this process, for good. OSError if one cannot be: then nothing may be done."""
    for guard in guards:
        try:
            os.mkdir(guard.path)
        except FileExistsError:
            pass  # it was there, and empty, or another call is being guarded
    if _libc.unshare(_NEW_USER | _NEW_MOUNTS):
        raise CannotNest(ctypes.get_errno())
    for guard in guards:
        _cover(guard.path, guard.mode)
    _give_up_rights()


def end_with(parent: int) -> None:
    """Let this process not outlive the one it comes from. To be said last: a change of rights undoes it."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)


def _cover(path: bytes, mode: int) -> None:
    """By its descriptor: whatever the name leads to meanwhile, this is the directory that is covered."""
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        place = b"/proc/self/fd/%d" % descriptor
        flags = _READ_ONLY | _NO_SETUID | _NO_DEVICES | _NO_EXEC
        _check(_libc.mount(b"tmpfs", place, b"tmpfs", flags, b"size=4k,mode=%03o" % mode), os.fsdecode(path))
        covered = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    seen = os.lstat(path)
    if (seen.st_dev, seen.st_ino) == (covered.st_dev, covered.st_ino):
        raise OSError(0, "it is not covered", os.fsdecode(path))


def _give_up_rights() -> None:
    """What came with the new namespace. no_new_privs, which is set, keeps them from coming back."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header = struct.pack("=Ii", _CAPABILITY_V3, 0)
    _check(_libc.syscall(_CAPSET[os.uname().machine], header, bytes(24)), "capset")


def _check(code: int, what: str) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
