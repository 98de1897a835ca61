"""Removing: one entry, or a directory with all that is in it. Links are removed, never entered.

A tree is removed through descriptors: whoever exchanges a directory for a link while it is being
removed gains nothing. Two descriptors are open at a time, however deep the tree is.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final, NamedTuple

from ...wire.errors import internal_error, invalid_request
from .errors import os_error
from .lane import ALONE, Turn
from .paths import parent_without_links

__all__ = ["remove"]

_LIST: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: bytes, recursive: bool, force: bool, follow: bool, turn: Turn = ALONE) -> dict[str, str]:
    """Remove what is there; with `force`, nothing being there is fine."""
    if not follow and recursive:
        raise internal_error("recursive no-follow removal is unsupported")
    try:
        if not follow:
            _remove_without_links(path)
        elif not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
        elif not recursive:
            os.rmdir(path)
        else:
            _remove_tree(path, turn)
    except FileNotFoundError:
        if not force:
            raise
    return {}


def _remove_without_links(path: bytes) -> None:
    with parent_without_links(path) as (parent, name):
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            raise invalid_request("path contains a symbolic link")
        if stat.S_ISDIR(mode):
            os.rmdir(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)


class _Level(NamedTuple):
    """A directory on the way down: who it is, and what of it remains."""

    info: os.stat_result
    names: list[bytes]


def _remove_tree(path: bytes, turn: Turn) -> None:
    if path == b"/":
        raise os_error(errno.EBUSY)
    turn.leave(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)))
    current = os.open(path, _LIST)
    try:
        levels = [_empty(current, turn)]
        while levels:
            if levels[-1].names:
                name = levels[-1].names[-1]
                try:
                    below = os.open(name, _LIST, dir_fd=current)
                except FileNotFoundError:
                    levels[-1].names.pop()
                    continue
                os.close(current)
                current = below
                levels.append(_empty(current, turn))
                continue
            levels.pop()
            if not levels:
                break
            above = os.open(b"..", _LIST, dir_fd=current)
            os.close(current)
            current = above
            if not os.path.samestat(os.fstat(current), levels[-1].info):
                raise os_error(errno.ENOENT)  # moved while we were in it: not ours to go on with
            _remove_entry(levels[-1].names.pop(), current)
    finally:
        os.close(current)
    os.rmdir(path)


def _empty(directory: int, turn: Turn) -> _Level:
    """Unlink all that is not a directory; what is left are directories to go into."""
    turn.check()
    info = os.fstat(directory)
    names: list[bytes] = []
    with os.scandir(directory) as entries:
        found = list(entries)
    for entry in found:
        name = os.fsencode(entry.name)
        if entry.is_dir(follow_symlinks=False):
            names.append(name)
            continue
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            names.append(name)
    return _Level(info, names)


def _remove_entry(name: bytes, directory: int) -> None:
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        pass
