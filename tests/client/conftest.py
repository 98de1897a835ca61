"""Machines whose connections break."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import exec_server
from exec_server.testing.faults import Faults
from support.server import RunningServer
from support.session import Drive, Scenario


@pytest.fixture(params=["websocket", "unix"])
def url(request: pytest.FixtureRequest, server: RunningServer, tmp_path: Path) -> Iterator[str]:
    """A server whose sessions can be resumed."""
    if request.param == "websocket":
        yield server.url
        return
    with RunningServer("--detach-ttl", "5", listen=f"unix://{tmp_path}/sock") as running:
        yield running.url


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
