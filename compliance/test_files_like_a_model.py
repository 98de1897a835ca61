"""Random operations on files and links: the model, our server and the reference's agree.

Both servers are driven by our client, on trees of their own, and only with methods the reference has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import exec_server
from compliance.server import Server
from exec_server import Client
from support.file_model import Model
from support.file_operations import Operation, Remote, behave_alike, operations


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all examples."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def clients(
    runner: asyncio.Runner,
    reference: Path,
    server_command: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[Client]]:
    """One connection to each server for all examples: the server under test, and the reference."""

    async def connect(url: str) -> Client:
        return await exec_server.connect(url)

    with ExitStack() as stack:
        clients = []
        for command in (server_command, [str(reference), "exec-server"]):
            server = Server(command, tmp_path_factory.mktemp("server"))
            stack.callback(server.stop)
            client = runner.run(connect(server.url))
            stack.callback(lambda client=client: runner.run(client.close()))
            clients.append(client)
        yield clients


def emptied_by_the_reference(model: Model, operation: Operation) -> bool:
    """Copies of a file onto itself, after which the reference's is empty."""
    return operation.method == "copy" and model.is_same_file(*operation.arguments[:2])


@pytest.mark.timeout(240)
@given(steps=operations(renames=False))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_two_servers_and_a_model(
    runner: asyncio.Runner,
    clients: list[Client],
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[Operation],
) -> None:
    performers = [Remote(client.files, tmp_path_factory.mktemp("tree")) for client in clients]
    runner.run(behave_alike(steps, performers, emptied_by_the_reference))
