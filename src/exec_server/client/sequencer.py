"""Putting events in order. Pure.

Every event of a process has a number, without gaps; they may arrive in any order and more than once.
Early ones wait here, within bounds, until what is missing has come.
"""

from __future__ import annotations

from typing import Final

from ..services import Closed, Event, Failed, Output

__all__ = ["ReorderOverflow", "Sequencer"]

MAX_EARLY_EVENTS: Final = 256
"""Events that may wait for a gap to close. The reference's clients use the same bounds."""

MAX_EARLY_BYTES: Final = 1024 * 1024
"""Bytes of output that may wait, in all and in one event."""


class ReorderOverflow(Exception):
    """The server left a gap too long; the process cannot be followed any more."""


class Sequencer:
    """The numbers of one process: what was published, what came too early."""

    __slots__ = ("_early", "_early_bytes", "ended", "last")

    def __init__(self) -> None:
        self.last = 0
        """The last number published."""
        self.ended = False
        """Closed was published: nothing follows."""
        self._early: dict[int, Event] = {}
        self._early_bytes = 0

    def push(self, seq: int, event: Event) -> list[Event]:
        """Take an event; what can be published now, in order."""
        if self.ended or seq <= self.last or seq in self._early:
            return []
        if seq != self.last + 1:
            self._keep(seq, event)
            return []
        ready = [event]
        self.last = seq
        while self._early and (following := self._early.pop(self.last + 1, None)) is not None:
            self._early_bytes -= _size(following)
            ready.append(following)
            self.last += 1
        if isinstance(ready[-1], Closed):
            self.end()
        return ready

    def end(self) -> None:
        """Nothing more is wanted."""
        self.ended = True
        self._early.clear()
        self._early_bytes = 0

    def _keep(self, seq: int, event: Event) -> None:
        size = _size(event)
        if size > MAX_EARLY_BYTES:
            raise ReorderOverflow(f"process event exceeds {MAX_EARLY_BYTES} bytes")
        if len(self._early) >= MAX_EARLY_EVENTS:
            raise ReorderOverflow(f"process event reorder buffer exceeds {MAX_EARLY_EVENTS} entries")
        if self._early_bytes + size > MAX_EARLY_BYTES:
            raise ReorderOverflow(f"process event reorder buffer exceeds {MAX_EARLY_BYTES} bytes")
        self._early[seq] = event
        self._early_bytes += size


def _size(event: Event) -> int:
    if isinstance(event, Output):
        return len(event.data)
    return len(event.message) if isinstance(event, Failed) else 0
