"""HTTP requests from this machine: sent as written, answered as received, ended in time."""

from __future__ import annotations

import asyncio
import gzip
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from aiohttp import web

from exec_server.local import http as http_module
from exec_server.local.http import MAX_BUFFERED_BODY_BYTES, MAX_DELTA_BYTES, Exchange, LocalHttp
from exec_server.wire.base64 import decode, encode
from exec_server.wire.errors import INTERNAL_ERROR, INVALID_PARAMS, RpcError
from exec_server.wire.http import HttpBodyDelta, HttpRequestParams

PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
DEAD = "http://127.0.0.1:1"
"""Nothing listens there."""


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def params(url: str, method: str = "GET", **fields: Any) -> HttpRequestParams:
    return msgspec.convert(
        {"method": method, "url": url, "requestId": "r", **fields}, HttpRequestParams, strict=True
    )


def header(name: str, value: str, variable: str | None = None) -> dict[str, str | None]:
    return {"name": name, "value": value, "valueEnvVar": variable}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await work

    return asyncio.run(bounded())


@asynccontextmanager
async def machine() -> AsyncIterator[LocalHttp]:
    http = LocalHttp()
    try:
        yield http
    finally:
        await http.close()


class Far:
    """A server that records the exact bytes of each request and answers with the exact bytes it is told."""

    def __init__(self, answer: Callable[[str, asyncio.StreamWriter], Awaitable[bool | None]]) -> None:
        self._answer = answer
        self._tasks: set[asyncio.Task[Any]] = set()
        self.requests: list[str] = []
        self.connections = 0
        self.url = ""

    async def __aenter__(self) -> Far:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._tasks.add(asyncio.ensure_future(self._talk(reader, writer)))

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            keep = True
            while keep:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                body = b""
                for line in head.lower().split("\r\n"):
                    if line.startswith("content-length:"):
                        body = await reader.readexactly(int(line.partition(":")[2]))
                    elif line == "transfer-encoding: chunked":
                        body = await reader.readuntil(b"0\r\n\r\n")
                self.requests.append(head + body.decode("latin-1"))
                keep = not await self._answer(head.split(" ")[1], writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other side is done
        finally:
            writer.close()


def always(answer: bytes, *, close: bool = False) -> Far:
    async def send(_: str, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer)
        return close

    return Far(send)


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def sent(url: str = "http://{host}/x", method: str = "GET", **fields: Any) -> str:
    """What arrives at the far end, its port left out."""

    async def work() -> str:
        async with machine() as http, always(OK) as far:
            await http.open(params(url.replace("{host}", f"127.0.0.1:{far.port}"), method, **fields))
            return far.requests[0].replace(str(far.port), "PORT")

    return str(run(work()))


def received(answer: bytes, method: str = "GET", *, close: bool = True, **fields: Any) -> Exchange:
    async def work() -> Exchange:
        async with machine() as http, always(answer, close=close) as far:
            return await http.open(params(far.url, method, **fields))

    result = run(work())
    assert isinstance(result, Exchange)
    return result


def failure(url: str, method: str = "GET", **fields: Any) -> RpcError:
    async def work() -> None:
        async with machine() as http:
            await http.open(params(url, method, **fields))

    with pytest.raises(RpcError) as caught:
        run(work())
    return caught.value


def streamed(answer: bytes, method: str = "GET", **fields: Any) -> tuple[Exchange, list[HttpBodyDelta]]:
    async def work() -> tuple[Exchange, list[HttpBodyDelta]]:
        async with machine() as http, always(answer, close=True) as far:
            exchange = await http.open(params(far.url, method, streamResponse=True, **fields))
            return exchange, [delta async for delta in exchange.deltas()]

    exchange, deltas = run(work())
    assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
    assert [delta.done for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].delta_base64 == ""
    assert all(delta.error is None for delta in deltas[:-1])
    return exchange, deltas


def joined(deltas: list[HttpBodyDelta]) -> bytes:
    return b"".join(decode(delta.delta_base64) for delta in deltas)


# What is sent ------------------------------------------------------------------------------------


def test_nothing_is_added_but_accept_and_host() -> None:
    assert sent() == "GET /x HTTP/1.1\r\naccept: */*\r\nhost: 127.0.0.1:PORT\r\n\r\n"


@pytest.mark.parametrize("method", ["get", "Post", "FOO-bar!", "HEADS"])
def test_the_case_of_the_method_is_kept(method: str) -> None:
    assert sent(method=method).startswith(f"{method} /x HTTP/1.1\r\n")


def test_a_body_brings_its_length() -> None:
    assert sent(method="POST", bodyBase64=encode(b"hello")).endswith("content-length: 5\r\n\r\nhello")


@pytest.mark.parametrize("body", [None, ""])
def test_no_body_has_no_length(body: str | None) -> None:
    assert "content-length" not in sent(method="POST", bodyBase64=body)


def test_headers_keep_order_and_repetition() -> None:
    headers = [header("X-B", "1"), header("a", "2"), header("x-b", "3"), header("X-U", "é"), header("e", "")]
    lines = sent(headers=headers).split("\r\n")
    assert lines[1:7] == ["x-b: 1", "x-b: 3", "a: 2", "x-u: é", "e: ", "accept: */*"]


def test_given_headers_win() -> None:
    headers = [header("Host", "h.example"), header("Accept", "a/b"), header("User-Agent", "me")]
    assert sent(headers=headers) == (
        "GET /x HTTP/1.1\r\nhost: h.example\r\naccept: a/b\r\nuser-agent: me\r\n\r\n"
    )


def test_a_wrong_length_is_corrected() -> None:
    text = sent(method="POST", bodyBase64=encode(b"hello"), headers=[header("Content-Length", "3")])
    assert "content-length: 5\r\n" in text
    assert text.endswith("\r\n\r\nhello")


def test_chunked_is_possible() -> None:
    text = sent(method="POST", bodyBase64=encode(b"hello"), headers=[header("Transfer-Encoding", "chunked")])
    assert text.endswith("\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
    assert "content-length" not in text


def test_expect_does_not_wait_for_an_answer() -> None:
    text = sent(method="POST", bodyBase64=encode(b"hello"), headers=[header("Expect", "100-continue")])
    assert "expect: 100-continue\r\n" in text
    assert text.endswith("hello")


def test_a_large_body_arrives_whole() -> None:
    body = os.urandom(3 << 20)

    async def work() -> bytes:
        async def echo(request: web.Request) -> web.Response:
            return web.Response(body=await request.read())

        async with machine() as http, serve(echo) as url:
            result = (await http.open(params(url, "POST", bodyBase64=encode(body)))).result
            return decode(result.body_base64)

    assert run(work()) == body


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("user:pass", "dXNlcjpwYXNz"),
        ("user", "dXNlcjo="),
        (":pw", "OnB3"),
        ("us%65r:p%40s:s", "dXNlcjpwQHM6cw=="),
        ("ü:é", "w7w6w6k="),
    ],
)
def test_a_user_in_the_url_becomes_a_header(user: str, expected: str) -> None:
    assert f"authorization: Basic {expected}\r\n" in sent(f"http://{user}@{{host}}/x")


