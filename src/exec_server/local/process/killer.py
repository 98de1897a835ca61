"""Killing trees in a thread, and not giving up on one that could not be looked at as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ... import log
from ...loop import Loop, Pending
from ..worker import Worker
from . import tree

__all__ = ["Killer"]

RETRY_SECONDS: Final = 1.0
"""Until the next try when descriptors had run out."""


class Killer:
    """One thread for all trees of this machine, one after another."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._worker = Worker(loop, "exec-server-kill")
        self._closed = False

    def kill(self, matches: Callable[[int], bool]) -> Pending[int]:
        """Kill everybody whose tag matches; how many there were.

        Fails with OSError when not everybody could be looked at. It is tried again until that works, so a
        tag must not be given to anybody else.
        """
        killing = self._worker.run(tree.kill_tagged, matches)
        killing.then(lambda outcome: self._tried(outcome, matches))
        return killing

    def close(self) -> None:
        """Let the thread end after what it was given."""
        self._closed = True
        self._worker.close()

    def _tried(self, outcome: Pending[int], matches: Callable[[int], bool]) -> None:
        try:
            outcome.result()
        except OSError as error:
            log.error("a tree of processes may not be dead yet; trying again", reason=error.strerror)
            self._loop.call_later(RETRY_SECONDS, self._try_again, matches)

    def _try_again(self, matches: Callable[[int], bool]) -> None:
        if not self._closed:
            self.kill(matches)
