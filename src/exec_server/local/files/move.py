"""Moving: a rename, which nobody sees half done."""

from __future__ import annotations

import errno
import os
import stat

from .copy import copy
from .errors import os_error
from .kernel import AT_FDCWD, RENAME_NOREPLACE, renameat2
from .lane import ALONE, Turn

__all__ = ["move"]


def move(source: bytes, target: bytes, overwrite: bool, turn: Turn = ALONE) -> dict[str, str]:
    """Give it another name. What has that name already is replaced if `overwrite`, and an error if not."""
    try:
        if overwrite:
            os.rename(source, target)
        else:
            _rename_without_replacing(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _move_across(source, target, overwrite, turn)
    return {}


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
    if os.path.lexists(target):
        if not overwrite:
            raise os_error(errno.EEXIST)
        if is_link or os.path.islink(target):
            os.unlink(target)
    copy(source, target, False, turn)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)
    os.unlink(source)
