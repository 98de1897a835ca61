"""HTTP from another machine, through a client: whole answers, bodies as they come, and what breaks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

import exec_server
from exec_server import ConnectionLost, ExecServerError, Unsupported
from exec_server.client import http as module
from exec_server.client.client import Client, ConnectOptions
from exec_server.client.errors import HttpFailed
from exec_server.environments.connect import IN_PROCESS
from exec_server.environments.environment import Environment
from exec_server.testing.faults import Faults
from support.scripted_server import ScriptedServer
from support.server import RunningServer
from support.wait import eventually_async

Scenario = Callable[[Environment, str], Awaitable[None]]


@asynccontextmanager
async def website() -> AsyncIterator[str]:
    """A web server of this test's own."""
    go_on = asyncio.Event()

    async def echo(request: web.Request) -> web.Response:
        items = request.headers.items()
        headers = {f"x-{name}": value for name, value in items if name.lower().startswith("k-")}
        return web.Response(status=418, body=await request.read(), headers=headers)

    async def move(request: web.Request) -> web.Response:
        raise web.HTTPFound("/echo")

    async def pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one")
        await go_on.wait()
        await response.write(b"two")
        return response

    async def let_go(request: web.Request) -> web.Response:
        go_on.set()
        return web.Response()

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=bytes(3_000_000))

    async def broken(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    app = web.Application()
    for handler in (echo, move, pieces, let_go, large, broken):
        app.router.add_route("*", f"/{handler.__name__}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    finally:
        go_on.set()
        await runner.cleanup()


def drive(scenario: Scenario, target: Any = IN_PROCESS, **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), website() as url, exec_server.connect(target, **options) as machine:
            await scenario(machine, url)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_a_request_and_its_answer() -> None:
    async def scenario(machine: Environment, url: str) -> None:
        answer = await machine.http.request("POST", f"{url}/echo", headers={"K-one": "1"}, body=b"\0body")
        assert (answer.status, answer.body, answer.header("X-K-One")) == (418, b"\0body", "1")
        assert answer.header("no-such") is None
        pairs = [("K-one", "1"), ("K-two", "2")]
        answer = await machine.http.request("GET", f"{url}/echo", headers=pairs)
        assert (answer.header("x-k-one"), answer.header("x-k-two")) == ("1", "2")

    drive(scenario)


def test_redirects_are_followed_unless_told_otherwise() -> None:
    async def scenario(machine: Environment, url: str) -> None:
        assert (await machine.http.request("GET", f"{url}/move")).status == 418
        stopped = await machine.http.request("GET", f"{url}/move", follow_redirects=False)
        assert (stopped.status, stopped.header("location")) == (302, "/echo")

    drive(scenario)


def test_a_secret_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TOKEN_OF_MACHINE", "hush")

    async def scenario(machine: Environment, url: str) -> None:
        answer = await machine.http.request(
            "GET", f"{url}/echo", env_headers={"K-token": "TEST_TOKEN_OF_MACHINE"}
        )
        assert answer.header("x-k-token") == "hush"
        with pytest.raises(HttpFailed, match="requires executor environment variable NO_SUCH_THING"):
            await machine.http.request("GET", f"{url}/echo", env_headers={"K": "NO_SUCH_THING"})
        machine._capabilities = {}
        with pytest.raises(Unsupported, match="variables of its environment"):
            await machine.http.request("GET", f"{url}/echo", env_headers={"K": "PATH"})

    drive(scenario)
    assert os.environ["TEST_TOKEN_OF_MACHINE"] == "hush"


def test_a_body_arrives_as_it_is_sent() -> None:
    async def scenario(machine: Environment, url: str) -> None:
        async with machine.http.stream("GET", f"{url}/pieces") as answer:
            assert answer.status == 200
            blocks = aiter(answer)
            assert await anext(blocks) == b"one"
            await machine.http.request("GET", f"{url}/let_go")
            assert [block async for block in blocks] == [b"two"]
        async with machine.http.stream("GET", f"{url}/large") as answer:
            assert b"".join([block async for block in answer]) == bytes(3_000_000)

    drive(scenario)


def test_leaving_a_body_early_disturbs_nobody() -> None:
    async def scenario(machine: Environment, url: str) -> None:
        async with machine.http.stream("GET", f"{url}/large") as answer:
            await anext(aiter(answer))
        assert not machine.http._streams
        assert (await machine.http.request("GET", f"{url}/echo")).status == 418

    drive(scenario)


def test_what_has_no_answer_is_an_error() -> None:
    async def scenario(machine: Environment, url: str) -> None:
        with pytest.raises(HttpFailed, match="error sending request for url"):
            await machine.http.request("GET", "http://127.0.0.1:1/")
        with pytest.raises(HttpFailed, match="only supports http and https"):
            await machine.http.request("GET", "ftp://127.0.0.1/")
        with pytest.raises(HttpFailed, match="timed out"):
            await machine.http.request("GET", f"{url}/pieces", timeout=0)
        with pytest.raises(HttpFailed, match="error decoding response body"):
            await machine.http.request("GET", f"{url}/broken")
        async with machine.http.stream("GET", f"{url}/broken") as answer:
            blocks = aiter(answer)
            assert await anext(blocks) == b"half"
            with pytest.raises(HttpFailed, match="error decoding response body"):
                await anext(blocks)
        with pytest.raises(HttpFailed):
            async with machine.http.stream("GET", "http://127.0.0.1:1/"):
                pass
        assert not machine.http._streams

    drive(scenario)


def test_a_body_ends_with_its_connection(server: RunningServer) -> None:
    """Streams belong to the connection: they fail at once, whatever becomes of the session."""
    faults = Faults()

    async def scenario(machine: Environment, url: str) -> None:
        async with machine.http.stream("GET", f"{url}/pieces") as answer:
            blocks = aiter(answer)
            assert await anext(blocks) == b"one"
            faults.cut()
            with pytest.raises(ConnectionLost, match="transport disconnected: cut by a test"):
                await anext(blocks)
        await eventually_async(lambda: machine.connected)
        assert (await machine.http.request("GET", f"{url}/echo")).status == 418

    drive(scenario, server.url, wrap_dialer=faults.wrap)


def test_a_body_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 100_000)

    async def scenario(machine: Environment, url: str) -> None:
        async with machine.http.stream("GET", f"{url}/large") as answer:
            await eventually_async(lambda: answer._failure)
            with pytest.raises(ExecServerError, match="wait to be read, more than the 100000 that are kept"):
                async for _ in answer:
                    pass

    drive(scenario)


def test_a_server_without_http_and_one_that_loses_pieces() -> None:
    def answer(server: ScriptedServer, params: dict[str, Any]) -> Any:
        server.notify(
            "http/request/bodyDelta", requestId="other", seq=1, deltaBase64="", done=False, error=None
        )
        return {"status": 200, "headers": [], "bodyBase64": ""}

    async def main() -> None:
        server = ScriptedServer({"initialize": lambda *_: {"sessionId": "s", "environmentInfo": {}}})
        client = Client(ConnectOptions())
        await client.open(server.dial)
        asking = asyncio.ensure_future(client.http.request("GET", "http://x/"))
        await eventually_async(lambda: server.sent("http/request"))
        server.send({"id": server.received[-1]["id"], "error": {"code": -32601, "message": "no"}})
        with pytest.raises(Unsupported, match="no `http/request`"):
            await asking
        server._answers["http/request"] = answer
        async with client.http.stream("GET", "http://x/") as body:
            request_id = server.sent("http/request")[-1]["requestId"]
            server.notify(
                "http/request/bodyDelta", requestId=request_id, seq=2, deltaBase64="", done=True, error=None
            )
            with pytest.raises(ExecServerError, match="a piece of a body is missing: 1 before 2"):
                await anext(aiter(body))
        await client.close()

    asyncio.run(main())
