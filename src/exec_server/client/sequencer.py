"""Putting events in order. Pure.

Every event of a process has a number, without gaps; they may arrive in any order and more than once.
Early ones wait here, within bounds, until what is missing has come. After a broken connection what was
missed is filled in from what the server retains.
"""

from __future__ import annotations

from typing import Final

from ..services import Closed, Event, Exited, Failed, Output, ReadOutput

__all__ = ["ReorderOverflow", "Sequencer", "Unrecoverable"]

MAX_EARLY_EVENTS: Final = 256
"""Events that may wait for a gap to close. The reference's clients use the same bounds."""

MAX_EARLY_BYTES: Final = 1024 * 1024
"""Bytes of output that may wait, in all and in one event."""


MAX_EARLY_BYTES_RECOVERING: Final = 64 * 1024 * 1024
"""The same while the answer that fills the gap is on its way: it will come, and what waits is wanted."""


class ReorderOverflow(Exception):
    """The server left a gap too long; the process cannot be followed any more."""


class Unrecoverable(ValueError):
    """What was missed cannot be had any more, or what the server retains contradicts itself."""


class Sequencer:
    """The numbers of one process: what was published, what came too early."""

    __slots__ = ("_early", "_early_bytes", "arrived", "ended", "exited", "first_live", "last", "recovering")

    def __init__(self) -> None:
        self.last = 0
        """The last number published."""
        self.ended = False
        """Closed was published: nothing follows."""
        self.exited = False
        """Exited was published."""
        self.recovering = False
        """Events were missed, and `recover` will be called."""
        self.arrived = 0
        """The highest number that arrived, published or not."""
        self.first_live = 0
        """The lowest number that came by itself since events were missed; 0 if none did."""
        self._early: dict[int, Event] = {}
        self._early_bytes = 0

    @property
    def joined(self) -> bool:
        """Whether what is missing no more goes over into what comes by itself."""
        return 0 < self.first_live <= self.last + 1

    def expect_recovery(self) -> None:
        """The connection is lost: what the next one brings may come before what was missed."""
        self.recovering = True
        self.first_live = 0

    def push(self, seq: int, event: Event) -> list[Event]:
        """Take an event; what can be published now, in order."""
        if self.recovering and not self.first_live:
            self.first_live = seq
        if seq > self.arrived:
            self.arrived = seq
        if self.ended or seq <= self.last or seq in self._early:
            return []
        if seq != self.last + 1:
            self._keep(seq, event)
            return []
        ready = [event]
        self._advance(event, seq)
        if self._early:
            self._take_following(ready)
        return ready

    def recover(self, found: ReadOutput, *, partial: bool = False) -> list[Event]:
        """Fill in what was missed from what the server retains after `last`; what can be published now.

        The exit has a number of its own but is not among what is retained: the one hole that is left is it.
        A `partial` answer is followed by another, so it says nothing of the end.
        """
        self.recovering = partial
        if found.failure is not None:
            raise Unrecoverable(f"process failed while recovering: {found.failure}")
        target = found.next_seq - 1
        if self.ended or target <= self.last:
            return []
        at_target = self._early.get(target)
        closed = found.closed and not partial
        if closed and (
            any(chunk.seq == target for chunk in found.chunks)
            or (at_target is not None and not isinstance(at_target, Closed))
        ):
            raise Unrecoverable(f"process close sequence {target} conflicts with recovered output")
        ready: list[Event] = []
        for chunk in found.chunks:
            if chunk.seq > target:
                raise Unrecoverable(
                    f"recovered process output sequence {chunk.seq} exceeds target sequence {target}"
                )
            if chunk.seq > self.last + 1 and found.exited and not self._exit_known():
                self._insert(self.last + 1, _exit(self.last + 1, found), ready)
            self._insert(chunk.seq, chunk, ready)
        if closed:
            self._insert(target, Closed(target), ready)
        holes = [seq for seq in range(self.last + 1, target + 1) if seq not in self._early]
        if found.exited and not self._exit_known() and len(holes) == 1:
            self._insert(holes[0], _exit(holes[0], found), ready)
        elif holes:
            raise Unrecoverable(
                f"process events are no longer retained while recovering through sequence {target}"
            )
        return [_with_denial(event, found) if isinstance(event, Exited) else event for event in ready]

    def _exit_known(self) -> bool:
        return self.exited or any(isinstance(event, Exited) for event in self._early.values())

    def _insert(self, seq: int, event: Event, ready: list[Event]) -> None:
        """Recovered events are wanted, however many: they are not subject to the bounds."""
        if self.ended or seq <= self.last or seq in self._early:
            return
        if seq == self.last + 1:
            ready.append(event)
            self._advance(event, seq)
            self._take_following(ready)
        else:
            self._early[seq] = event
            self._early_bytes += _size(event)

    def _take_following(self, ready: list[Event]) -> None:
        while self._early and (following := self._early.pop(self.last + 1, None)) is not None:
            self._early_bytes -= _size(following)
            ready.append(following)
            self._advance(following, self.last + 1)

    def _advance(self, event: Event, seq: int) -> None:
        self.last = seq
        if seq > self.arrived:
            self.arrived = seq
        if isinstance(event, Exited):
            self.exited = True
        elif isinstance(event, Closed):
            self.end()

    def end(self) -> None:
        """Nothing more is wanted."""
        self.ended = True
        self._early.clear()
        self._early_bytes = 0

    def _keep(self, seq: int, event: Event) -> None:
        size = _size(event)
        if self.recovering and self._early_bytes + size <= MAX_EARLY_BYTES_RECOVERING:
            self._early[seq] = event
            self._early_bytes += size
            return
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


def _exit(seq: int, found: ReadOutput) -> Exited:
    if found.exit_code is None:
        raise Unrecoverable("recovering exited process did not include its exit code")
    return Exited(seq, found.exit_code, found.sandbox_denied)


def _with_denial(event: Exited, found: ReadOutput) -> Exited:
    """What was read later knows more than what was told at the exit."""
    return Exited(event.seq, event.exit_code, bool(event.sandbox_denied) or found.sandbox_denied)