def test_a_user_that_is_not_text_is_left_out() -> None:
    assert "authorization" not in sent("http://a%ff:b@{host}/x")


def test_a_given_authorization_wins_over_the_url() -> None:
    text = sent("http://u:p@{host}/x", headers=[header("Authorization", "mine")])
    assert "authorization: mine\r\n" in text


def test_netrc_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login u password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert "authorization" not in sent()


def test_the_url_is_sent_as_it_is_escaped() -> None:
    text = sent("http://{host}/%7e~%zz/a b'\"?q=%2B+'#frag")
    assert text.startswith("GET /%7e~%zz/a%20b'%22?q=%2B+%27 HTTP/1.1\r\n")


def test_connections_are_used_again() -> None:
    async def work() -> int:
        async with machine() as http, always(OK) as far:
            for _ in range(3):
                await http.open(params(far.url))
            return far.connections

    assert run(work()) == 1


# Variables of the executor -----------------------------------------------------------------------


def test_a_variable_is_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    assert "x-auth: Bearer s3cret\r\n" in sent(headers=[header("X-Auth", "Bearer ", "MY_TOKEN")])


@pytest.mark.parametrize("name", ["openai_api_key", "OPENAI_API_KEY", "Aws_Secret_Access_Key"])
def test_denied_variables_stay_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "secret")
    error = failure(DEAD, headers=[header("X-A", "", name)])
    assert error.code == INVALID_PARAMS
    assert error.message == f"http/request header X-A cannot use executor environment variable {name}"


