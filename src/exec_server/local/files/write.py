"""Writing whole files: replaced whole or not at all.

The new content goes to a file without a name in the same directory, which then takes the name of the
old one; a crash, a full disk or a killed server leaves the old content. What is kept: mode, owner,
extended attributes, and a link that led to the file. Written in place instead, because a new file would
not be the same one: files with more than one name, files that a stream is writing to, files whose
owner or attributes cannot be given to the new one, files in directories that cannot be written to,
files that are mount points, and everything that is not a regular file. Even then space is reserved
before the old content is touched.

The policy for disks that lose power is `SYNC`.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Callable
from threading import Lock
from typing import Final

from ...wire.errors import invalid_request
from ...wire.files import BadBase64
from .content import LARGE_BYTES, Decoded
from .errors import os_error
from .kernel import RENAME_NOREPLACE, renameat2
from .lane import ALONE, Turn
from .paths import SEARCH, opened, parent_without_links, real_path

__all__ = [
    "CANNOT_REPLACE",
    "PINS",
    "SYNC",
    "WRITE",
    "Filler",
    "NewFile",
    "decode_content",
    "make_alike",
    "mode_after_writing",
    "replace_file",
    "write_all",
    "write_all_at",
    "write_file",
]

Filler = Callable[[int], None]
"""Writes the whole content to a descriptor, from the start."""

SYNC: Final = False
"""Whether content is forced to the disk before it takes its name. It is not: after a crash of the server
or of a program the file is whole either way, fsync costs up to a hundred times the write itself, and
ext4, XFS and Btrfs write a renamed file's data out by themselves soon after."""

TEMPORARY_PREFIX: Final = b".exec-server-"
"""Names of files that are about to take another's name. Seen for microseconds, or after a crash."""

WRITE: Final = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""Without waiting: opening a FIFO that nobody reads says ENXIO."""

_UNNAMED: Final = getattr(os, "O_TMPFILE", 0) if os.path.isdir("/proc/self/fd") else 0
"""For files without a name, where there are any and there is a way to name them later."""

CANNOT_REPLACE: Final = frozenset(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.EXDEV, errno.EBUSY, errno.ENOTSUP)
)
"""Why a new file may not be had where the old one can still be written."""

_NOT_KEPT: Final = frozenset(("security.capability", "security.ima", "security.evm"))
"""Attributes that are about the old content: writing to a file takes them away."""

_NO_UNNAMED: Final = frozenset((errno.EISDIR, errno.ENOTSUP, errno.ENOENT, errno.EINVAL))
"""How a file system or kernel without files that have no name says so."""

WAIT_MS: Final = 500
"""How long to wait for a reader before looking whether anybody still wants the answer."""

MAX_LINKS: Final = 40
"""Links in a row, as the kernel follows them."""

ATTEMPTS: Final = 16
"""How often to begin again when somebody else creates or removes the file at the same time."""


class _Pins:
    """Files that must stay the file they are, because a stream writes to them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[tuple[int, int], int] = {}

    def add(self, info: os.stat_result) -> None:
        with self._lock:
            key = (info.st_dev, info.st_ino)
            self._counts[key] = self._counts.get(key, 0) + 1

    def remove(self, info: os.stat_result) -> None:
        with self._lock:
            key = (info.st_dev, info.st_ino)
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]

    def __contains__(self, info: os.stat_result) -> bool:
        return (info.st_dev, info.st_ino) in self._counts


PINS: Final = _Pins()
"""Of all connections of this process."""


def write_file(path: bytes, data_base64: str | bytes, follow: bool, turn: Turn = ALONE) -> dict[str, str]:
    """Make `path` a file with this content."""
    content = decode_content(data_base64)

    def fill(descriptor: int) -> None:
        for piece in content.pieces():
            write_all(descriptor, piece, turn)

    replace_file(path, fill, content.size, follow=follow, turn=turn)
    return {}


def decode_content(data_base64: str | bytes) -> Decoded:
    """What is to be written; RpcError if it is not base64."""
    try:
        return Decoded(data_base64)
    except BadBase64 as error:
        raise invalid_request(f"fs/writeFile requires valid base64 dataBase64: {error}") from None


