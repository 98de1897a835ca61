"""HTTP requests made from this machine for somebody who is not on it.

The caller's request goes out as it was written: no header is added except `accept`, `host` and the
length of the body, nothing is decompressed, no cookie is kept. aiohttp carries it; what it would do on
its own account (upper-case methods, wait for `100-continue`, read `~/.netrc`, re-quote URLs) is turned
off here. It is imported with the first request, because that takes longer than starting the server.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from ..limits import MAX_FRAME_BYTES, MIB
from ..wire.base64 import decode, encode
from ..wire.errors import internal_error, invalid_params
from ..wire.http import (
    HttpBodyDelta,
    HttpHeader,
    HttpRequestHeader,
    HttpRequestParams,
    HttpRequestResult,
    HttpUrl,
    UnsupportedScheme,
    UrlError,
    parse_url,
)

if TYPE_CHECKING:
    from asyncio import Future

    from aiohttp import ClientHandlerType, ClientRequest, ClientResponse, ClientSession, StreamReader

__all__ = ["MAX_BUFFERED_BODY_BYTES", "MAX_DELTA_BYTES", "MAX_REDIRECTS", "Exchange", "LocalHttp"]

MAX_DELTA_BYTES: Final = MIB
"""Most bytes of a body in one `http/request/bodyDelta`."""

MAX_BUFFERED_BODY_BYTES: Final = (MAX_FRAME_BYTES - MIB) // 4 * 3
"""Most bytes of a body in one answer: as base64, with a MiB for headers, they fill a frame of 16 MiB,
and clients drop the connection over a larger one. Longer bodies have to be streamed."""

MAX_REDIRECTS: Final = 10
"""Redirects followed in one request."""

MAX_HEADER_BYTES: Final = 256 * 1024
"""Longest status line or header field accepted from a server; some put whole documents in them."""

DENIED_VARIABLES: Final = frozenset(
    (
        "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
        "OPENAI_FEDERATION_RULE_ID",
        "OPENAI_IDENTITY_TOKEN_FILE",
        "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
        "OPENAI_API_KEY",
        "CODEX_API_KEY",
        "CODEX_ACCESS_TOKEN",
        "CODEX_CONNECTORS_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE",
        "GOOGLE_APPLICATION_CREDENTIALS",
    )
)
"""Variables that never leave in a header: they open more than the request they would be put in."""

_READ_BUFFER_BYTES: Final = 256 * 1024
_LONGEST_TIMEOUT_MS: Final = 10 * 365 * 24 * 3600 * 1000
"""Beyond this there is no deadline; event loops cannot count to 2**64 milliseconds."""

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE = re.compile("[^\x00-\x08\x0a-\x1f\x7f]*")
_READABLE_VALUE = re.compile(rb"[\t\x20-\x7e]*")

_REDIRECTS: Final = frozenset((301, 302, 303, 307, 308))
_ABOUT_THE_BODY: Final = ("content-type", "content-length", "content-encoding", "transfer-encoding")
_FOR_ONE_ORIGIN: Final = ("authorization", "cookie", "cookie2", "proxy-authorization", "www-authenticate")

_BROKEN_BODY: Final = "error decoding response body"
_TIMED_OUT: Final = "http/request failed: route-aware request timed out"

Headers = dict[str, list[str]]
"""Names in lower case, in order of first appearance, each with its values in order."""


class _Request(Struct):
    """What is sent next; a redirect makes another one of it."""

    method: str
    url: HttpUrl
    headers: Headers
    body: bytes


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


class LocalHttp:
    """Makes requests, with one pool of connections. Belongs to the event loop of its first request."""

    def __init__(self) -> None:
        self._session: ClientSession | None = None

    async def open(self, params: HttpRequestParams) -> Exchange:
        """Send the request; answered with the whole body, or with the headers if it is streamed.

        Raises RpcError: -32602 for a request that cannot be sent, -32603 for one that failed.
        """
        import asyncio

        request = _prepare(params, os.environ)
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

        _end_with_connection(response)
        result = HttpRequestResult(response.status, _received_headers(response.raw_headers), "")
        if params.stream_response:
            return Exchange(params.request_id, result, response, deadline)
        try:
            result.body_base64 = encode(await _read_all(response, deadline))
        finally:
            response.close()
        return Exchange(params.request_id, result, None, None)

    async def close(self) -> None:
        """Drop every connection. Bodies still being read break off."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _follow(self, request: _Request, follow: bool) -> ClientResponse:
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
            request = _redirected(request, response.status, target)

    async def _send(self, request: _Request) -> ClientResponse:
        from aiohttp import ClientError

        try:
            return await self._transmit(request)
        except (ClientError, OSError, ValueError) as error:
            text = f"http/request failed: error sending request for url ({request.url})"
            raise internal_error(text) from error

    async def _transmit(self, request: _Request) -> ClientResponse:
        """Through aiohttp, which gets everything its own way and is corrected before it is sent."""
        from io import BytesIO

        from multidict import CIMultiDict
        from yarl import URL

        lines = CIMultiDict(_lines(request))

        async def as_written(prepared: ClientRequest, send: ClientHandlerType) -> ClientResponse:
            prepared.method = request.method
            prepared.headers = lines
            return await send(prepared)

        body: bytes | BytesIO | None = request.body or None
        if len(request.body) > MIB:
            body = BytesIO(request.body)  # written in pieces, so that it does not hold up the loop
        proxy = _proxy_for(request.url, os.environ)
        return await self._open_session().request(
            request.method,
            URL(request.url.without_fragment(), encoded=True),
            data=body,
            chunked=True if "transfer-encoding" in lines else None,
            skip_auto_headers=("content-type",),
            allow_redirects=False,
            proxy=None if proxy is None else URL(proxy),
            middlewares=(as_written,),
        )

    def _open_session(self) -> ClientSession:
        if self._session is None:
            from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

            self._session = ClientSession(
                connector=TCPConnector(limit=0),  # a hundred stalled streams must not stop the next one
                cookie_jar=DummyCookieJar(),
                timeout=ClientTimeout(total=None, sock_connect=None),
                auto_decompress=False,
                read_bufsize=_READ_BUFFER_BYTES,
                max_line_size=MAX_HEADER_BYTES,
                max_field_size=MAX_HEADER_BYTES,
            )
        return self._session


