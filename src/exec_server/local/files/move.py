"""Moving: a rename, which nobody sees half done."""

from __future__ import annotations

import errno
import os
import stat

from .copy import copy
from .errors import os_error
from .kernel import AT_FDCWD, RENAME_NOREPLACE, renameat2
from .lane import ALONE, Turn
from .paths import SEARCH, opened
from .read import READ
from .write import WRITE, NewFile, make_alike

__all__ = ["move"]


def move(
    source: bytes, target: bytes, overwrite: bool, turn: Turn = ALONE, *, keep_attributes: bool = False
) -> dict[str, str]:
    """Give it another name. What has that name already is replaced if `overwrite`, and an error if not.

    With `keep_attributes`, a file that replaces a file gets its mode, owner and extended attributes, as far
    as they may be given, and one that replaces nothing gets the mode of a new file.
    """
    if overwrite and keep_attributes and not _take_attributes(source, target):
        return _move_into(source, target, turn)
    try:
        if overwrite:
            os.rename(source, target)
        else:
            _rename_without_replacing(source, target)
    except OSError as error:
        if keep_attributes and error.errno in (errno.EBUSY, errno.EPERM):
            return _move_into(source, target, turn)  # a mount point, or another's in a sticky directory
        if error.errno != errno.EXDEV:
            raise
        _move_across(source, target, overwrite, turn)
    return {}


def _move_into(source: bytes, target: bytes, turn: Turn) -> dict[str, str]:
    """Write what is in one file to another, which stays the one it is, and remove the first."""
    copy(source, target, False, turn)
    os.unlink(source)
    return {}


def _take_attributes(source: bytes, target: bytes) -> bool:
    """Whether the one may take the name of the other; it is like it then.

    False where a new file would not be the same: devices, FIFOs, files with several names, and those whose
    owner or attributes cannot be given to another.
    """
    try:
        existing = os.open(target, WRITE | os.O_NOFOLLOW)
    except FileNotFoundError:
        _take_usual_mode(source, target)
        return True
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        if error.errno != errno.ETXTBSY:
            if error.errno in (errno.EACCES, errno.EROFS):
                raise
            return True  # a link, or a directory: the rename says what it thinks of it
        existing = os.open(target, READ | os.O_NOFOLLOW)
    with opened(existing):
        info = os.fstat(existing)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            return False
        with opened(os.open(source, WRITE | os.O_NOFOLLOW)) as moved:
            if not stat.S_ISREG(os.fstat(moved).st_mode):
                return True
            return make_alike(moved, existing, info, stat.S_IMODE(info.st_mode))


def _take_usual_mode(source: bytes, target: bytes) -> None:
    """What a new file would have there, by the umask and what the directory says: asked by making one."""
    try:
        with opened(os.open(os.path.dirname(target), SEARCH)) as directory:
            new = NewFile(directory, 0o666)
            try:
                usual = stat.S_IMODE(os.fstat(new.descriptor).st_mode)
            finally:
                new.close()
        with opened(os.open(source, WRITE | os.O_NOFOLLOW)) as moved:
            if stat.S_ISREG(os.fstat(moved).st_mode):
                os.fchmod(moved, usual)
    except OSError:
        pass  # the rename says what it thinks of it


def _rename_without_replacing(source: bytes, target: bytes) -> None:
    try:
        renameat2(AT_FDCWD, source, AT_FDCWD, target, RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        if os.path.lexists(target):
            raise os_error(errno.EEXIST) from None
        os.rename(source, target)


def _move_across(source: bytes, target: bytes, overwrite: bool, turn: Turn) -> None:
    """To another file system: copied whole, then removed. Trees are left to the caller to copy."""
    info = os.lstat(source)
    is_link = stat.S_ISLNK(info.st_mode)
    if not is_link and not stat.S_ISREG(info.st_mode):
        raise os_error(errno.EXDEV)
    directory = os.path.dirname(source)
    if not os.access(directory, os.W_OK | os.X_OK):  # it could be copied, but not taken away
        raise os_error(errno.EROFS if os.statvfs(directory).f_flag & os.ST_RDONLY else errno.EACCES)
    if os.path.lexists(target):
        if not overwrite:
            raise os_error(errno.EEXIST)
        if is_link or os.path.islink(target):
            os.unlink(target)
    copy(source, target, False, turn)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)
    os.unlink(source)
