"""What a process has said: numbered, bounded, readable from any number on. Pure.

Every output chunk, the exit and the close take the next number of one counter that starts at 1. The
newest bytes are kept; of what falls out, the very first bytes are kept too (for snapshots), and the
rest is counted.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

from ...wire.process import StreamName

__all__ = ["Chunk", "OutputLog"]


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
        "_size",
        "closed",
        "closed_seq",
        "evicted_bytes",
        "exit_code",
        "exited_seq",
        "next_seq",
        "total_bytes",
    )

    def __init__(self, max_bytes: int, max_chunks: int, head_bytes: int) -> None:
        self._chunks: deque[Chunk] = deque()
        self._size = 0
        self._max_bytes = max_bytes
        self._max_chunks = max_chunks
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

    def append(self, stream: StreamName, data: bytes) -> int:
        """Keep a chunk and give it its number."""
        seq = self.next_seq
        self.next_seq = seq + 1
        size = len(data)
        self.total_bytes += size
        self._size += size
        self._chunks.append(Chunk(seq, stream, data))
        while self._size > self._max_bytes or len(self._chunks) > self._max_chunks:
            self._evict()
        return seq

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