# Before it is sent -------------------------------------------------------------------------------


def _prepare(params: HttpRequestParams, environ: Mapping[str, str]) -> _Request:
    """Check everything that can be checked without sending it, in the order peers are used to."""
    try:
        body = decode(params.body_base64 or "")
    except ValueError as error:
        raise invalid_params(str(error)) from None
    if not _TOKEN.fullmatch(params.method):
        raise invalid_params("http/request method is invalid: invalid HTTP method")
    try:
        url = parse_url(params.url)
    except UnsupportedScheme as error:
        raise invalid_params(f"http/request only supports http and https URLs, got {error.scheme}") from None
    except UrlError as error:
        raise invalid_params(f"http/request url is invalid: {error}") from None
    headers: Headers = {}
    for header in params.headers:
        if not _TOKEN.fullmatch(header.name):
            raise invalid_params("http/request header name is invalid: invalid HTTP header name")
        headers.setdefault(header.name.lower(), []).append(_header_value(header, environ))
    if (url.user or url.password) and "authorization" not in headers:
        headers |= _basic_authorization(url)
    return _Request(params.method, url, headers, body)


def _header_value(header: HttpRequestHeader, environ: Mapping[str, str]) -> str:
    value = header.value
    if (name := header.value_env_var) is not None:
        if name.upper() in DENIED_VARIABLES:
            raise invalid_params(
                f"http/request header {header.name} cannot use executor environment variable {name}"
            )
        secret = environ.get(name)
        if secret is None or not _is_text(secret):
            raise invalid_params(
                f"http/request header {header.name} requires executor environment variable {name}"
            )
        if not secret:
            raise invalid_params(
                f"http/request header {header.name} requires a non-empty executor environment variable {name}"
            )
        value += secret
    if not _HEADER_VALUE.fullmatch(value):
        raise invalid_params(
            f"http/request header value is invalid for {header.name}: failed to parse header value"
        )
    return value


