"""Staying awake for a moment after an answer.

Whoever asks one thing after another asks the next within microseconds, and waking a sleeping process
takes longer than most answers do. So after a request the loop looks again, without sleeping, for a time
far shorter than anybody notices, but long enough for a client that has to be woken itself. Measured on a
quiet machine: 39 µs for a call and its answer, 98 without it, and 99 when it is too short (50 µs).

Whoever asks now and then would only pay for that. So when it was in vain some times in a row, it is tried
again only for one in so many requests, until it pays.

On a busy machine the opposite is true: whoever looks and looks has had its share of the processor when the
request comes, and waits for all the others first. Measured with eight busy programs to a processor: 1,100 µs
instead of 270. So when somebody else was let run in the middle of looking, there is none of it for a while.
"""

from __future__ import annotations

import os
from time import perf_counter
from typing import Final

from ..loop import Loop

__all__ = ["Linger"]

GAP_SECONDS: Final = 0.0005
"""Between two looks: many times what a turn of the loop takes, and less than a turn of somebody else."""

REST_SECONDS: Final = 0.25
"""How long a busy machine is left alone."""

IN_VAIN: Final = 8
"""How often in a row nobody asked, until it is believed that nobody will."""

ONE_IN: Final = 16
"""Requests after which it is tried again."""


class Linger:
    """Keeps a loop from sleeping until some time after the last request."""

    def __init__(self, loop: Loop, seconds: float) -> None:
        self._loop = loop
        # With a single processor, the client needs it to ask.
        self._seconds = seconds if _processors() > 1 else 0.0
        self._until = 0.0
        self._awake = False
        self._looked = 0.0
        self._interruptions = 0
        self._rest_until = 0.0
        self._in_vain = 0
        self._untried = 0

    def touch(self) -> None:
        """A request was answered."""
        if self._awake:
            self._in_vain = 0  # it came while somebody looked
        elif self._in_vain >= IN_VAIN:
            self._untried += 1
            if self._untried < ONE_IN:
                return
            self._untried = 0
        self._stay(self._seconds)

    def expect(self, seconds: float) -> None:
        """Another process is about to answer this one, sooner than waking up would take."""
        if self._seconds:
            self._stay(seconds)

    def _stay(self, seconds: float) -> None:
        if not seconds:
            return
        now = perf_counter()
        if now < self._rest_until:
            return
        self._until = now + seconds
        if not self._awake:
            self._awake = True
            self._looked = now
            self._interruptions = _interruptions()
            self._loop.call_soon(self._look_again)

    def end(self) -> None:
        """Somebody else has work to do, and two threads cannot run Python at once. Measured: a small
        write takes 380 µs instead of 500."""
        self._until = 0.0

    def _look_again(self) -> None:
        now = perf_counter()
        if now - self._looked > GAP_SECONDS and _interruptions() > self._interruptions:
            self._rest_until = now + REST_SECONDS
            self._awake = False
        elif now < self._until:
            self._looked = now
            self._loop.call_soon(self._look_again)
        else:
            self._awake = False
            if self._until:
                self._in_vain += 1


def _interruptions() -> int:
    """How often the processor was taken from this thread."""
    import resource

    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(who).ru_nivcsw


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
