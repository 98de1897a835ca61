"""Bodies in pieces, and in time."""

from __future__ import annotations

import asyncio
import os

import pytest
from aiohttp import web

from exec_server.local.http import MAX_DELTA_BYTES
from exec_server.wire.base64 import decode
from exec_server.wire.errors import INTERNAL_ERROR, RpcError
from exec_server.wire.http import HttpBodyDelta
from support.far import (
    BROKEN_BODIES,
    DEAD,
    OK,
    Far,
    always,
    failure,
    joined,
    machine,
    params,
    run,
    sent,
    serve,
    streamed,
)

# Streaming ---------------------------------------------------------------------------------------


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
