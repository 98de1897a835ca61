"""What tests of clients share: machines of every kind, and a scenario with the files of one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import exec_server
from exec_server import Client
from exec_server.client.landing import part_name
from exec_server.environments.connect import IN_PROCESS, Target
from exec_server.services import Files
from support.server import COMMAND, RunningServer

__all__ = ["MB", "FilesRun", "FilesScenario", "down_part", "drive_files", "target_of", "up_part"]

FilesScenario = Callable[[Client, Files], Awaitable[None]]
FilesRun = Callable[[FilesScenario], None]

MB = 1_000_000


def target_of(request: pytest.FixtureRequest) -> Target:
    """What to connect to, by the way there that a fixture has as its parameter. Servers are shared."""
    shared = {"websocket": "server", "unix": "unix_server"}.get(request.param)
    if shared is not None:
        running: RunningServer = request.getfixturevalue(shared)
        return running.url
    ways: dict[str, Target] = {
        "local": None,
        "in-process": IN_PROCESS,
        "stdio": [COMMAND, "--listen", "stdio"],
    }
    return ways[request.param]


def drive_files(target: Target, scenario: FilesScenario) -> None:
    """Run a scenario with a client and its files."""

    async def main() -> None:
        async with asyncio.timeout(40), exec_server.connect(target) as client:
            await scenario(client, client.files)

    asyncio.run(main())


def up_part(place: Path, name: str) -> Path:
    """What an upload of `source` leaves beside its target when it breaks."""
    return Path(part_name(f"{place}/{name}", f"{os.uname().nodename}:{place}/source"))


def down_part(place: Path, name: str, source: str = "source") -> Path:
    """And a download."""
    return Path(part_name(f"{place}/{name}", f"{place}/{source}"))
