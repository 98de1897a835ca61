"""HTTP requests made from a machine across a connection, their bodies whole or as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import msgspec
from msgspec import Raw

from ..services import Headers, Http, HttpAnswer
from ..wire import base64
from ..wire.errors import METHOD_NOT_FOUND
from ..wire.http import HttpBodyDelta, HttpHeader, HttpRequestHeader, HttpRequestParams, HttpRequestResult
from .errors import ConnectionLost, ExecServerError, HttpFailed, ProtocolError, ServerRejected, Unsupported

if TYPE_CHECKING:
    from .client import Client

__all__ = ["MAX_WAITING_BYTES", "RemoteHttp", "RemoteHttpBody"]

MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
"""Of a streamed body that nobody reads: the protocol cannot make a single stream wait, so beyond this it
fails instead of taking all memory."""


class RemoteHttp:
    """Implements services.Http; `client.http` is one.

    Nothing is repeated after a broken connection: a request without an answer raises ConnectionLost, and
    so does a body that was still coming.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._streams: dict[str, RemoteHttpBody] = {}
        client.listen("http/request/bodyDelta", self._arrived, self._lost)

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Headers = (),
        env_headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: float | None = None,
        follow_redirects: bool = True,
    ) -> HttpAnswer:
        """One request and its whole answer. `timeout` covers both."""
        params = self._params(method, url, headers, env_headers, body, timeout, follow_redirects)
        result = await self._call(params)
        return HttpAnswer(result.status, _pairs(result.headers), _content(result.body_base64))

    def stream(
        self,
        method: str,
        url: str,
        *,
        headers: Headers = (),
        env_headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: float | None = None,
        follow_redirects: bool = True,
    ) -> RemoteHttpBody:
        """`async with http.stream("GET", url) as answer: async for block in answer: ...`

        Leaving early drops what still comes: the protocol has no word for stopping it.
        """
        params = self._params(method, url, headers, env_headers, body, timeout, follow_redirects)
        params.stream_response = True
        return RemoteHttpBody(self, params)

    def _params(
        self,
        method: str,
        url: str,
        headers: Headers,
        env_headers: Mapping[str, str] | None,
        body: bytes | None,
        timeout: float | None,
        follow_redirects: bool,
    ) -> HttpRequestParams:
        if env_headers and not self._client.has("httpHeaderEnvVars"):
            raise Unsupported("this server does not put variables of its environment into headers")
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        sent = [HttpRequestHeader(name, value) for name, value in pairs]
        sent += [HttpRequestHeader(name, "", variable) for name, variable in (env_headers or {}).items()]
        return HttpRequestParams(
            method=method,
            url=url,
            request_id=uuid4().hex,
            headers=sent,
            body_base64=None if body is None else base64.encode(body),
            timeout_ms=None if timeout is None else max(round(timeout * 1000), 0),
            redirect_policy="follow" if follow_redirects else "stop",
        )

    async def _call(self, params: HttpRequestParams) -> HttpRequestResult:
        try:
            return await self._client.call("http/request", params, HttpRequestResult)
        except ServerRejected as error:
            if error.code == METHOD_NOT_FOUND:
                raise Unsupported("this server has no `http/request`") from None
            raise HttpFailed(error.method, error.code, error.message) from None

    def _arrived(self, params: Raw) -> None:
        delta = msgspec.json.decode(params, type=HttpBodyDelta)
        stream = self._streams.get(delta.request_id)
        if stream is not None:
            stream.put(delta)

    def _lost(self, reason: str) -> None:
        for stream in list(self._streams.values()):
            stream.fail(ConnectionLost(reason))


class RemoteHttpBody:
    """An answer whose body is still coming. Made by `RemoteHttp.stream`."""

    def __init__(self, http: RemoteHttp, params: HttpRequestParams) -> None:
        self._http = http
        self._params = params
        self._blocks: deque[bytes] = deque()
        self._waiting = 0
        self._next_seq = 1
        self._news = asyncio.Event()
        self._done = False
        self._failure: ExecServerError | None = None
        self.status = 0
        self.headers: list[tuple[str, str]] = []

    async def __aenter__(self) -> RemoteHttpBody:
        streams = self._http._streams
        streams[self._params.request_id] = self
        try:
            result = await self._http._call(self._params)
        except BaseException:
            del streams[self._params.request_id]
            raise
        self.status = result.status
        self.headers = _pairs(result.headers)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http._streams.pop(self._params.request_id, None)
        self._done = True
        self._blocks.clear()
        self._news.set()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._blocks:
            if self._failure is not None:
                raise self._failure
            if self._done:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        block = self._blocks.popleft()
        self._waiting -= len(block)
        return block

    def put(self, delta: HttpBodyDelta) -> None:
        """A piece arrived; they are numbered from 1 and come in order."""
        if self._done or self._failure is not None:
            return
        if delta.seq != self._next_seq:
            self.fail(ProtocolError(f"a piece of a body is missing: {self._next_seq} before {delta.seq}"))
            return
        self._next_seq += 1
        data = _content(delta.delta_base64)
        if data:
            self._blocks.append(data)
            self._waiting += len(data)
        if self._waiting > MAX_WAITING_BYTES:
            self._blocks.clear()
            self.fail(
                ExecServerError(
                    f"{self._waiting} bytes of a streamed body wait to be read, more than the"
                    f" {MAX_WAITING_BYTES} that are kept: read faster, or use `request`"
                )
            )
        elif delta.done:
            if delta.error is not None:
                self.fail(HttpFailed("http/request", 0, delta.error))
            self._done = True
        self._news.set()

    def fail(self, error: ExecServerError) -> None:
        """What has come can still be read; then the error."""
        if not self._done and self._failure is None:
            self._failure = error
            self._news.set()


def _pairs(headers: list[HttpHeader]) -> list[tuple[str, str]]:
    return [(header.name, header.value) for header in headers]


def _content(text: str) -> bytes:
    try:
        return base64.decode(text)
    except ValueError as error:
        raise ProtocolError(f"the server sent a body that is not base64: {error}") from None


if TYPE_CHECKING:
    _IS_COMPLETE: type[Http] = RemoteHttp

    def _body_is_complete(body: RemoteHttpBody) -> Any:
        from ..services import HttpBody

        complete: HttpBody = body
        return complete
