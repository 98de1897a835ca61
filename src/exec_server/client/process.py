"""A process across a connection: everything a caller can do with it. Its events are in process_events.py."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from ..services import (
    Collected,
    Completed,
    Event,
    ExitStatus,
    Output,
    ReadOutput,
    Snapshot,
)
from ..wire import base64
from ..wire.errors import METHOD_NOT_FOUND
from ..wire.process import ReadResult, SnapshotResult, TerminateResult, WriteResult
from .errors import (
    CommunicateTimeout,
    ConnectionLost,
    ExecServerError,
    ProcessFailed,
    Recovering,
    ServerRejected,
    StdinClosed,
    StdinCloseUnsupported,
    Unsupported,
)
from .process_events import HISTORY_EVENTS, ProcessEvents, decode_event, read_output
from .reader import Reader

if TYPE_CHECKING:
    from .client import Client

__all__ = ["HISTORY_EVENTS", "RemoteProcess", "check_timeout", "decode_event"]

WRITE_BYTES: Final = 64 * 1024
"""What `communicate` writes at once."""

UNKNOWN_EXIT: Final = -1
"""What servers report when the kernel could not be asked for the exit code."""

MAX_WRITE_BYTES: Final = 256 * 1024
"""What is sent in one message: little enough to get through where a line breaks again and again."""

WRITES_AT_ONCE: Final = 16
"""Messages of one long write on their way to a server that takes them in their order."""

CLEANUP_SECONDS: Final = 2.0
"""How long a killed process may take to be reported closed."""


class RemoteProcess(ProcessEvents):
    """Made by `Client.start`."""

    def __init__(self, client: Client, process_id: str, *, tty: bool, stdin: bool) -> None:
        super().__init__(client, process_id)
        self._tty = tty
        self._stdin = stdin
        self._reader: Reader | None = None
        self._readers = 0
        self._waiters = 0
        self._gathered = False
        self._next_write = 1
        self._writing = asyncio.Lock()
        """Held by a write that takes more than one message."""
        self.running = False
        """The server has said that it was started. Until then there is nothing to recover."""

    # Reading -------------------------------------------------------------------------------------

    async def output(self, *, from_start: bool = False) -> AsyncIterator[Output]:
        """Only the output, until there is no more. Raises ProcessFailed if the process was lost.

        It goes on where the last `output`, `communicate` or `collect` stopped: a loop may be left at a
        prompt, and the next one reads the answer. As long as nobody reads, the process is made to wait;
        `wait` and `wait_exit` let it go on without a reader. With `from_start` everything comes again that
        is still kept, for readers of their own.
        """
        if from_start:
            async for event in self.events():
                if isinstance(event, Output):
                    yield event
        else:
            with self._reading() as reader:
                while (event_or_none := await reader.next()) is not None:
                    if isinstance(event_or_none, Output):
                        yield event_or_none
        if self._failure is not None:
            raise ProcessFailed(self._failure)

    @contextmanager
    def _reading(self) -> Iterator[Reader]:
        """The reader that `output`, `communicate` and `collect` share: what one took no other sees."""
        if self._reader is None:
            self._reader = self._new_reader()
        self._readers += 1
        try:
            yield self._reader
        finally:
            self._readers -= 1
            if self._waiters:
                self._let_go_on()

    def _let_go_on(self) -> None:
        """Whoever waits without reading does not want the output: do not make the process wait for it."""
        if self._primary is not None:
            self._primary.make_lossy()
        if self._reader is not None and not self._readers:
            self._reader.subscription.make_lossy()

    async def read(
        self, after_seq: int | None = None, max_bytes: int | None = None, wait: float = 0.0
    ) -> ReadOutput:
        """Retained output after a number, without disturbing the iterators."""
        if self._failure is not None:
            # As the reference: the failure counts as one more after everything that arrived.
            return ReadOutput([], self._sequencer.arrived + 2, True, None, True, self._failure, False)
        params = {
            "processId": self._id,
            "afterSeq": after_seq,
            "maxBytes": max_bytes,
            "waitMs": int(wait * 1000),
        }
        try:
            return read_output(await self._client.call_until_answered("process/read", params, ReadResult))
        except ConnectionLost:
            if self._failure is None:
                raise
            return await self.read()  # it failed meanwhile, and that is the answer

    # Writing -------------------------------------------------------------------------------------

    async def write(self, data: bytes) -> None:
        """Write to stdin: applied once, however often it has to be sent."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"a process is written bytes, not {type(data).__name__}")
        view = memoryview(data).cast("B")
        if len(view) <= MAX_WRITE_BYTES and not self._writing.locked():
            await self._write_piece(bytes(view))
            return
        pieces = [
            bytes(view[start : start + MAX_WRITE_BYTES])
            for start in range(0, max(len(view), 1), MAX_WRITE_BYTES)
        ]
        # Our servers take writes in the order in which they come; others may not.
        step = WRITES_AT_ONCE if self._acknowledges else 1
        async with self._writing:  # nothing of another write may come in between
            for first in range(0, len(pieces), step):
                group = [self._write_piece(piece) for piece in pieces[first : first + step]]
                for outcome in await asyncio.gather(*group, return_exceptions=True):
                    if isinstance(outcome, BaseException):
                        raise outcome

    async def _write_piece(self, data: bytes) -> None:
        write_id = str(self._next_write)
        self._next_write += 1
        params = {"processId": self._id, "chunk": base64.encode(data), "writeId": write_id}
        result = await self._client.call_until_answered("process/write", params, WriteResult)
        if result.status == "stdinClosed":
            raise StdinClosed(
                f"process {self._id!r} has no open stdin (start it with stdin=True or tty=True)"
            )
        if result.status != "accepted":
            raise ProcessFailed(f"the server does not know process {self._id!r} ({result.status})")

    async def close_stdin(self) -> None:
        """Deliver EOF after everything written. On a terminal, send the end-of-file character."""
        if self._tty:
            await self.write(b"\x04")
            return
        if not self._client.has("processCloseStdin"):
            raise StdinCloseUnsupported("this server cannot close the stdin of a process on pipes")
        params = {"processId": self._id}
        if self._writing.locked():
            async with self._writing:
                await self._client.call_until_answered("process/closeStdin", params, WriteResult)
        else:
            await self._client.call_until_answered("process/closeStdin", params, WriteResult)

    async def resize(self, rows: int, cols: int) -> None:
        """Change the size of the terminal."""
        if not self._client.has("processResize"):
            raise Unsupported("this server cannot resize terminals")
        params = {"processId": self._id, "rows": rows, "cols": cols}
        await self._client.call_until_answered("process/resize", params, dict[str, Any])

    async def signal(self, name: str) -> None:
        """Signal the process group: `interrupt`, or a name such as `SIGUSR1`."""
        if name in ("SIGINT", "INT"):
            name = "interrupt"
        if name != "interrupt" and not self._client.has("processSignals"):
            raise Unsupported(f"this server can only send `interrupt`, not {name}")
        await self._client.call("process/signal", {"processId": self._id, "signal": name}, dict[str, Any])

    async def terminate(self, grace: float | None = None) -> int | None:
        """Kill the whole tree; with `grace`, ask with SIGTERM first. How many were killed, if known."""
        params: dict[str, Any] = {"processId": self._id}
        modes = self._client.has("processTerminateModes")
        if grace and not modes:
            await self.signal("interrupt")
            try:
                await self.wait(grace)
            except TimeoutError:
                pass
            else:
                return None
        elif modes:
            graceful = {"type": "graceful", "timeoutMs": int((grace or 0) * 1000)}
            params["mode"] = graceful if grace else {"type": "force"}
        result = await self._client.call("process/terminate", params, TerminateResult)
        return result.killed if isinstance(result.killed, int) else None

    # Waiting -------------------------------------------------------------------------------------

    async def wait(self, timeout: float | None = None) -> ExitStatus:
        """The end, when all output is there as well, also that of children which still have the pipe.

        Whoever waits without reading does not want the output, so the process is not made to wait for
        a reader any more.
        """
        await self._until(self._ended, "end", timeout)
        return await self._status()

    async def wait_exit(self, timeout: float | None = None) -> ExitStatus:
        """The exit of the process itself, although children of it may still run and write."""
        await self._until(self._exited, "exit", timeout)
        return await self._status()

    async def _until(self, happened: asyncio.Future[None], what: str, timeout: float | None) -> None:
        check_timeout(timeout)
        self._waiters += 1
        self._let_go_on()
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(happened)
        except TimeoutError:
            raise TimeoutError(f"process {self._id!r} did not {what} within {timeout:g}s") from None
        finally:
            self._waiters -= 1
        if self._failure is not None:
            raise ProcessFailed(self._failure)

    async def _status(self) -> ExitStatus:
        if self._exit is None:
            raise ProcessFailed(f"process {self._id!r} was closed without an exit code")
        if self._exit.exit_code == UNKNOWN_EXIT:
            failure = (await self.read(after_seq=self._sequencer.last)).failure
            if failure is not None:
                raise ProcessFailed(failure)
        denied = self._exit.sandbox_denied
        if denied is None:
            denied = (await self.read(after_seq=self._sequencer.last)).sandbox_denied
        return ExitStatus(self._exit.exit_code, denied)

    async def communicate(
        self, data: bytes | None = None, timeout: float | None = None, *, limit: int | None = None
    ) -> Completed:
        """Write, close stdin, and gather until the end what has not been read yet.

        With `limit` only so many bytes are kept, the newest of all streams together; `dropped_bytes` says
        how many are missing. When the time is over the process is terminated, and CommunicateTimeout has
        what it wrote. There is one such conversation with a process: a second call raises RuntimeError.
        """
        if data is not None and not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"a process is written bytes, not {type(data).__name__}")
        if data and not (self._stdin or self._tty):
            raise StdinClosed(f"process {self._id!r} was started without stdin")
        if self._stdin and not self._tty and not self._client.has("processCloseStdin"):
            raise StdinCloseUnsupported("this server cannot close stdin, so the input would never end")
        check_timeout(timeout)
        if limit is not None and limit < 0:
            raise ValueError(f"a limit is a number of bytes, not {limit}")
        if self._gathered:
            raise RuntimeError(
                f"the output of process {self._id!r} has been gathered by `communicate` already"
            )
        gathered = _Gathered(limit)
        try:
            async with asyncio.timeout(timeout):
                await self._exchange(data or b"", gathered)
            self._gathered = True
        except TimeoutError:
            self._gathered = True
            await self._kill_quietly(gathered)
            raise CommunicateTimeout(timeout or 0.0, gathered.completed(self.exit_code)) from None
        if self._failure is not None:
            raise ProcessFailed(self._failure)
        status = await self._status()
        return gathered.completed(status.exit_code, status.sandbox_denied)

    async def _exchange(self, data: bytes, gathered: _Gathered) -> None:
        writer = asyncio.ensure_future(self._feed(data))
        try:
            await self._gather(gathered)
            await writer
        finally:
            if not writer.done():
                writer.cancel()

    async def _gather(self, gathered: _Gathered) -> None:
        with self._reading() as reader:
            while (event := await reader.next()) is not None:
                gathered.add(event)

    async def _feed(self, data: bytes) -> None:
        try:
            for start in range(0, len(data), WRITE_BYTES):
                await self.write(data[start : start + WRITE_BYTES])
            if self._tty and data and not data.endswith(b"\n"):
                await self.write(b"\n")
            if self._stdin or (self._tty and data):
                await self.close_stdin()
        except (StdinClosed, ProcessFailed):
            pass  # it ended without wanting all of it
        except ServerRejected as error:
            if not self.ended and error.code == METHOD_NOT_FOUND:
                raise

    async def _kill_quietly(self, gathered: _Gathered) -> None:
        try:
            async with asyncio.timeout(CLEANUP_SECONDS):
                await self.terminate()
                await self._gather(gathered)
        except (TimeoutError, ExecServerError):
            pass

    async def collect(self, window: float) -> Collected:
        """What was written since the last call, waiting for at most `window` seconds or the end."""
        parts: list[bytes] = []
        try:
            with self._reading() as reader:
                async with asyncio.timeout(window):
                    while (event := await reader.next()) is not None:
                        if isinstance(event, Output):
                            parts.append(event.data)
        except TimeoutError:
            pass
        if self._failure is not None and not parts:
            raise ProcessFailed(self._failure)
        return Collected(b"".join(parts), self._exit is not None, self.exit_code)

    async def snapshot(self) -> Snapshot:
        """Oldest and newest output, joined per stream."""
        if self._client.has("processSnapshot"):
            params = {"processId": self._id}
            found = await self._client.call_until_answered("process/snapshot", params, SnapshotResult)
            return Snapshot(
                base64.decode(found.stdout),
                base64.decode(found.stderr),
                base64.decode(found.terminal),
                found.truncated,
                found.running,
                found.exit_code,
            )
        result = await self.read()
        streams: dict[str, list[bytes]] = {"stdout": [], "stderr": [], "pty": []}
        for chunk in result.chunks:
            streams[chunk.stream].append(chunk.data)
        joined = {name: b"".join(parts) for name, parts in streams.items()}
        ended = result.exited + result.closed
        truncated = len(result.chunks) < result.next_seq - 1 - ended
        return Snapshot(
            joined["stdout"], joined["stderr"], joined["pty"], truncated, not result.exited, result.exit_code
        )

    # Context -------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.end()

    async def end(self) -> None:
        """Kill it if it runs, and wait until the server has said so."""
        if self.ended:
            return
        if self._primary is not None:
            self._primary.make_lossy()
        for subscription in self._subscriptions:
            subscription.make_lossy()
        try:
            await self._terminate_surely()
            async with asyncio.timeout(CLEANUP_SECONDS):
                await asyncio.shield(self._ended)
        except (ConnectionLost, ServerRejected, TimeoutError):
            pass

    async def _terminate_surely(self) -> None:
        """Nobody is left who could try again, so this does, as long as there is a way to the server."""
        while not self.ended:
            try:
                await self.terminate()
            except ConnectionLost as error:
                if self._client.failure is not None or isinstance(error, Recovering):
                    raise
            else:
                return


def check_timeout(timeout: float | None) -> None:
    """ValueError for a time that is none: it would be over at once, or never."""
    if timeout is not None and timeout != timeout:
        raise ValueError(f"a timeout is a number of seconds, not {timeout}")


class _Gathered:
    """Output per stream, within a limit: the newest is kept."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._chunks: deque[Output] = deque()
        self._size = 0
        self._dropped = 0

    def add(self, event: Event) -> None:
        if not isinstance(event, Output):
            return
        self._chunks.append(event)
        self._size += len(event.data)
        while self._limit is not None and (excess := self._size - self._limit) > 0:
            oldest = self._chunks.popleft()
            dropped = min(len(oldest.data), excess)
            if dropped < len(oldest.data):
                self._chunks.appendleft(Output(oldest.seq, oldest.stream, oldest.data[dropped:]))
            self._size -= dropped
            self._dropped += dropped

    def completed(self, exit_code: int | None, sandbox_denied: bool = False) -> Completed:
        def joined(stream: str) -> bytes:
            return b"".join([chunk.data for chunk in self._chunks if chunk.stream == stream])

        outputs = joined("stdout"), joined("stderr"), joined("pty")
        return Completed(*outputs, exit_code, self._dropped, sandbox_denied)
