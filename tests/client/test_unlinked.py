"""Files by paths in which no link is followed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from exec_server.client.errors import Unsupported
from exec_server.client.files import WHOLE_WRITE_BYTES
from exec_server.environments.connect import IN_PROCESS, connect


def test_paths_without_links(tmp_path: Path) -> None:
    async def main() -> None:
        async with connect(IN_PROCESS) as machine:
            files = machine.files.without_links()
            await files.make_directory(f"{tmp_path}/a/b")
            await files.write(f"{tmp_path}/a/b/c", b"x" * 300_000)
            assert await files.read(f"{tmp_path}/a/b/c") == b"x" * 300_000
            assert (await files.metadata(f"{tmp_path}/a/b/c")).size == 300_000
            assert await files.exists(f"{tmp_path}/a")
            assert not await files.exists(f"{tmp_path}/a/none")
            await files.remove(f"{tmp_path}/a/b/c")
            await files.remove(f"{tmp_path}/a/b/c", force=True)

    asyncio.run(main())
    assert os.listdir(tmp_path / "a/b") == []


@pytest.mark.parametrize("path", ["directory/x", "directory/new", "file"])
def test_a_link_is_an_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/x").write_text("x")
    (tmp_path / "directory").symlink_to("real")
    (tmp_path / "file").symlink_to("real/x")

    async def main() -> None:
        async with connect(IN_PROCESS) as machine:
            files = machine.files.without_links()
            calls = [
                files.read(f"{tmp_path}/{path}"),
                files.write(f"{tmp_path}/{path}", b"y"),
                files.make_directory(f"{tmp_path}/{path}"),
                files.remove(f"{tmp_path}/{path}"),
            ]
            done = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(one, OSError) for one in done), done

    asyncio.run(main())
    assert sorted(os.listdir(tmp_path)) == ["directory", "file", "real"]
    assert os.listdir(tmp_path / "real") == ["x"]
    assert (tmp_path / "real/x").read_text() == "x"


def test_what_does_not_fit_into_a_message(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate(WHOLE_WRITE_BYTES + 1)

    async def main() -> None:
        async with connect(IN_PROCESS) as machine:
            files = machine.files.without_links()
            with pytest.raises(Unsupported):
                await files.read(f"{tmp_path}/large")
            with pytest.raises(Unsupported):
                await files.write(f"{tmp_path}/new", bytes(WHOLE_WRITE_BYTES + 1))

    asyncio.run(main())
    assert os.listdir(tmp_path) == ["large"]
