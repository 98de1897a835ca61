"""One inotify descriptor for everybody who watches: many watchers of a directory share one watch of it.

Watches are added from threads, for finding a directory may block; events are given out on the loop.
The descriptor is opened for the first watcher and closed with the last one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from typing import Any, Protocol

from ...loop import Loop
from .kernel import (
    IN_EXCL_UNLINK,
    IN_IGNORED,
    IN_MASK_ADD,
    IN_Q_OVERFLOW,
    Event,
    inotify_add_watch,
    inotify_create,
    inotify_read,
    inotify_remove_watch,
)

__all__ = ["Notifier", "Watcher", "notifier_of"]


class Watcher(Protocol):
    """Who is told. On the loop's thread, always."""

    def heard(self, event: Event, role: Any) -> None:
        """Something happened to what was watched in this role."""

    def lost(self) -> None:
        """More happened than could be told."""


class Notifier:
    """Who watches what, and why."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._lock = Lock()
        self._descriptor = inotify_create()
        self._roles: dict[int, list[tuple[Watcher, Any]]] = {}
        self._watches: dict[Watcher, set[int]] = {}
        loop.add_reader(self._descriptor, self._readable)

    def join(self, watcher: Watcher) -> None:
        """Before anything is watched. On the loop."""
        with self._lock:
            self._watches[watcher] = set()

    def watch(self, target: int, mask: int, watcher: Watcher, role: Any) -> bool:
        """Watch an open file or directory, from any thread. False when the watcher has left."""
        with self._lock:
            watches = self._watches.get(watcher)
            if watches is None:
                return False
            number = inotify_add_watch(
                self._descriptor, b"/proc/self/fd/%d" % target, mask | IN_MASK_ADD | IN_EXCL_UNLINK
            )
            self._roles.setdefault(number, []).append((watcher, role))
            watches.add(number)
            return True

    def forget(self, watcher: Watcher, unwanted: Callable[[Any], bool]) -> None:
        """Forget those of a watcher's roles for which this holds."""
        with self._lock:
            for number in tuple(self._watches.get(watcher, ())):
                self._drop(number, watcher, unwanted)

    def leave(self, watcher: Watcher) -> None:
        """Tell this one nothing more. On the loop."""
        with self._lock:
            for number in self._watches.pop(watcher, ()):
                self._drop(number, watcher, lambda _: True)
            last = not self._watches
        if last:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            _notifiers.pop(self._loop, None)

    def _drop(self, number: int, watcher: Watcher, unwanted: Callable[[Any], bool]) -> None:
        roles = self._roles.get(number)
        if roles is None:
            return
        roles[:] = [entry for entry in roles if entry[0] is not watcher or not unwanted(entry[1])]
        if watcher in self._watches and not any(entry[0] is watcher for entry in roles):
            self._watches[watcher].discard(number)
        if not roles:
            del self._roles[number]
            inotify_remove_watch(self._descriptor, number)

    def _readable(self) -> None:
        for event in inotify_read(self._descriptor):
            with self._lock:
                if event.mask & IN_Q_OVERFLOW:
                    lost = list(self._watches)
                    told = []
                else:
                    lost = []
                    told = list(self._roles.get(event.watch, ()))
                if event.mask & IN_IGNORED:
                    for watcher, _ in self._roles.pop(event.watch, ()):
                        self._watches[watcher].discard(event.watch)
            for watcher in lost:
                watcher.lost()
            for watcher, role in told:
                watcher.heard(event, role)


_notifiers: dict[Loop, Notifier] = {}


def notifier_of(loop: Loop) -> Notifier:
    """The one of this loop. On the loop."""
    notifier = _notifiers.get(loop)
    if notifier is None:
        notifier = _notifiers[loop] = Notifier(loop)
    return notifier
