"""What happens to a process across a connection: put in order, kept for a while, given to readers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..limits import MAX_OUTPUT_CHUNK_BYTES
from ..services import Closed, Event, Exited, Failed, Output, ReadOutput
from ..wire import base64
from ..wire.process import ReadResult
from .reader import Reader
from .sequencer import ReorderOverflow, Sequencer
from .subscription import Subscription

if TYPE_CHECKING:
    from .client import Client

__all__ = ["HISTORY_BYTES", "HISTORY_EVENTS", "ProcessEvents", "decode_event", "read_output"]

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


class ProcessEvents(ABC):
    """The events of one process, from the first to the last."""

    def __init__(self, client: Client, process_id: str) -> None:
        self._client = client
        self._id = process_id
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
        self._exit: Exited | None = None
        self._failure: str | None = None
        loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
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
        found = read_output(result)
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

    # Readers ------------------------------------------------------------------------------------

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

    @abstractmethod
    async def read(
        self, after_seq: int | None = None, max_bytes: int | None = None, wait: float = 0.0
    ) -> ReadOutput:
        """What the server still has."""


def read_output(result: ReadResult) -> ReadOutput:
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
