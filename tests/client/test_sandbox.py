"""Sandboxes as callers ask for them: what they say on the wire, and that a server does as asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import exec_server
from exec_server import Client, Sandbox
from exec_server.wire.sandbox import decode_sandbox
from support.profiles import managed, path, sandbox, special
from support.sandbox import needs_bubblewrap
from support.server import RunningServer

__all__ = ["needs_bubblewrap"]

ROOT = special("root", "read")


def on_the_wire(box: Sandbox) -> Any:
    return msgspec.json.decode(msgspec.json.encode(box))


def metadata(name: str) -> dict[str, Any]:
    return {**special("project_roots", "read", subpath=name), "missing_path_behavior": "skip"}


def test_read_only() -> None:
    assert on_the_wire(Sandbox.read_only()) == managed(ROOT)
    assert on_the_wire(Sandbox.read_only(network=True)) == managed(ROOT, network="enabled")


def test_workspace_write() -> None:
    box = Sandbox.workspace_write("/w", "/v", writable=["/x y"], network=True)
    assert on_the_wire(box) == managed(
        ROOT,
        special("project_roots", "write"),
        special("slash_tmp", "write"),
        special("tmpdir", "write"),
        path("/x y", "write"),
        *map(metadata, (".git", ".agents", ".codex")),
        network="enabled",
        cwd="file:///w",
        workspaceRoots=["file:///w", "file:///v"],
    )
    bare = on_the_wire(Sandbox.workspace_write("file:///w", slash_tmp=False, tmpdir=False))
    kinds = [entry["path"]["value"]["kind"] for entry in bare["permissions"]["file_system"]["entries"]]
    assert kinds == ["root", *["project_roots"] * 4]
    without_roots = Sandbox.workspace_write(writable=["/x"], tmpdir=False)
    assert on_the_wire(without_roots) == managed(ROOT, special("slash_tmp", "write"), path("/x", "write"))


def test_the_others() -> None:
    assert on_the_wire(Sandbox.full_access()) == sandbox({"type": "disabled"})
    assert on_the_wire(Sandbox.external()) == sandbox({"type": "external", "network": "restricted"})
    scoped = Sandbox.scoped(readable=["/r"], writable=["/w"])
    assert on_the_wire(scoped) == managed(special("minimal", "read"), path("/r", "read"), path("/w", "write"))


def test_denying() -> None:
    box = Sandbox.workspace_write("/w").denying("/w/secret", "**/*.env")
    denied = on_the_wire(box)["permissions"]["file_system"]["entries"][-2:]
    assert denied == [
        path("/w/secret", "deny"),
        {"path": {"type": "glob_pattern", "pattern": "**/*.env"}, "access": "deny"},
    ]
    with pytest.raises(ValueError, match="restricts no files"):
        Sandbox.full_access().denying("/x")


@pytest.mark.parametrize(
    "box", [Sandbox.read_only(), Sandbox.workspace_write("/w"), Sandbox.full_access(), Sandbox.external()]
)
def test_they_are_what_servers_decode(box: Sandbox) -> None:
    assert msgspec.json.encode(decode_sandbox(on_the_wire(box))) == msgspec.json.encode(box)


def test_paths_of_another_machine_are_absolute() -> None:
    with pytest.raises(ValueError, match="must be absolute"):
        Sandbox.workspace_write("project")


def through(server: RunningServer, body: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(40), exec_server.connect(server.url) as client:
            await body(client)

    asyncio.run(main())


@pytest.mark.usefixtures("needs_bubblewrap")
def test_commands_and_files(server: RunningServer, tmp_path: Path) -> None:
    place = os.path.realpath(tmp_path)
    os.mkdir(f"{place}/w")
    os.mkdir(f"{place}/o")
    os.mkdir(f"{place}/v")
    Path(f"{place}/w/x.env").write_bytes(b"secret")
    box = Sandbox.workspace_write(f"{place}/w", slash_tmp=False, tmpdir=False).denying("**/*.env")

    async def body(client: Client) -> None:
        done = await client.run(
            ["sh", "-c", "echo in > w/in; cat w/x.env; echo out > o/out"], cwd=place, sandbox=box
        )
        assert done.exit_code != 0
        assert done.sandbox_denied
        assert b"Permission denied" in done.stderr
        assert b"Read-only file system" in done.stderr
        files = client.files.under(box)
        await files.write(f"{place}/w/file", b"content")
        assert await files.read(f"{place}/w/file") == b"content"
        await files.write_stream(f"{place}/w/stream", [b"one", b"two"])
        with pytest.raises(PermissionError):
            await files.read(f"{place}/w/x.env")
        with pytest.raises(OSError, match="Read-only file system"):
            await files.write(f"{place}/o/file", b"content")
        with pytest.raises(OSError, match="Read-only file system"):
            await files.write_stream(f"{place}/o/file", [b"content"])
        for argv in (["no-such-program"], ["sh", "-c", "exit 3"]):
            assert not (await client.run(argv, sandbox=box)).sandbox_denied
        # Without a workspace, but with something to write to.
        elsewhere = Sandbox.workspace_write(writable=[f"{place}/v"], slash_tmp=False, tmpdir=False)
        assert (await client.run(["touch", f"{place}/v/made"], sandbox=elsewhere)).exit_code == 0
        await client.files.under(elsewhere).write(f"{place}/v/file", b"content")
        with pytest.raises(OSError, match="Read-only file system"):
            await client.files.under(elsewhere).write(f"{place}/w/file", b"content")
        # Without the sandbox everything is as ever.
        assert await client.files.read(f"{place}/w/x.env") == b"secret"
        assert (await client.files.metadata(f"{place}/w/x.env")).size == 6
        assert (await files.metadata(f"{place}/w/x.env")).size == 0

    through(server, body)
    assert sorted(os.listdir(f"{place}/w")) == ["file", "in", "stream", "x.env"]
    assert os.listdir(f"{place}/o") == []
    assert sorted(os.listdir(f"{place}/v")) == ["file", "made"]
    assert Path(f"{place}/w/stream").read_bytes() == b"onetwo"
