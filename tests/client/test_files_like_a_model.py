"""Random operations on files and links: the model, this machine and a server across a socket agree."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings

import exec_server
from exec_server import Client
from support.file_operations import Local, Operation, Remote, behave_alike, operations
from support.server import RunningServer


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all examples."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(runner: asyncio.Runner, server: RunningServer) -> Iterator[Client]:
    """One connection for all examples."""

    async def connect() -> Client:
        return await exec_server.connect(server.url)

    client = runner.run(connect())
    yield client
    runner.run(client.close())


@given(steps=operations())
@settings(max_examples=120)
def test_locally_and_through_a_websocket(
    runner: asyncio.Runner,
    client: Client,
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[Operation],
) -> None:
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    runner.run(behave_alike(steps, [Local(here), Remote(client.files, there)]))
