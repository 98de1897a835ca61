"""Where paths lead, and files that are changed there and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from exec_server.agent.places import DecidedFiles, real_entry, real_path
from exec_server.client.files import RemoteFiles
from exec_server.client.sandbox import Sandbox
from exec_server.environments.connect import IN_PROCESS, connect


def on_machine(work: Callable[[RemoteFiles], Awaitable[None]]) -> None:
    async def main() -> None:
        async with connect(IN_PROCESS) as machine:
            await work(machine.files)

    asyncio.run(main())


def test_where_paths_lead(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").touch()
    (tmp_path / "directory").symlink_to("real")
    (tmp_path / "link").symlink_to("directory/file")
    (tmp_path / "nowhere").symlink_to("gone")

    async def work(files: RemoteFiles) -> None:
        for path, real, entry in (
            ("real/file", "real/file", "real/file"),
            ("link", "real/file", "link"),
            ("directory/file", "real/file", "real/file"),
            ("directory/new/er", "real/new/er", "real/new/er"),
            ("nowhere", "nowhere", "nowhere"),
            ("nowhere/new", "nowhere/new", "nowhere/new"),
        ):
            assert await real_path(files, f"{tmp_path}/{path}") == f"{tmp_path}/{real}"
            assert await real_entry(files, f"{tmp_path}/{path}") == f"{tmp_path}/{entry}"
        assert await real_path(files, "/") == "/"
        assert await real_path(files, "/none such") == await real_entry(files, "/none such") == "/none such"

    on_machine(work)


def test_what_is_decided_on_is_changed_and_nothing_else(tmp_path: Path, needs_bubblewrap: None) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_text("x")
    (tmp_path / "directory").symlink_to("real")
    (tmp_path / "link").symlink_to("real/file")

    async def work(files: RemoteFiles) -> None:
        decided = DecidedFiles(files, files.under(Sandbox.read_only()))
        await decided.write(f"{tmp_path}/real/file", b"y")
        for path in ("directory/file", "directory/new", "link"):
            with pytest.raises(OSError):
                await decided.write(f"{tmp_path}/{path}", b"z")
        with pytest.raises(OSError):
            await decided.make_directory(f"{tmp_path}/directory/new")
        with pytest.raises(OSError):
            await decided.remove(f"{tmp_path}/directory/file")
        # A link itself can be read and removed as far as the sandbox lets anybody.
        assert await decided.read(f"{tmp_path}/link") == b"y"
        for path in ("link", "directory"):
            with pytest.raises(OSError, match="Read-only"):
                await decided.remove(f"{tmp_path}/{path}")
        with pytest.raises(OSError, match="Read-only"):
            await decided.copy(f"{tmp_path}/real/file", f"{tmp_path}/copy")
        await decided.remove(f"{tmp_path}/real/file")

    on_machine(work)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["directory", "link", "real"]
