"""Output with a bound: its beginning and its end are kept, the middle is counted.

Pure. The beginning says what a command set out to do, the end says how it went.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["BUFFER_BYTES", "HeadTailBuffer", "omission_marker"]

BUFFER_BYTES: Final = 1024 * 1024
"""What the reference keeps per command."""


def omission_marker(omitted: int) -> str:
    """The line that stands for what is missing."""
    return f"... {omitted} bytes omitted ..."


class HeadTailBuffer:
    """Half the capacity for the head, which never changes once it is full, and the rest for the tail."""

    def __init__(self, capacity: int = BUFFER_BYTES) -> None:
        self._head_budget = capacity // 2
        self._tail_budget = capacity - capacity // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.omitted = 0
        """Bytes between head and tail that are gone."""

    @property
    def head(self) -> bytes:
        return bytes(self._head)

    @property
    def tail(self) -> bytes:
        return b"".join(self._tail)

    @property
    def retained(self) -> int:
        return len(self._head) + self._tail_size

    @property
    def total(self) -> int:
        """Everything that was ever pushed."""
        return self.retained + self.omitted

    def __bool__(self) -> bool:
        return self.total > 0

    def push(self, data: bytes) -> None:
        """Append output, in pieces of any size."""
        room = self._head_budget - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        if len(data) >= self._tail_budget:
            self.omitted += self._tail_size + len(data) - self._tail_budget
            self._tail.clear()
            data = data[len(data) - self._tail_budget :]
            self._tail_size = 0
        if data:
            self._tail.append(data)
            self._tail_size += len(data)
        self._trim()

    def merge(self, later: HeadTailBuffer) -> None:
        """Append what a later buffer of the same capacity got, as if it had been pushed here."""
        if not later.omitted:
            self.push(later.head)
            self.push(later.tail)
            return
        # Its tail is full and is the end of everything; what it omitted lies between its head and that.
        total = self.total + later.total
        room = self._head_budget - len(self._head)
        if room > 0:
            self._head += later._head[:room]
        self._tail = deque(later._tail)
        self._tail_size = later._tail_size
        self.omitted = total - self.retained

    def drain(self) -> HeadTailBuffer:
        """Everything so far as a buffer of its own; this one starts anew."""
        taken = HeadTailBuffer(self._head_budget + self._tail_budget)
        taken._head, self._head = self._head, taken._head
        taken._tail, self._tail = self._tail, taken._tail
        taken._tail_size, self._tail_size = self._tail_size, 0
        taken.omitted, self.omitted = self.omitted, 0
        return taken

    def joined(self, marker: bool = True) -> bytes:
        """Head and tail, with a line between them that says how much is missing, if anything is."""
        if marker and self.omitted:
            return self.head + f"\n{omission_marker(self.omitted)}\n".encode() + self.tail
        return self.head + self.tail

    def _trim(self) -> None:
        excess = self._tail_size - self._tail_budget
        while excess > 0:
            oldest = self._tail.popleft()
            if len(oldest) > excess:
                self._tail.appendleft(oldest[excess:])
                oldest = oldest[:excess]
            self._tail_size -= len(oldest)
            self.omitted += len(oldest)
            excess -= len(oldest)
