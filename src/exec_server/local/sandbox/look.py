"""What the compiler may ask about a file system, and nothing else.

A plan is a function of a profile and of these answers. So a plan that was made before still holds when
asking the same questions again gives the same answers, which is cheaper than making it anew (`Recorder`).
"""

from __future__ import annotations

import errno
import os
import stat
from time import monotonic
from typing import Any, Final, Literal, Protocol, TypeAlias

from ..files.kernel import birth_time
from .links import Look, Real, open_unlinked, resolve
from .mounts import Mounts, mounts
from .plan import Identity, PlanError

__all__ = ["Machine", "Maker", "Recorder", "ThisMachine", "keep_private", "keep_secret", "secret_files"]

Maker: TypeAlias = Literal["nobody", "anybody", "owner", "owner alone"]
"""Who inside of a sandbox could make something in a directory: nobody; anybody; whoever owns it, after
changing its mode. `owner alone`: and nobody could put something there before him, not even this server."""

SETTLED_SECONDS: Final = 1.0
"""How long nobody looks again where `/usr` and its like lead. Asking for all of them takes longer than
anything else about a call."""

FEW_QUESTIONS: Final = 64
"""Asking as many takes a tenth of a millisecond at most."""

HEAD_BYTES: Final = 4096
"""How much of a `.git` file is read: a path and its prefix."""


MISSING: Final = Look("missing")
UNSEEN: Final = Look("missing", unseen=True)
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

    def maker(self, directory: bytes) -> Maker:
        """Whether this user, without special rights, could make something in it."""

    def mounts(self) -> Mounts:
        """What is mounted."""

    def private(self) -> tuple[bytes, ...]:
        """What belongs to this server, and to nobody inside of a sandbox."""


_private: tuple[bytes, ...] = ()


def keep_private(path: bytes) -> None:
    """A path of the server's own, such as its socket: from now on no sandbox may reach or replace it."""
    global _private
    _private = (*_private, path)


_secret: tuple[bytes, ...] = ()


def keep_secret(path: bytes) -> None:
    """A file of the server's own, such as its key: from now on no view of the machine shows what is in it.

    Rules that only add cannot take it away again, so where there is only Landlock it stays readable.
    """
    global _secret
    _secret = (*_secret, path)


def secret_files() -> tuple[bytes, ...]:
    """What was kept secret, as far as this machine can hide it."""
    from . import probe

    return _secret if _secret and probe.backend().name == "bubblewrap" else ()


class ThisMachine:
    """The real one."""

    def look(self, path: bytes) -> Look:
        try:
            info = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return MISSING
        except PermissionError:
            return UNSEEN
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
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
        found: tuple[tuple[bytes, bool], ...] = ()
        problem: OSError | None = None
        try:
            with os.scandir(directory) as listing:
                found = tuple([(entry.name, entry.is_dir(follow_symlinks=False)) for entry in listing])
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except OSError as error:
            problem = error
        if not os.access(directory, os.X_OK):
            return _unreachable(directory)
        if problem is not None:
            reason = f"{problem.strerror} (os error {problem.errno})"
            raise PlanError(f"cannot look for what fits a pattern in {_text(directory)}: {reason}")
        return found

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
            descriptor = open_unlinked(path)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise PlanError(f"{_text(path)} was made a link while the sandbox was planned") from None
            return Identity(path, 0, 0, 0)
        try:
            info = os.fstat(descriptor)
            return Identity(path, info.st_dev, info.st_ino, birth_time(b"", dir_fd=descriptor))
        finally:
            os.close(descriptor)

    def maker(self, directory: bytes) -> Maker:
        user = os.geteuid()
        possible = os.access(directory, os.W_OK | os.X_OK)
        if user and possible:
            return "anybody"
        info = os.stat(directory)
        if user:
            owned = info.st_uid == user and not os.statvfs(directory).f_flag & os.ST_RDONLY
            return "owner alone" if owned else "nobody"
        if not possible:
            return "nobody"  # only a disk that takes no changes stops root
        # But root inside of a sandbox is a user like any other.
        if info.st_uid == 0:
            return "anybody" if info.st_mode & stat.S_IWUSR else "owner"
        ours = info.st_gid in (os.getegid(), *os.getgroups())
        writable = info.st_mode & (stat.S_IWGRP if ours else stat.S_IWOTH)
        return "anybody" if writable or _has_access_list(directory) else "nobody"

    def mounts(self) -> Mounts:
        return mounts()

    def private(self) -> tuple[bytes, ...]:
        return _private


def _unreachable(directory: bytes) -> tuple[tuple[bytes, bool], ...]:
    """Of a directory in which nothing can be reached now; PlanError if a command could change that."""
    if os.lstat(directory).st_uid == os.geteuid():
        raise PlanError(
            f"cannot look for what fits a pattern in {_text(directory)}: "
            "its mode forbids it, and a command could change that"
        )
    return ()


def _text(path: bytes) -> str:
    return path.decode("utf-8", "replace")


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
        self._asked: list[tuple[Any, tuple[Any, ...], Any]] = []
        """The same once more, as it is gone through for every call."""
        self._listed = False

    def _ask(self, question: Any, *arguments: Any) -> Any:
        key = (question, *arguments)
        try:
            return self._answers[key]
        except KeyError:
            answer = self._answers[key] = question(*arguments)
            self._asked.append((question, arguments, answer))
            return answer

    @property
    def brief(self) -> bool:
        """Whether all of it can be asked again in a moment: few questions, and no directory to list."""
        return not self._listed and len(self._asked) <= FEW_QUESTIONS

    def still_true(self) -> bool:
        """Whether every answer would be the same now."""
        try:
            for question, arguments, answer in self._asked:
                if question(*arguments) != answer:
                    return False
        except (OSError, PlanError):
            return False  # there would be no answer
        return True

    def look(self, path: bytes) -> Look:
        found: Look = self._ask(self._machine.look, path)
        return found

    def entries(self, directory: bytes) -> tuple[tuple[bytes, bool], ...]:
        self._listed = True
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

    def maker(self, directory: bytes) -> Maker:
        found: Maker = self._ask(self._machine.maker, directory)
        return found

    def mounts(self) -> Mounts:
        found: Mounts = self._ask(self._machine.mounts)
        return found

    def private(self) -> tuple[bytes, ...]:
        found: tuple[bytes, ...] = self._ask(self._machine.private)
        return found
