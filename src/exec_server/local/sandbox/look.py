"""What the compiler may ask about a file system, and nothing else.

A plan is a function of a profile and of these answers. So a plan that was made before still holds when
asking the same questions again gives the same answers, which is cheaper than making it anew (`Recorder`).
"""

from __future__ import annotations

import errno
import os
import stat
from time import monotonic
from typing import Any, Final, Protocol

from ..files.kernel import birth_time
from .links import Look, Real, resolve
from .plan import Identity, PlanError

__all__ = ["Machine", "Recorder", "ThisMachine"]

SETTLED_SECONDS: Final = 1.0
"""How long nobody looks again where `/usr` and its like lead. Asking for all of them takes longer than
anything else about a call."""

HEAD_BYTES: Final = 4096
"""How much of a `.git` file is read: a path and its prefix."""


MISSING: Final = Look("missing")
DIRECTORY: Final = Look("directory")
FILE: Final = Look("file")
OTHER: Final = Look("other")


_NOTHING: Final = (Real(b"/", MISSING, b"/", ()), Identity(b"/", 0, 0, 0))


class Machine(Protocol):
    """Paths are absolute. What cannot be looked at because of permissions counts as missing."""

    def look(self, path: bytes) -> Look:
        """What is there."""

    def entries(self, directory: bytes) -> tuple[tuple[bytes, bool], ...]:
        """Names and whether each is a directory (a link is none), in any order; of nothing, nothing."""

    def is_empty(self, directory: bytes) -> bool:
        """Whether nothing is in it."""

    def head(self, file: bytes) -> bytes:
        """How a file begins."""

    def identity(self, path: bytes) -> Identity:
        """Which file this is."""

    def settled(self, path: bytes) -> tuple[Real, Identity]:
        """Where a path of the system, or of this very program, leads. May be a second old."""

    def may_create(self, directory: bytes) -> bool:
        """Whether this user, without special rights, could make something in it."""


class ThisMachine:
    """The real one."""

    def look(self, path: bytes) -> Look:
        try:
            info = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return MISSING
        mode = info.st_mode
        if stat.S_ISDIR(mode):
            return DIRECTORY
        if stat.S_ISLNK(mode):
            return Look("link", os.readlink(path))
        if stat.S_ISREG(mode):
            return Look("file", blank=True) if info.st_size == 0 and mode & 0o777 == 0o444 else FILE
        return OTHER

    def entries(self, directory: bytes) -> tuple[tuple[bytes, bool], ...]:
        try:
            with os.scandir(directory) as listing:
                return tuple([(entry.name, entry.is_dir(follow_symlinks=False)) for entry in listing])
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except PermissionError as error:
            if not os.access(directory, os.X_OK):
                return ()  # nobody who runs as this user can reach what is in it
            raise PlanError(f"{error.strerror} (os error {error.errno})") from None

    def is_empty(self, directory: bytes) -> bool:
        try:
            with os.scandir(directory) as listing:
                return next(listing, None) is None
        except FileNotFoundError:
            return True  # it was there to be mounted upon, and has just been taken away
        except OSError:
            return False

    def head(self, file: bytes) -> bytes:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.read(descriptor, HEAD_BYTES)
        except OSError:
            return b""
        finally:
            os.close(descriptor)

    def __init__(self) -> None:
        self._settled: dict[bytes, tuple[float, tuple[Real, Identity]]] = {}

    def settled(self, path: bytes) -> tuple[Real, Identity]:
        now = monotonic()
        known = self._settled.get(path)
        if known is None or now - known[0] > SETTLED_SECONDS:
            known = self._settled[path] = (now, self._look_at(path, None if known is None else known[1]))
        return known[1]

    def _look_at(self, path: bytes, before: tuple[Real, Identity] | None) -> tuple[Real, Identity]:
        try:
            info = os.stat(path)
        except OSError:
            return _NOTHING
        if before is not None and (before[1].inode, before[1].device) == (info.st_ino, info.st_dev):
            return before
        real = resolve(path, self.look)
        return real, Identity(real.path, info.st_dev, info.st_ino, 0)

    def identity(self, path: bytes) -> Identity:
        try:
            info = os.lstat(path)
            born = birth_time(path, follow=False)
        except OSError:
            return Identity(path, 0, 0, 0)
        return Identity(path, info.st_dev, info.st_ino, born)

    def may_create(self, directory: bytes) -> bool:
        if os.geteuid():
            return os.access(directory, os.W_OK | os.X_OK)
        # Root inside of a sandbox is a user like any other.
        info = os.stat(directory)
        if info.st_uid == 0:
            return bool(info.st_mode & stat.S_IWUSR)
        ours = info.st_gid in (os.getegid(), *os.getgroups())
        return bool(info.st_mode & (stat.S_IWGRP if ours else stat.S_IWOTH)) or _has_access_list(directory)


def _has_access_list(path: bytes) -> bool:
    """Whether somebody may have been given rights that the mode does not show; in doubt yes."""
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except OSError as error:
        return error.errno != errno.ENOTSUP


class Recorder:
    """Another machine, and a memory of everything that was asked of it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._answers: dict[tuple[Any, ...], Any] = {}

    def _ask(self, question: Any, *arguments: Any) -> Any:
        key = (question, *arguments)
        try:
            return self._answers[key]
        except KeyError:
            answer = self._answers[key] = question(*arguments)
            return answer

    def still_true(self) -> bool:
        """Whether every answer would be the same now."""
        answers = self._answers.items()
        try:
            return all(question(*arguments) == answer for (question, *arguments), answer in answers)
        except (OSError, PlanError):
            return False  # there would be no answer

    def look(self, path: bytes) -> Look:
        found: Look = self._ask(self._machine.look, path)
        return found

    def entries(self, directory: bytes) -> tuple[tuple[bytes, bool], ...]:
        found: tuple[tuple[bytes, bool], ...] = self._ask(self._machine.entries, directory)
        return found

    def is_empty(self, directory: bytes) -> bool:
        found: bool = self._ask(self._machine.is_empty, directory)
        return found

    def head(self, file: bytes) -> bytes:
        found: bytes = self._ask(self._machine.head, file)
        return found

    def identity(self, path: bytes) -> Identity:
        found: Identity = self._ask(self._machine.identity, path)
        return found

    def settled(self, path: bytes) -> tuple[Real, Identity]:
        found: tuple[Real, Identity] = self._ask(self._machine.settled, path)
        return found

    def may_create(self, directory: bytes) -> bool:
        found: bool = self._ask(self._machine.may_create, directory)
        return found
