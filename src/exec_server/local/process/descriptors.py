"""Descriptors of the server itself: enough of them, and none that children should not see."""

from __future__ import annotations

import os
import resource
from typing import Final

__all__ = ["hide_inherited", "make_room", "restore_in_child"]

DESCRIPTORS_PER_PROCESS: Final = 4
"""Three streams and a pidfd."""

BEFORE_LOOKING: Final = 16
"""Processes that any limit leaves room for."""

_inherited_limit: tuple[int, int] | None = None
"""The limit this process was started with, once it has been raised."""


def make_room(processes: int) -> None:
    """Raise our limit on descriptors when this many processes may come to need it.

    Only then: a child inherits our limit and gets back the one we were given a moment after it has
    started, and should rather never see another.
    """
    global _inherited_limit
    if _inherited_limit is not None or processes < BEFORE_LOOKING:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard or processes * DESCRIPTORS_PER_PROCESS < soft // 2:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return
    _inherited_limit = (soft, hard)


def restore_in_child(pid: int) -> None:
    """Give a child the limit this process was started with."""
    if _inherited_limit is not None and hasattr(resource, "prlimit"):
        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _inherited_limit)
        except OSError:
            pass  # it has already ended, or became another user's


def hide_inherited() -> None:
    """Keep what this process inherited above stderr from its children, and make 0, 1 and 2 exist."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    try:
        inherited = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return
    for fd in inherited:
        if fd > 2:
            try:
                os.set_inheritable(fd, False)
            except OSError:
                pass  # it was the descriptor of the listing itself
