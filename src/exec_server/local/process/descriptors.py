"""Descriptors of the server itself: enough of them, and none that children should not see."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from typing import Any, Final, TypeVar

__all__ = ["EXHAUSTED", "afford", "hide_inherited", "keep_spare", "make_room", "restore_in_child"]

T = TypeVar("T")

EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE))
"""What the system says when there are no descriptors left, for this process or for anybody."""

SPARE_DESCRIPTORS: Final = 3
"""What finding and killing a tree needs at once (a pidfd and a file of /proc), and one for a thief."""

_spare: list[int] = []
"""Held so that there is something to give up when a process must be killed and nothing can be opened."""

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


def keep_spare() -> None:
    """Put descriptors by for `afford`, as far as there are any."""
    try:
        while len(_spare) < SPARE_DESCRIPTORS:
            _spare.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass  # the next one who needs them does without


def afford(call: Callable[..., T], *args: Any) -> T:
    """Make a call that opens a descriptor, with those put by if there are no others."""
    while True:
        try:
            return call(*args)
        except OSError as error:
            if error.errno not in EXHAUSTED or not _spare:
                raise
        # Another thread may be quicker and take it. That is why there are several.
        os.close(_spare.pop())


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
