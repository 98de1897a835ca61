"""Transfers on every transport: what arrives is whole, and what broke is taken up."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import exec_server
from exec_server import Client, ConnectionLost, Unsupported
from exec_server.client import download, transfer, transfers, upload
from exec_server.client.errors import (
    TransferFailed,
)
from exec_server.services import Files
from support.client import MB, FilesRun, down_part, drive_files, up_part
from support.server import COMMAND


def test_trees_go_there_and_come_back(run: FilesRun, place: Path) -> None:
    tree = place / "tree"
    (tree / "empty").mkdir(parents=True)
    (tree / "deep" / "er").mkdir(parents=True)
    for number in range(150):
        (tree / "deep" / f"small {number}").write_bytes(os.urandom(number))
    (tree / "deep" / "er" / "large").write_bytes(os.urandom(transfers.PART_BYTES + 99))
    (tree / "link").symlink_to("deep")
    (tree / "file link").symlink_to("deep/small 1")
    os.mkfifo(tree / "fifo")
    total = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
    seen: list[tuple[int, int]] = []

    async def scenario(client: Client, files: Files) -> None:
        def progress(done: int, whole: int, path: str) -> None:
            seen.append((done, whole))

        up = await files.upload(str(tree), f"{place}/there", progress)
        assert (up.files, up.directories, up.bytes, up.verified) == (152, 4, total, "digest")
        assert sorted(os.path.basename(path) for path, _ in up.skipped) == ["fifo", "link"]
        assert seen[0] == (0, total)
        assert seen[-1] == (total, total)
        down = await files.download(f"{place}/there", f"{place}/back", progress)
        assert (down.files, down.directories, down.bytes, down.skipped) == (152, 4, total, [])
        for path in tree.rglob("*"):
            if path.is_file():
                assert (place / "back" / path.relative_to(tree)).read_bytes() == path.read_bytes()
        assert (place / "back" / "empty").is_dir()
        assert not list(place.rglob("*-part"))

    run(scenario)


def test_a_broken_transfer_is_taken_up(run: FilesRun, place: Path) -> None:
    data = os.urandom(9 * MB)
    (place / "source").write_bytes(data)

    async def scenario(client: Client, files: Files) -> None:
        up_part(place, "up").write_bytes(data[: 5 * MB])
        done = await files.upload(f"{place}/source", f"{place}/up")
        assert (done.resumed_bytes, done.bytes) == (5 * MB, 9 * MB)
        down_part(place, "down").write_bytes(data[: 5 * MB])
        done = await files.download(f"{place}/source", f"{place}/down")
        assert (done.resumed_bytes, done.bytes) == (5 * MB, 9 * MB)
        # What is not the beginning of this file is not taken up.
        up_part(place, "up2").write_bytes(b"x" + data[1 : 5 * MB])
        assert (await files.upload(f"{place}/source", f"{place}/up2")).resumed_bytes == 0
        down_part(place, "down2").write_bytes(b"x" + data[1 : 5 * MB])
        assert (await files.download(f"{place}/source", f"{place}/down2")).resumed_bytes == 0
        for name in ("up", "down", "up2", "down2"):
            assert (place / name).read_bytes() == data
        assert not list(place.glob(".*"))
        # A link stays one; what it leads to is replaced.
        (place / "target").write_bytes(b"old")
        (place / "link").symlink_to("target")
        await files.upload(f"{place}/source", f"{place}/link")
        assert (place / "link").is_symlink()
        assert (place / "target").read_bytes() == data

    run(scenario)


@pytest.mark.parametrize("size", [1000, transfers.PART_BYTES + 1000])
@pytest.mark.parametrize("verify", [True, False])
def test_what_is_not_compared_is_not_hashed(
    place: Path, monkeypatch: pytest.MonkeyPatch, size: int, verify: bool
) -> None:
    hashed = 0

    class Counting:
        def __init__(self) -> None:
            self._real = hashlib.sha256()

        def update(self, data: bytes) -> None:
            nonlocal hashed
            hashed += len(data)
            self._real.update(data)

        def hexdigest(self) -> str:
            return self._real.hexdigest()

    for module in (transfer, upload, download):
        monkeypatch.setattr(module, "hashlib", SimpleNamespace(sha256=Counting))
    content = os.urandom(size)
    (place / "source").write_bytes(content)

    async def scenario(client: Client, files: Files) -> None:
        await files.upload(f"{place}/source", f"{place}/there", verify=verify)
        await files.download(f"{place}/there", f"{place}/back", verify=verify)

    drive_files("in-process:", scenario)
    assert (place / "back").read_bytes() == content
    assert hashed == (2 * size if verify else 0)


def test_an_upload_leaves_the_mode_of_what_it_replaces(run: FilesRun, place: Path) -> None:
    """Whether it goes in one message or in parts, which get the name at the end."""

    async def scenario(client: Client, files: Files) -> None:
        for size in (10, 5 * MB):
            (place / "source").write_bytes(os.urandom(size))
            (place / "tool").write_bytes(b"old")
            (place / "tool").chmod(0o751)
            await files.upload(str(place / "source"), str(place / "tool"))
            assert (place / "tool").read_bytes() == (place / "source").read_bytes()
            assert (place / "tool").stat().st_mode & 0o777 == 0o751

    run(scenario)


def test_a_server_that_dies_in_the_middle(place: Path) -> None:
    with (place / "large").open("wb") as file:
        file.truncate(60 * MB)

    async def main() -> None:
        client = await exec_server.connect([COMMAND, "--listen", "stdio"])
        pid = int((await client.run(["sh", "-c", "echo $PPID"])).stdout)
        stream = client.files.stream(f"{place}/large")
        await anext(stream)
        watch = client.files.watch(str(place))
        await watch.__aenter__()

        def progress(done: int, total: int, path: str) -> None:
            if done > 20 * MB:
                os.kill(pid, signal.SIGKILL)

        with pytest.raises(ConnectionLost):
            await client.files.download(f"{place}/large", f"{place}/copy", progress)
        with pytest.raises(ConnectionLost):
            async for _ in stream:
                pass
        with pytest.raises(ConnectionLost):
            async for _ in watch:
                pass
        with pytest.raises(ConnectionLost):
            await client.files.metadata(str(place))
        await client.close()
        # What has arrived is the start of the next attempt.
        have = down_part(place, "copy", "large").stat().st_size
        assert have > 20 * MB
        async with exec_server.connect() as another:
            done = await another.files.download(f"{place}/large", f"{place}/copy")
        assert (done.resumed_bytes, done.bytes) == (have, 60 * MB)

    asyncio.run(main())


def test_a_file_that_keeps_changing_is_not_taken_for_whole(place: Path) -> None:
    source = place / "source"
    source.write_bytes(bytes(6 * MB))

    async def scenario(client: Client, files: Files) -> None:
        writes = iter(range(1, 100))

        def progress(done: int, total: int, path: str) -> None:
            with source.open("r+b") as file:
                file.write(b"%d" % next(writes))

        with pytest.raises(TransferFailed, match="does something write to it"):
            await files.download(str(source), f"{place}/copy", progress)
        assert not (place / "copy").exists()
        assert (await files.download(str(source), f"{place}/copy", progress, verify=False)).verified == "no"

    drive_files(None, scenario)


def test_names_that_lead_out_of_the_tree(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "tree").mkdir()
    (place / "evil").write_text("x")

    async def scenario(client: Client, files: Files) -> None:
        from exec_server.services import DirectoryEntry

        async def lying(path: str) -> list[DirectoryEntry]:
            return [DirectoryEntry("../evil", False, True), DirectoryEntry("..", True, False)]

        monkeypatch.setattr(files, "list", lying)
        (place / "out").mkdir()
        done = await files.download(f"{place}/tree", f"{place}/out/in")
        assert (done.files, [reason for _, reason in done.skipped]) == (0, ["not a name"] * 2)
        assert not (place / "out" / "evil").exists()

    drive_files(None, scenario)


def test_without_commands(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(9 * MB)
    (place / "source").write_bytes(data)

    async def scenario(client: Client, files: Files) -> None:
        async def refuse(*arguments: Any, **options: Any) -> Any:
            raise Unsupported("no commands here")

        monkeypatch.setattr(client, "run", refuse)
        down_part(place, "down").write_bytes(data[: 5 * MB])
        done = await files.download(f"{place}/source", f"{place}/down")
        assert (done.resumed_bytes, done.verified) == (5 * MB, "reread")
        # Only the end of the part fits; reading everything again tells, and it is fetched anew.
        down_part(place, "down").write_bytes(b"x" + data[1 : 5 * MB])
        await files.download(f"{place}/source", f"{place}/down")
        assert (place / "down").read_bytes() == data
        up_part(place, "up").write_bytes(data[: 5 * MB])
        done = await files.upload(f"{place}/source", f"{place}/up")
        assert (done.resumed_bytes, done.verified) == (0, "reread")
        assert (place / "up").read_bytes() == data

    drive_files(None, scenario)
