"""transport/door.py: one request head, and who gets the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.limits import Limits
from exec_server.transport.door import MAX_HEAD_BYTES, Answer, Door, Head, _parse_head


def heard(head: Head) -> Answer:
    return Answer(200, f"{head.method} {head.path}")


@asynccontextmanager
async def door(
    route: Callable[[Head], Answer | None] = heard, **limits: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a door."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(
        lambda: Door(route, lambda channel: None, Limits(**limits)), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass  # the door closed first
        listener.close()
        await listener.wait_closed()


async def answer(reader: asyncio.StreamReader) -> tuple[str, str, str]:
    """Status line, headers, body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, _, headers = head.partition("\r\n")
    size = next(
        int(line.split(":")[1]) for line in headers.split("\r\n") if line.startswith("content-length")
    )
    return status, headers, (await reader.readexactly(size)).decode()


def exchange(*requests: bytes, **limits: Any) -> tuple[list[tuple[str, str, str]], bool]:
    """The answers to what is sent, and whether the door closed the connection after them."""

    async def run() -> tuple[list[tuple[str, str, str]], bool]:
        async with door(**limits) as (reader, writer):
            answers = []
            for request in requests:
                writer.write(request)
                answers.append(await answer(reader))
            writer.write_eof()
            return answers, reader.at_eof() or not await reader.read()

    return asyncio.run(run())


def test_a_connection_is_kept_for_more_requests() -> None:
    answers, _ = exchange(b"GET /a HTTP/1.1\r\n\r\n", b"GET /b?x=y HTTP/1.1\r\nA: b\r\n\r\n")
    assert [body for _, _, body in answers] == ["GET /a", "GET /b"]
    assert all("connection" not in headers.lower() for _, headers, _ in answers)
    assert all("date: " in headers for _, headers, _ in answers)


def test_requests_may_come_all_at_once_or_bit_by_bit() -> None:
    async def run() -> None:
        async with door() as (reader, writer):
            writer.write(b"GET /1 HTTP/1.1\r\n\r\n" * 3)
            for _ in range(3):
                assert (await answer(reader))[2] == "GET /1"
            for byte in b"GET /2 HTTP/1.1\r\nName: value\r\n\r\n":
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0)
            assert (await answer(reader))[2] == "GET /2"

    asyncio.run(run())


def test_who_speaks_tls_is_told_that_it_is_the_wrong_port() -> None:
    answers, closed = exchange(b"\x16\x03\x01\x02\x00")
    assert [(status, body) for status, _, body in answers] == [
        ("HTTP/1.1 400 Bad Request", "there is no TLS on this port: use ws:// or http://")
    ]
    assert closed


@pytest.mark.parametrize(
    "request_head", [b"GET / HTTP/1.1\r\nConnection: x, Close\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"]
)
def test_a_client_that_wants_to_close_is_let_go(request_head: bytes) -> None:
    async def run() -> None:
        async with door() as (reader, writer):
            writer.write(request_head)
            assert "connection: close" in (await answer(reader))[1]
            assert await reader.read() == b""

    asyncio.run(run())


