"""Calls and answers over one channel. Knows nothing of processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from ..transport.channel import Channel
from ..wire import binary
from ..wire.envelope import encode_error, encode_notification, encode_request
from ..wire.errors import METHOD_NOT_FOUND, RpcError
from .errors import ConnectionLost, ProtocolError, ServerRejected, TooManyCalls

__all__ = ["CLEANUP_METHODS", "MAX_CALLS", "Rpc", "Take", "decoded"]

T = TypeVar("T")

MAX_CALLS: Final = 1024
"""Calls in flight on one connection, as many as the reference's clients make."""

CLEANUP_METHODS: Final = frozenset({"process/terminate", "fs/close"})
"""What may go out even when everything is in use: one more call. If there is no room even for that, and
nobody who could hear of it, the connection is ended, and with it what was to be cleaned up."""


class _Error(Struct):
    code: int
    message: str
    data: Any = None


class _Incoming(Struct):
    """Any message, its payload not yet decoded."""

    id: int | str | UnsetType = UNSET
    method: str | UnsetType = UNSET
    params: Raw = Raw(b"null")
    result: Raw | UnsetType = UNSET
    error: _Error | UnsetType = UNSET


_decode = msgspec.json.Decoder(_Incoming).decode

NotificationHandler = Callable[[str, Raw], None]
BinaryHandler = Callable[[bytes | memoryview], None]
Take = Callable[[binary.FilePart], binary.FilePart]
"""Puts a part where it belongs while its message is there, and says what to remember of it."""
ClosedHandler = Callable[[str], None]


