"""Where paths really lead, found out by asking what is at each step of the way."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from ..files.kernel import RESOLVE_NO_SYMLINKS, open_resolving
from .plan import PlanError

__all__ = ["Look", "Real", "open_unlinked", "resolve"]

MAX_LINKS: Final = 40
"""Links that one path may lead through, as for the kernel."""


class Look(NamedTuple):
    """What is at a path, without following a link there."""

    kind: Literal["missing", "directory", "file", "link", "other"]
    leads_to: bytes = b""
    """Of a link: where it leads, as it says itself."""
    blank: bool = False
    """A file like those that stand in for a missing one while a sandbox runs: empty, and for reading."""
    unseen: bool = False
    """Of something missing: it may be there, but the mode of a directory on the way keeps us from looking."""


class Real(NamedTuple):
    """Where a path leads."""

    path: bytes
    """Without links, as far as it exists; the rest as it was written."""
    look: Look
    """What is there."""
    existing: bytes
    """The last part of the path that exists."""
    links: tuple[tuple[bytes, bytes], ...]
    """Links on the way: where each is, and where it says it leads."""

    @property
    def exists(self) -> bool:
        return self.look.kind != "missing"

    @property
    def first_missing(self) -> bytes:
        """What would have to be made first for the path to exist."""
        return self.path[: (self.path + b"/").index(b"/", len(self.existing.rstrip(b"/")) + 1)]


def resolve(path: bytes, look: Callable[[bytes], Look]) -> Real:
    """Follow every link, as the kernel would. PlanError where it would give up."""
    todo = [part for part in reversed(path.split(b"/")) if part]
    here, found = b"/", look(b"/")
    links: list[tuple[bytes, bytes]] = []
    while todo:
        part = todo.pop()
        if part == b".":
            continue
        if part == b"..":
            here = os.path.dirname(here)
            found = look(here)
            continue
        following = os.path.join(here, part)
        there = look(following)
        if there.kind == "link":
            links.append((following, there.leads_to))
            if len(links) > MAX_LINKS:
                raise PlanError(f"too many symbolic links on the way to {path.decode('utf-8', 'replace')}")
            todo += [step for step in reversed(there.leads_to.split(b"/")) if step]
            if there.leads_to.startswith(b"/"):
                here, found = b"/", look(b"/")
        elif there.kind == "missing":
            rest = [step for step in reversed(todo) if step != b"."]
            return Real(os.path.normpath(os.path.join(following, *rest)), there, here, tuple(links))
        else:
            here, found = following, there
    return Real(here, found, here, tuple(links))


_LOOK: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def open_unlinked(path: bytes, root: int | None = None) -> int:
    """A descriptor of what is at a path without links, of the machine or below another root. ELOOP or ENOTDIR
    if there is a link, on the way or at its end."""
    below = path if root is None else path.lstrip(b"/") or b"."
    try:
        return _not_a_link(open_resolving(below, _LOOK, RESOLVE_NO_SYMLINKS, dir_fd=root))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
    return _step_by_step(path, root)


def _step_by_step(path: bytes, root: int | None) -> int:
    """For kernels before 5.6."""
    here = os.open(b"/", _LOOK) if root is None else os.dup(root)
    for step in filter(None, path.split(b"/")):
        try:
            following = _not_a_link(os.open(step, _LOOK, dir_fd=here))
        finally:
            os.close(here)
        here = following
    return here


def _not_a_link(descriptor: int) -> int:
    if stat.S_ISLNK(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return descriptor