def write_all(descriptor: int, data: bytes | memoryview, turn: Turn = ALONE) -> None:
    """However many calls it takes. Waits for a FIFO or a terminal for as long as somebody wants it to."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll(WAIT_MS)
            turn.check()


def write_all_at(descriptor: int, data: bytes, offset: int) -> None:
    """The same at an offset, for regular files."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def replace_file(
    path: bytes,
    fill: Filler,
    size: int,
    *,
    mode: int | None = None,
    follow: bool = True,
    turn: Turn = ALONE,
    same_file_as: os.stat_result | None = None,
) -> None:
    """Give a file its new content and, if one is given, its new mode. If either cannot be had, neither is.

    Does nothing when the file is `same_file_as`. `size` is how much `fill` will write.
    """
    if not follow:
        with parent_without_links(path) as (parent, name):
            for _ in range(ATTEMPTS):
                if _replace_entry(parent, name, fill, size, turn):
                    return
        raise os_error(errno.EBUSY)
    for _ in range(ATTEMPTS):
        try:
            existing = os.open(path, WRITE)
        except FileNotFoundError:
            if _create(path, fill, size, mode, turn):
                return
            continue
        with opened(existing):
            info = os.fstat(existing)
            if same_file_as is not None and os.path.samestat(info, same_file_as):
                return
            if not stat.S_ISREG(info.st_mode):
                turn.leave(real_path(existing))
                fill(existing)
                return
            place = real_path(existing)
            if size >= LARGE_BYTES:
                turn.leave(place)
            if place is None or not _replace_existing(place, existing, info, fill, mode):
                if not os.fstat(existing).st_nlink:
                    continue  # somebody has put another in its place; this one is only its readers' now
                _overwrite(existing, info, fill, size, mode)
            return
    raise os_error(errno.EBUSY)


def _replace_entry(parent: int, name: bytes, fill: Filler, size: int, turn: Turn) -> bool:
    """The same for an entry of an open directory, through no link. False: begin again."""
    try:
        existing = os.open(name, WRITE | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        if size >= LARGE_BYTES:
            turn.leave()
        return _create_in(parent, name, fill, None)
    with opened(existing):
        info = os.fstat(existing)
        if not stat.S_ISREG(info.st_mode):
            raise invalid_request("path is not a regular file")
        if size >= LARGE_BYTES:
            turn.leave()
        if not _renew(parent, name, existing, info, fill, None):
            if not os.fstat(existing).st_nlink:
                return False
            _overwrite(existing, info, fill, size, None)
    return True


# A file that is not there yet ---------------------------------------------------------------------


def _create(path: bytes, fill: Filler, size: int, mode: int | None, turn: Turn) -> bool:
    """At the end of whatever links lead nowhere yet. False: somebody else made it first."""
    directory, name = _end_of_links(path)
    with opened(directory):
        if size >= LARGE_BYTES:
            place = real_path(directory)
            turn.leave(None if place is None else os.path.join(place, name))
        return _create_in(directory, name, fill, mode)


def _end_of_links(path: bytes) -> tuple[int, bytes]:
    """An open directory and the name in it that the kernel would create for a path."""
    directory: int | None = None
    try:
        for _ in range(MAX_LINKS):
            parent, name = os.path.split(path.rstrip(b"/"))
            above, directory = directory, os.open(parent or b".", SEARCH, dir_fd=directory)
            if above is not None:
                os.close(above)
            if path.endswith(b"/") or name in (b".", b".."):
                raise os_error(errno.EISDIR)
            try:
                path = os.readlink(name, dir_fd=directory)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOENT):
                    raise
                # Not a link, or nothing at all: here it ends.
                found, directory = directory, None
                return found, name
        raise os_error(errno.ELOOP)
    finally:
        if directory is not None:
            os.close(directory)


def _create_in(directory: int, name: bytes, fill: Filler, mode: int | None) -> bool:
    new = NewFile(directory, 0o666)
    try:
        if mode is not None:
            os.fchmod(new.descriptor, mode)  # first: nobody else may see in it what they must not
        fill(new.descriptor)
        if SYNC:
            os.fsync(new.descriptor)
        return new.take_free_name(name)
    finally:
        new.close()


# A file that is there -----------------------------------------------------------------------------


def _replace_existing(
    place: bytes, existing: int, info: os.stat_result, fill: Filler, mode: int | None
) -> bool:
    """Put a new file in the place of an existing one; False if that must be done in place."""
    parent, name = os.path.split(place)
    if not name:
        return False
    try:
        directory = os.open(parent, SEARCH)
    except OSError:
        return False
    with opened(directory):
        return _renew(directory, name, existing, info, fill, mode)


