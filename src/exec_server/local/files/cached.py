"""What the kernel can answer from memory, answered without a thread.

Handing a call to a thread and its answer back costs several times what reading a small file does. So
the loop asks first whether the answer is there already: a path is looked up only in the kernel's cache
(RESOLVE_CACHED), and content is read only if it is in memory (RWF_NOWAIT). Neither waits for a disk.
Opening a file on a network or FUSE file system may wait for whoever serves it even so; where such a one
is mounted, only files on the root mount are looked at. Everything else, and every answer that is not
plainly a success or "not found", is None: ask again in a thread.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from time import monotonic
from typing import Final

from ...wire.binary import FilePart
from ...wire.envelope import Encoded
from ...wire.files import MetadataResult, content_result, ranged_result
from .errors import failure
from .kernel import (
    RESOLVE_CACHED,
    RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_XDEV,
    birth_time_ms,
    is_on_proc,
    openat2,
)
from .metadata import metadata_result
from .read import READ, as_it_is

__all__ = ["cached_metadata", "cached_read_file", "cached_read_range", "nothing_hangs"]

SMALL_BYTES: Final = 64 * 1024
"""Largest file whose content is encoded on the loop: twenty microseconds of work."""

LOOK_SECONDS: Final = 0.1
"""How old the knowledge of what is mounted may be."""

LOCAL_KINDS: Final = frozenset(
    [
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "bcachefs",
        "f2fs",
        "zfs",
        "jfs",
        "tmpfs",
        "ramfs",
        "overlay",
        "squashfs",
        "erofs",
        "iso9660",
        "vfat",
        "exfat",
        "ntfs3",
        "proc",
        "sysfs",
        "devtmpfs",
        "devpts",
        "cgroup",
        "cgroup2",
        "mqueue",
        "hugetlbfs",
        "debugfs",
        "tracefs",
        "securityfs",
        "configfs",
        "pstore",
        "bpf",
        "efivarfs",
        "nsfs",
        "binfmt_misc",
        "fusectl",
        "selinuxfs",
    ]
)
"""File systems that wait for nobody but this machine."""

_MOUNTS: Final = "/proc/self/mountinfo"
_ANYWHERE: Final = RESOLVE_CACHED | RESOLVE_NO_MAGICLINKS
_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)


class _Mounts:
    """Which paths are safe to look at, kept up to date as things are mounted.

    The table is opened when it is first asked for: who is never asked for files holds no descriptor, and who
    has none left when he is asked first does without it until there is one.
    """

    def __init__(self) -> None:
        self._possible = bool(_NOWAIT)
        self._resolve: int | None = None
        self._descriptor = -1
        self._changes = select.poll()
        self._look_again = 0.0

    def resolve(self) -> int | None:
        """The flags for `openat2`; None when nothing is safe."""
        if self._possible:
            now = monotonic()
            if now > self._look_again:
                self._look_again = now + LOOK_SECONDS
                if self._descriptor < 0:
                    self._open()
                elif self._changes.poll(0):
                    self._read()
        return self._resolve

    def never(self) -> None:
        """The kernel does not know how: do not ask again."""
        self._possible = False
        self._resolve = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        try:
            self._descriptor = os.open(_MOUNTS, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            # Without /proc there is no telling, ever; without a descriptor there is none for now.
            self._possible = error.errno in (errno.EMFILE, errno.ENFILE)
            return
        self._changes.register(self._descriptor, select.POLLPRI | select.POLLERR)
        self._read()

    def _read(self) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        table = b""
        while more := os.read(self._descriptor, 65536):
            table += more
        root, others = _kinds(table)
        if root not in LOCAL_KINDS:
            self._resolve = None
        elif others <= LOCAL_KINDS:
            self._resolve = _ANYWHERE
        else:
            self._resolve = _ANYWHERE | RESOLVE_NO_XDEV


def _kinds(table: bytes) -> tuple[str, set[str]]:
    """What the root is, and what else there is."""
    root, others = "", set()
    for line in table.decode("utf-8", "replace").splitlines():
        mount, _, source = line.partition(" - ")
        kind = source.partition(" ")[0]
        if mount.split(" ")[4] == "/":
            root = kind
        else:
            others.add(kind)
    return root, others


_mounts = _Mounts()


def cached_read_file(path: bytes) -> Encoded | None:
    """The answer to `read_file`, links followed, if it is small and in memory.

    Never a file of `/proc` that has anything in it: none of them says how large it is, and others are not
    reached through it (procfs.py).
    """
    content = _content(path)
    return None if content is None else content_result(content)


def cached_read_range(
    path: bytes, offset: int, length: int | None, binary: bool
) -> Encoded | FilePart | None:
    """The answer to `read_range`, likewise."""
    content = _content(path)
    if content is None:
        return None
    size = len(content)
    part = memoryview(content)[offset : size if length is None else offset + length]
    eof = length is None or offset + length >= size
    if as_it_is(length, binary):
        return FilePart(bytes(part), eof, size)
    return ranged_result(content_result(part), eof)


def _content(path: bytes) -> bytearray | None:
    descriptor = _open(path, READ)
    if descriptor is None:
        return None
    try:
        info = os.fstat(descriptor)
        if info.st_size > SMALL_BYTES or not stat.S_ISREG(info.st_mode):
            return None
        data = bytearray(info.st_size + 1)
        if os.preadv(descriptor, [data], 0, _NOWAIT) != info.st_size:
            return None  # some of it is on disk, or it is growing
        del data[-1]
        return data
    except OSError:
        return None
    finally:
        os.close(descriptor)


def cached_metadata(path: bytes, *, off_proc: bool = False) -> MetadataResult | None:
    """The answer to `get_metadata` of anything but a link; `off_proc`: or a file of `/proc`."""
    descriptor = _open(path, os.O_PATH | os.O_NOFOLLOW)
    if descriptor is None:
        return None
    try:
        info = os.fstat(descriptor)
        if stat.S_ISLNK(info.st_mode) or (off_proc and is_on_proc(descriptor)):
            return None
        return metadata_result(info, False, birth_time_ms(b"", dir_fd=descriptor))
    finally:
        os.close(descriptor)


def _open(path: bytes, flags: int) -> int | None:
    """A descriptor, None if that is not so simple, or the RpcError of a path that is not there."""
    resolve = _mounts.resolve()
    if resolve is None:
        return None
    try:
        return openat2(path, flags, resolve)
    except FileNotFoundError as error:
        raise failure(error) from None
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EINVAL, errno.EPERM):
            _mounts.never()
        return None


def nothing_hangs() -> bool:
    """Whether looking at a path waits for this machine's own disks at most, wherever the path leads."""
    return _mounts.resolve() == _ANYWHERE
