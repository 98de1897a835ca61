"""The body of an answer: whole in one message, or in pieces as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from ...limits import MAX_FRAME_BYTES, MIB
from ...wire.base64 import encode
from ...wire.errors import internal_error
from ...wire.http import HttpBodyDelta, HttpRequestResult

if TYPE_CHECKING:
    from asyncio import Future

    from aiohttp import ClientResponse, StreamReader

__all__ = ["MAX_BUFFERED_BODY_BYTES", "MAX_DELTA_BYTES", "Exchange", "end_with_connection", "read_all"]

MAX_DELTA_BYTES: Final = MIB
"""Most bytes of a body in one `http/request/bodyDelta`."""

MAX_BUFFERED_BODY_BYTES: Final = (MAX_FRAME_BYTES - MIB) // 4 * 3
"""Most bytes of a body in one answer: as base64, with a MiB for headers, they fill a frame of 16 MiB,
and clients drop the connection over a larger one. Longer bodies have to be streamed."""

_BROKEN_BODY: Final = "error decoding response body"


class Exchange:
    """One answered request. A streamed body is read with `deltas`; `close` ends it early."""

    def __init__(
        self,
        request_id: str,
        result: HttpRequestResult,
        response: ClientResponse | None,
        deadline: float | None,
    ) -> None:
        self.result = result
        self._request_id = request_id
        self._response = response
        self._deadline = deadline

    async def deltas(self) -> AsyncIterator[HttpBodyDelta]:
        """The body in order, then one frame that says how it ended. Nothing if it was not streamed."""
        seq = 0
        error: str | None = None
        while (response := self._response) is not None:
            seq += 1
            try:
                data = await _read_some(response, self._deadline)
            except _BrokenBody:
                data, error = b"", _BROKEN_BODY
            if not data:
                await self.close()
            yield HttpBodyDelta(self._request_id, seq, encode(data), not data, error)

    async def close(self) -> None:
        """Let go of the connection. A body that was read to its end leaves it usable for others."""
        response, self._response = self._response, None
        if response is not None:
            response.close()


class _BrokenBody(Exception):
    """The body ended before its end, was not what it said it was, or took too long."""


def end_with_connection(response: ClientResponse) -> None:
    """Let a body fail when its connection is gone.

    aiohttp does so itself, except after a chunk that makes no sense: it closes the connection over that
    and forgets to tell the reader, who would wait for ever.
    """
    connection, content = response.connection, response.content
    if connection is None or connection.protocol is None:
        return  # read to its end already
    closed = connection.protocol.closed

    def fail(closed: Future[None] | None) -> None:
        if closed is not None and not closed.cancelled():
            closed.exception()  # looked at, so that nobody warns that it was not
        if not content.is_eof() and content.exception() is None:
            content.set_exception(ConnectionError("the connection was closed inside the body"))

    def forget() -> None:
        if closed is not None:
            closed.remove_done_callback(fail)  # the connection lives on and serves others

    if closed is None:
        fail(None)
    else:
        closed.add_done_callback(fail)
        content.on_eof(forget)


async def _read_some(response: ClientResponse, deadline: float | None) -> bytes:
    """What there is of the body, up to one delta; nothing at its end."""
    import asyncio

    from aiohttp import ClientError

    try:
        async with asyncio.timeout_at(deadline):
            return await response.content.read(MAX_DELTA_BYTES)
    except (ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
        if data := _arrived_before(response.content):
            return data
        raise _BrokenBody from error


def _arrived_before(content: StreamReader) -> bytes:
    """Bytes that came before a body broke: aiohttp has them, but only ever answers with the error."""
    error = content.exception()
    content.set_exception(None)  # type: ignore[arg-type]  # the only way to be let at them
    data = content.read_nowait(MAX_DELTA_BYTES)
    if error is not None:
        content.set_exception(error)
    return data


async def read_all(response: ClientResponse, deadline: float | None) -> bytes:
    prefix = "failed to read http/request response body"
    body = bytearray()
    try:
        while data := await _read_some(response, deadline):
            body += data
            if len(body) > MAX_BUFFERED_BODY_BYTES:
                raise internal_error(
                    f"{prefix}: more than {MAX_BUFFERED_BODY_BYTES} bytes; "
                    "ask for it with streamResponse to get it in pieces"
                )
    except _BrokenBody as error:
        raise internal_error(f"{prefix}: {_BROKEN_BODY}") from error.__cause__
    return bytes(body)
