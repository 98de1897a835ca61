"""A process across a connection: its events in order, and everything a caller can do with it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from ..limits import MAX_OUTPUT_CHUNK_BYTES
from ..services import (
    Closed,
    Collected,
    Completed,
    Event,
    Exited,
    ExitStatus,
    Failed,
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
from .reader import Reader
from .sequencer import ReorderOverflow, Sequencer
from .subscription import Subscription

if TYPE_CHECKING:
    from .client import Client

__all__ = ["RemoteProcess"]

BUFFER_BYTES: Final = 4 * 1024 * 1024
"""Output that may wait for its reader before the process is made to wait."""

UNPAUSABLE_BUFFER_BYTES: Final = 64 * 1024 * 1024
"""The same where the server cannot make a single process wait; beyond it output is dropped and told."""

ACKNOWLEDGE_BYTES: Final = 4 * 1024 * 1024
ACKNOWLEDGE_EVENTS: Final = 16 * 1024
"""How much arrives before the server is told so: seldom enough to cost nothing, and with what fits into the
buffers of a connection on top still less than a server keeps."""

HISTORY_EVENTS: Final = 256
HISTORY_BYTES: Final = 1024 * 1024
"""What late readers get without asking the server."""

WRITE_BYTES: Final = 64 * 1024
"""What `communicate` writes at once."""

UNKNOWN_EXIT: Final = -1
"""What servers report when the kernel could not be asked for the exit code."""

MAX_WRITE_BYTES: Final = 4 * 1024 * 1024
"""What is sent in one message: with base64, well below the largest frame a server takes."""

CLEANUP_SECONDS: Final = 2.0
"""How long a killed process may take to be reported closed."""


class RemoteProcess:
    """Made by `Client.start`."""

    def __init__(self, client: Client, process_id: str, *, tty: bool, stdin: bool) -> None:
        self._client = client
        self._id = process_id
        self._tty = tty
        self._stdin = stdin
        self._sequencer = Sequencer()
        self._history: deque[Event] = deque()
        self._history_bytes = 0
        self._subscriptions: list[Subscription] = []
        self._acknowledges = client.has("processOutputAcks")
        self._unacknowledged_bytes = 0
        self._unacknowledged_events = 0
        pausable = client.has("processFlowControl")
        self._primary: Subscription | None = Subscription(
            BUFFER_BYTES if pausable else UNPAUSABLE_BUFFER_BYTES,
            2**62,
            self._press if pausable else None,
        )
        self._subscriptions.append(self._primary)
        self._reader: Reader | None = None
        self._readers = 0
        self._waiters = 0
        self._gathered = False
        self._next_write = 1
        self._exit: Exited | None = None
        self._failure: str | None = None
        loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self.running = False
        """The server has said that it was started. Until then there is nothing to recover."""
        self.held = False
        """The server was asked to make it wait for its reader."""

    @property
    def id(self) -> str:
        return self._id

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._exit is None else self._exit.exit_code

    @property
    def ended(self) -> bool:
        """Closed, or lost."""
        return self._ended.done()

    def __repr__(self) -> str:
        state = "lost" if self._failure else "ended" if self.ended else "running"
        return f"<RemoteProcess {self._id!r} {state}>"

    @property
    def last_seq(self) -> int:
        """The number of the last event that was published."""
        return self._sequencer.last

    # Events, from the client ---------------------------------------------------------------------

    def deliver(self, seq: int, event: Event) -> None:
        """A numbered event arrived."""
        if self._failure is not None:
            return
        try:
            ready = self._sequencer.push(seq, event)
        except ReorderOverflow as error:
            self.fail(str(error))
            return
        for published in ready:
            self._publish(published)

    def expect_recovery(self) -> None:
        """The connection is lost: what the next one brings may come before what was missed."""
        self._sequencer.expect_recovery()

    def recover(self, result: ReadResult, max_bytes: int | None = None) -> bool:
        """What the server retains, read after `last_seq`; whether to ask for more than these `max_bytes`.

        Raises Unrecoverable if what is retained is not enough.
        """
        found = _read_output(result)
        size = sum(len(chunk.data) for chunk in found.chunks)
        partial = False
        if max_bytes is not None and found.chunks:
            # Chunks are not split, so an answer with room for another has all of them. Such an answer goes
            # up to its last chunk: what it says of an exit is numbered by one that has no chunks.
            partial = size > max_bytes - MAX_OUTPUT_CHUNK_BYTES or found.exited or found.closed
        for event in self._sequencer.recover(found, partial=partial):
            self._publish(event)
        if partial and (self._sequencer.joined or self.ended):
            self._sequencer.recovering = partial = False
        return partial

    def fail(self, message: str) -> None:
        """The process is lost; tell everybody, once."""
        if self._failure is None and not self.ended:
            self._failure = message
            self._sequencer.end()
            self._publish(Failed(message))

    def _publish(self, event: Event) -> None:
        self._history.append(event)
        if isinstance(event, Output):
            self._history_bytes += len(event.data)
            if self._acknowledges:
                self._acknowledge(len(event.data))
        elif isinstance(event, Exited):
            self._exit = event
        while self._history and (len(self._history) > HISTORY_EVENTS or self._history_bytes > HISTORY_BYTES):
            oldest = self._history.popleft()
            if isinstance(oldest, Output):
                self._history_bytes -= len(oldest.data)
        for subscription in self._subscriptions:
            subscription.put(event)
        if isinstance(event, Closed | Failed):
            self._client.forget(self)
            if not self._ended.done():
                self._ended.set_result(None)
        if isinstance(event, Exited | Closed | Failed) and not self._exited.done():
            self._exited.set_result(None)

    def _acknowledge(self, size: int) -> None:
        """Say from time to time what has arrived: until then the server keeps it for us."""
        self._unacknowledged_bytes += size
        self._unacknowledged_events += 1
        if (
            self._unacknowledged_bytes >= ACKNOWLEDGE_BYTES
            or self._unacknowledged_events >= ACKNOWLEDGE_EVENTS
        ):
            self._unacknowledged_bytes = self._unacknowledged_events = 0
            params = {"processId": self._id, "seq": self._sequencer.last}
            self._client.tell("process/acknowledgeOutput", params)

    def _press(self, pressed: bool) -> None:
        """Make the process wait for its reader, or go on."""
        self.held = pressed
        if not self.ended:
            method = "process/pauseOutput" if pressed else "process/resumeOutput"
            self._client.tell(method, {"processId": self._id})

    # Reading -------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[Event]:
        """Everything that happens, from the first event on, each once and in order.

        The first reader gets everything however slow it is: the process waits for it. Further readers
        never make it wait; one that falls too far behind catches up from what the server retains.
        """
        reader = self._new_reader()
        try:
            while (event := await reader.next()) is not None:
                yield event
        finally:
            if reader.subscription in self._subscriptions:
                self._subscriptions.remove(reader.subscription)
                reader.subscription.make_lossy()

    def _new_reader(self) -> Reader:
        return Reader(self._id, self._subscribe(), self._missed, lambda: self.ended)

    def _subscribe(self) -> Subscription:
        if self._primary is not None:
            primary, self._primary = self._primary, None
            return primary
        subscription = Subscription(HISTORY_BYTES, HISTORY_EVENTS, None)
        for event in self._history:
            subscription.put(event)
        self._subscriptions.append(subscription)
        return subscription

    async def _missed(self, last: int, before: int | None) -> tuple[list[Event], bool]:
        """Events after `last` that a reader did not get, from the server; and whether they are all."""
        result = await self.read(after_seq=last)
        events: list[Event] = []
        for chunk in result.chunks:
            if before is not None and chunk.seq >= before:
                break
            if chunk.seq > last + 1:
                if self._exit is None or not self._exit.seq == last + 1 == chunk.seq - 1:
                    return events, False
                events.append(self._exit)
            events.append(chunk)
            last = chunk.seq
        if self._exit is not None and self._exit.seq == last + 1 and (before is None or last + 1 < before):
            events.append(self._exit)
            last += 1
        if before is not None and before > last + 1:
            return events, False
        if before is None and result.closed and last + 2 == result.next_seq:
            events.append(Closed(last + 1))
        return events, True

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
            return _read_output(await self._client.call_until_answered("process/read", params, ReadResult))
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
        for start in range(0, max(len(view), 1), MAX_WRITE_BYTES):
            await self._write_piece(bytes(view[start : start + MAX_WRITE_BYTES]))

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
        return gathered.completed((await self._status()).exit_code)

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

    def completed(self, exit_code: int | None) -> Completed:
        def joined(stream: str) -> bytes:
            return b"".join([chunk.data for chunk in self._chunks if chunk.stream == stream])

        return Completed(joined("stdout"), joined("stderr"), joined("pty"), exit_code, self._dropped)


def _read_output(result: ReadResult) -> ReadOutput:
    chunks = [Output(chunk.seq, chunk.stream, base64.decode(chunk.chunk)) for chunk in result.chunks]
    return ReadOutput(
        chunks,
        result.next_seq,
        result.exited,
        result.exit_code,
        result.closed,
        result.failure,
        result.sandbox_denied,
    )


def decode_event(method: str, params: msgspec.Raw) -> tuple[str, Event] | None:
    """A process notification as an event, with the id of its process; None for others."""
    if method == "process/output":
        output = _decode_output(params)
        return output.process_id, Output(output.seq, output.stream, base64.decode(output.chunk))
    if method == "process/exited":
        exited = _decode_exited(params)
        return exited.process_id, Exited(exited.seq, exited.exit_code, exited.sandbox_denied)
    if method == "process/closed":
        closed = _decode_closed(params)
        return closed.process_id, Closed(closed.seq)
    return None


class _OutputParams(msgspec.Struct, rename="camel"):
    process_id: str
    seq: int
    stream: Any
    chunk: str


class _ExitedParams(msgspec.Struct, rename="camel"):
    process_id: str
    seq: int
    exit_code: int
    sandbox_denied: bool | None = None


class _ClosedParams(msgspec.Struct, rename="camel"):
    process_id: str
    seq: int


_decode_output = msgspec.json.Decoder(_OutputParams).decode
_decode_exited = msgspec.json.Decoder(_ExitedParams).decode
_decode_closed = msgspec.json.Decoder(_ClosedParams).decode
