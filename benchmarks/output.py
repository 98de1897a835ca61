"""Counting what processes send as it arrives, cheaply, and knowing at the end that it was all of it."""

import json
from collections import Counter
from collections.abc import Iterable

from .client import Client, WrongAnswer, result_of

__all__ = ["ProcessCount"]

IS_OUTPUT = b'"method":"process/output"'
CHUNK = b'"chunk":"'
PROCESS_ID = b'"processId":"'
BINARY_HEAD = 12
"""Bytes of a binary output frame before the process id (exec_server/wire/binary.py)."""


class ProcessCount:
    """Takes every message of a connection while some processes run; `check` says it was right.

    The decoded size of a chunk is known from the length of its base64, so nothing is decoded. Every
    event of a process takes the next sequence number and `closed` takes the last one: a process is done
    when as many events were seen. (Events may overtake each other; the reference's `exited` is now and
    then behind its `closed`.)
    """

    def __init__(self, processes: Iterable[str], request_ids: Iterable[int]) -> None:
        self.open = set(processes)
        self.unanswered = set(request_ids)
        self.binary_chunks = 0
        self._bytes: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._closed_at: dict[str, int] = {}
        self._exit_codes: dict[str, int] = {}

    def take(self, client: Client) -> None:
        """Block for messages and count them."""
        buffer = client.buffer
        for start, end in client.spans():
            if client.buffer is not buffer:  # it had to grow
                buffer = client.buffer
            if buffer[start] == 1:
                self._take_binary(buffer, start, end)
            elif buffer.find(IS_OUTPUT, start, end) >= 0:
                self._take_output(buffer, start, end)
            else:
                self._take_other(json.loads(buffer[start:end]))

    def _take_binary(self, buffer: bytearray, start: int, end: int) -> None:
        name = start + BINARY_HEAD
        chunk = name + (buffer[start + 2] << 8 | buffer[start + 3])
        process = buffer[name:chunk].decode()
        self.binary_chunks += 1
        self._count(process, end - chunk)

    def _take_output(self, buffer: bytearray, start: int, end: int) -> None:
        chunk = buffer.find(CHUNK, start, end) + len(CHUNK)
        name = buffer.find(PROCESS_ID, start, end) + len(PROCESS_ID)
        last = buffer.find(b'"', chunk, end)
        if chunk < len(CHUNK) or name < len(PROCESS_ID) or (last - chunk) % 4:
            raise WrongAnswer(f"not an output notification: {bytes(buffer[start : start + 200])!r}")
        process = buffer[name : buffer.find(b'"', name, end)].decode()
        self._count(process, (last - chunk) // 4 * 3 - buffer.count(b"=", last - 2, last))

    def _count(self, process: str, size: int) -> None:
        self._bytes[process] += size
        self._events[process] += 1
        if process in self._closed_at:
            self._finish(process)

    def _take_other(self, message: dict[str, object]) -> None:
        if "id" in message:
            result_of(message)
            self.unanswered.remove(message["id"])  # type: ignore[arg-type]
            return
        params = message["params"]
        assert isinstance(params, dict)
        process = params["processId"]
        self._events[process] += 1
        if message["method"] == "process/exited":
            self._exit_codes[process] = params["exitCode"]
        elif message["method"] == "process/closed":
            self._closed_at[process] = params["seq"]
        else:
            raise WrongAnswer(f"unexpected message {message}")
        self._finish(process)

    def _finish(self, process: str) -> None:
        if process in self._closed_at and self._events[process] >= self._closed_at[process]:
            self.open.remove(process)

    def check(self, expected: int) -> None:
        """Raise `WrongAnswer` unless each process exited with 0 after `expected` bytes."""
        for process in self._closed_at:
            if (code := self._exit_codes.get(process)) != 0:
                raise WrongAnswer(f"{process} exited with {code}")
            if (size := self._bytes[process]) != expected:
                raise WrongAnswer(f"{process} sent {size} bytes instead of {expected}")
