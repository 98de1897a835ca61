"""The reference's client asks for sandboxes, and the server under test keeps commands and edits in them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compliance.harness import Codex
from compliance.model import Turn, apply_patch, exec_command
from compliance.proxy import Proxy
from compliance.server import Server

SOCKET = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 9))'"
"""A port that nobody listens on: without a sandbox the connection is refused, which is another error."""


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that no policy lets anybody write to: not in the workspace, and not below /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def starts(proxy: Proxy) -> list[dict[str, Any]]:
    """The params of every process that was started, in order."""
    return [message.params for message in proxy.messages if message.method == "process/start"]


def denials(proxy: Proxy) -> dict[str, bool]:
    """Whether the sandbox kept something from each process, as the server said when it exited."""
    exits = [message.params for message in proxy.messages if message.method == "process/exited"]
    return {params["processId"]: params["sandboxDenied"] for params in exits}


def in_order(proxy: Proxy) -> list[bool]:
    denied = denials(proxy)
    return [denied[params["processId"]] for params in starts(proxy)]


def test_workspace_write(codex: Codex, server: Server, workspace: Path, outside: Path) -> None:
    (workspace / "existing.txt").write_text("old\n")
    codex.sandbox = "workspace-write"
    turns: list[Turn] = [
        exec_command("echo new > made.txt && echo more >> existing.txt && cat made.txt"),
        exec_command(f"echo escaped > {outside}/made.txt"),
        exec_command("mkdir .git/hooks"),
        exec_command(SOCKET),
        "done",
    ]
    with Proxy(server.url) as proxy:
        run = codex.run(turns, url=proxy.url)

    allowed, beyond, protected, network = run.results
    assert (allowed.exit_code, allowed.output) == (0, "new\n")
    assert (workspace / "existing.txt").read_text() == "old\nmore\n"
    assert beyond.exit_code != 0
    assert "Read-only file system" in beyond.output
    assert list(outside.iterdir()) == []
    assert protected.exit_code != 0
    assert "Read-only file system" in protected.output
    assert network.exit_code != 0
    assert "Operation not permitted" in network.output
    assert sorted(path.name for path in workspace.iterdir()) == ["existing.txt", "made.txt"]

    assert in_order(proxy) == [False, True, True, True]
    assert all(params["sandbox"]["permissions"]["type"] == "managed" for params in starts(proxy))
    replies = [proxy.reply_to(m) or {} for m in proxy.messages if m.method == "process/start"]
    assert {reply["result"]["sandboxType"] for reply in replies} == {"linuxSeccomp"}


def test_read_only(codex: Codex, server: Server, workspace: Path) -> None:
    (workspace / "existing.txt").write_text("old\n")
    codex.sandbox = "read-only"
    turns: list[Turn] = [
        exec_command("cat existing.txt"),
        exec_command("echo new >> existing.txt"),
        exec_command("rm existing.txt"),
        exec_command(SOCKET),
        "done",
    ]
    with Proxy(server.url) as proxy:
        run = codex.run(turns, url=proxy.url)

    read, write, remove, network = run.results
    assert (read.exit_code, read.output) == (0, "old\n")
    for refused in (write, remove):
        assert refused.exit_code != 0
        assert "Read-only file system" in refused.output
    assert "Operation not permitted" in network.output
    assert (workspace / "existing.txt").read_text() == "old\n"
    assert os.listdir(workspace) == ["existing.txt"]
    assert in_order(proxy) == [False, True, True, True]


ADD = """\
*** Begin Patch
*** Add File: {path}
+new
*** End Patch"""


def test_edits_in_the_workspace(codex: Codex, server: Server, workspace: Path, outside: Path) -> None:
    """The client edits by `fs/*`, under the same profile."""
    codex.sandbox = "workspace-write"
    turns: list[Turn] = [apply_patch(ADD.format(path="added.txt")), "done"]
    with Proxy(server.url) as proxy:
        run = codex.run(turns, url=proxy.url)
    writes = [m.params for m in proxy.messages if m.method in ("fs/writeFile", "fs/open")]
    assert writes
    assert all(params["sandbox"]["permissions"]["type"] == "managed" for params in writes)
    assert "Success" in run.results[0].text
    assert (workspace / "added.txt").read_text() == "new\n"
    assert os.listdir(workspace) == ["added.txt"]
    assert list(outside.iterdir()) == []


def test_a_terminal_in_a_sandbox(codex: Codex, server: Server, workspace: Path) -> None:
    codex.sandbox = "read-only"
    run = codex.run([exec_command("test -t 0 && stty size; touch x", tty=True), "done"], url=server.url)
    (result,) = run.results
    assert "24 80" in result.output
    assert "Read-only file system" in result.output
    assert list(workspace.iterdir()) == []