def test_an_unset_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    error = failure(DEAD, headers=[header("X-A", "", "MY_TOKEN")])
    assert error.message == "http/request header X-A requires executor environment variable MY_TOKEN"


def test_a_variable_that_is_not_text_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", os.fsdecode(b"\xff"))
    error = failure(DEAD, headers=[header("X-A", "", "MY_TOKEN")])
    assert error.message == "http/request header X-A requires executor environment variable MY_TOKEN"


def test_an_empty_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "")
    error = failure(DEAD, headers=[header("X-A", "", "MY_TOKEN")])
    assert error.message == (
        "http/request header X-A requires a non-empty executor environment variable MY_TOKEN"
    )


def test_a_variable_cannot_smuggle_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a\r\nx-evil: 1")
    error = failure(DEAD, headers=[header("X-A", "", "MY_TOKEN")])
    assert error.message == "http/request header value is invalid for X-A: failed to parse header value"


# What cannot be sent -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["", "GE T", "GÉT", "G\nT", "(x)", "a:b"])
def test_bad_methods(method: str) -> None:
    error = failure(DEAD, method)
    assert (error.code, error.message) == (
        INVALID_PARAMS,
        "http/request method is invalid: invalid HTTP method",
    )


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("nope", "http/request url is invalid: relative URL without a base"),
        ("http://", "http/request url is invalid: empty host"),
        ("http://a:b/", "http/request url is invalid: invalid port number"),
        ("FTP://x", "http/request only supports http and https URLs, got ftp"),
    ],
)
def test_bad_urls(url: str, text: str) -> None:
    error = failure(url)
    assert (error.code, error.message) == (INVALID_PARAMS, text)


@pytest.mark.parametrize("name", ["", "bad name", "é", "a:b"])
def test_bad_header_names(name: str) -> None:
    error = failure(DEAD, headers=[header(name, "1")])
    assert (error.code, error.message) == (
        INVALID_PARAMS,
        "http/request header name is invalid: invalid HTTP header name",
    )


@pytest.mark.parametrize("value", ["a\nb", "a\x7fb", "a\0b", "\r"])
def test_bad_header_values(value: str) -> None:
    error = failure(DEAD, headers=[header("X-Ab", value)])
    assert error.message == "http/request header value is invalid for X-Ab: failed to parse header value"


def test_the_order_of_complaints() -> None:
    bad_header = [header("bad name", "1")]
    assert "base64" in failure("nope", "G T", bodyBase64="!!", headers=bad_header).message
    assert "method" in failure("nope", "G T", headers=bad_header).message
    assert "url" in failure("nope", headers=bad_header).message
    assert "header" in failure(DEAD, headers=bad_header, timeoutMs=0).message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"{DEAD}/a b#f", f"{DEAD}/a%20b#f"),
        ("http://u:p@127.0.0.1:1", f"{DEAD}/"),
        ("https://127.0.0.1:1/", "https://127.0.0.1:1/"),
    ],
)
def test_nobody_there(url: str, shown: str) -> None:
    error = failure(url)
    assert error.code == INTERNAL_ERROR
    assert error.message == f"http/request failed: error sending request for url ({shown})"


# What is received --------------------------------------------------------------------------------


def test_headers_are_lower_case_and_together() -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nX-B: 1\r\nA-a: 2\r\nx-b: 3\r\nSet-Cookie: k=v\r\nX-Uni: \xc3\xa9\r\n"
        b"X-Tab: a\tb\r\nX-Empty:\r\nX-Sp:   a b  \r\ncontent-length: 0\r\n\r\n"
    )
    headers = [(one.name, one.value) for one in received(answer).result.headers]
    assert headers == [
        ("x-b", "1"),
        ("x-b", "3"),
        ("a-a", "2"),
        ("set-cookie", "k=v"),
        ("x-tab", "a\tb"),
        ("x-empty", ""),
        ("x-sp", "a b"),
        ("content-length", "0"),
    ]


