"""`exec-server token`: secrets that the server then accepts."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

import exec_server
from support.server import COMMAND, RunningServer


def token(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, "token", *words], capture_output=True, text=True, timeout=30)


async def _echo(url: str, secret: str) -> bytes:
    async with exec_server.connect(url, token=secret) as client:
        return (await client.run(["echo", "in"])).stdout


def test_capability_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert token("capability", "--file", str(path)).returncode == 0
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert token("capability", "--file", str(path)).returncode == 1, "an existing secret is not overwritten"
    with RunningServer("--ws-auth", "capability-token", "--ws-token-file", str(path)) as server:
        assert asyncio.run(_echo(server.url, path.read_text().strip())) == b"in\n"
        done = subprocess.run(
            [COMMAND, "run", "--url", server.url, "--token-file", str(path), "--", "echo", "cli"],
            capture_output=True,
            timeout=30,
        )
        assert done.stdout == b"cli\n"


def test_capability_digest() -> None:
    made = token("capability")
    digest = made.stderr.split()[-1]
    with RunningServer("--ws-auth", "capability-token", "--ws-token-sha256", digest) as server:
        assert asyncio.run(_echo(server.url, made.stdout.strip())) == b"in\n"


def test_signed_tokens(tmp_path: Path) -> None:
    path = str(tmp_path / "secret")
    assert token("secret", "--file", path).returncode == 0
    options = ("--ws-auth", "signed-bearer-token", "--ws-shared-secret-file", path, "--ws-audience", "me")
    with RunningServer(*options) as server:
        good = token("jwt", "--secret-file", path, "--audience", "me").stdout.strip()
        assert asyncio.run(_echo(server.url, good)) == b"in\n"
        bad = token("jwt", "--secret-file", path, "--audience", "you").stdout.strip()
        with pytest.raises(OSError, match="audience mismatch"):
            asyncio.run(_echo(server.url, bad))
    short = tmp_path / "short"
    short.write_text("x")
    assert "shorter than 32 bytes" in token("jwt", "--secret-file", str(short)).stderr
