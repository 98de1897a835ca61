"""What every compliance test needs: the reference binary, a server, a place to work, and the client."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from compliance.harness import Codex
from compliance.server import Server, command_under_test

REFERENCE = "EXEC_SERVER_REFERENCE"
"""Environment variable: the reference's native binary. `python -m compliance` installs it and sets this."""


def pytest_report_header() -> list[str]:
    """Which two programs meet in this run: without it a green run says little."""
    return [
        f"server under test: {' '.join(command_under_test())}",
        f"reference: {os.environ.get(REFERENCE, 'not set')}",
    ]


@pytest.fixture(scope="session")
def reference() -> Path:
    """The reference's native binary, seen to start."""
    chosen = os.environ.get(REFERENCE)
    if not chosen:
        pytest.fail(
            f"{REFERENCE} is not set: run `make compliance`, or `python -m compliance` with pytest's options"
        )
    version = subprocess.run([chosen, "--version"], capture_output=True, text=True, timeout=30, check=True)
    assert version.stdout.startswith("codex-cli "), (
        f"{chosen} is not the reference: it says {version.stdout!r}"
    )
    return Path(chosen)


@pytest.fixture(scope="session")
def server_command() -> list[str]:
    """The command that starts the server under test, without `--listen`."""
    return command_under_test()


@pytest.fixture
def server(server_command: list[str], tmp_path: Path) -> Iterator[Server]:
    """A server of this test's own, which must be alive at its end."""
    server = Server(server_command, tmp_path)
    try:
        yield server
        assert server.exit_code is None, f"the server died during the test\n{server.report()}"
    finally:
        server.stop()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """The folder the client works in, and the cwd of every command it starts."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    return workspace


@pytest.fixture
def codex(reference: Path, tmp_path: Path, workspace: Path) -> Codex:
    """The reference client with a home of its own, ready to run a script."""
    return Codex(reference, tmp_path, workspace)


@pytest.fixture(params=["websocket", "stdio"])
def reference_server(
    request: pytest.FixtureRequest, reference: Path, tmp_path: Path
) -> Iterator[str | list[str]]:
    """The reference's server, as something our client connects to."""
    if request.param == "stdio":
        yield [str(reference), "exec-server", "--listen", "stdio"]
        return
    server = Server([str(reference), "exec-server"], tmp_path)
    try:
        yield server.url
    finally:
        server.stop()
