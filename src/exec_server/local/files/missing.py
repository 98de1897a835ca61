"""A one-shot watch for clients that remember "this file is not there".

It fires when a missing path, or a directory missing above it, appears; when an existing directory above
it is removed, renamed or changes its attributes; and when anything happens to `present` but reading it.
A path with a link in it, or in a file system that does not tell of changes, cannot be watched.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from ...loop import Loop
from .kernel import (
    IN_ATTRIB,
    IN_CREATE,
    IN_DELETE,
    IN_DELETE_SELF,
    IN_IGNORED,
    IN_MASK_ADD,
    IN_MODIFY,
    IN_MOVE_SELF,
    IN_MOVED_FROM,
    IN_MOVED_TO,
    Event,
    inotify_add_watch,
    inotify_create,
    inotify_read,
)
from .lane import ALONE, Turn
from .paths import SEARCH

__all__ = ["MAX_MISSING", "MissingWatch", "watch_missing"]

MAX_MISSING: Final = 64
"""Paths of one watch."""

MAX_DIRECTORIES: Final = 1024
"""Directories of one watch: all that exist above its paths."""

_SELF: Final = IN_DELETE_SELF | IN_MOVE_SELF | IN_ATTRIB
_APPEARS: Final = IN_CREATE | IN_MOVED_TO
_ANYTHING: Final = _APPEARS | IN_MOVED_FROM | IN_DELETE | IN_MODIFY | IN_ATTRIB

_LEAF: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC


class _Unwatchable(Exception):
    """For whatever reason. The client is only told that."""


class MissingWatch:
    """A watch that is set. `listen` calls back once, from the loop; `close` may come at any time."""

    def __init__(self, descriptor: int, names: dict[int, set[bytes]]) -> None:
        self._descriptor = descriptor
        self._names = names
        self._loop: Loop | None = None

    def listen(self, loop: Loop, changed: Callable[[], object]) -> None:
        """Call back when something has changed since the watch was made."""
        if self._descriptor < 0:
            return
        self._loop = loop
        loop.add_reader(self._descriptor, self._readable, changed)

    def __del__(self) -> None:
        if self._loop is None:
            self.close()  # nobody wanted it any more when it was ready

    def close(self) -> None:
        """Watch no longer."""
        if self._descriptor >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _readable(self, changed: Callable[[], object]) -> None:
        if any(self._matters(event) for event in inotify_read(self._descriptor)):
            self.close()
            changed()

    def _matters(self, event: Event) -> bool:
        if event.mask & IN_IGNORED:
            return False  # what made it so was said before
        names = self._names.get(event.watch)
        return not event.name or names is None or event.name in names


def watch_missing(missing: list[bytes], present: bytes | None, turn: Turn = ALONE) -> MissingWatch | None:
    """Watch, if that is possible. None: something is there, or not there, or cannot be watched."""
    del turn
    if not 1 <= len(missing) <= MAX_MISSING:
        return None
    before = _Survey(missing, present)
    try:
        before.look()
        watch = before.watch()
    except (OSError, _Unwatchable):
        return None
    finally:
        before.close()
    after = _Survey(missing, present)
    try:
        after.look()
        if after.facts() == before.facts():
            return watch
    except (OSError, _Unwatchable):
        pass  # it changed while we set the watch
    finally:
        after.close()
    watch.close()
    return None


class _Survey:
    """All directories that exist above some paths, and which names matter in each."""

    def __init__(self, missing: list[bytes], present: bytes | None) -> None:
        self._missing = missing
        self._present = present
        self._directories: dict[bytes, int | None] = {}
        self._leaf: int | None = None
        self._names: dict[bytes, set[bytes]] = {}
        self._identities: dict[bytes, tuple[int, int]] = {}
        self._silent = {os.stat(path).st_dev for path in (b"/proc", b"/sys") if os.path.isdir(path)}

    def look(self) -> None:
        for path in self._missing:
            parent, name = os.path.split(path)
            directory = self._directory(parent)
            if directory is None:
                continue
            if not name or _exists(name, directory):
                raise _Unwatchable
            self._names[parent].add(name)
        if self._present is not None:
            parent, name = os.path.split(self._present)
            directory = self._directory(parent)
            if directory is None or not name:
                raise _Unwatchable
            self._leaf = os.open(name, _LEAF, dir_fd=directory)
            info = os.fstat(self._leaf)
            if (info.st_mode & 0o170000) == 0o120000:
                raise _Unwatchable
            self._identities[self._present] = (info.st_dev, info.st_ino)
            self._names[parent].add(name)

    def facts(self) -> tuple[dict[bytes, set[bytes]], dict[bytes, tuple[int, int]]]:
        return self._names, self._identities

    def watch(self) -> MissingWatch:
        descriptor = inotify_create()
        names: dict[int, set[bytes]] = {}
        try:
            for path, directory in self._directories.items():
                if directory is not None:
                    wanted = self._names[path]
                    mask = _SELF | (_ANYTHING if wanted else 0)
                    names.setdefault(_add(descriptor, directory, mask), set()).update(wanted)
            if self._leaf is not None:
                leaf_is_directory = os.path.isdir(b"/proc/self/fd/%d" % self._leaf)
                mask = _SELF if leaf_is_directory else _SELF | IN_MODIFY
                names.setdefault(_add(descriptor, self._leaf, mask), set())
        except BaseException:
            os.close(descriptor)
            raise
        return MissingWatch(descriptor, names)

    def close(self) -> None:
        for directory in self._directories.values():
            if directory is not None:
                os.close(directory)
        if self._leaf is not None:
            os.close(self._leaf)

    def _directory(self, path: bytes) -> int | None:
        """A descriptor; None if the directory is not there, its first missing part then being noted."""
        if path in self._directories:
            return self._directories[path]
        if len(self._directories) >= MAX_DIRECTORIES:
            raise _Unwatchable
        if path == b"/":
            found: int | None = os.open(b"/", SEARCH)
        else:
            parent, name = os.path.split(path)
            above = self._directory(parent)
            found = None
            if above is not None:
                try:
                    found = os.open(name, SEARCH | os.O_NOFOLLOW, dir_fd=above)
                except FileNotFoundError:
                    self._names[parent].add(name)
        self._directories[path] = found
        if found is not None:
            info = os.fstat(found)
            if info.st_dev in self._silent:
                raise _Unwatchable
            self._names[path] = set()
            self._identities[path] = (info.st_dev, info.st_ino)
        return found


def _exists(name: bytes, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _add(descriptor: int, target: int, mask: int) -> int:
    return inotify_add_watch(descriptor, b"/proc/self/fd/%d" % target, mask | IN_MASK_ADD)
