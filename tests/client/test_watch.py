"""client/watch.py: changes are told, on every transport."""

from __future__ import annotations

import asyncio
from pathlib import Path

from exec_server import Client
from exec_server.client.files import RemoteFiles
from exec_server.client.sandbox import Sandbox
from exec_server.services import Files
from support.client import FilesRun, drive_files


def test_watching(run: FilesRun, place: Path) -> None:
    async def scenario(client: Client, files: Files) -> None:
        async with files.watch(str(place)) as changes, files.watch(str(place), recursive=True) as deep:
            (place / "new").write_text("x")
            assert f"{place}/new" in (await anext(changes)).paths
            (place / "below").mkdir()
            (place / "below" / "deep").write_text("x")
            seen: set[str] = set()
            while f"{place}/below/deep" not in seen:
                seen.update((await anext(deep)).paths)
        assert [change async for change in changes][1:] == []  # what had come may be left; then it ends

    run(scenario)


def test_waiting_for_what_is_missing(run: FilesRun, place: Path) -> None:
    async def scenario(client: Client, files: Files) -> None:
        assert isinstance(files, RemoteFiles)
        assert await files.watch_missing([str(place)]) is None
        first = await files.watch_missing([f"{place}/never"])
        appears = await files.watch_missing([f"{place}/soon"])
        assert first is not None
        assert first.cancelled()
        assert appears is not None
        (place / "soon").touch()
        await appears

    run(scenario)


def test_watches_of_one_sandbox_are_told_like_those_of_another(place: Path) -> None:
    """There is one connection below all of them, and what it says is for all of them."""

    async def scenario(client: Client, files: Files) -> None:
        assert isinstance(files, RemoteFiles)
        confined = files.under(Sandbox.read_only())
        first = await files.watch_missing([f"{place}/never"])
        appears = await confined.watch_missing([f"{place}/soon"])
        assert first is not None
        assert first.cancelled()
        assert appears is not None
        (place / "soon").touch()
        async with asyncio.timeout(10):
            await appears

    drive_files(None, scenario)


def test_where_files_are_hidden_nobody_says_whether_they_come(place: Path) -> None:
    async def scenario(client: Client, files: Files) -> None:
        assert isinstance(files, RemoteFiles)
        hiding = files.under(Sandbox.scoped(readable=["/usr"]))
        assert await hiding.watch_missing([f"{place}/soon"]) is None

    drive_files(None, scenario)
