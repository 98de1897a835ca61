"""The behaviour every environment has, and the protocol every server speaks, through the relay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import exec_server
from exec_server.relay.forward import forward_to
from exec_server.testing import check_environment, check_server
from exec_server.testing.faults import Faults
from support.server import RunningServer

from .stage import KEY, stage


def test_the_behaviour_suite_without_acknowledgements(tmp_path: Path) -> None:
    """As with an end of the reference. With acknowledgements it is run where the suite itself is tested."""

    async def main() -> None:
        async with asyncio.timeout(58), stage(tmp_path) as ready:
            ready.start_environment()
            await ready.connected.wait()
            target = f"relay+{ready.node.url}/env-1?acks=off"
            faults = Faults()
            report = await check_environment(
                lambda: exec_server.connect(target, token=KEY, wrap_dialer=faults.wrap), faults=faults
            )
            report.raise_for_failures()

    asyncio.run(main())


@pytest.mark.parametrize("query", ["", "?acks=off"], ids=["acked", "plain"])
def test_the_conformance_kit(tmp_path: Path, server: RunningServer, query: str) -> None:
    """Of a server in another process, through a forwarder: it may kill whole trees, and all of it arrives."""

    async def main() -> None:
        async with asyncio.timeout(58), stage(tmp_path) as ready:
            ready.start_environment(forward_to(server.url))
            await ready.connected.wait()
            report = await check_server(f"relay+{ready.node.url}/env-1{query}", token=KEY)
            report.raise_for_failures()

    asyncio.run(main())
