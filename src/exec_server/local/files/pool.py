"""Threads for calls that may block: as many as are needed, up to a bound.

A job is given to a thread that is free; when none is, one more is started. A thread stuck in the
kernel therefore only costs itself, until the bound is reached. Threads that have had nothing to do
for a while end. The pool is one for the whole process: threads belong to no server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Final

__all__ = ["POOL", "Pool"]

MAX_THREADS: Final = 64
"""Most threads at once. The reference stops at 512, but its threads have no interpreter to share."""

IDLE_SECONDS: Final = 10.0
"""A thread without work ends after this."""

SWITCH_SECONDS: Final = 0.001
"""How long a busy thread may keep the interpreter from the loop, which waits for it at every system
call. Python's default of 5 ms makes a small call wait five times as long behind a large listing."""


class Pool:
    """Runs jobs. What they give back is their own business."""

    def __init__(self, most: int = MAX_THREADS, idle_seconds: float = IDLE_SECONDS) -> None:
        self._most = most
        self._idle_seconds = idle_seconds
        self._jobs: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = SimpleQueue()
        self._lock = Lock()
        self._threads = 0
        self._free = 0
        """Threads that wait, less jobs that wait."""

    @property
    def threads(self) -> int:
        """How many there are now."""
        return self._threads

    def run(self, job: Callable[..., object], *args: Any) -> None:
        """Do it as soon as there is a thread for it. The job must not raise."""
        with self._lock:
            self._jobs.put((job, args))
            self._free -= 1
            if self._free >= 0 or self._threads >= self._most:
                return
            self._threads += 1
        if sys.getswitchinterval() > SWITCH_SECONDS:
            sys.setswitchinterval(SWITCH_SECONDS)
        try:
            Thread(target=self._serve, name="exec-server-files", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    raise  # nobody will ever come for the job

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._free += 1
            try:
                job, args = self._jobs.get(timeout=self._idle_seconds)
            except Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._free -= 1
                        self._threads -= 1
                        return
                    self._free -= 1  # counted again at the top
                continue
            job(*args)
            del job, args  # they may hold a file's contents


POOL: Final = Pool()
"""The one everybody uses."""
