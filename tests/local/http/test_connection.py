"""What is received: answers as servers really send them."""

from __future__ import annotations

import asyncio
import gzip
import socket

import pytest

from exec_server.local.http import MAX_BUFFERED_BODY_BYTES, Exchange, body
from exec_server.wire.base64 import decode
from exec_server.wire.errors import INTERNAL_ERROR, RpcError
from support.far import BROKEN_BODIES, OK, Far, always, joined, machine, params, received, run, streamed

# What is sent, is sent once ----------------------------------------------------------------------


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
def test_a_request_that_was_read_and_not_answered_is_not_sent_again(method: str, used_before: bool) -> None:
    async def work() -> list[str]:
        async def answer(path: str, writer: asyncio.StreamWriter) -> bool:
            if path == "/drop":
                return True
            writer.write(OK)
            return False

        async with machine() as http, Far(answer) as far:
            if used_before:
                await http.open(params(far.url))
            with pytest.raises(RpcError, match="error sending request"):
                await http.open(params(f"{far.url}/drop", method, bodyBase64="YQ=="))
            assert far.connections == 1
            return far.requests[used_before:]

    assert len(run(work())) == 1


def test_a_connection_closed_while_it_was_idle_is_not_used_again() -> None:
    async def work() -> int:
        ends: list[asyncio.StreamWriter] = []

        async def answer(_: str, writer: asyncio.StreamWriter) -> bool:
            ends.append(writer)
            writer.write(OK)
            return False

        async with machine() as http, Far(answer) as far:
            await http.open(params(far.url))
            # Before the loop has had a chance to see it.
            ends[0].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            await http.open(params(far.url, "POST"))
            return far.connections

    assert run(work()) == 2


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


@pytest.mark.parametrize("answer", BROKEN_BODIES)
def test_a_body_that_breaks_off(answer: bytes) -> None:
    with pytest.raises(RpcError) as caught:
        received(answer)
    assert (caught.value.code, caught.value.message) == (
        INTERNAL_ERROR,
        "failed to read http/request response body: error decoding response body",
    )


def test_a_body_too_large_to_answer_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_BUFFERED_BODY_BYTES", 1000)
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


# Lengths and codings, as the reference takes them --------------------------------------------------


def answered(head: str, body: bytes = b"ok", method: str = "GET", status: int = 200) -> Exchange:
    lines = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status} X", *head.splitlines()))
    return received(lines.encode() + b"\r\n" + body, method)


CHUNKED_OK = b"2\r\nok\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("content-length: 2\ncontent-length: 2", b"ok"),
        ("content-length: 2\nx: y\nContent-Length: 02", b"ok"),
        ("content-length: 2, 2", b"ok"),
        ("content-length: 2\nx: y", b"ok, and what nobody asked for"),
        ("content-length: 9\ntransfer-encoding: chunked", CHUNKED_OK),
        ("transfer-encoding: chunked\ncontent-length: 1\ncontent-length: 2", CHUNKED_OK),
        ("transfer-encoding: identity\ncontent-length: 1", b"ok"),
    ],
)
def test_a_length_that_others_understand(head: str, body: bytes) -> None:
    result = answered(head, body).result
    assert decode(result.body_base64) == b"ok"
    said = sorted((line.partition(": ")[0].lower(), line.partition(": ")[2]) for line in head.splitlines())
    assert sorted((one.name, one.value) for one in result.headers) == said


@pytest.mark.parametrize(
    "head",
    [
        "content-length: 2\ncontent-length: 3",
        "content-length: 2, 3",
        "content-length: 2,",
        "content-length: +2",
        "content-length: two",
        "content-length:",
        "content-length: 99999999999999999999",
        "content-length : 2",
        "content-length: 2\n more",
        "x-folded: one\n two\ncontent-length: 2",
        "\n".join(["content-length: 2"] * 40),
    ],
)
def test_a_head_that_nobody_understands(head: str) -> None:
    with pytest.raises(RpcError) as caught:
        answered(head)
    assert caught.value.message.startswith("http/request failed: error sending request for url (http://")


@pytest.mark.parametrize(("status", "method"), [(204, "GET"), (304, "GET"), (200, "HEAD")])
def test_where_there_is_no_body_its_length_does_not_matter(status: int, method: str) -> None:
    result = answered("content-length: 2\ncontent-length: two", b"", method, status).result
    assert (result.status, result.body_base64) == (status, "")
    assert [one.value for one in result.headers] == ["2", "two"]


def test_a_provisional_answer_has_its_own_head() -> None:
    provisional = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\ncontent-length: 9\r\n\r\n"
    result = received(provisional + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").result
    assert [(one.name, one.value) for one in result.headers] == [("content-length", "2")]
    assert decode(result.body_base64) == b"ok"


def test_a_length_said_twice_leaves_the_connection_usable() -> None:
    async def work() -> int:
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nok"
        async with machine() as http, always(answer) as far:
            for _ in range(3):
                await http.open(params(far.url))
            return far.connections

    assert run(work()) == 1


@pytest.mark.parametrize("nonsense", [b"hello", b"hello\r\n"])
def test_nonsense_is_not_waited_for(nonsense: bytes) -> None:
    """The connection stays open: whoever waited for the end of the head would wait for ever."""
    with pytest.raises(RpcError) as caught:
        received(nonsense, close=False)
    assert caught.value.code == INTERNAL_ERROR


BROKEN_CHUNKS = [
    pytest.param(b"2\r\nok\r\nzz\r\nno\r\n0\r\n\r\n", b"ok", id="size"),
    pytest.param(b"zz\r\nno\r\n0\r\n\r\n", b"", id="first size"),
    pytest.param(b"2\r\nokXX2\r\nok\r\n0\r\n\r\n", b"ok", id="end"),
    pytest.param(b"11111111111111111\r\nok\r\n0\r\n\r\n", b"", id="too large"),
    pytest.param(b"\r\nok\r\n0\r\n\r\n", b"", id="no size"),
    pytest.param(b"2\nok\n0\n\n", b"", id="bare line feeds"),
]
"""Sent together with the head: the parser must not lose the head over them."""


@pytest.mark.parametrize(("chunks", "before"), BROKEN_CHUNKS)
@pytest.mark.parametrize("close", [True, False])
def test_a_broken_chunk(chunks: bytes, before: bytes, close: bool) -> None:
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks
    with pytest.raises(RpcError) as caught:
        received(answer, close=close)
    assert (caught.value.code, caught.value.message) == (
        INTERNAL_ERROR,
        "failed to read http/request response body: error decoding response body",
    )
    exchange, deltas = streamed(answer, close=close)
    assert exchange.result.status == 200
    assert joined(deltas) == before
    assert deltas[-1].error == "error decoding response body"
