"""Where a download arrives on this machine: in a part beside its place, or straight in its place.

A part has a name that nobody else uses, is opened through no link, must be a plain file of ours, and is
locked: two downloads never write to one. What has the name already decides what happens at the end: a link
stays one and the file it leads to is replaced, a file passes its mode, owner and attributes on, and what
cannot be replaced (devices, FIFOs, files with several names, mount points, files in directories that cannot
be written to) is written in place.

Everything here blocks.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from typing import Final

from ..local.files.copy import copy_content
from ..local.files.lane import Abandoned, Turn
from ..local.files.write import CANNOT_REPLACE, WRITE, make_alike, replace_file, write_all, write_all_at
from .errors import TransferFailed

__all__ = ["Landing", "part_name"]

PART_SUFFIX: Final = ".exec-server-part"

MAX_NAME_BYTES: Final = 200
"""Of the name in a part's name; with the rest of it, file systems take 255."""

ATTEMPTS: Final = 16
"""How often to begin again when an earlier transfer gives its part the name just now."""

_PART: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def part_name(target: str, source: str) -> str:
    """The part beside `target` that a transfer of `source` uses, and the next one of the same."""
    directory, slash, name = target.rpartition("/")
    mark = hashlib.sha256(f"{source}\0{name}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
    shown = os.fsdecode(os.fsencode(name)[:MAX_NAME_BYTES])
    return f"{directory}{slash}.{shown}.{mark}{PART_SUFFIX}"


class _Wanted(Turn):
    """Whether the transfer still goes on."""

    def __init__(self) -> None:
        self.gone = False

    def check(self) -> None:
        if self.gone:
            raise Abandoned


class Landing:
    """The file that one download writes to."""

    def __init__(self, target: str, source: str) -> None:
        self.target = os.path.realpath(target) if os.path.islink(target) else target
        self.part: str | None = part_name(self.target, source)
        self._turn = _Wanted()
        self._descriptor = -1

    def open(self) -> bool:
        """Open what is written to. False: it is a FIFO that nobody reads yet."""
        mode = 0o666
        try:
            info = os.stat(self.target)
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISDIR(info.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.target)
            if not stat.S_ISREG(info.st_mode):
                return self._open_in_place(stat.S_ISFIFO(info.st_mode))
            _require_writable(self.target)
            mode = 0o600  # until it gets the mode of what it replaces
        assert self.part is not None  # noqa: S101  # given up only below, after which nobody calls this
        try:
            self._descriptor = _open_part(self.part, mode)
        except OSError as error:
            if error.errno not in CANNOT_REPLACE or not os.path.exists(self.target):
                raise
            self._open_in_place(fifo=False)
        return True

    def _open_in_place(self, fifo: bool) -> bool:
        self.part = None
        try:
            self._descriptor = os.open(self.target, WRITE | os.O_NOCTTY)
        except OSError as error:
            if fifo and error.errno == errno.ENXIO:
                return False
            raise
        return True

    @property
    def descriptor(self) -> int:
        """Of the part."""
        return self._descriptor

    def size(self) -> int:
        """How much an earlier transfer left."""
        return 0 if self.part is None else os.fstat(self._descriptor).st_size

    def write(self, data: bytes, at: int) -> None:
        try:
            if self.part is None:
                write_all(self._descriptor, data, self._turn)
            else:
                write_all_at(self._descriptor, data, at)
        except OSError as error:
            error.filename = self.part or self.target  # a full disk should say which file it is about
            raise

    def end_at(self, size: int) -> None:
        """Nothing comes after this."""
        if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.ftruncate(self._descriptor, size)

    def finish(self) -> None:
        """Give what arrived its name."""
        if self.part is None or self._take_name(self.part):
            return
        size = self.size()
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        replace_file(
            os.fsencode(self.target), lambda target: copy_content(self._descriptor, target, self._turn), size
        )
        os.unlink(self.part)

    def _take_name(self, part: str) -> bool:
        """Whether the part could replace what is there, and be like it."""
        try:
            info = os.lstat(self.target)
        except FileNotFoundError:
            os.rename(part, self.target)
            return True
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            return False
        try:
            existing = os.open(self.target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            info = os.fstat(existing)
            mode = stat.S_IMODE(info.st_mode)
            if os.geteuid():
                mode &= ~(stat.S_ISUID | stat.S_ISGID)  # as the kernel does when such a file is written to
            if not make_alike(self._descriptor, existing, info, mode):
                return False
            os.rename(part, self.target)
        except OSError as error:
            if error.errno not in CANNOT_REPLACE:
                raise
            return False
        finally:
            os.close(existing)
        return True

    def discard(self) -> None:
        """Remove what is left of it."""
        if self.part is not None:
            os.unlink(self.part)

    def give_up(self) -> None:
        """Whoever waits for a reader of a FIFO, in a thread, waits no longer."""
        self._turn.gone = True

    def close(self) -> None:
        """A part in which nothing has arrived is of no use to a later transfer, and goes."""
        if self._descriptor >= 0:
            try:
                if self.size() == 0 and self._still_named():
                    self.discard()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def _still_named(self) -> bool:
        """Whether the part has not become what it is a part of."""
        try:
            return self.part is not None and os.path.samestat(os.lstat(self.part), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False


def _require_writable(path: str) -> None:
    """A file that may not be written is not replaced either. One that runs may be."""
    try:
        os.close(os.open(path, WRITE))
    except OSError as error:
        if error.errno != errno.ETXTBSY:
            raise


def _open_part(part: str, mode: int) -> int:
    """A part that only we write to, new or as an earlier transfer left it."""
    for _ in range(ATTEMPTS):
        made = True
        try:
            descriptor = os.open(part, _PART | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            try:
                descriptor = os.open(part, _PART)
                made = False
            except FileNotFoundError:
                continue  # it got its name just now
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
                    raise _not_ours(part) from None
                raise
        try:
            info = os.fstat(descriptor)
            ours = made or (info.st_uid == os.geteuid() and info.st_nlink == 1)
            if not stat.S_ISREG(info.st_mode) or not ours:
                raise _not_ours(part)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.lstat(part), info):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise TransferFailed(f"another transfer writes to {part}; wait for it, or end it") from None
        except FileNotFoundError:
            pass  # likewise
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise TransferFailed(f"{part} comes and goes; does another transfer use it?")


def _not_ours(part: str) -> TransferFailed:
    return TransferFailed(f"{part} is not a plain file of this user, so nothing is written to it; remove it")
