"""Two channels tied together inside one process: a server without a socket."""

from __future__ import annotations

import asyncio

from .channel import Receiver

__all__ = ["MemoryChannel", "pair"]


class MemoryChannel:
    """One end of a pair. Messages arrive in order, on a later turn of the loop."""

    peer = "in-process"
    parse_failure = "failed to parse JSON-RPC message from exec-server in-process"
    carries_binary = True
    resumable = False

    def __init__(self, high_water: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._receiver: Receiver | None = None
        self._other: MemoryChannel = self
        self._high_water = high_water
        self._inbox: list[tuple[bool, bytes]] = []
        self._inbox_size = 0
        self._delivering = False
        self._reading = True
        self._closed = False
        self._paused_other = False

    def attach(self, receiver: Receiver) -> None:
        """Deliver to this receiver."""
        self._receiver = receiver
        self._plan()

    def send(self, message: bytes) -> None:
        if not self._closed:
            self._other._put(False, message)

    def send_parts(self, head: bytes, body: bytes | memoryview, tail: bytes, *, binary: bool) -> None:
        if not self._closed:
            self._other._put(binary, b"".join((head, body, tail)))

    def unsent(self) -> int:
        return self._other._inbox_size

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._plan()

    def close(self) -> None:
        if not self._closed:
            self._loop.call_soon(self._other._end, "the peer closed the connection")
            self._end("closed")

    def abort(self) -> None:
        self.close()

    def _put(self, binary: bool, message: bytes) -> None:
        if self._closed:
            return
        self._inbox.append((binary, message))
        self._inbox_size += len(message)
        if self._inbox_size > self._high_water and not self._paused_other:
            self._paused_other = True
            if self._other._receiver is not None:
                self._other._receiver.writing_paused()
        self._plan()

    def _plan(self) -> None:
        if self._inbox and self._reading and not self._delivering and self._receiver is not None:
            self._delivering = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivering = False
        receiver = self._receiver
        if receiver is None or self._closed:
            return
        batch, self._inbox = self._inbox, []
        for index, (binary, message) in enumerate(batch):
            if not self._reading or self._closed:
                self._inbox = batch[index:] + self._inbox
                break
            self._inbox_size -= len(message)
            (receiver.binary_received if binary else receiver.message_received)(message)
        if self._paused_other and self._inbox_size < self._high_water // 4:
            self._paused_other = False
            if self._other._receiver is not None:
                self._other._receiver.writing_resumed()
        self._plan()

    def _end(self, reason: str) -> None:
        if self._closed:
            return
        if reason != "closed":
            self._reading = True
            self._deliver()  # what was sent before the end arrives before it
        self._closed = True
        if self._receiver is not None:
            self._receiver.channel_closed(reason)


def pair(high_water: int) -> tuple[MemoryChannel, MemoryChannel]:
    """Two ends; what one sends the other receives."""
    one, other = MemoryChannel(high_water), MemoryChannel(high_water)
    one._other, other._other = other, one
    return one, other
