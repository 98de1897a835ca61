"""What all processes of this machine share: who spawns, who kills, who notices, who guards."""

from __future__ import annotations

import signal
from typing import Final

from ... import log
from ...limits import Limits
from ...loop import Loop
from ..worker import Worker
from . import tree
from .guard import Guard
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
        self.killer = Worker(loop, "exec-server-kill")
        self.watcher = ExitWatcher(loop)
        self.guard = Guard(loop, self.spawner, self.tags.nonce, tree.SESSION_SHIFT)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            log.warning("SIGCHLD is ignored in this process, so the kernel keeps no exit codes for it")

    def close(self) -> None:
        """Kill everything that was ever started here, and let go of the threads and the guardian."""
        self.spawner.stop(SPAWN_TIMEOUT)  # nobody is born after the last look
        tree.kill_tagged(self.tags.contains)
        self.killer.close()
        self.guard.stop()
