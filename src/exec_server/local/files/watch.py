"""Watching a path: a file, a directory with its entries, a whole tree, or something not there yet.

A path is watched in every directory on the way to it, so that it does not matter how it comes and goes:
made, removed, replaced, or all of it moved at once. When something on the way changes, the way is
gone again (in a thread), and what is found there now takes the place of what was there before.

What happens is collected and told in batches; a batch begins with the first event in it. A watcher
that is told too late, or that too much happened, is told that: the watched path itself is reported
with `overflowed`, which means "look again at everything".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Final

from ...loop import Loop, Pending, Timer
from .kernel import (
    IN_ATTRIB,
    IN_CREATE,
    IN_DELETE,
    IN_DELETE_SELF,
    IN_IGNORED,
    IN_ISDIR,
    IN_MODIFY,
    IN_MOVE_SELF,
    IN_MOVED_FROM,
    IN_MOVED_TO,
    Event,
)
from .lane import ALONE, Turn
from .notifier import notifier_of
from .paths import SEARCH, opened
from .pool import POOL, Pool
from .write import TEMPORARY_PREFIX

__all__ = ["DEBOUNCE_SECONDS", "MAX_CHANGED_PATHS", "FileWatch"]

DEBOUNCE_SECONDS: Final = 0.2
"""From the first event of a batch to telling it."""

MAX_CHANGED_PATHS: Final = 4096
"""Paths of one notification; what is over goes into the next one."""

MAX_COLLECTED_PATHS: Final = 65_536
"""Paths that may wait to be told. With more, only that there were more is remembered."""

MAX_TREE_DIRECTORIES: Final = 65_536
"""Directories of one watched tree. With more, the rest is not watched and `overflowed` says so."""

_COMES_OR_GOES: Final = IN_CREATE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE
_SELF: Final = IN_DELETE_SELF | IN_MOVE_SELF
_ENTRIES: Final = _COMES_OR_GOES | IN_MODIFY | IN_ATTRIB

_LOOK: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC

Told = Callable[[list[bytes], bool], "Pending[None] | None"]
"""Takes sorted paths and whether something was lost; gives what settles when it can take more."""


class _Way:
    """A directory on the way: only one name in it matters, and whether it is still there."""

    __slots__ = ("generation", "last", "name")

    def __init__(self, generation: int, name: bytes, last: bool) -> None:
        self.generation = generation
        self.name = name
        self.last = last


class _Itself:
    """The file that is watched, wherever links led to it."""

    __slots__ = ("generation",)

    def __init__(self, generation: int) -> None:
        self.generation = generation


class _Inside:
    """A directory whose entries are reported."""

    __slots__ = ("generation", "path")

    def __init__(self, generation: int, path: bytes) -> None:
        self.generation = generation
        self.path = path


Role = _Way | _Itself | _Inside
Identity = tuple[int, int] | None
"""Who is at the end of the way: device and inode, or nobody."""


class FileWatch:
    """One watched path. Made on the loop; `start` is run in a thread; the rest happens on the loop."""

    def __init__(self, loop: Loop, path: bytes, recursive: bool, told: Told, pool: Pool = POOL) -> None:
        self._loop = loop
        self._pool = pool
        self._path = path
        self._recursive = recursive
        self._told = told
        self._notifier = notifier_of(loop)
        self._notifier.join(self)
        self._identity: Identity = None
        self._generation = 0
        """How often the way was gone. Roles of an earlier time are dropped when it has been gone again."""
        self._listening = False
        self._closed = False
        self._looking = False
        self._look_again = False
        self._changed: set[bytes] = set()
        self._overflowed = False
        self._timer: Timer | None = None
        self._blocked = False

    # In a thread ---------------------------------------------------------------------------------

    def start(self, turn: Turn = ALONE) -> None:
        """Begin to watch."""
        self._identity = self._look(turn)

    def _look(self, turn: Turn = ALONE) -> Identity:
        """Go the way and watch it; who is at its end."""
        current = os.open(b"/", SEARCH)
        try:
            parts = [part for part in self._path.split(b"/") if part]
            for index, part in enumerate(parts):
                last = index == len(parts) - 1
                mask = _SELF | (_ENTRIES if last else _COMES_OR_GOES)
                self._watch(current, mask, _Way(self._generation, part, last))
                try:
                    following = os.open(part, _LOOK, dir_fd=current)
                except OSError:
                    return None  # not there yet, or a link that leads nowhere
                os.close(current)
                current = following
            info = os.fstat(current)
            if stat.S_ISDIR(info.st_mode):
                self._watch_directory(current, self._path, turn)
            else:
                self._watch(current, IN_MODIFY | IN_ATTRIB, _Itself(self._generation))
            return (info.st_dev, info.st_ino)
        finally:
            os.close(current)

    def _watch(self, target: int, mask: int, role: Role) -> None:
        try:
            self._notifier.watch(target, mask, self, role)
        except PermissionError:
            if not isinstance(role, _Way):
                raise
            # A directory that may be passed but not read: what comes and goes in it stays unseen.

    def _watch_directory(self, directory: int, path: bytes, turn: Turn) -> list[bytes]:
        """Watch a directory, and what is below it if wanted; every path found below it."""
        self._watch(directory, _ENTRIES | _SELF, _Inside(self._generation, path))
        found: list[bytes] = []
        if not self._recursive:
            return found
        todo = [(os.dup(directory), path)]
        watched = 0
        try:
            while todo:
                turn.check()
                current, above = todo.pop()
                with opened(current):
                    below = self._look_into(current, above, found)
                watched += len(below)
                todo += below
                if watched > MAX_TREE_DIRECTORIES:
                    self._overflowed = True
                    break
        finally:
            for current, _ in todo:
                os.close(current)
        return found

    def _look_into(self, directory: int, path: bytes, found: list[bytes]) -> list[tuple[int, bytes]]:
        """Watch the directories in a directory; descriptors of them."""
        below: list[tuple[int, bytes]] = []
        try:
            listed = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        except OSError:
            return below  # not ours to read
        with opened(listed), os.scandir(listed) as entries:
            for entry in entries:
                name = os.fsencode(entry.name)
                child = os.path.join(path, name)
                found.append(child)
                if not entry.is_dir(follow_symlinks=False):
                    continue
                try:
                    descriptor = os.open(name, SEARCH | os.O_NOFOLLOW, dir_fd=directory)
                except OSError:
                    continue  # it is gone again
                below.append((descriptor, child))
                try:
                    self._watch(descriptor, _ENTRIES | _SELF, _Inside(self._generation, child))
                except PermissionError:
                    pass
        return below

    # On the loop ---------------------------------------------------------------------------------

    def listen(self) -> None:
        """From now on, tell. What happened since `start` is told too."""
        self._listening = True
        if self._changed or self._overflowed:
            self._plan()

    def close(self) -> None:
        """Watch no longer, and tell nothing more."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._notifier.leave(self)

    def lost(self) -> None:
        self._overflow()
        self._look_soon()

    def heard(self, event: Event, role: Role) -> None:
        if self._closed or event.mask & IN_IGNORED:
            return
        if isinstance(role, _Way):
            self._heard_on_the_way(event, role)
        elif isinstance(role, _Itself):
            self._report(self._path)
        elif not event.name:
            self._report(role.path)
            if event.mask & _SELF and role.path == self._path:
                self._look_soon()
        else:
            self._heard_inside(event, os.path.join(role.path, event.name))

    def _heard_on_the_way(self, event: Event, role: _Way) -> None:
        if not event.name:
            if event.mask & _SELF:
                self._look_soon()
        elif event.name == role.name:
            if role.last:
                self._report(self._path)
            if event.mask & _COMES_OR_GOES:
                self._look_soon()

    def _heard_inside(self, event: Event, path: bytes) -> None:
        self._report(path)
        if self._recursive and event.mask & IN_ISDIR:
            if event.mask & (IN_CREATE | IN_MOVED_TO):
                self._pool.run(self._look_below, path)
            elif event.mask & (IN_DELETE | IN_MOVED_FROM):
                below = path + b"/"
                self._notifier.forget(
                    self, lambda role: isinstance(role, _Inside) and (role.path + b"/").startswith(below)
                )

    def _report(self, path: bytes) -> None:
        if os.path.basename(path).startswith(TEMPORARY_PREFIX):
            return  # about to take another's name, which will be told
        if len(self._changed) >= MAX_COLLECTED_PATHS:
            self._overflow()
        else:
            self._changed.add(path)
            self._plan()

    def _overflow(self) -> None:
        self._overflowed = True
        self._changed.clear()
        self._plan()

    def _plan(self) -> None:
        if self._listening and self._timer is None and not self._closed and not self._blocked:
            self._timer = self._loop.call_later(DEBOUNCE_SECONDS, self._tell)

    def _tell(self) -> None:
        self._timer = None
        if self._overflowed:
            self._changed.add(self._path)
        paths, overflowed = sorted(self._changed), self._overflowed
        self._changed, self._overflowed = set(), False
        room = None
        for start in range(0, len(paths), MAX_CHANGED_PATHS):
            room = self._told(paths[start : start + MAX_CHANGED_PATHS], overflowed)
        if room is not None:
            self._blocked = True
            room.then(lambda _: self._unblock())

    def _unblock(self) -> None:
        self._blocked = False
        if self._changed or self._overflowed:
            self._plan()

    # Looking again: decided on the loop, done in a thread ------------------------------------------

    def _look_soon(self) -> None:
        if self._looking:
            self._look_again = True
        elif not self._closed:
            self._looking = True
            self._generation += 1
            self._pool.run(self._look_in_thread)

    def _look_in_thread(self) -> None:
        found: Identity | Exception
        try:
            found = self._look()
        except Exception as error:
            found = error
        self._call_loop(self._looked, found)

    def _looked(self, found: Identity | Exception) -> None:
        self._looking = False
        if self._closed:
            return
        if isinstance(found, Exception):
            self._overflow()
        else:
            if found != self._identity:
                self._identity = found
                self._report(self._path)
            generation = self._generation
            self._notifier.forget(self, lambda role: role.generation < generation)
        if self._look_again:
            self._look_again = False
            self._look_soon()

    def _look_below(self, path: bytes) -> None:
        """A directory has come into a watched tree: what is in it may be older than our watch of it."""
        try:
            with opened(os.open(path, SEARCH | os.O_NOFOLLOW)) as directory:
                found = self._watch_directory(directory, path, ALONE)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return  # it is gone again, or not ours to look into
        except OSError:
            self._call_loop(self._overflow)  # too many watches: what happens there is not seen
            return
        self._call_loop(self._looked_below, found)

    def _looked_below(self, found: list[bytes]) -> None:
        for path in found:
            self._report(path)

    def _call_loop(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            pass  # the loop is closed
