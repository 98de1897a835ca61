"""Calls and answers over one channel. Knows nothing of processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from ..transport.channel import Channel
from ..wire.envelope import encode_error, encode_notification, encode_request
from ..wire.errors import METHOD_NOT_FOUND, RpcError
from .errors import ConnectionLost, ProtocolError, ServerRejected, TooManyCalls

__all__ = ["MAX_CALLS", "Rpc"]

MAX_CALLS: Final = 1024
"""Calls in flight on one connection, as many as the reference's clients make."""

CLEANUP_METHODS: Final = frozenset({"process/terminate", "fs/close"})
"""What may go out even when everything is in use."""


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
BinaryHandler = Callable[[bytes], None]
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
        self._calls: dict[int | str, tuple[str, asyncio.Future[Raw]]] = {}
        self._closed_reason: str | None = None

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

    def send(self, method: str, params: Any) -> asyncio.Future[Raw]:
        """Send a request now; the future is its answer."""
        if self._closed_reason is not None or self._channel is None:
            raise ConnectionLost(_lost(self._closed_reason))
        if len(self._calls) >= MAX_CALLS + (1 if method in CLEANUP_METHODS else 0):
            raise TooManyCalls(f"exec-server has reached its limit of {MAX_CALLS} pending requests")
        request_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[Raw] = self._loop.create_future()
        self._calls[request_id] = (method, future)
        future.add_done_callback(lambda done: self._given_up(request_id, done))
        self._channel.send(encode_request(request_id, method, params))
        return future

    def _given_up(self, request_id: int, future: asyncio.Future[Raw]) -> None:
        """Nobody waits for the answer any more, so it does not count as a call."""
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
        try:
            incoming = _decode(message)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._protocol_error(f"the server sent something that is not a message: {error}")
            return
        if incoming.method is not UNSET:
            if incoming.id is UNSET:
                try:
                    self._on_notification(incoming.method, incoming.params)
                except ProtocolError as error:
                    self._protocol_error(str(error))
            else:
                self._refuse(incoming.id, incoming.method)
        elif incoming.id is not UNSET:
            self._answer(incoming)

    def binary_received(self, message: bytes) -> None:
        try:
            self._on_binary(message)
        except ValueError as error:
            self._protocol_error(str(error))

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

    def _protocol_error(self, reason: str) -> None:
        if self._channel is not None:
            self._channel.abort()
        self.channel_closed(reason)


def _lost(reason: str | None) -> str:
    return "exec-server transport disconnected" + (f": {reason}" if reason else "")