def _renew(
    directory: int, name: bytes, existing: int, info: os.stat_result, fill: Filler, mode: int | None
) -> bool:
    if info.st_nlink != 1 or info in PINS:
        return False
    if mode is None:
        mode = mode_after_writing(stat.S_IMODE(info.st_mode))
    try:
        if not os.path.samestat(os.stat(name, dir_fd=directory, follow_symlinks=False), info):
            return False
        new = NewFile(directory, mode & 0o777)
    except OSError as error:
        if error.errno in CANNOT_REPLACE or error.errno == errno.ENOENT:
            return False
        raise
    try:
        if not make_alike(new.descriptor, existing, info, mode):
            return False
        fill(new.descriptor)
        if SYNC:
            os.fsync(new.descriptor)
        try:
            new.take_name(name)
        except OSError as error:
            if error.errno not in CANNOT_REPLACE:
                raise
            return False  # a mount point, or another's file in a sticky directory
    finally:
        new.close()
    return True


def mode_after_writing(mode: int) -> int:
    """What the kernel leaves of a mode when such a file is written to by somebody without privileges."""
    if os.geteuid():
        mode &= ~stat.S_ISUID
        if mode & stat.S_IXGRP:
            mode &= ~stat.S_ISGID
    return mode


def make_alike(descriptor: int, existing: int, info: os.stat_result, mode: int) -> bool:
    """Owner, attributes and mode of the old file; False if they cannot be had."""
    try:
        mine = os.fstat(descriptor)
        changed = (mine.st_uid, mine.st_gid) != (info.st_uid, info.st_gid)
        if changed:
            os.fchown(descriptor, info.st_uid, info.st_gid)
        changed |= _copy_attributes(existing, descriptor)
        if changed or stat.S_IMODE(mine.st_mode) != mode:
            os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def _copy_attributes(source: int, target: int) -> bool:
    """Extended attributes, access lists among them; whether there was anything to copy."""
    try:
        names = os.listxattr(source)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENOSYS):
            return False
        raise
    if not names:
        return False
    present = os.listxattr(target)
    for name in names:
        if name in _NOT_KEPT:
            continue
        value = os.getxattr(source, name)
        if name not in present or os.getxattr(target, name) != value:
            os.setxattr(target, name, value)
    return True


def _overwrite(descriptor: int, info: os.stat_result, fill: Filler, size: int, mode: int | None) -> None:
    """In place; a full disk, or a mode that is not ours to change, says so before anything is lost."""
    if mode is not None and mode != stat.S_IMODE(info.st_mode):
        os.fchmod(descriptor, stat.S_IMODE(info.st_mode))  # changes nothing, and is refused like the real one
    if size > info.st_size:
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                os.ftruncate(descriptor, info.st_size)
                raise
    fill(descriptor)
    os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR))
    if mode is not None and mode != stat.S_IMODE(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, mode)


class NewFile:
    """A file that is nobody's until it takes a name."""

    def __init__(self, directory: int, mode: int) -> None:
        self._directory = directory
        self._name: bytes | None = None
        if _UNNAMED:
            try:
                self.descriptor = os.open(b".", os.O_WRONLY | _UNNAMED | os.O_CLOEXEC, mode, dir_fd=directory)
                return
            except OSError as error:
                if error.errno == errno.EPERM and not os.fstat(directory).st_nlink:
                    raise os_error(errno.ENOENT) from None  # how ext4 says that the directory is gone
                if error.errno not in _NO_UNNAMED:
                    raise
        name = TEMPORARY_PREFIX + os.urandom(8).hex().encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(name, flags, mode, dir_fd=directory)
        self._name = name

    def take_free_name(self, name: bytes) -> bool:
        """Whether the name was free."""
        try:
            if self._name is None:
                self._link(name)
                return True
            renameat2(self._directory, self._name, self._directory, name, RENAME_NOREPLACE)
        except FileExistsError:
            return False
        except OSError as error:
            if self._name is None or error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
            os.rename(self._name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._name = None
        return True

    def take_name(self, name: bytes) -> None:
        """Whoever has it now."""
        if self._name is None:
            self._name = self._link_somewhere()
        os.rename(self._name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._name = None

    def _link_somewhere(self) -> bytes:
        while True:
            name = TEMPORARY_PREFIX + os.urandom(8).hex().encode()
            try:
                self._link(name)
            except FileExistsError:
                continue
            return name

    def _link(self, name: bytes) -> None:
        os.link(b"/proc/self/fd/%d" % self.descriptor, name, dst_dir_fd=self._directory, follow_symlinks=True)

    def close(self) -> None:
        os.close(self.descriptor)
        if self._name is not None:
            try:
                os.unlink(self._name, dir_fd=self._directory)
            except OSError:
                pass  # it is gone, or the directory is
