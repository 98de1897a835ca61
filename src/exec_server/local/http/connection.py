"""aiohttp's connections, with our own reading of the heads of answers (head.py) before its parser.

A head goes to the parser before anything of the body does: what is wrong with the body is then an error
of the body, and does not take the head and all that came before with it.
"""

from __future__ import annotations

import asyncio
import select
from functools import partial
from typing import Any

from aiohttp import ClientResponse, TCPConnector
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http_exceptions import BadHttpMessage

from .head import Head

__all__ = ["Answer", "Connector"]


class _Handler(ResponseHandler):
    """One connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.head = Head()

    def set_response_params(self, *, skip_payload: bool = False, **others: Any) -> None:
        """Another request is about to be sent."""
        self.head = Head(body_expected=not skip_payload)
        super().set_response_params(skip_payload=skip_payload, **others)

    def is_connected(self) -> bool:
        """Whether it can take another request; asked of connections that nobody uses.

        Nothing is sent twice, so a request must not go where the other side has hung up already: what
        has arrived while nobody asked for anything is the end, even before the loop has seen it.
        """
        return super().is_connected() and not _has_something_to_read(self.transport)

    def data_received(self, data: bytes) -> None:
        if self.head.complete or self._parser is None or not data:
            super().data_received(data)
            return
        head, body = self.head.feed(bytes(data))
        if head:
            super().data_received(head)
        if self.head.refused:
            if self.transport is not None:
                self.transport.close()
            self.set_exception(BadHttpMessage("blanks around the name of a header field"))
        if body and self.exception() is None:
            super().data_received(body)


def _has_something_to_read(transport: asyncio.BaseTransport | None) -> bool:
    end = None if transport is None else transport.get_extra_info("socket")
    if end is None:
        return False
    poll = select.poll()
    poll.register(end.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _new_handler(loop: asyncio.AbstractEventLoop) -> ResponseHandler:
    return _Handler(loop)


class Connector(TCPConnector):
    """Makes such connections."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # There is no public way to say which protocol; a test notices if this name goes.
        self._factory = partial(_new_handler, loop=asyncio.get_running_loop())


class Answer(ClientResponse):
    """An answer over such a connection, with the headers that were sent, not those the parser got."""

    _head: Head | None = None

    async def start(self, connection: Connection) -> ClientResponse:
        protocol = connection.protocol
        if isinstance(protocol, _Handler):
            self._head = protocol.head
        return await super().start(connection)

    @property
    def raw_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return () if self._head is None else tuple(self._head.headers)
