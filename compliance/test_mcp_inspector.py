"""The MCP inspector, a client nobody here wrote, lists our tools and calls them, over both transports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compliance.packages import INSPECTOR, TEST_DEADLINE
from compliance.programs import Program, wait_until

pytestmark = pytest.mark.timeout(TEST_DEADLINE)

DEADLINE = 30.0
"""Seconds for one call: the inspector needs one to start, and so do we."""


def command() -> list[str]:
    return [str(Path(sysconfig.get_path("scripts")) / "exec-server"), "mcp"]


@pytest.fixture(params=["stdio", "http"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """What the inspector connects to: a command that it starts, or an address."""
    if request.param == "stdio":
        yield command()
        return
    server = Program(
        [*command(), "--listen", "http://127.0.0.1:0"],
        name="mcp",
        folder=tmp_path,
        cwd=tmp_path,
        environment={"HOME": str(tmp_path), "CODEX_HOME": str(tmp_path)},
    )
    try:
        wait_until(lambda: "\n" in server.stdout, "the address of the server")
        yield [server.stdout.partition("\n")[0], "--transport", "http"]
    finally:
        server.stop()


def inspect(target: list[str], folder: Path, *words: str) -> Any:
    """One run of the inspector; what it printed, which is what the server answered."""
    node = shutil.which("node")
    assert node is not None, "node ran npm a moment ago"
    done = subprocess.run(
        [node, str(INSPECTOR.entry()), *target, "--method", *words],
        cwd=folder,
        env={"HOME": str(folder), "CODEX_HOME": str(folder), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


def test_it_lists_and_calls_our_tools(target: list[str], tmp_path: Path) -> None:
    listed = inspect(target, tmp_path, "tools/list")
    names = {tool["name"] for tool in listed["tools"]}
    assert {"exec_command", "write_stdin", "read_file", "write_file", "list_directory", "screen"} <= names
    (tmp_path / "a.txt").write_text("found by a stranger\n")
    ran = inspect(
        target,
        tmp_path,
        "tools/call",
        "--tool-name",
        "exec_command",
        "--tool-arg",
        f"cmd=cat {tmp_path}/a.txt",
    )
    assert not ran.get("isError")
    assert "found by a stranger" in ran["content"][0]["text"]
    wrong = inspect(
        target, tmp_path, "tools/call", "--tool-name", "read_file", "--tool-arg", f"path={tmp_path}/none"
    )
    assert wrong["isError"]
