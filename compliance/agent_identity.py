"""Services an agent identity needs, in a network of their own in which there is nothing else.

    unshare --map-root-user --net python -m compliance.agent_identity FOLDER COMMAND...

The reference takes an agent identity only where it would ask its vendor's services; two variables give them
other addresses. So that nobody outside is asked, whatever else it has in mind, it runs where there is no
outside. Prints, as JSON, every request up to the registration of the environment.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import socket
import struct
import sys
import time
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key

__all__ = ["ACCOUNT", "AGENT", "SEED", "TASK"]

AGENT, ACCOUNT, TASK = "agent-1", "account-1", "task-1"
SEED = bytes(range(32))
"""The agent's key, so that whoever reads the requests can check their signatures."""

KEY_NAME = "key-1"
SECONDS = 20
SIOCSIFFLAGS, UP_AND_RUNNING = 0x8914, 0x41


def bring_up_loopback() -> None:
    """A new network has it, but down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", UP_AND_RUNNING))


def access_token(issuer: RSAPrivateKey) -> str:
    """What the vendor's sign-in would have given."""
    private = Ed25519PrivateKey.from_private_bytes(SEED).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    now = int(time.time())
    claims = {
        "iss": "https://chatgpt.com/codex-backend/agent-identity",
        "aud": "codex-app-server",
        "iat": now,
        "exp": now + 3600,
        "agent_runtime_id": AGENT,
        "agent_private_key": base64.b64encode(private).decode(),
        "account_id": ACCOUNT,
        "chatgpt_user_id": "user-1",
        "plan_type": "pro",
        "chatgpt_account_is_fedramp": False,
    }
    return jwt.encode(claims, issuer, algorithm="RS256", headers={"kid": KEY_NAME})


async def watch(folder: str, command: list[str]) -> list[dict[str, Any]]:
    """Run the command as an environment, and give what it asks."""
    issuer = generate_private_key(65537, 2048)
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(issuer.public_key()))
    asked: list[dict[str, Any]] = []
    registered = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        text = await request.text()
        asked.append({"method": request.method, "path": request.path, "headers": headers, "body": text})
        if request.path.endswith("/jwks"):
            return web.json_response({"keys": [{**public, "kid": KEY_NAME, "use": "sig", "alg": "RS256"}]})
        if request.path.endswith("/task/register"):
            return web.json_response({"task_id": TASK})
        registered.set()
        return web.json_response({"error": {"code": "enough", "message": "seen"}}, status=403)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    program = await asyncio.create_subprocess_exec(
        *(*command, "--remote", base, "--environment-id", "env-1", "--use-agent-identity-auth"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        env={
            "PATH": os.environ["PATH"],
            "HOME": folder,
            "CODEX_HOME": folder,
            "CODEX_ACCESS_TOKEN": access_token(issuer),
            "CODEX_AGENT_IDENTITY_JWKS_BASE_URL": f"{base}/keys",
            "CODEX_AGENT_IDENTITY_AUTHAPI_BASE_URL": f"{base}/accounts",
        },
    )
    try:
        async with asyncio.timeout(SECONDS):
            await registered.wait()
            await program.wait()
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
        await runner.cleanup()
    return asked


if __name__ == "__main__":
    bring_up_loopback()
    json.dump(asyncio.run(watch(sys.argv[1], sys.argv[2:])), sys.stdout)
