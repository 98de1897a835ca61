"""The commands of a thread that a model can still talk to: their numbers, and which goes first.

Pure: it decides; whoever uses it terminates.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["MAX_PROCESSES", "PROTECTED", "ProcessStore", "Storable", "victim"]

MAX_PROCESSES: Final = 64
"""Stored processes of one thread, as in the reference."""

PROTECTED: Final = 8
"""The most recently used, which are never pruned."""

FIRST_NUMBER: Final = 1000
LAST_NUMBER: Final = 99_999
"""Range of the numbers models are told."""


class Storable(Protocol):
    """What the store has to know of a process."""

    number: int

    @property
    def ended(self) -> bool:
        """Whether it is over, as far as is known."""

    @property
    def busy(self) -> bool:
        """Whether somebody is talking to it at this moment."""


P = TypeVar("P", bound=Storable)


class ProcessStore(Generic[P]):
    """Processes by number. A number is taken from its reservation to its release."""

    def __init__(self, most: int = MAX_PROCESSES, *, sequential: bool = False) -> None:
        self._most = most
        self._sequence = count(FIRST_NUMBER) if sequential else None
        self._random = random.SystemRandom()
        self._reserved: set[int] = set()
        self._processes: dict[int, P] = {}
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._processes)

    def __iter__(self) -> Iterator[P]:
        return iter(list(self._processes.values()))

    def reserve(self) -> int:
        """A number nobody else has."""
        while True:
            if self._sequence is not None:
                number = next(self._sequence)
            else:
                number = self._random.randint(FIRST_NUMBER, LAST_NUMBER)
            if number not in self._reserved:
                self._reserved.add(number)
                return number

    def release(self, number: int) -> None:
        """The process is over or never was; its number may be given again."""
        self._processes.pop(number, None)
        self._reserved.discard(number)

    def is_full(self, starting: int = 0) -> bool:
        """Whether there is no room for another, besides those that are being started."""
        return len(self._processes) + starting >= self._most

    def make_room(self) -> P | None:
        """Let one go, which is to be terminated; None if somebody talks to every one that could."""
        gone = victim(list(self._processes.values()), min(PROTECTED, self._most - 1))
        if gone is not None:
            self.release(gone.number)
        return gone

    def store(self, process: P) -> None:
        """Keep a process."""
        self._processes[process.number] = process

    def get(self, number: int) -> P | None:
        return self._processes.get(number)

    def touch(self, process: P) -> None:
        """It was just used."""
        if self._processes.pop(process.number, None) is not None:
            self._processes[process.number] = process

    def running(self) -> list[P]:
        """Those that still run, by number."""
        return sorted(
            (process for process in self._processes.values() if not process.ended),
            key=lambda process: process.number,
        )

    def clear(self) -> list[P]:
        """Forget everything, reservations too; gives what there was."""
        processes = list(self._processes.values())
        self._processes.clear()
        self._reserved.clear()
        return processes


def victim(by_use: list[P], protected: int = PROTECTED) -> P | None:
    """Which process to give up, of a list with the least recently used first.

    One that is over, if there is any; never one somebody talks to right now. If only such a one is over,
    none: it will be reported in a moment, and a live one must not die in its place.
    """
    open_to_it = by_use[: max(len(by_use) - protected, 0)]
    over = [process for process in open_to_it if process.ended]
    for process in over:
        if not process.busy:
            return process
    if over:
        return None
    return next((process for process in open_to_it if not process.busy), None)
