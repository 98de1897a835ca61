"""The direct transport against a service that we play: it checks the signatures and speaks first."""

from __future__ import annotations

import asyncio
import calendar
import json
import time
from typing import Any

import pytest
from aiohttp import web

from exec_server.limits import Limits
from exec_server.relay import direct as module
from exec_server.relay.direct import DirectEnvironment, DirectOptions
from exec_server.relay.environment import RegistrationFailed
from exec_server.relay.registry import BadRegistryUrl
from exec_server.relay.sigv4 import AwsCredentials, sign
from exec_server.server.server import Server
from support.wait import eventually_async

from .support import Remembering

OPTIONS = DirectOptions(credentials=AwsCredentials("id", "secret"), region="us-east-1")


class Service:
    """Registers, and asks every connection what machine it is."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.status = 200
        self.upgrade_statuses: list[int] = []
        self.answers: list[dict[str, Any]] = []
        self.registrations = 0
        self.url = ""

    async def __aenter__(self) -> Service:
        app = web.Application()
        app.router.add_post("/base/cloud/environment/env-1/direct/register", self._register)
        app.router.add_get("/socket", self._socket)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def _check(self, request: web.Request, headers: dict[str, str], body: bytes) -> None:
        now = calendar.timegm(time.strptime(request.headers["x-amz-date"], "%Y%m%dT%H%M%SZ"))
        expected = sign(
            *(OPTIONS.credentials, OPTIONS.region, OPTIONS.service),
            *(request.method, self.url + request.raw_path, headers, body, now),
        )
        assert request.headers["authorization"] == expected["authorization"]

    async def _register(self, request: web.Request) -> web.Response:
        self.registrations += 1
        body = await request.read()
        self._check(request, {"content-type": "application/json"}, body)
        assert json.loads(body) == {"transport": "direct_jsonrpc_v1"}
        answer = {
            "environment_id": "env-1",
            "url": self.url.replace("http", "ws") + "/socket?a=1",
            "transport": "direct_jsonrpc_v1",
            "registration_id": "r",
            **self.changes,
        }
        return web.json_response(answer, status=self.status)

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        self._check(request, {}, b"")
        if self.upgrade_statuses:
            return web.Response(status=self.upgrade_statuses.pop(0))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str('{"id":1,"method":"initialize","params":{"clientName":"service"}}')
        self.answers.append(json.loads((await socket.receive()).data))
        await socket.close()
        return socket


def run(main: Any) -> None:
    async def timed() -> None:
        async with asyncio.timeout(40):
            await main()

    asyncio.run(timed())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(module, "MAX_DELAY", 0.02)


@pytest.mark.usefixtures("impatient")
def test_it_registers_serves_and_comes_back() -> None:
    async def main() -> None:
        server = Server(asyncio.get_running_loop(), Limits(), tag_trees=False)
        async with Service() as service:
            environment = DirectEnvironment(f"{service.url}/base/", "env-1", OPTIONS, server.accept)
            task = asyncio.ensure_future(environment.run())
            service.upgrade_statuses = [500, 503]
            await eventually_async(lambda: len(service.answers) >= 3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        server.close()
        assert all(answer["result"]["sessionId"] for answer in service.answers)
        assert service.registrations == 1

    run(main)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment_id": "other"}, "another environment"),
        ({"transport": "other"}, "another environment"),
        ({"registration_id": " "}, "registration_id"),
        ({"url": 7}, "no url"),
        ({"url": "ws://example.com/"}, "without TLS"),
        ({"url": "http://127.0.0.1/"}, "without TLS"),
    ],
)
def test_answers_that_end_it(changes: dict[str, Any], message: str) -> None:
    async def main() -> None:
        async with Service(**changes) as service:
            environment = DirectEnvironment(f"{service.url}/base", "env-1", OPTIONS, Remembering)
            with pytest.raises(RegistrationFailed, match=message):
                await environment.run()

    run(main)


@pytest.mark.usefixtures("impatient")
def test_refusals_that_end_it() -> None:
    async def main() -> None:
        async with Service() as service:
            service.status = 403
            environment = DirectEnvironment(f"{service.url}/base", "env-1", OPTIONS, Remembering)
            with pytest.raises(RegistrationFailed, match="403"):
                await environment.run()
            service.status, service.upgrade_statuses = 200, [401]
            with pytest.raises(RegistrationFailed, match="401"):
                await environment.run()
        with pytest.raises(RegistrationFailed, match="cannot be reached"):
            await environment.run()
        with pytest.raises(BadRegistryUrl):
            DirectEnvironment("http://example.com", "env-1", OPTIONS, Remembering)

    run(main)
