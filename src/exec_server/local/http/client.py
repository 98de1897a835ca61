"""Requests sent and redirects followed, over one pool of connections."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from ...limits import MIB
from ...wire.base64 import encode
from ...wire.errors import internal_error
from ...wire.http import (
    HttpHeader,
    HttpRequestParams,
    HttpRequestResult,
    HttpUrl,
    UnsupportedScheme,
    UrlError,
    parse_url,
)
from .body import Exchange, end_with_connection, read_all
from .head import MAX_HEADER_BYTES
from .proxy import proxy_for
from .request import Headers, Request, lines, prepare, redirected

if TYPE_CHECKING:
    from aiohttp import ClientHandlerType, ClientRequest, ClientResponse, ClientSession

__all__ = ["MAX_REDIRECTS", "LocalHttp"]

MAX_REDIRECTS: Final = 10
"""Redirects followed in one request."""

_READ_BUFFER_BYTES: Final = 256 * 1024
_LONGEST_TIMEOUT_MS: Final = 10 * 365 * 24 * 3600 * 1000
"""Beyond this there is no deadline; event loops cannot count to 2**64 milliseconds."""

_READABLE_VALUE = re.compile(rb"[\t\x20-\x7e]*")
_REDIRECTS: Final = frozenset((301, 302, 303, 307, 308))
_TIMED_OUT: Final = "http/request failed: route-aware request timed out"


class LocalHttp:
    """Makes requests, with one pool of connections. Belongs to the event loop of its first request."""

    def __init__(self) -> None:
        self._session: ClientSession | None = None

    async def open(self, params: HttpRequestParams) -> Exchange:
        """Send the request; answered with the whole body, or with the headers if it is streamed.

        Raises RpcError: -32602 for a request that cannot be sent, -32603 for one that failed.
        """
        import asyncio

        request = prepare(params, os.environ)
        deadline = None
        if params.timeout_ms is not None and params.timeout_ms < _LONGEST_TIMEOUT_MS:
            if params.timeout_ms == 0:
                raise internal_error(_TIMED_OUT)
            deadline = asyncio.get_running_loop().time() + params.timeout_ms / 1000
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._follow(request, params.redirect_policy == "follow")
        except TimeoutError:
            raise internal_error(_TIMED_OUT) from None

        end_with_connection(response)
        result = HttpRequestResult(response.status, _received_headers(response.raw_headers), "")
        if params.stream_response:
            return Exchange(params.request_id, result, response, deadline)
        try:
            result.body_base64 = encode(await read_all(response, deadline))
        finally:
            response.close()
        return Exchange(params.request_id, result, None, None)

    async def close(self) -> None:
        """Drop every connection. Bodies still being read break off."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _follow(self, request: Request, follow: bool) -> ClientResponse:
        """Send it and what its redirects make of it."""
        redirects = 0
        while True:
            response = await self._send(request)
            target = _redirect_target(response, request.url) if follow else None
            if target is None:
                return response
            response.close()
            if redirects == MAX_REDIRECTS:
                raise internal_error("http/request failed: too many redirects")
            redirects += 1
            request = redirected(request, response.status, target)

    async def _send(self, request: Request) -> ClientResponse:
        from aiohttp import ClientError

        try:
            return await self._transmit(request)
        except (ClientError, OSError, ValueError) as error:
            text = f"http/request failed: error sending request for url ({request.url})"
            raise internal_error(text) from error

    async def _transmit(self, request: Request) -> ClientResponse:
        """Through aiohttp, which gets everything its own way and is corrected before it is sent."""
        from io import BytesIO

        from multidict import CIMultiDict
        from yarl import URL

        url = URL(request.url.without_fragment(), encoded=True)
        if request.url.query == "":
            # yarl drops the question mark of an empty query, unless it takes it for part of the path.
            url = URL.build(
                scheme=url.scheme, authority=url.raw_authority, path=f"{url.raw_path}?", encoded=True
            )
        headers = CIMultiDict(lines(request))

        async def as_written(prepared: ClientRequest, send: ClientHandlerType) -> ClientResponse:
            prepared.method = request.method
            prepared.headers = headers
            return await send(prepared)

        body: bytes | BytesIO | None = request.body or None
        if len(request.body) > MIB:
            body = BytesIO(request.body)  # written in pieces, so that it does not hold up the loop
        proxy = proxy_for(request.url, os.environ)
        return await self._open_session().request(
            request.method,
            url,
            data=body,
            chunked=True if "transfer-encoding" in headers else None,
            skip_auto_headers=("content-type",),
            allow_redirects=False,
            proxy=None if proxy is None else URL(proxy),
            middlewares=(as_written,),
        )

    def _open_session(self) -> ClientSession:
        if self._session is None:
            from aiohttp import ClientSession, ClientTimeout, DummyCookieJar

            from .connection import Answer, Connector

            self._session = ClientSession(
                connector=Connector(limit=0),  # a hundred stalled streams must not stop the next one
                cookie_jar=DummyCookieJar(),
                response_class=Answer,
                timeout=ClientTimeout(total=None, sock_connect=None),
                auto_decompress=False,
                read_bufsize=_READ_BUFFER_BYTES,
                max_line_size=MAX_HEADER_BYTES,
                max_field_size=MAX_HEADER_BYTES,
            )
            # A request that was sent may have had its effect, answered or not: the caller decides whether
            # to repeat it. There is no public way to say so; a test notices if this name goes.
            self._session._retry_connection = False
        return self._session


def _redirect_target(response: ClientResponse, base: HttpUrl) -> HttpUrl | None:
    """Where the response sends us; None if it does not, or if there is no telling where."""
    if response.status not in _REDIRECTS:
        return None
    for header in _received_headers(response.raw_headers):
        if header.name == "location":
            try:
                return parse_url(header.value, base)
            except UnsupportedScheme as error:
                response.close()
                text = f"http/request failed: redirect target uses unsupported URL scheme: {error.scheme}"
                raise internal_error(text) from None
            except UrlError:
                return None
    return None


def _received_headers(raw: Iterable[tuple[bytes, bytes]]) -> list[HttpHeader]:
    """Names in lower case and together; values that are not readable ASCII cannot be told, so are not."""
    headers: Headers = {}
    for name, value in raw:
        if _READABLE_VALUE.fullmatch(value):
            headers.setdefault(name.decode("ascii", "replace").lower(), []).append(value.decode("ascii"))
    return [HttpHeader(name, value) for name, values in headers.items() for value in values]
