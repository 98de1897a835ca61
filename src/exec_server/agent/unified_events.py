"""What happens to a model's command, as events: Begin, OutputDelta, TerminalInteraction, End.

A listener gets them in this order; the stream of exec-events.md shows the first and the last as one item.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Final, Literal

from msgspec import Struct

from ..events.model import CommandExecution

__all__ = [
    "Deltas",
    "ExecCommandBegin",
    "ExecCommandEnd",
    "ExecCommandOutputDelta",
    "ExecEvent",
    "Listener",
    "TerminalInteraction",
    "as_item",
]

DELTA_BYTES: Final = 8192
"""Most bytes in one delta."""

MAX_DELTAS: Final = 10_000
"""Most deltas of one call; what comes later is only in the transcript."""


class ExecCommandBegin(Struct, frozen=True, kw_only=True):
    """A command was started, or was about to be."""

    call_id: str
    process_id: int
    command: list[str]
    cwd: str
    source: str = "unified_exec_startup"


class ExecCommandOutputDelta(Struct, frozen=True, kw_only=True):
    """More output; both streams are one."""

    call_id: str
    chunk: bytes
    stream: Literal["stdout"] = "stdout"


class TerminalInteraction(Struct, frozen=True, kw_only=True):
    """Something was typed, or somebody looked and it was still running."""

    call_id: str
    """Of the `exec_command` that started it."""
    process_id: int
    stdin: str


class ExecCommandEnd(Struct, frozen=True, kw_only=True):
    """A command is over. `exit_code` is -1 if it was lost or never ran, None if it was declined."""

    call_id: str
    process_id: int
    command: list[str]
    cwd: str
    stdout: str
    stderr: str
    aggregated_output: str
    exit_code: int | None
    duration: float
    """Seconds."""
    status: Literal["completed", "failed", "declined"]
    source: str = "unified_exec_startup"


ExecEvent = ExecCommandBegin | ExecCommandOutputDelta | TerminalInteraction | ExecCommandEnd
Listener = Callable[[ExecEvent], None]


def as_item(event: ExecCommandBegin | ExecCommandEnd) -> CommandExecution:
    """The item of the event stream: at the start and at the completion of a command."""
    command = shlex.join(event.command)
    if isinstance(event, ExecCommandBegin):
        return CommandExecution(command=command, aggregated_output="", status="in_progress")
    return CommandExecution(
        command=command,
        aggregated_output=event.aggregated_output,
        exit_code=event.exit_code,
        status=event.status,
    )


class Deltas:
    """Output cut into deltas that never split a character. Nothing is sent before `open`."""

    def __init__(self, call_id: str, emit: Listener) -> None:
        self._call_id = call_id
        self._emit = emit
        self._waiting = bytearray()
        self._sent = 0
        self._open = False

    def open(self) -> None:
        """The command has been announced; what waited may follow."""
        self._open = True
        self._send()

    def push(self, data: bytes) -> None:
        """More output."""
        if len(self._waiting) < (MAX_DELTAS - self._sent) * DELTA_BYTES:
            self._waiting += data
            if self._open:
                self._send()

    def end(self) -> None:
        """No more output: half a character is sent as it is."""
        if self._open:
            self._send()
            if self._waiting:
                self._put(len(self._waiting))

    def _send(self) -> None:
        while self._waiting and self._sent < MAX_DELTAS:
            size = _whole_characters(self._waiting, DELTA_BYTES)
            if size == 0:
                return
            self._put(size)

    def _put(self, size: int) -> None:
        if self._sent < MAX_DELTAS:
            self._sent += 1
            self._emit(ExecCommandOutputDelta(call_id=self._call_id, chunk=bytes(self._waiting[:size])))
        del self._waiting[:size]
        if self._sent >= MAX_DELTAS:
            self._waiting.clear()


def _whole_characters(data: bytearray, limit: int) -> int:
    """How many bytes, at most `limit`, do not end inside a character. Bytes that are no UTF-8 count."""
    size = min(len(data), limit)
    for back in range(1, min(size, 3) + 1):
        byte = data[size - back]
        if byte & 0xC0 != 0x80:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return size - back if back < needed else size
    return size