@pytest.mark.parametrize(
    "body", [b"Content-Length: 5\r\n\r\nGET /", b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"]
)
def test_a_body_is_not_taken_for_a_request(body: bytes) -> None:
    async def run() -> None:
        async with door() as (reader, writer):
            writer.write(b"POST /x HTTP/1.1\r\n" + body)
            status, headers, text = await answer(reader)
            assert (status, text) == ("HTTP/1.1 200 OK", "POST /x")
            assert "connection: close" in headers
            assert await reader.read() == b""

    asyncio.run(run())


def test_the_head_of_an_answer_without_its_body() -> None:
    async def run() -> None:
        async with door() as (reader, writer):
            writer.write(b"HEAD /x HTTP/1.1\r\n\r\nGET /y HTTP/1.1\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"content-length: 7" in head
            assert (await answer(reader))[2] == "GET /y"

    asyncio.run(run())


MALFORMED = [
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /\r\n\r\n",
    b"GET / HTTP/2\r\n\r\n",
    b"GET  / HTTP/1.1\r\n\r\n",
    b"G<T / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET / HTTP/1.1\r\nna me: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nname : x\r\n\r\n",
    b"GET / HTTP/1.1\r\n folded: x\r\n\r\n",
    b"GET / HTTP/1.1\r\na: x\0y\r\n\r\n",
    b"GET / HTTP/1.1\r\na: x\ny\r\n\r\n",
]


@pytest.mark.parametrize("request_head", MALFORMED)
def test_malformed_heads(request_head: bytes) -> None:
    async def run() -> None:
        async with door() as (reader, writer):
            writer.write(request_head)
            status, _, text = await answer(reader)
            assert (status, text) == ("HTTP/1.1 400 Bad Request", "malformed HTTP request")
            assert await reader.read() == b""

    asyncio.run(run())


@pytest.mark.parametrize("complete", [True, False])
def test_a_head_without_end_is_cut_off(complete: bool) -> None:
    async def run() -> None:
        async with door() as (reader, writer):
            long = b"GET / HTTP/1.1\r\nA: " + b"x" * (MAX_HEAD_BYTES + 1)
            writer.write(long + (b"\r\n\r\n" if complete else b""))
            assert (await answer(reader))[0].startswith("HTTP/1.1 431 ")
            assert await reader.read() == b""

    asyncio.run(run())


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET /kept HTTP/1.1\r\n\r\n"])
def test_a_slow_head_is_not_waited_for(sent: bytes) -> None:
    async def run() -> None:
        async with door(handshake_timeout=0.05) as (reader, writer):
            writer.write(sent)
            if sent.endswith(b"\r\n\r\n"):
                await answer(reader)  # the time begins anew with each request
            async with asyncio.timeout(10):
                try:
                    assert await reader.read() == b""
                except ConnectionError:
                    pass

    asyncio.run(run())


def test_a_slow_one_does_not_get_more_time_by_sending_a_little() -> None:
    async def run() -> None:
        async with door(handshake_timeout=0.2) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\n")
            end = asyncio.create_task(reader.read())
            async with asyncio.timeout(10):
                while not end.done():
                    writer.write(b"A: b\r\n")
                    await asyncio.sleep(0.01)
            assert end.exception() is not None or end.result() == b""

    asyncio.run(run())


def test_what_a_head_says() -> None:
    head = _parse_head(
        b"GET /p%20q?x HTTP/1.1\r\nHost: a\r\nX: 1\r\nX:\t2 \r\nConnection: keep-alive, Upgrade"
    )
    assert head is not None
    assert (head.method, head.path) == ("GET", "/p%20q")
    assert (head.get("x"), head.get("host"), head.get("missing")) == ("1", "a", None)
    assert head.headers[2] == ("x", "2")
    assert head.has_word("connection", "upgrade")
    assert not head.has_word("connection", "close")
    assert not head.has_word("missing", "x")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/readyz", "/readyz"),
        ("http://host/readyz", "/readyz"),
        ("HTTPS://host:1/readyz?x", "/readyz"),
        ("http://host", "/"),
        ("http://host?x", "/"),
        ("http:///readyz", "http:///readyz"),
        ("/http://host/readyz", "/http://host/readyz"),
        ("*", "*"),
    ],
)
def test_the_address_may_be_a_whole_one(target: str, path: str) -> None:
    head = _parse_head(f"GET {target} HTTP/1.1".encode())
    assert head is not None
    assert head.path == path


@given(st.binary(max_size=200) | st.builds(lambda tail: b"GET / HTTP/1.1\r\n" + tail, st.binary(max_size=80)))
def test_any_bytes_are_a_head_or_not(raw: bytes) -> None:
    head = _parse_head(raw)
    if head is not None:
        assert all("\n" not in value and "\0" not in value for _, value in head.headers)
