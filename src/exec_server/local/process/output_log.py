"""What a process has said: numbered, bounded, readable from any number on. Pure.

Every output chunk, the exit and the close take the next number of one counter that starts at 1. The
newest bytes are kept; of what falls out, the very first bytes are kept too (for snapshots), and the
rest is counted. More is kept for a client that says what it has received, until it has said so.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final, NamedTuple

from ...wire.process import StreamName

__all__ = ["EVERYTHING", "Chunk", "OutputLog"]

EVERYTHING: Final = 2**63
"""More than any number: all of it is acknowledged."""

UNACKNOWLEDGED_CHUNKS: Final = 4
"""How many times the usual number of chunks may be kept for want of an acknowledgement."""

UNACKNOWLEDGED_MARGIN: Final = 2 * 1024 * 1024
"""Room that is left when output is said to fill what may be kept: for what both pipes of a process hold."""


class Chunk(NamedTuple):
    """One numbered piece of output."""

    seq: int
    stream: StreamName
    data: bytes


class OutputLog:
    """The retained output of one process and the numbers of its events."""

    __slots__ = (
        "_chunks",
        "_head",
        "_head_limit",
        "_head_size",
        "_max_bytes",
        "_max_chunks",
        "_max_unacknowledged",
        "_size",
        "acknowledged",
        "closed",
        "closed_seq",
        "evicted_bytes",
        "exit_code",
        "exited_seq",
        "next_seq",
        "total_bytes",
    )

    def __init__(self, max_bytes: int, max_chunks: int, head_bytes: int, max_unacknowledged: int = 0) -> None:
        self._chunks: deque[Chunk] = deque()
        self._size = 0
        self._max_bytes = max_bytes
        self._max_chunks = max_chunks
        self._max_unacknowledged = max_unacknowledged
        self.acknowledged = EVERYTHING
        """The number up to which somebody has received everything."""
        self._head: list[tuple[StreamName, bytearray]] = []
        self._head_size = 0
        self._head_limit = head_bytes
        self.next_seq = 1
        self.total_bytes = 0
        self.evicted_bytes = 0
        self.exit_code: int | None = None
        self.exited_seq = 0
        self.closed_seq = 0
        self.closed = False

    @property
    def exited(self) -> bool:
        return self.exited_seq > 0

    @property
    def retained_bytes(self) -> int:
        """Bytes kept now, head and tail."""
        return self._size + self._head_size

    @property
    def dropped_bytes(self) -> int:
        """Bytes no snapshot can show any more."""
        return self.evicted_bytes - self._head_size

    @property
    def full(self) -> bool:
        """Whether more output would soon cost some that nobody has received yet."""
        chunks = self._chunks
        most = self._max_unacknowledged - UNACKNOWLEDGED_MARGIN
        return (
            most > 0
            and len(chunks) > 0
            and chunks[0].seq > self.acknowledged
            and (self._size > most or len(chunks) > self._max_chunks * (UNACKNOWLEDGED_CHUNKS - 1))
        )

    def append(self, stream: StreamName, data: bytes) -> int:
        """Keep a chunk and give it its number."""
        seq = self.next_seq
        self.next_seq = seq + 1
        size = len(data)
        self.total_bytes += size
        self._size += size
        self._chunks.append(Chunk(seq, stream, data))
        if self._size > self._max_bytes or len(self._chunks) > self._max_chunks:
            self._trim()
        return seq

    def acknowledge(self, seq: int) -> None:
        """Everything up to this number has been received."""
        if seq > self.acknowledged:
            self.acknowledged = seq
            self._trim()

    def _trim(self) -> None:
        chunks = self._chunks
        while self._size > self._max_bytes or len(chunks) > self._max_chunks:
            if (
                chunks[0].seq > self.acknowledged
                and self._size <= self._max_unacknowledged
                and len(chunks) <= self._max_chunks * UNACKNOWLEDGED_CHUNKS
            ):
                return
            self._evict()

    def exit(self, code: int) -> int:
        """Note the exit and give it its number."""
        self.exit_code = code
        self.exited_seq = self._take()
        return self.exited_seq

    def close(self) -> int:
        """Note that no more will come, and give that its number, the last one."""
        self.closed = True
        self.closed_seq = self._take()
        return self.closed_seq

    def read(self, after: int, max_bytes: int | None) -> tuple[list[Chunk], int]:
        """Retained chunks numbered above `after`, and the number to go on from.

        A budget stops before the chunk that would exceed it, but never before the first: chunks are
        not split, and a reader must always get ahead.
        """
        retained = self._from(after)
        if max_bytes is None:
            return list(retained), self.next_seq
        taken: list[Chunk] = []
        total = 0
        for chunk in retained:
            if taken and total + len(chunk.data) > max_bytes:
                break
            taken.append(chunk)
            total += len(chunk.data)
            if total >= max_bytes:
                break
        return taken, taken[-1].seq + 1 if taken else self.next_seq

    def joined(self, stream: StreamName) -> bytes:
        """Head and tail of one stream."""
        head = [data for name, data in self._head if name == stream]
        tail = [chunk.data for chunk in self._chunks if chunk.stream == stream]
        return b"".join([*head, *tail])

    def _from(self, after: int) -> islice[Chunk]:
        chunks = self._chunks
        if not chunks:
            return islice(chunks, 0)
        first = chunks[0].seq
        # Numbers are contiguous but for the exit's, so the index can be computed.
        index = after + 1 - first - (1 if first < self.exited_seq <= after else 0)
        return islice(chunks, max(index, 0), None) if index < len(chunks) else islice(chunks, 0)

    def _take(self) -> int:
        seq = self.next_seq
        self.next_seq = seq + 1
        return seq

    def _evict(self) -> None:
        chunk = self._chunks.popleft()
        size = len(chunk.data)
        self._size -= size
        self.evicted_bytes += size
        # The head stays one unbroken run from the first byte on.
        if self._head_size < self._head_limit and self._head_size + size == self.evicted_bytes:
            part = chunk.data[: self._head_limit - self._head_size]
            if self._head and self._head[-1][0] == chunk.stream:
                self._head[-1][1].extend(part)
            else:
                self._head.append((chunk.stream, bytearray(part)))
            self._head_size += len(part)