@pytest.mark.parametrize("status", [200, 299, 404, 500, 999])
def test_every_status_is_a_success(status: int) -> None:
    result = received(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\nok" % status).result
    assert (result.status, decode(result.body_base64)) == (status, b"ok")


def test_bodies_stay_compressed() -> None:
    packed = gzip.compress(b"hello")
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)
    assert decode(received(head + packed).result.body_base64) == packed


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 10\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
)
def test_answers_without_a_body(answer: bytes) -> None:
    assert received(answer).result.body_base64 == ""


def test_head_has_no_body() -> None:
    result = received(b"HTTP/1.1 200 OK\r\ncontent-length: 55\r\n\r\n", "HEAD", close=False).result
    assert (result.status, result.body_base64) == (200, "")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\nuntil close",
        b"HTTP/1.0 200 OK\r\n\r\nuntil close",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\nuntil close",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nuntil \r\n5\r\nclose\r\n0\r\n\r\n",
    ],
)
def test_ways_to_send_a_body(answer: bytes) -> None:
    assert decode(received(answer).result.body_base64) == b"until close"


def test_long_headers_are_received() -> None:
    answer = b"HTTP/1.1 200 OK\r\nx-long: " + b"v" * 100_000 + b"\r\ncontent-length: 0\r\n\r\n"
    assert len(received(answer).result.headers[0].value) == 100_000


