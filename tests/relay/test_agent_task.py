"""An agent identity towards services that are on this machine: what is sent is what the reference sends."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from exec_server.relay.agent_task import register_task
from exec_server.relay.credentials import AgentIdentity, CredentialError
from relay.test_credentials import access_token
from support.server import COMMAND, server_environment

KEY = Ed25519PrivateKey.generate()


class Services:
    """An accounts service and a registry in one: what they were asked, and what they answer."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.answer: tuple[int, bytes] = (200, b'{"task_id": "task-1"}')
        self.registered = asyncio.Event()

    async def take(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.path, headers, json.loads(await request.read())))
        if "/task/" in request.path:
            status, body = self.answer
            return web.Response(status=status, body=body)
        self.registered.set()
        return web.json_response({"error": {"code": "enough", "message": "seen"}}, status=403)


@asynccontextmanager
async def services() -> AsyncIterator[Services]:
    made, app = Services(), web.Application()
    app.router.add_route("POST", "/{rest:.*}", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        await runner.cleanup()


def test_a_task_is_registered_and_every_call_is_signed_for_it(tmp_path: Path) -> None:
    """`--use-agent-identity-auth`, as a process; the order and the members are those of the reference."""

    async def scenario() -> None:
        async with asyncio.timeout(50), services() as made:
            program = await asyncio.create_subprocess_exec(
                *(
                    COMMAND,
                    "--remote",
                    f"{made.url}/base",
                    "--environment-id",
                    "e",
                    "--use-agent-identity-auth",
                ),
                env=server_environment(
                    CODEX_ACCESS_TOKEN=access_token(KEY),
                    CODEX_AGENT_IDENTITY_AUTHAPI_BASE_URL=f"{made.url}/accounts/",
                    XDG_STATE_HOME=str(tmp_path),
                ),
                stderr=asyncio.subprocess.PIPE,
            )
            _, complaint = await program.communicate()
            assert (program.returncode, b"seen" in complaint) == (1, True)
            (task, _, body), (path, headers, _) = made.asked
            assert task == "/accounts/v1/agent/agent-1/task/register"
            assert list(body) == ["timestamp", "signature"]
            KEY.public_key().verify(
                base64.b64decode(body["signature"]), f"agent-1:{body['timestamp']}".encode()
            )
            assert path == "/base/cloud/environment/e/register"
            assert headers["chatgpt-account-id"] == "account-1"
            scheme, _, text = headers["authorization"].partition(" ")
            assertion = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            assert (scheme, assertion["task_id"]) == ("AgentAssertion", "task-1")
            signed = f"agent-1:task-1:{assertion['timestamp']}".encode()
            KEY.public_key().verify(base64.b64decode(assertion["signature"]), signed)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("status", "body", "result"),
    [
        (201, b'{"taskId": "t", "more": 1}', "t"),
        (200, b'{"task_id": " "}', "no task"),
        (200, b"[]", "JSON object"),
        (200, b'"\xff"', "JSON object"),
        (200, b'{"encrypted_task_id": "eA=="}', "EXEC_SERVER_AGENT_TASK_ID"),
        (302, b'{"task_id": "t"}', "HTTP 302"),
        (500, b"", "HTTP 500"),
    ],
)
def test_answers_of_an_accounts_service(status: int, body: bytes, result: str) -> None:
    async def scenario() -> None:
        async with services() as made:
            made.answer = (status, body)
            identity = AgentIdentity(access_token(KEY))
            if result == "t":
                assert await register_task(identity, made.url) == "t"
            else:
                with pytest.raises(CredentialError, match=result):
                    await register_task(identity, made.url)

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["http://accounts.example/", "ftp://127.0.0.1", "nothing", "https://"])
def test_signatures_go_nowhere_in_the_clear(url: str) -> None:
    with pytest.raises(CredentialError, match="accounts service"):
        asyncio.run(register_task(AgentIdentity(access_token(KEY)), url))


def test_nobody_is_asked_by_default() -> None:
    done = subprocess.run(
        [COMMAND, "--remote", "http://127.0.0.1:9", "--environment-id", "e", "--use-agent-identity-auth"],
        env=server_environment(CODEX_ACCESS_TOKEN=access_token(KEY)),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert "CODEX_AGENT_IDENTITY_AUTHAPI_BASE_URL" in done.stderr
