"""What all processes of this machine share: who spawns, who kills, who notices, who guards."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final

from ... import log
from ...limits import Limits
from ...loop import Loop
from ..worker import Worker
from . import descriptors, tree
from .guard import Guard
from .killer import Killer
from .process import ExitWatcher
from .tree import TagSpace

__all__ = ["ProcessMachine"]

SPAWN_TIMEOUT: Final = 2.0
"""Seconds that the end waits for a child that is being started."""


class ProcessMachine:
    """One per server, or per local environment."""

    def __init__(self, loop: Loop, limits: Limits, *, tag_trees: bool = True) -> None:
        self.loop = loop
        self.limits = limits
        self.tags = TagSpace()
        self.tag_trees = tag_trees and tree.SUPPORTED
        """Whether children are marked. Not in a process that also starts others: they would be, too."""
        self.spawner = Worker(loop, "exec-server-spawn")
        self.sandboxer = Worker(loop, "exec-server-sandbox")
        """Makes sandboxes and starts what runs in them, so that nobody else waits for that. What is in a
        sandbox dies with the thread that started it."""
        self._last_things: list[Callable[[], None]] = []
        self.killer = Killer(loop)
        self.watcher = ExitWatcher(loop)
        self.guard = Guard(loop, self.spawner, self.tags.nonce, tree.SESSION_SHIFT)
        if self.tag_trees:
            descriptors.keep_spare()
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            log.warning("SIGCHLD is ignored in this process, so the kernel keeps no exit codes for it")

    def last_thing(self, call: Callable[[], None]) -> None:
        """To be called, once, at the very end: when everything that was ever started here has been killed."""
        if call not in self._last_things:
            self._last_things.append(call)

    def close(self) -> None:
        """Kill everything that was ever started here, and let go of the threads and the guardian."""
        self.spawner.stop(SPAWN_TIMEOUT)  # nobody is born after the last look
        self.sandboxer.stop(SPAWN_TIMEOUT)
        try:
            tree.kill_tagged(self.tags.contains)
        except OSError as error:
            log.error("not every process is dead; the guardian is left to kill them", reason=error.strerror)
            self.guard.leave()
        for last_thing in self._last_things:
            last_thing()
        self.killer.close()
        self.guard.stop()