class Rpc:
    """One physical connection."""

    def __init__(
        self, on_notification: NotificationHandler, on_binary: BinaryHandler, on_closed: ClosedHandler
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_notification = on_notification
        self._on_binary = on_binary
        self._on_closed = on_closed
        self._channel: Channel | None = None
        self._next_id = 1
        self._calls: dict[int | str, tuple[str, asyncio.Future[Any]]] = {}
        self.binary_files = False
        """Whether the server has agreed to blocks as binary messages."""
        self._takes: dict[int | str, Take] = {}
        self._closed_reason: str | None = None
        self._heard_at = self._loop.time()
        self.hung_up = False
        """We ended it, because of what the server said."""

    @property
    def heard_at(self) -> float:
        """When the server was last heard, on the loop's clock, be it only to ask whether we are there."""
        return max(self._heard_at, getattr(self._channel, "pinged_at", 0.0))

    @property
    def closed(self) -> bool:
        return self._closed_reason is not None

    def use(self, channel: Channel) -> None:
        """The channel to send on; it must deliver to this object."""
        self._channel = channel

    async def call(self, method: str, params: Any, timeout: float | None = None) -> Raw:
        """Send a request and wait for its answer."""
        future = self.send(method, params)
        if timeout is None:
            return await future
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise TimeoutError(
                f"timed out waiting for exec-server `{method}` response after {timeout:g}s"
            ) from None

    def send(self, method: str, params: Any, *, again: bool = False) -> asyncio.Future[Raw]:
        """Send a request now; the future is its answer. One that was sent before is not counted `again`."""
        channel, request_id, future = self._begin(method, again=again)
        channel.send(encode_request(request_id, method, params))
        return future

    def send_reading(
        self, method: str, params: Any, take: Take | None = None
    ) -> asyncio.Future[Raw | binary.FilePart]:
        """The same for a method that reads a part of a file, which may come as a binary message: it is given
        to `take` when it comes, and the answer is what that returns."""
        channel, request_id, future = self._begin(method)
        self._takes[request_id] = _copied if take is None else take
        channel.send(encode_request(request_id, method, params))
        return future

    def send_block(self, handle_id: str, offset: int, data: bytes | memoryview) -> asyncio.Future[Raw]:
        """Send `fs/writeBlock` as a binary message."""
        channel, request_id, future = self._begin("fs/writeBlock")
        head = binary.write_block_header(b"%d" % request_id, handle_id.encode(), offset)
        channel.send_parts(head, data, b"", binary=True)
        return future

    def _begin(self, method: str, *, again: bool = False) -> tuple[Channel, int, asyncio.Future[Any]]:
        if self._closed_reason is not None or self._channel is None:
            raise ConnectionLost(_lost(self._closed_reason))
        if not again and len(self._calls) >= MAX_CALLS + (1 if method in CLEANUP_METHODS else 0):
            raise TooManyCalls(f"exec-server has reached its limit of {MAX_CALLS} pending requests")
        request_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls[request_id] = (method, future)
        future.add_done_callback(lambda done: self._given_up(request_id, done))
        return self._channel, request_id, future

    def _given_up(self, request_id: int, future: asyncio.Future[Raw]) -> None:
        """Nobody waits for the answer any more, so it does not count as a call."""
        self._takes.pop(request_id, None)
        if future.cancelled():
            self._calls.pop(request_id, None)

    def notify(self, method: str, params: Any) -> None:
        """Tell the server something that has no answer."""
        if self._channel is not None:
            self._channel.send(encode_notification(method, params))

    def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            self._channel.close()

    # From the channel ----------------------------------------------------------------------------

    def message_received(self, message: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            incoming = _decode(message)
        except (msgspec.MsgspecError, RecursionError) as error:
            self.hang_up(f"the server sent something that is not a message: {error}")
            return
        if incoming.method is not UNSET:
            if incoming.id is UNSET:
                try:
                    self._on_notification(incoming.method, incoming.params)
                except ProtocolError as error:
                    self.hang_up(str(error))
            else:
                self._refuse(incoming.id, incoming.method)
        elif incoming.id is not UNSET:
            self._answer(incoming)

    def binary_received(self, message: bytes) -> None:
        self.view_received(message)

    def view_received(self, message: bytes | memoryview) -> None:
        self._heard_at = self._loop.time()
        try:
            if message and message[0] == binary.FILE_PART:
                request_id, part = binary.decode_file_part(message)
                method, future = self._calls.pop(request_id, ("", None))
                if future is None or future.done():
                    return
                take = self._takes.get(request_id)
                if take is None:
                    raise ValueError(f"the answer to `{method}` came as a part of a file")
                future.set_result(take(part))
            else:
                self._on_binary(message)
        except ValueError as error:
            self.hang_up(str(error))

    def writing_paused(self) -> None:
        """Requests are few and small next to output; they are bounded by MAX_CALLS."""

    def writing_resumed(self) -> None:
        """See above."""

    def channel_closed(self, reason: str) -> None:
        if self._closed_reason is not None:
            return
        self._closed_reason = reason
        calls, self._calls = self._calls, {}
        for _, future in calls.values():
            if not future.done():
                future.set_exception(ConnectionLost(_lost(reason)))
                future.exception()  # whoever gave up waiting must not be warned about it
        self._on_closed(reason)

    def _answer(self, incoming: _Incoming) -> None:
        method, future = self._calls.pop(incoming.id, ("", None))  # type: ignore[arg-type]  # not UNSET here
        if future is None or future.done():
            return
        if incoming.error is not UNSET:
            error = incoming.error
            future.set_exception(ServerRejected(method, error.code, error.message))
            future.exception()
        elif incoming.result is not UNSET:
            future.set_result(incoming.result)
        else:
            future.set_exception(ProtocolError(f"the answer to `{method}` has neither result nor error"))

    def _refuse(self, request_id: int | str, method: str) -> None:
        """We offer nothing that could be asked for."""
        if self._channel is not None:
            error = RpcError(METHOD_NOT_FOUND, f"exec-server client does not implement `{method}` yet")
            self._channel.send(encode_error(request_id, error))

    def hang_up(self, reason: str) -> None:
        """End it as if it had broken: it cannot be used any more, but the session may get another."""
        self.hung_up = True
        self.channel_closed(reason)  # first, so that this is the reason
        if self._channel is not None:
            self._channel.abort()


def _copied(part: binary.FilePart) -> binary.FilePart:
    return part._replace(data=bytes(part.data))


def _lost(reason: str | None) -> str:
    return "exec-server transport disconnected" + (f": {reason}" if reason else "")


def decoded(method: str, raw: Raw, kind: type[T]) -> T:
    """The answer to a call as `kind`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the answer to `{method}` is not what it should be: {error}") from None
