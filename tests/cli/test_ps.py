"""`exec-server ps`: what a server is running, whoever started it."""

from __future__ import annotations

import asyncio
import json
import subprocess

import exec_server
from support.server import COMMAND, RunningServer


def ps(url: str, *options: str) -> str:
    done = subprocess.run(
        [COMMAND, "ps", "--url", url, *options], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


def test_everybodys_processes_are_listed(server: RunningServer) -> None:
    async def main() -> None:
        async with exec_server.connect(server.url) as client:
            await client.start(["sleep", "77"], process_id="mine")
            listed = await asyncio.to_thread(ps, server.url)
            (row,) = [line for line in listed.splitlines() if "sleep 77" in line]
            assert listed.startswith("SESSION ")
            assert row.split()[:3] == [client.session_id[:8], "mine", "running"]
            objects = [
                json.loads(line) for line in (await asyncio.to_thread(ps, server.url, "--json")).splitlines()
            ]
            assert any(entry["argv"] == ["sleep", "77"] for entry in objects)
            assert client.session_id not in listed

    asyncio.run(main())