@pytest.mark.parametrize("answer", [b"", b"hello\r\n\r\n", b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n"])
def test_answers_that_are_none(answer: bytes) -> None:
    with pytest.raises(RpcError) as caught:
        received(answer)
    assert caught.value.code == INTERNAL_ERROR
    assert caught.value.message.startswith("http/request failed: error sending request for url (http://")


BROKEN_BODIES = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\npartial",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\npartial\r\n",
]


@pytest.mark.parametrize("answer", BROKEN_BODIES)
def test_a_body_that_breaks_off(answer: bytes) -> None:
    with pytest.raises(RpcError) as caught:
        received(answer)
    assert (caught.value.code, caught.value.message) == (
        INTERNAL_ERROR,
        "failed to read http/request response body: error decoding response body",
    )


def test_a_body_too_large_to_answer_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "MAX_BUFFERED_BODY_BYTES", 1000)
    fits = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b"x" * 1000
    assert len(decode(received(fits).result.body_base64)) == 1000
    with pytest.raises(RpcError) as caught:
        received(b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n" + b"x" * 1001)
    assert caught.value.code == INTERNAL_ERROR
    assert "more than 1000 bytes" in caught.value.message
    assert "streamResponse" in caught.value.message


def test_the_largest_body_fits_a_frame() -> None:
    assert 4 * (MAX_BUFFERED_BODY_BYTES // 3 + 1) < 16 * 1024 * 1024


def test_no_cookies_are_kept() -> None:
    async def work() -> list[str]:
        answer = b"HTTP/1.1 200 OK\r\nset-cookie: k=v\r\ncontent-length: 0\r\n\r\n"
        async with machine() as http, always(answer) as far:
            await http.open(params(far.url))
            await http.open(params(far.url))
            return far.requests

    assert all("cookie" not in request for request in run(work()))


# Streaming ---------------------------------------------------------------------------------------


@asynccontextmanager
async def serve(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """A real HTTP server."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def test_a_stream() -> None:
    exchange, deltas = streamed(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
    assert (exchange.result.status, exchange.result.body_base64) == (200, "")
    assert joined(deltas) == b"hello"
    assert deltas[-1].error is None


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_stream_without_a_body_is_its_end(method: str) -> None:
    _, deltas = streamed(b"HTTP/1.1 204 No Content\r\n\r\n", method)
    assert deltas == [HttpBodyDelta("r", 1, "", True, None)]


@pytest.mark.parametrize("answer", BROKEN_BODIES)
def test_a_broken_stream_delivers_what_arrived(answer: bytes) -> None:
    _, deltas = streamed(answer)
    assert joined(deltas) == b"partial"
    assert deltas[-1].error == "error decoding response body"


def test_a_stream_of_nonsense_ends() -> None:
    """aiohttp closes the connection over a bad chunk, and would leave the reader waiting."""

    async def work() -> list[HttpBodyDelta]:
        first_seen = asyncio.Event()

        async def answer(_: str, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\npartial\r\n")
            await first_seen.wait()
            writer.write(b"ZZ\r\n")
            return False

        async with machine() as http, Far(answer) as far:
            exchange = await http.open(params(far.url, streamResponse=True))
            deltas: list[HttpBodyDelta] = []
            async for delta in exchange.deltas():
                deltas.append(delta)
                first_seen.set()
            return deltas

    deltas = run(work())
    assert joined(deltas) == b"partial"
    assert deltas[-1].error == "error decoding response body"


def test_a_large_stream_comes_in_bounded_pieces() -> None:
    body = os.urandom(1 << 20) * 5

    async def work() -> list[HttpBodyDelta]:
        async def send(_: web.Request) -> web.Response:
            return web.Response(body=body)

        async with machine() as http, serve(send) as url:
            exchange = await http.open(params(url, streamResponse=True))
            return [delta async for delta in exchange.deltas()]

    deltas = run(work())
    assert joined(deltas) == body
    assert max(len(decode(delta.delta_base64)) for delta in deltas) <= MAX_DELTA_BYTES


def test_pieces_come_as_they_are_sent() -> None:
    async def work() -> list[bytes]:
        turns: asyncio.Queue[bytes] = asyncio.Queue()

        async def drip(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            while piece := await turns.get():
                await response.write(piece)
            return response

        pieces: list[bytes] = []
        async with machine() as http, serve(drip) as url:
            exchange = await http.open(params(url, streamResponse=True))
            turns.put_nowait(b"one")
            async for delta in exchange.deltas():
                pieces.append(decode(delta.delta_base64))
                turns.put_nowait(b"two" if len(pieces) == 1 else b"")
        return pieces

    assert run(work()) == [b"one", b"two", b""]


def test_many_stalled_streams_do_not_stop_another_request() -> None:
    async def work() -> bytes:
        async def answer(path: str, writer: asyncio.StreamWriter) -> bool:
            if path == "/stall":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx")
                await asyncio.Event().wait()
            writer.write(OK)
            return False

        async with machine() as http, Far(answer) as far:
            stalled = [await http.open(params(f"{far.url}/stall", streamResponse=True)) for _ in range(120)]
            result = (await http.open(params(far.url))).result
            for exchange in stalled:
                await exchange.close()
            return decode(result.body_base64)

    assert run(work()) == b"ok"


def test_closing_ends_a_stream_early() -> None:
    async def work() -> tuple[bool, list[HttpBodyDelta]]:
        gone = asyncio.Event()

        async def answer(_: str, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await writer.drain()
            try:
                while True:
                    writer.write(b"x" * 65536)
                    await writer.drain()
            except ConnectionError:
                gone.set()
            return True

        async with machine() as http, Far(answer) as far:
            exchange = await http.open(params(far.url, streamResponse=True))
            await exchange.close()
            await exchange.close()
            await gone.wait()
            return True, [delta async for delta in exchange.deltas()]

    assert run(work()) == (True, [])


def test_closing_everything_breaks_streams_off() -> None:
    async def work() -> list[HttpBodyDelta]:
        async def answer(_: str, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx")
            await asyncio.Event().wait()
            return True

        async with machine() as http, Far(answer) as far:
            exchange = await http.open(params(far.url, streamResponse=True))
            deltas: list[HttpBodyDelta] = []
            async for delta in exchange.deltas():
                deltas.append(delta)
                await http.close()
            return deltas

    deltas = run(work())
    assert [delta.done for delta in deltas] == [False, True]
    assert deltas[-1].error == "error decoding response body"


def test_a_buffered_answer_has_no_deltas() -> None:
    async def work() -> list[HttpBodyDelta]:
        async with machine() as http, always(OK) as far:
            exchange = await http.open(params(far.url))
            return [delta async for delta in exchange.deltas()]

    assert run(work()) == []


# Deadlines ---------------------------------------------------------------------------------------

SILENT = b""
STALLS = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\npartial"


def stalling(answer: bytes) -> Far:
    async def send(_: str, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer)
        await writer.drain()
        await asyncio.Event().wait()
        return True

    return Far(send)


@pytest.mark.parametrize("stream", [False, True])
def test_no_headers_in_time(stream: bool) -> None:
    async def work() -> None:
        async with machine() as http, stalling(SILENT) as far:
            await http.open(params(far.url, timeoutMs=50, streamResponse=stream))

    with pytest.raises(RpcError) as caught:
        run(work())
    assert (caught.value.code, caught.value.message) == (
        INTERNAL_ERROR,
        "http/request failed: route-aware request timed out",
    )


def test_no_end_of_the_body_in_time() -> None:
    async def work() -> None:
        async with machine() as http, stalling(STALLS) as far:
            await http.open(params(far.url, timeoutMs=200))

    with pytest.raises(RpcError) as caught:
        run(work())
    assert caught.value.message == "failed to read http/request response body: error decoding response body"


def test_no_end_of_a_stream_in_time() -> None:
    async def work() -> list[HttpBodyDelta]:
        async with machine() as http, stalling(STALLS) as far:
            exchange = await http.open(params(far.url, timeoutMs=200, streamResponse=True))
            return [delta async for delta in exchange.deltas()]

    deltas = run(work())
    assert joined(deltas) == b"partial"
    assert (deltas[-1].done, deltas[-1].error) == (True, "error decoding response body")


def test_a_deadline_of_zero_has_passed() -> None:
    assert failure(DEAD, timeoutMs=0).message == "http/request failed: route-aware request timed out"


def test_the_longest_deadline_is_none() -> None:
    assert sent(timeoutMs=2**64 - 1)


def test_redirects_share_one_deadline() -> None:
    async def work() -> None:
        async def answer(path: str, writer: asyncio.StreamWriter) -> bool:
            if path == "/hang":
                await asyncio.Event().wait()
            writer.write(b"HTTP/1.1 302 X\r\nlocation: /hang\r\ncontent-length: 0\r\n\r\n")
            return False

        async with machine() as http, Far(answer) as far:
            await http.open(params(far.url, timeoutMs=200))

    with pytest.raises(RpcError, match="timed out"):
        run(work())


# Redirects ---------------------------------------------------------------------------------------


def redirected(
    status: int, location: str, method: str = "GET", *, redirecting_path: str = "/from", **fields: Any
) -> tuple[Exchange, list[str]]:
    """Ask for a path that redirects once; the answer, and what arrived with ports left out."""

    async def work() -> tuple[Exchange, list[str]]:
        async def answer(path: str, writer: asyncio.StreamWriter) -> bool:
            if path.partition("?")[0] == redirecting_path:
                place = location.replace("{port}", str(far.port))
                writer.write(f"HTTP/1.1 {status} X\r\nlocation: {place}\r\n".encode())
                writer.write(b"content-length: 0\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return False

        async with machine() as http, Far(answer) as far:
            exchange = await http.open(params(f"{far.url}{redirecting_path}?q=1#f", method, **fields))
            return exchange, [request.replace(str(far.port), "PORT") for request in far.requests]

    result: tuple[Exchange, list[str]] = run(work())
    return result


@pytest.mark.parametrize(
    ("status", "method", "then"),
    [
        (301, "POST", "GET"),
        (302, "POST", "GET"),
        (303, "POST", "GET"),
        (303, "PUT", "GET"),
        (301, "PUT", "PUT"),
        (302, "DELETE", "DELETE"),
        (302, "post", "post"),
        (307, "POST", "POST"),
        (308, "PUT", "PUT"),
        (307, "GET", "GET"),
    ],
)
def test_what_becomes_of_a_body(status: int, method: str, then: str) -> None:
    headers = [header("Content-Type", "a/b"), header("X-A", "1")]
    _, requests = redirected(status, "/to", method, bodyBase64=encode(b"hello"), headers=headers)
    assert requests[1].startswith(f"{then} /to HTTP/1.1\r\n")
    assert "x-a: 1\r\n" in requests[1]
    kept = then == method
    assert requests[1].endswith("hello") is kept
    assert ("content-type" in requests[1]) is kept
    assert ("content-length" in requests[1]) is kept


def test_head_stays_head() -> None:
    _, requests = redirected(303, "/to", "HEAD")
    assert requests[1].startswith("HEAD /to ")


def test_the_referer_says_where_we_came_from() -> None:
    _, requests = redirected(302, "/to", headers=[header("Referer", "http://mine/")])
    assert "referer: http://127.0.0.1:PORT/from?q=1\r\n" in requests[1]
    assert "mine" not in requests[1]


def test_secrets_stay_with_their_origin() -> None:
    names = ["Authorization", "Cookie", "Proxy-Authorization", "WWW-Authenticate", "X-Other"]
    headers = [header(name, "secret") for name in names]
    _, same = redirected(302, "/to", headers=headers)
    assert same[1].count("secret") == 5
    _, other = redirected(302, "http://localhost:{port}/to", headers=headers)
    assert other[1].count("secret") == 1
    assert "x-other: secret\r\n" in other[1]
    assert "referer: http://127.0.0.1:PORT/\r\n" in other[1]
    assert "host: localhost:PORT\r\n" in other[1]


def test_a_user_in_a_location_is_not_used() -> None:
    _, requests = redirected(302, "http://u:p@127.0.0.1:{port}/to")
    assert "authorization" not in requests[1]


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("//127.0.0.1:{port}/to", "/to"),
        ("to", "/to"),
        ("../x/./to?a b", "/x/to?a%20b"),
        ("http:/to", "/to"),
        ("\\to", "/to"),
        ("  /to  ", "/to"),
    ],
)
def test_relative_locations(location: str, path: str) -> None:
    _, requests = redirected(302, location)
    assert requests[1].startswith(f"GET {path} ")


@pytest.mark.parametrize("location", ["http://", "http://[bad/", "/é"])
def test_a_location_that_is_none_is_handed_over(location: str) -> None:
    exchange, requests = redirected(302, location)
    assert exchange.result.status == 302
    assert len(requests) == 1


@pytest.mark.parametrize("status", [300, 304, 305, 399])
def test_not_every_3xx_redirects(status: int) -> None:
    exchange, _ = redirected(status, "/to")
    assert exchange.result.status == status


def test_stop_returns_the_redirect() -> None:
    exchange, requests = redirected(302, "/to", redirectPolicy="stop")
    assert exchange.result.status == 302
    assert exchange.result.headers[0].value == "/to"
    assert len(requests) == 1


@pytest.mark.parametrize("location", ["ftp://x/", "file:///etc/passwd", "mailto:x"])
def test_redirects_leave_http_never(location: str) -> None:
    with pytest.raises(RpcError) as caught:
        redirected(302, location)
    scheme = location.partition(":")[0]
    assert caught.value.message == (
        f"http/request failed: redirect target uses unsupported URL scheme: {scheme}"
    )


@pytest.mark.parametrize(("count", "ok"), [(10, True), (11, False)])
def test_ten_redirects_are_enough(count: int, ok: bool) -> None:
    async def work() -> int:
        async def answer(path: str, writer: asyncio.StreamWriter) -> bool:
            left = int(path[1:])
            status = f"302 X\r\nlocation: /{left - 1}" if left else "200 OK"
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
            return False

        async with machine() as http, Far(answer) as far:
            return (await http.open(params(f"{far.url}/{count}"))).result.status

    if ok:
        assert run(work()) == 200
    else:
        with pytest.raises(RpcError) as caught:
            run(work())
        assert (caught.value.code, caught.value.message) == (
            INTERNAL_ERROR,
            "http/request failed: too many redirects",
        )


def test_a_failure_after_a_redirect_names_the_target() -> None:
    with pytest.raises(RpcError) as caught:
        redirected(302, "http://127.0.0.1:1/x")
    assert caught.value.message == (
        "http/request failed: error sending request for url (http://127.0.0.1:1/x)"
    )


def test_a_redirect_can_be_streamed() -> None:
    async def work() -> list[HttpBodyDelta]:
        async def answer(path: str, writer: asyncio.StreamWriter) -> bool:
            redirect = b"HTTP/1.1 302 X\r\nlocation: /to\r\ncontent-length: 3\r\n\r\nnot"
            writer.write(OK if path == "/to" else redirect)
            return False

        async with machine() as http, Far(answer) as far:
            exchange = await http.open(params(far.url, streamResponse=True))
            return [delta async for delta in exchange.deltas()]

    assert joined(run(work())) == b"ok"


# Proxies -----------------------------------------------------------------------------------------


def through_proxy(
    url: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> list[str]:
    """What a proxy sees; `P` in a variable is its address."""

    async def work() -> list[str]:
        async with machine() as http, always(OK) as proxy:
            for name, value in variables.items():
                monkeypatch.setenv(name, value.replace("P", f"127.0.0.1:{proxy.port}"))
            with suppress(RpcError):  # many of these go nowhere; what matters is who was asked
                await http.open(params(url, timeoutMs=5000, **fields))
            return proxy.requests

    requests: list[str] = run(work())
    return requests


@pytest.mark.parametrize(
    "variables",
    [
        {"HTTP_PROXY": "http://P"},
        {"http_proxy": "http://P"},
        {"ALL_PROXY": "http://P"},
        {"HTTP_PROXY": "P"},
        {"HTTP_PROXY": "http://P", "http_proxy": "http://127.0.0.1:1"},
        {"HTTP_PROXY": "http://P", "NO_PROXY": "other, 10.0.0.0/8"},
    ],
)
def test_a_proxy_is_asked(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = through_proxy("http://host.invalid/x?y", variables, monkeypatch)
    assert request == "GET http://host.invalid/x?y HTTP/1.1\r\naccept: */*\r\nhost: host.invalid\r\n\r\n"


@pytest.mark.parametrize(
    ("url", "variables"),
    [
        (f"{DEAD}/", {"HTTP_PROXY": "http://P", "NO_PROXY": "*"}),
        (f"{DEAD}/", {"HTTP_PROXY": "http://P", "NO_PROXY": "a, 127.0.0.1"}),
        (f"{DEAD}/", {"HTTP_PROXY": "http://P", "no_proxy": "127.0.0.0/8"}),
        ("http://localhost:1/", {"HTTP_PROXY": "http://P", "NO_PROXY": ".LocalHost"}),
        ("http://[::1]:1/", {"HTTP_PROXY": "http://P", "NO_PROXY": "::1"}),
        (f"{DEAD}/", {"HTTPS_PROXY": "http://P"}),
        (f"{DEAD}/", {"HTTP_PROXY": "http://P", "REQUEST_METHOD": "GET"}),
        (f"{DEAD}/", {"HTTP_PROXY": ""}),
    ],
)
def test_a_proxy_is_not_asked(url: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert through_proxy(url, variables, monkeypatch) == []


def test_a_proxy_with_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = through_proxy("http://host.invalid/", {"HTTP_PROXY": "http://us%40r:pw@P"}, monkeypatch)
    assert "proxy-authorization: basic dxnacjpwdw==" in request.lower()


def test_tls_goes_through_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> str:
        refusal = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n"
        async with machine() as http, always(refusal, close=True) as proxy:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
            with pytest.raises(RpcError, match="error sending request"):
                await http.open(params("https://host.invalid/"))
            return proxy.requests[0]

    assert run(work()).startswith("CONNECT host.invalid:443 HTTP/1.1\r\n")


def test_a_proxy_we_cannot_speak_to_is_not_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> list[str]:
        async with machine() as http, always(OK) as far:
            monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
            with pytest.raises(RpcError, match="error sending request"):
                await http.open(params(far.url))
            return far.requests

    assert run(work()) == []
