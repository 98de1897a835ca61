"""How a process talks to its session's connection: one voice per process, in the dialect that started it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from msgspec.json import encode

from ..local.process.process import ManagedProcess
from ..loop import Timer
from ..wire import binary
from ..wire import process as current
from ..wire.envelope import encode_notification
from ..wire.process import StreamName
from .metrics import Metrics

if TYPE_CHECKING:
    from ..loop import Loop
    from .session import Session

__all__ = ["CurrentVoice", "LegacyVoice"]

_STREAMS: Final[dict[StreamName, bytes]] = {"stdout": b"stdout", "stderr": b"stderr", "pty": b"pty"}

LEGACY_EXIT_DELAY: Final = 0.5
"""Seconds a first-dialect exit waits for output that background children may still hold open."""


class CurrentVoice:
    """`process/output`, `process/exited`, `process/closed`."""

    def __init__(self, session: Session, metrics: Metrics, process_id: str) -> None:
        self._session = session
        self._metrics = metrics
        self._id = encode(process_id)
        self._raw_id = process_id.encode()
        self._prefix = current.output_prefix(self._id)

    def process_started(self, process: ManagedProcess) -> None:
        self._metrics.processes_started_total += 1
        self._metrics.processes_running += 1
        connection = self._session.connection
        if connection is not None and connection.lifecycle_events:
            params = {"processId": process.id, "pid": process.pid}
            connection.channel.send(encode_notification("process/started", params))

    def process_output(self, process: ManagedProcess, seq: int, stream: StreamName, data: bytes) -> None:
        del process
        self._metrics.output_bytes_total += len(data)
        connection = self._session.connection
        if connection is None:
            return
        if connection.binary_output and len(self._raw_id) <= binary.MAX_PROCESS_ID_BYTES:
            header = binary.header(self._raw_id, seq, binary.STREAM_CODES[stream])
            connection.channel.send_parts(header, data, b"", binary=True)
        else:
            head, body, tail = current.output_notification(self._prefix, seq, _STREAMS[stream], data)
            connection.channel.send_parts(head, body, tail, binary=False)

    def process_exited(self, process: ManagedProcess, seq: int) -> None:
        self._metrics.processes_running -= 1
        connection = self._session.connection
        if connection is None:
            return
        code = process.log.exit_code
        connection.channel.send(
            current.exited_notification(
                self._id, seq, -1 if code is None else code, process.denied(connection.extensions)
            )
        )
        if process.failure is not None and connection.lifecycle_events:
            params = {"processId": process.id, "message": process.failure}
            connection.channel.send(encode_notification("process/failed", params))

    def process_closed(self, process: ManagedProcess, seq: int) -> None:
        self._metrics.dropped_bytes_total += process.log.dropped_bytes
        self._session.processes.forget_later(process)
        connection = self._session.connection
        if connection is not None:
            connection.channel.send(current.closed_notification(self._id, seq))


class LegacyVoice:
    """`command/exec/outputDelta` and `command/exec/exited`; the id is free after the latter."""

    def __init__(self, session: Session, metrics: Metrics, process_id: str, loop: Loop) -> None:
        self._session = session
        self._metrics = metrics
        self._loop = loop
        self._id = encode(process_id)
        self._timer: Timer | None = None
        self._said_exit = False
        self.on_exit: Callable[[], object] = lambda: None
        """Called when the child has exited, before anybody is told."""

    def process_started(self, process: ManagedProcess) -> None:
        del process
        self._metrics.processes_started_total += 1
        self._metrics.processes_running += 1

    def process_output(self, process: ManagedProcess, seq: int, stream: StreamName, data: bytes) -> None:
        from ..wire import legacy

        del process, seq
        self._metrics.output_bytes_total += len(data)
        connection = self._session.connection
        if connection is not None:
            connection.channel.send(legacy.output_notification(self._id, _STREAMS[stream], data))

    def process_exited(self, process: ManagedProcess, seq: int) -> None:
        del seq
        self._metrics.processes_running -= 1
        self.on_exit()
        self._timer = self._loop.call_later(LEGACY_EXIT_DELAY, self._say_exit, process)

    def process_closed(self, process: ManagedProcess, seq: int) -> None:
        del seq
        if self._timer is not None:
            self._timer.cancel()
        self._say_exit(process)

    def _say_exit(self, process: ManagedProcess) -> None:
        from ..wire import legacy

        if self._said_exit:
            return
        self._said_exit = True
        self._session.processes.forget(process)
        connection = self._session.connection
        if connection is not None:
            code = process.log.exit_code
            connection.channel.send(legacy.exited_notification(self._id, -1 if code is None else code))
