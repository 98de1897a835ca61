"""Writing to a child: in order, each id once, never blocking anybody but the writer."""

from __future__ import annotations

import os
from collections import deque

from ...limits import MAX_REMEMBERED_WRITES, Limits
from ...loop import Loop, Pending, resolved
from ...wire.process import WriteStatus

__all__ = ["Stdin"]


class Stdin:
    """The writable end of a child's stdin: a pipe of its own, or the terminal it shares with its output."""

    def __init__(self, loop: Loop, fd: int, *, terminal: bool, limits: Limits) -> None:
        self._loop = loop
        self._fd: int | None = fd
        self._terminal = terminal
        self._max_chunks = limits.stdin_queue_chunks
        self._max_bytes = limits.stdin_queue_bytes
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._waiting: deque[tuple[bytes, str | None, Pending[WriteStatus]]] = deque()
        self._accepted: dict[str, None] = {}
        self._writing = False
        self._close_requested = False
        self.broken = False
        """The child was terminated: there is nobody to write to."""

    @property
    def close_requested(self) -> bool:
        """No more writes are taken; what was accepted before is still delivered."""
        return self._close_requested

    def earlier(self, write_id: str) -> Pending[WriteStatus] | None:
        """What became, or will become, of a write with this id; None if there was none."""
        if write_id in self._accepted:
            return resolved("accepted")
        return next((pending for _, known, pending in self._waiting if known == write_id), None)

    def write(self, data: bytes, write_id: str | None) -> Pending[WriteStatus]:
        """Queue bytes. Answered when they are queued, which a full queue delays."""
        if self._waiting or self._is_full():
            pending: Pending[WriteStatus] = Pending()
            self._waiting.append((data, write_id, pending))
            return pending
        self._remember(write_id)
        self._enqueue(data)
        self._flush()
        return resolved("accepted")

    def request_close(self) -> None:
        """Deliver EOF after everything accepted so far."""
        self._close_requested = True
        self._close_if_drained()

    def break_off(self) -> None:
        """The child is being killed: what waits for room was not taken and never will be."""
        self.broken = True
        waiting, self._waiting = self._waiting, deque()
        for _, _, pending in waiting:
            pending.fail(BrokenPipeError("failed to write to process stdin"))

    def discard(self) -> None:
        """The child is gone: drop what it did not take, and let everybody who waits go on."""
        self._queue.clear()
        self._queued_bytes = 0
        self._stop_writing()
        fd, self._fd = self._fd, None
        if fd is not None and not self._terminal:
            os.close(fd)
        while self._waiting:
            _, write_id, pending = self._waiting.popleft()
            self._remember(write_id)
            pending.resolve("accepted")

    def _remember(self, write_id: str | None) -> None:
        if write_id is None:
            return
        self._accepted[write_id] = None
        if len(self._accepted) > MAX_REMEMBERED_WRITES:
            del self._accepted[next(iter(self._accepted))]

    def _is_full(self) -> bool:
        return len(self._queue) >= self._max_chunks or self._queued_bytes >= self._max_bytes

    def _enqueue(self, data: bytes) -> None:
        if data and self._fd is not None:
            self._queue.append(memoryview(data))
            self._queued_bytes += len(data)

    def _flush(self) -> None:
        fd = self._fd
        if fd is None:
            return
        while self._queue:
            data = self._queue[0]
            try:
                written = os.write(fd, data)
            except BlockingIOError:
                break
            except OSError:
                # The child closed its stdin or is gone. Writes to it are accepted and go nowhere.
                self.discard()
                return
            self._queued_bytes -= written
            if written < len(data):
                self._queue[0] = data[written:]
                break
            self._queue.popleft()
        while self._waiting and not self._is_full():
            data_waiting, write_id, pending = self._waiting.popleft()
            self._remember(write_id)
            self._enqueue(data_waiting)
            pending.resolve("accepted")
        if self._queue and not self._writing:
            self._writing = True
            self._loop.add_writer(fd, self._flush)
        elif not self._queue:
            self._stop_writing()
            self._close_if_drained()

    def _stop_writing(self) -> None:
        if self._writing and self._fd is not None:
            self._loop.remove_writer(self._fd)
        self._writing = False

    def _close_if_drained(self) -> None:
        if self._close_requested and not self._queue and not self._waiting and self._fd is not None:
            self.discard()
