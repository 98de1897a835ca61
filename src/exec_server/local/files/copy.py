"""Copying: files with their permission bits, links as links, directories with all that is in them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

from ...wire.errors import invalid_request
from .content import PIECE_BYTES
from .directory import make_directories
from .errors import os_error
from .lane import ALONE, Turn
from .paths import opened, resolved
from .write import mode_after_writing, replace_file, write_all

__all__ = ["copy", "copy_content"]

COPY_BYTES: Final = 64 * 1024 * 1024
"""Asked of the kernel at once, between two looks whether anybody still wants the copy."""

_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC

_CANNOT_COPY_INSIDE: Final = frozenset(
    (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EBADF, errno.ETXTBSY)
)
"""Why the kernel may refuse to copy without showing us the bytes."""


def copy(source: bytes, target: bytes, recursive: bool, turn: Turn = ALONE) -> dict[str, str]:
    """Copy what `source` itself is. A file copied onto itself stays as it is."""
    info = os.lstat(source)
    if stat.S_ISREG(info.st_mode):
        _copy_file(source, target, turn)
    elif stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISDIR(info.st_mode):
        if not recursive:
            raise invalid_request("fs/copy requires recursive: true when sourcePath is a directory")
        real_source = resolved(source)
        real_target = _resolve_existing_part(target)
        if real_target == real_source or real_target.startswith(real_source.rstrip(b"/") + b"/"):
            raise invalid_request("fs/copy cannot copy a directory to itself or one of its descendants")
        turn.leave(real_source, real_target)
        _copy_tree(source, target, turn)
    else:
        raise invalid_request("fs/copy only supports regular files, directories, and symlinks")
    return {}


def _resolve_existing_part(path: bytes) -> bytes:
    """The path with the links of its existing part resolved."""
    missing: list[bytes] = []
    while True:
        try:
            real = resolved(path)
        except OSError:
            path, name = os.path.split(path)
            if not name:
                raise
            missing.append(name)
        else:
            return os.path.join(real, *reversed(missing)) if missing else real


def _copy_file(source: bytes, target: bytes, turn: Turn) -> None:
    with opened(os.open(source, _READ | os.O_NOFOLLOW)) as descriptor:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise os_error(errno.EINVAL)  # exchanged since it was looked at
        replace_file(
            target,
            lambda into: copy_content(descriptor, into, turn),
            info.st_size,
            mode=mode_after_writing(stat.S_IMODE(info.st_mode)),
            turn=turn,
            same_file_as=info,
        )


def copy_content(source: int, target: int, turn: Turn) -> None:
    os.lseek(source, 0, os.SEEK_SET)
    copied = 0
    try:
        while count := os.copy_file_range(source, target, COPY_BYTES):
            copied += count
            turn.check()
        if copied:
            return
    except OSError as error:
        if copied or error.errno not in _CANNOT_COPY_INSIDE:
            raise
    # Nothing came: empty, one of those files that do not say how large they are, or not possible.
    while chunk := os.read(source, PIECE_BYTES):
        write_all(target, chunk, turn)
        turn.check()


def _copy_tree(source: bytes, target: bytes, turn: Turn) -> None:
    """Merge one directory into another, which is made if it is not there."""
    todo = [(source, target)]
    while todo:
        source, target = todo.pop()
        make_directories(target)
        for name, entry_mode in _listed(source):
            turn.check()
            below, into = os.path.join(source, name), os.path.join(target, name)
            if stat.S_ISDIR(entry_mode):
                todo.append((below, into))
            elif stat.S_ISREG(entry_mode):
                _copy_file(below, into, turn)
            elif stat.S_ISLNK(entry_mode):
                os.symlink(os.readlink(below), into)


def _listed(path: bytes) -> Iterator[tuple[bytes, int]]:
    """Names and kinds. A directory that was exchanged for a link since is not entered."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with opened(descriptor), os.scandir(descriptor) as entries:
        found = list(entries)
        for entry in found:
            yield os.fsencode(entry.name), entry.stat(follow_symlinks=False).st_mode
