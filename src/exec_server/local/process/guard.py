"""Keeping a guardian (guardian.py) alive for as long as this process lives."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

from ... import log
from ...loop import Loop, Pending
from ..worker import Worker
from . import tree

__all__ = ["Guard"]

_GUARDIAN: Final = os.path.join(os.path.dirname(__file__), "guardian.py")
"""Started by its path: importing it here would only cost time."""

_SWEEPER: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "sandbox", "mountpoints.py")

RESTART_DELAY: Final = 1.0
"""Seconds before a guardian that was killed is replaced."""


class Guard:
    """Starts the guardian with the first child, and again whenever somebody kills it."""

    def __init__(self, loop: Loop, spawner: Worker, nonce: int, shift: int) -> None:
        self._loop = loop
        self._spawner = spawner
        self._arguments = (nonce, shift)
        self._write_end: int | None = None
        self._pidfd: int | None = None
        self._stopped = False

    def start(self) -> None:
        """Have a guardian from now on. Cheap when there is one."""
        if self._write_end is not None or self._stopped or not tree.SUPPORTED:
            return
        if not sys.executable:
            log.error("no guardian: this Python does not know its own path, so processes may outlive it")
            return
        try:
            read_end, self._write_end = os.pipe()
        except OSError as error:
            log.warning("no guardian yet: the next process tries again", reason=str(error))
            return
        self._spawner.run(self._spawn, read_end).then(self._spawned)

    def stop(self) -> None:
        """Everything it would kill has been killed: it is not needed any more."""
        self._stopped = True
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._reap()
        self._forget()

    def leave(self) -> None:
        """Let it do its work now: it has a process, and descriptors, of its own."""
        self._stopped = True
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._forget()

    def _spawn(self, read_end: int) -> int:
        """In the spawner's thread. The pidfd of the guardian."""
        nonce, shift = self._arguments
        argv = [sys.executable, "-I", "-S", "-B", _GUARDIAN, "3", str(nonce), str(shift), _SWEEPER]
        null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
        actions = [*null, (os.POSIX_SPAWN_DUP2, read_end, 3)]
        try:
            with tree.tagged(None):  # not while a child is being given its tag
                pid = os.posix_spawn(sys.executable, argv, {}, file_actions=actions, setsid=True)
        finally:
            os.close(read_end)
        return os.pidfd_open(pid)

    def _spawned(self, outcome: Pending[int]) -> None:
        try:
            self._pidfd = outcome.result()
        except OSError as error:
            log.error("no guardian: processes may outlive this one if it is killed", reason=str(error))
            return
        self._loop.add_reader(self._pidfd, self._died)
        if self._stopped:
            self.stop()

    def _died(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            self._reap()
            self._forget()
            log.warning("the guardian was killed; starting another")
            self._loop.call_later(RESTART_DELAY, self.start)

    def _reap(self) -> None:
        if self._pidfd is not None:
            os.set_blocking(self._pidfd, True)  # uvloop makes what it watches non-blocking
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            os.close(self._pidfd)
            self._pidfd = None

    def _forget(self) -> None:
        if self._write_end is not None:
            os.close(self._write_end)
            self._write_end = None
