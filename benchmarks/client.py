"""The load client: one reused receive buffer, messages found in it without copying.

Deliberately not the project's own client: this one must cost next to nothing, and must be the
same code for both servers. It blocks, it decodes only what a workload looks at, and it raises
`WrongAnswer` as soon as a server says something that cannot be right.
"""

import json
from abc import ABC, abstractmethod
from typing import Any, Self

__all__ = ["Client", "WrongAnswer", "result_of"]

BUFFER_SIZE = 1 << 20
"""Bytes asked of the kernel at once. Grows when one message does not fit."""


class WrongAnswer(Exception):
    """A server's answer makes the measurement worthless."""


class Client(ABC):
    """One connection. A transport adds three things: fill the buffer, find a message in it, write."""

    def __init__(self) -> None:
        self.buffer = bytearray(BUFFER_SIZE)
        self._view = memoryview(self.buffer)
        self._start = 0
        self._end = 0
        self._last_id = 0

    @abstractmethod
    def _read_into(self, room: memoryview) -> int:
        """Block until there are bytes, put them into `room`; 0 at the end of the connection."""

    @abstractmethod
    def _span(self, start: int, end: int) -> tuple[int, int, int] | None:
        """Where the message at `start` begins and ends, and where the next one starts."""

    @abstractmethod
    def frame(self, message: bytes) -> bytes:
        """One message as it goes over the wire."""

    @abstractmethod
    def send_raw(self, data: bytes) -> None:
        """Write framed bytes, however many messages they are."""

    @abstractmethod
    def close(self) -> None:
        """Hang up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- receiving

    def fill(self) -> None:
        """Block until more bytes have arrived."""
        size = len(self.buffer)
        if self._start == self._end:
            self._start = self._end = 0
        elif size - self._end < size // 4:
            rest = self._end - self._start
            if rest > size // 2:
                grown = bytearray(size * 2)
                grown[:rest] = self._view[self._start : self._end]
                self.buffer, self._view = grown, memoryview(grown)
            else:
                self._view[:rest] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, rest
        count = self._read_into(self._view[self._end :])
        if not count:
            raise WrongAnswer("the server closed the connection")
        self._end += count

    def spans(self) -> list[tuple[int, int]]:
        """Every complete message that is there, at least one, as (start, end) in `buffer`.

        Valid until the next call: the buffer is reused.
        """
        found: list[tuple[int, int]] = []
        while True:
            start, end, span = self._start, self._end, self._span
            while start < end and (at := span(start, end)) is not None:
                first, last, start = at
                if first <= last:
                    found.append((first, last))
            self._start = start
            if found:
                return found
            self.fill()

    def receive(self) -> bytes:
        """The next message."""
        while True:
            at = self._span(self._start, self._end) if self._start < self._end else None
            if at is None:
                self.fill()
                continue
            first, last, self._start = at
            if first <= last:
                return bytes(self._view[first:last])

    def fill_until(self, needle: bytes, count: int) -> None:
        """Take in bytes until `needle` was seen `count` times, leaving the messages for `spans`."""
        seen = looked_at = 0
        while True:
            seen += self.buffer.count(needle, self._start + looked_at, self._end)
            if seen >= count:
                return
            looked_at = max(looked_at, self._end - self._start - len(needle) + 1)
            self.fill()

    # -- calling

    def request(self, method: str, params: object = None) -> tuple[int, bytes]:
        """A fresh id and the framed request, not yet sent: building it is not what is timed."""
        self._last_id += 1
        message: dict[str, object] = {"id": self._last_id, "method": method}
        if params is not None:
            message["params"] = params
        return self._last_id, self.frame(json.dumps(message, separators=(",", ":")).encode())

    def call(self, method: str, params: object = None) -> dict[str, Any]:
        """One request and its result; everything that arrives before the answer is thrown away."""
        id_, data = self.request(method, params)
        self.send_raw(data)
        while True:
            message = json.loads(self.receive())
            if message.get("id") == id_:
                return result_of(message)

    def handshake(self, **params: object) -> dict[str, Any]:
        """`initialize` and `initialized`; the result of the first."""
        result = self.call("initialize", {"clientName": "benchmarks", **params})
        self.send_raw(self.frame(b'{"method":"initialized"}'))
        return result


def result_of(message: dict[str, Any]) -> dict[str, Any]:
    """The result of a response, or `WrongAnswer` with the server's error."""
    if "error" in message:
        raise WrongAnswer(f"the server answered {message['error']}")
    result = message["result"]
    if not isinstance(result, dict):
        raise WrongAnswer(f"not an object: {result!r}")
    return result
