"""The far end of HTTP requests from this machine, and requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from exec_server.local.http import Exchange, LocalHttp
from exec_server.wire.base64 import decode
from exec_server.wire.errors import RpcError
from exec_server.wire.http import HttpBodyDelta, HttpRequestParams, decode_request

__all__ = [
    "BROKEN_BODIES",
    "DEAD",
    "OK",
    "Far",
    "always",
    "failure",
    "header",
    "joined",
    "machine",
    "params",
    "received",
    "run",
    "sent",
    "serve",
    "streamed",
]

DEAD = "http://127.0.0.1:1"
"""Nothing listens there."""


def params(url: str, method: str = "GET", **fields: Any) -> HttpRequestParams:
    return decode_request({"method": method, "url": url, "requestId": "r", **fields})


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


BROKEN_BODIES = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\npartial",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\npartial\r\n",
]

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


def streamed(
    answer: bytes, method: str = "GET", *, close: bool = True, **fields: Any
) -> tuple[Exchange, list[HttpBodyDelta]]:
    async def work() -> tuple[Exchange, list[HttpBodyDelta]]:
        async with machine() as http, always(answer, close=close) as far:
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