def _is_text(value: str) -> bool:
    """Whether a variable is UTF-8, which is all that a header can carry."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _basic_authorization(url: HttpUrl) -> Headers:
    """The user in the URL as a header; one that is not UTF-8 is ignored."""
    from urllib.parse import unquote_to_bytes

    user, password = unquote_to_bytes(url.user), unquote_to_bytes(url.password)
    try:
        pair = f"{user.decode()}:{password.decode()}"
    except UnicodeDecodeError:
        return {}
    return {"authorization": [f"Basic {encode(pair.encode())}"]}


def _lines(request: _Request) -> list[tuple[str, str]]:
    """The header lines to send. The length of the body is ours to say, whatever the caller said."""
    headers = dict(request.headers)
    headers.setdefault("accept", ["*/*"])
    headers.setdefault("host", [request.url.authority])
    if request.body and (codings := ", ".join(headers.get("transfer-encoding", ()))):
        chunked = codings.lower().endswith("chunked")
        headers["transfer-encoding"] = [codings if chunked else f"{codings}, chunked"]
        headers.pop("content-length", None)
    else:
        headers.pop("transfer-encoding", None)
        if request.body or "content-length" in headers:
            headers["content-length"] = [str(len(request.body))]
    return [(name, value) for name, values in headers.items() for value in values]


def _proxy_for(url: HttpUrl, environ: Mapping[str, str]) -> str | None:
    """The proxy that the server's environment names for this URL.

    Not left to aiohttp: its `trust_env` would also send passwords out of `~/.netrc`.
    """
    own = f"{url.scheme}_proxy"
    for name in (own.upper(), own, "ALL_PROXY", "all_proxy"):
        if name == "HTTP_PROXY" and "REQUEST_METHOD" in environ:
            continue  # under CGI this is the caller's `Proxy:` header, not a setting
        if proxy := environ.get(name):
            if _bypasses_proxy(url.host, environ.get("NO_PROXY") or environ.get("no_proxy") or ""):
                return None
            return proxy if "://" in proxy else f"http://{proxy}"
    return None


def _bypasses_proxy(host: str, exceptions: str) -> bool:
    """`NO_PROXY`: names with everything below them, addresses, networks, or `*`."""
    if not exceptions:
        return False
    from ipaddress import ip_address, ip_network

    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        address = None
    for exception in (entry.strip().lower() for entry in exceptions.split(",")):
        if exception == "*":
            return True
        if address is None:
            name = exception.removeprefix(".")
            if name and (host == name or host.endswith(f".{name}")):
                return True
            continue
        try:
            if address in ip_network(exception, strict=False):
                return True
        except ValueError:
            continue  # a name, and this is an address
    return False


# After it was sent -------------------------------------------------------------------------------


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


def _redirected(request: _Request, status: int, target: HttpUrl) -> _Request:
    """The next request. Secrets stay with their origin; browsers' rules for what becomes of a POST."""
    headers = dict(request.headers)
    method, body = request.method, request.body
    if (status == 303 and method not in ("GET", "HEAD")) or (status in (301, 302) and method == "POST"):
        method, body = "GET", b""
        for name in _ABOUT_THE_BODY:
            headers.pop(name, None)
    same_origin = target.origin == request.url.origin
    if not same_origin:
        for name in _FOR_ONE_ORIGIN:
            headers.pop(name, None)
    if request.url.scheme == "https" and target.scheme == "http":
        headers.pop("referer", None)
    else:
        came_from = request.url.without_fragment() if same_origin else f"{request.url.origin}/"
        headers["referer"] = [came_from]
    return _Request(method, target, headers, body)


def _received_headers(raw: Iterable[tuple[bytes, bytes]]) -> list[HttpHeader]:
    """Names in lower case and together; values that are not readable ASCII cannot be told, so are not."""
    headers: Headers = {}
    for name, value in raw:
        if _READABLE_VALUE.fullmatch(value):
            headers.setdefault(name.decode("ascii", "replace").lower(), []).append(value.decode("ascii"))
    return [HttpHeader(name, value) for name, values in headers.items() for value in values]


class _BrokenBody(Exception):
    """The body ended before its end, was not what it said it was, or took too long."""


def _end_with_connection(response: ClientResponse) -> None:
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


async def _read_all(response: ClientResponse, deadline: float | None) -> bytes:
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
