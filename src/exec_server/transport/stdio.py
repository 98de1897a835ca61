"""Newline-delimited messages over a pair of descriptors: our own stdin and stdout, or a child's."""

from __future__ import annotations

import os
import stat
from collections import deque
from typing import Final

from ..limits import MAX_MESSAGE_BYTES, Limits
from ..loop import Loop
from .channel import Receiver

__all__ = ["StdioChannel"]

READ_BYTES: Final = 256 * 1024
BATCH_PARTS: Final = 64
"""Messages handed to the operating system in one call."""


class StdioChannel:
    """One JSON message per line, each way. Takes the descriptors over and closes them with itself."""

    peer = "stdio"
    parse_failure = "failed to parse JSON-RPC message from exec-server stdio"
    carries_binary = False
    resumable = False

    def __init__(self, loop: Loop, read_fd: int, write_fd: int, limits: Limits) -> None:
        self._loop = loop
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._high_water = limits.outgoing_high_water
        self._receiver: Receiver | None = None
        self._line: list[bytes] = []
        self._line_size = 0
        self._unsent: deque[bytes | memoryview] = deque()
        self._unsent_size = 0
        self._flush_planned = False
        self._writing = False
        self._paused = False
        self._closed = False
        self._reading = False
        self._always_ready = False
        self._was_blocking = [(fd, os.get_blocking(fd)) for fd in (read_fd, write_fd)]
        for fd in (read_fd, write_fd):
            if stat.S_ISFIFO(os.fstat(fd).st_mode) or stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.set_blocking(fd, False)

    def attach(self, receiver: Receiver) -> None:
        """Deliver to this receiver."""
        self._receiver = receiver
        self.resume_reading()

    # Sending -------------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        if not self._closed:
            self._unsent.append(message)
            self._unsent.append(b"\n")
            self._unsent_size += len(message) + 1
            self._plan_flush()

    def send_parts(self, head: bytes, body: bytes | memoryview, tail: bytes, *, binary: bool) -> None:
        if binary:
            raise RuntimeError("lines carry no binary messages")
        if not self._closed:
            self._unsent.extend((head, body, tail, b"\n"))
            self._unsent_size += len(head) + len(body) + len(tail) + 1
            self._plan_flush()

    def _plan_flush(self) -> None:
        if self._unsent_size > self._high_water:
            self._flush()
            if self._unsent_size > self._high_water and not self._paused and self._receiver is not None:
                self._paused = True
                self._receiver.writing_paused()
        elif not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    def unsent(self) -> int:
        return self._unsent_size

    def _flush(self) -> None:
        self._flush_planned = False
        unsent = self._unsent
        while unsent and not self._closed:
            parts = [unsent.popleft() for _ in range(min(len(unsent), BATCH_PARTS))]
            try:
                written = os.writev(self._write_fd, parts)
            except BlockingIOError:
                unsent.extendleft(reversed(parts))
                break
            except OSError as error:
                self._end(f"the peer stopped reading: {error.strerror}")
                return
            self._unsent_size -= written
            rest = self._rest(parts, written)
            if rest:
                unsent.extendleft(reversed(rest))
                break
        if self._closed:
            return
        if unsent and not self._writing:
            self._writing = True
            self._loop.add_writer(self._write_fd, self._flush)
        elif not unsent and self._writing:
            self._writing = False
            self._loop.remove_writer(self._write_fd)
        if self._paused and self._unsent_size <= self._high_water // 4 and self._receiver is not None:
            self._paused = False
            self._receiver.writing_resumed()

    @staticmethod
    def _rest(parts: list[bytes | memoryview], written: int) -> list[bytes | memoryview]:
        """What of the parts was not written."""
        for index, part in enumerate(parts):
            if written < len(part):
                return [memoryview(part)[written:], *parts[index + 1 :]]
            written -= len(part)
        return []

    # Receiving -----------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            if not self._always_ready:
                self._loop.remove_reader(self._read_fd)

    def resume_reading(self) -> None:
        if self._reading or self._closed:
            return
        self._reading = True
        try:
            self._loop.add_reader(self._read_fd, self._readable)
        except PermissionError:
            # A regular file: always ready, and not to be watched.
            self._always_ready = True
            self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        if not self._reading:
            return
        try:
            data = os.read(self._read_fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"cannot read: {error.strerror}")
            return
        if not data:
            self._deliver(b"".join(self._line))
            self._end("end of input")
            return
        if self._always_ready:
            self._loop.call_soon(self._readable)
        *lines, rest = data.split(b"\n")
        for line in lines:
            if self._line:
                self._line.append(line)
                line = b"".join(self._line)
                self._line.clear()
                self._line_size = 0
            self._deliver(line)
            if self._closed:
                return
        if rest:
            self._line.append(rest)
            self._line_size += len(rest)
            if self._line_size > MAX_MESSAGE_BYTES + 1:  # a carriage return does not count
                self._end(f"a line is longer than {MAX_MESSAGE_BYTES} bytes")

    def _deliver(self, line: bytes) -> None:
        if line.endswith(b"\r"):
            line = line[:-1]
        if self._receiver is None or not line or line.isspace():
            return
        if len(line) > MAX_MESSAGE_BYTES:
            self._end(f"a line is longer than {MAX_MESSAGE_BYTES} bytes")
            return
        if not line.isascii():
            try:
                line.decode()
            except UnicodeDecodeError:
                self._end("a line is not UTF-8")
                return
        self._receiver.message_received(line)

    # Ending --------------------------------------------------------------------------------------

    def close(self) -> None:
        self._flush()
        self._end("closed")

    def abort(self) -> None:
        self._end("aborted")

    def _end(self, reason: str) -> None:
        if self._closed:
            return
        self._flush()
        if self._closed:
            return
        self.pause_reading()
        self._closed = True
        if self._writing:
            self._loop.remove_writer(self._write_fd)
        # Others may share these descriptors (a terminal, a shell): leave them as they were.
        for fd, blocking in self._was_blocking:
            os.set_blocking(fd, blocking)
        self._unsent.clear()
        os.close(self._read_fd)
        if self._write_fd != self._read_fd:
            os.close(self._write_fd)
        if self._receiver is not None:
            self._receiver.channel_closed(reason)
