"""`client.files` against the reference's server, over WebSocket and stdio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import exec_server
from exec_server import Unsupported
from exec_server.client.blocks import BLOCK_BYTES
from exec_server.client.files import WHOLE_WRITE_BYTES
from exec_server.client.landing import part_name
from exec_server.services import Files, WalkEntry

Target = str | list[str]
Scenario = Callable[[Files], Awaitable[None]]


@pytest.fixture
def target(reference_server: Target) -> Target:
    """The reference's server."""
    return reference_server


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty directory."""
    directory = tmp_path / "place"
    directory.mkdir()
    return directory


def drive(target: Target, scenario: Scenario) -> None:
    """Run a scenario with the files of a client."""

    async def main() -> None:
        async with asyncio.timeout(60), exec_server.connect(target) as client:
            await scenario(client.files)

    asyncio.run(main())


def test_contents(target: Target, place: Path) -> None:
    async def scenario(files: Files) -> None:
        path = f"{place}/ü name"
        for size in (0, 5, BLOCK_BYTES, 3 * BLOCK_BYTES + 7, WHOLE_WRITE_BYTES):
            data = os.urandom(size)
            await files.write(path, data)
            assert Path(path).read_bytes() == data
            assert await files.read(path) == data
        part = await files.read_range(path, 5, 2 * BLOCK_BYTES)
        assert (part.data, part.eof) == (data[5 : 5 + 2 * BLOCK_BYTES], False)
        part = await files.read_range(path, len(data) - 3, 10)
        assert (part.data, part.eof) == (data[-3:], True)

    drive(target, scenario)


def test_streams(target: Target, place: Path) -> None:
    data = os.urandom(WHOLE_WRITE_BYTES + 12345)

    async def scenario(files: Files) -> None:
        path = f"{place}/large"
        await files.write(path, data)
        assert b"".join([block async for block in files.stream(path)]) == data
        assert await files.write_stream(f"{place}/copy", files.stream(path)) == len(data)
        assert (place / "copy").read_bytes() == data

    drive(target, scenario)


def test_directories(target: Target, place: Path) -> None:
    async def scenario(files: Files) -> None:
        await files.make_directory(f"{place}/a/b")
        await files.write(f"{place}/a/file", b"12")
        (place / "a" / "link").symlink_to("b")
        listed = [(entry.name, entry.is_directory) for entry in await files.list(f"{place}/a")]
        assert listed == [("b", True), ("file", False), ("link", True)]
        found = await files.metadata(f"{place}/a/link")
        assert (found.is_directory, found.is_file, found.is_symlink) == (True, False, True)
        assert (await files.metadata(f"{place}/a/file")).size == 2
        assert (await files.walk(str(place))).entries == [
            WalkEntry(f"{place}/a", "directory"),
            WalkEntry(f"{place}/a/b", "directory"),
            WalkEntry(f"{place}/a/file", "file"),
        ]
        assert await files.canonicalize(f"{place}/a/link") == os.path.realpath(place / "a" / "b")

    drive(target, scenario)


def test_copy_move_and_remove(target: Target, place: Path) -> None:
    async def scenario(files: Files) -> None:
        await files.make_directory(f"{place}/tree")
        await files.write(f"{place}/tree/file", b"content")
        await files.copy(f"{place}/tree", f"{place}/twin", recursive=True)
        assert (place / "twin" / "file").read_bytes() == b"content"
        await files.move(f"{place}/twin", f"{place}/moved")
        assert (place / "moved" / "file").read_bytes() == b"content"
        assert not (place / "twin").exists()
        await files.move(f"{place}/moved/file", f"{place}/moved/file", overwrite=True)
        assert (place / "moved" / "file").read_bytes() == b"content"
        await files.remove(f"{place}/moved", recursive=True)
        assert not await files.exists(f"{place}/moved")

    drive(target, scenario)


def test_errors_and_what_is_missing(target: Target, place: Path) -> None:
    async def scenario(files: Files) -> None:
        with pytest.raises(FileNotFoundError):
            await files.read(f"{place}/none")
        with pytest.raises(FileNotFoundError):
            await files.remove(f"{place}/none")
        with pytest.raises(FileExistsError):
            await files.make_directory(str(place), recursive=False)
        with pytest.raises(IsADirectoryError):
            await files.write(str(place), b"")
        await files.write(f"{place}/file", b"")
        with pytest.raises(NotADirectoryError):
            await files.list(f"{place}/file")
        with pytest.raises(Unsupported):
            await files.glob(str(place), "*")
        with pytest.raises(Unsupported):
            await files.search(str(place), "x")
        with pytest.raises(Unsupported):
            async with files.watch(str(place)):
                pass

    drive(target, scenario)


def test_trees_and_resumption(target: Target, place: Path) -> None:
    tree = place / "tree"
    (tree / "deep").mkdir(parents=True)
    for number in range(70):
        (tree / "deep" / f"{number}").write_bytes(os.urandom(number))
    data = os.urandom(6 * BLOCK_BYTES + 3)
    (tree / "large").write_bytes(data)

    async def scenario(files: Files) -> None:
        done = await files.upload(str(tree), f"{place}/there")
        assert (done.files, done.directories, done.verified) == (71, 2, "digest")
        done = await files.download(f"{place}/there", f"{place}/back")
        assert (done.files, done.directories, done.verified) == (71, 2, "digest")
        for path in tree.rglob("*"):
            if path.is_file():
                assert (place / "back" / path.relative_to(tree)).read_bytes() == path.read_bytes()
        begun = part_name(f"{place}/up", f"{os.uname().nodename}:{tree}/large")
        Path(begun).write_bytes(data[: 5 * BLOCK_BYTES])
        done = await files.upload(f"{tree}/large", f"{place}/up")
        assert (done.resumed_bytes, (place / "up").read_bytes() == data) == (5 * BLOCK_BYTES, True)

    drive(target, scenario)
