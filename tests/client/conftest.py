"""Machines whose connections break, and files on every transport."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import exec_server
from exec_server.environments.connect import Target
from exec_server.testing.faults import Faults
from support.client import FilesRun, drive_files, target_of
from support.server import RunningServer
from support.session import Drive, Scenario


@pytest.fixture(params=["websocket", "unix"])
def url(request: pytest.FixtureRequest) -> str:
    """A server whose sessions can be resumed."""
    target = target_of(request)
    assert isinstance(target, str)
    return target


@pytest.fixture
def drive(server: RunningServer) -> Drive:
    """Run a scenario with a machine, and with the faults between us and it."""

    def go(scenario: Scenario, *plan: Any, url: str | None = None, **options: Any) -> None:
        async def main() -> None:
            faults = Faults(plan)
            async with asyncio.timeout(40):
                async with exec_server.connect(
                    url or server.url, wrap_dialer=faults.wrap, **options
                ) as machine:
                    await scenario(machine, faults)

        asyncio.run(main())

    return go


@pytest.fixture(params=["local", "websocket", "unix", "stdio"])
def target(request: pytest.FixtureRequest) -> Target:
    """Something to connect to."""
    return target_of(request)


@pytest.fixture
def run(target: Target) -> FilesRun:
    """Run a scenario with a client and its files."""
    return lambda scenario: drive_files(target, scenario)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty directory."""
    directory = tmp_path / "place"
    directory.mkdir()
    return directory
