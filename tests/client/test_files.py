"""`client.files` against real servers: one suite, every transport; then what goes wrong."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from exec_server import Client, Unsupported
from exec_server.client.blocks import BLOCK_BYTES
from exec_server.client.errors import (
    RemoteFileError,
    RemoteFileNotFound,
    RemotePermissionDenied,
)
from exec_server.client.files import WHOLE_WRITE_BYTES
from exec_server.services import Files, WalkEntry
from exec_server.wire.uri import path_to_uri
from support.client import MB, FilesRun, drive_files
from support.server import COMMAND, RunningServer

# One behaviour, every transport --------------------------------------------------------------------


def test_every_path_may_be_a_path_object(server: RunningServer, place: Path) -> None:
    async def scenario(client: Client, files: Files) -> None:
        tree, file = place / "tree", place / "tree" / "file"
        await files.make_directory(tree)
        await files.write(file, b"one\ntwo\n")
        assert await files.write_stream(tree / "streamed", [b"x"]) == 1
        assert await files.read(file) == b"one\ntwo\n"
        assert (await files.read_range(file, 0, 3)).data == b"one"
        assert b"".join([block async for block in files.stream(file)]) == b"one\ntwo\n"
        assert (await files.metadata(file)).is_file
        assert await files.exists(file)
        assert [entry.name for entry in await files.list(tree)] == ["file", "streamed"]
        assert len((await files.walk(tree)).entries) == 2
        assert await files.canonicalize(file) == os.path.realpath(file)
        assert (await files.glob(tree, "f*")).paths == [str(file)]
        assert len((await files.search(tree, "two")).matches) == 1
        await files.copy(file, tree / "copy")
        await files.move(tree / "copy", tree / "moved")
        await files.remove(tree / "moved")
        async with files.watch(tree) as changes:
            (tree / "news").touch()
            assert str(tree / "news") in (await anext(aiter(changes))).paths
        assert (await files.upload(tree, place / "up")).files == 3
        assert (await files.download(place / "up", place / "down")).files == 3
        waiting = await client.files.watch_missing([tree / "later"], present=file)
        assert waiting is not None
        with pytest.raises(FileNotFoundError) as caught:
            await files.read(tree / "gone")
        assert caught.value.filename == str(tree / "gone")

    drive_files(server.url, scenario)


def test_what_was_written_is_read(run: FilesRun, place: Path) -> None:
    path = str(place / "file")

    async def scenario(client: Client, files: Files) -> None:
        for size in (0, 5, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 7):
            data = os.urandom(size)
            await files.write(path, data)
            assert Path(path).read_bytes() == data
            assert await files.read(path) == data
            assert b"".join([block async for block in files.stream(path)]) == data
            assert b"".join([block async for block in files.stream(path, 3)]) == data[3:]
            assert (await files.metadata(path)).size == size

    run(scenario)


def test_directories_and_what_is_in_them(run: FilesRun, place: Path) -> None:
    async def scenario(client: Client, files: Files) -> None:
        await files.make_directory(f"{place}/a/b")
        await files.make_directory(f"{place}/a/b")
        with pytest.raises(FileExistsError):
            await files.make_directory(f"{place}/a", recursive=False)
        await files.write(f"{place}/a/ü name", b"12")
        (place / "a" / "link").symlink_to("b")
        (place / "a" / "nowhere").symlink_to("none")
        listed = await files.list(f"{place}/a")
        assert [(entry.name, entry.is_directory, entry.is_file) for entry in listed] == [
            ("b", True, False),
            ("link", True, False),
            ("nowhere", False, False),
            ("ü name", False, True),
        ]
        walked = await files.walk(str(place))
        assert walked.entries == [
            WalkEntry(f"{place}/a", "directory"),
            WalkEntry(f"{place}/a/b", "directory"),
            WalkEntry(f"{place}/a/ü name", "file"),
        ]
        assert (walked.errors, walked.truncated) == ([], False)
        assert (await files.walk(str(place), max_entries=1)).truncated
        found = await files.metadata(f"{place}/a/link")
        assert (found.is_directory, found.is_file, found.is_symlink) == (True, False, True)
        with pytest.raises(RemoteFileError, match="symbolic link"):
            await files.metadata(f"{place}/a/link", follow_symlinks=False)
        assert await files.canonicalize(f"{place}/a/link/../ü name") == os.path.realpath(
            place / "a" / "ü name"
        )
        assert await files.exists(f"{place}/a/link")
        assert not await files.exists(f"{place}/a/nowhere")
        assert not await files.exists(f"{place}/a/ü name/below")

    run(scenario)


def test_copy_move_and_remove(run: FilesRun, place: Path) -> None:
    (place / "tree").mkdir()
    (place / "tree" / "file").write_text("content")

    async def scenario(client: Client, files: Files) -> None:
        with pytest.raises(RemoteFileError, match="requires recursive"):
            await files.copy(f"{place}/tree", f"{place}/twin")
        await files.copy(f"{place}/tree", f"{place}/twin", recursive=True)
        assert (place / "twin" / "file").read_text() == "content"
        await files.move(f"{place}/twin/file", f"{place}/moved")
        assert (place / "moved").read_text() == "content"
        assert not (place / "twin" / "file").exists()
        await files.write(f"{place}/other", b"other")
        with pytest.raises(FileExistsError):
            await files.move(f"{place}/moved", f"{place}/other")
        await files.move(f"{place}/moved", f"{place}/other", overwrite=True)
        assert (place / "other").read_text() == "content"
        with pytest.raises(OSError, match="not empty"):
            await files.remove(f"{place}/tree")
        await files.remove(f"{place}/tree", recursive=True)
        await files.remove(f"{place}/tree", force=True)
        with pytest.raises(FileNotFoundError):
            await files.remove(f"{place}/tree")

    run(scenario)


def test_glob_and_search(run: FilesRun, place: Path) -> None:
    (place / "src").mkdir()
    (place / "src" / "a.py").write_text("one\nneedle here\nthree\n")
    (place / "src" / "b.txt").write_text("needle\n")

    async def scenario(client: Client, files: Files) -> None:
        found = await files.glob(str(place), "**/*.py")
        assert (found.paths, found.truncated) == ([f"{place}/src/a.py"], False)
        searched = await files.search(str(place), "n[e]+dle", globs=["*.py"], before_context=1)
        (match,) = searched.matches
        assert (match.path, match.line_number, match.line) == (f"{place}/src/a.py", 2, "needle here")
        assert (match.spans, match.byte_offset) == ([(0, 6)], 4)
        assert [(line.line_number, line.line) for line in searched.context] == [(1, "one")]
        with pytest.raises(RemoteFileError):
            await files.search(str(place), "(")

    run(scenario)


# Paths ---------------------------------------------------------------------------------------------


def test_paths_of_every_spelling(place: Path) -> None:
    name = b"\xff \x01%41".decode("utf-8", "surrogateescape")

    async def scenario(client: Client, files: Files) -> None:
        await files.write(f"{place}/{name}", b"odd")
        assert os.path.exists(os.fsencode(place) + b"/\xff \x01%41")
        assert await files.read(path_to_uri(f"{place}/{name}")) == b"odd"
        assert await files.exists(os.path.relpath(place))
        assert await files.read(os.fsencode(f"{place}/{name}")) == b"odd"  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"str, bytes or os\.PathLike"):
            await files.read(5)  # type: ignore[arg-type]
        for wrong in ("", "a\0b", "file:///a?b"):
            with pytest.raises(ValueError, match="is not a path"):
                await files.read(wrong)

    drive_files(None, scenario)


def test_questions_at_the_same_time_are_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: Client, files: Files) -> None:
        sent: list[str] = []
        send = client._rpc.send

        def counted(method: str, params: Any) -> asyncio.Future[Any]:
            sent.append(method)
            return send(method, params)

        monkeypatch.setattr(client._rpc, "send", counted)
        path = str(place / "file")
        answers = await asyncio.gather(*(files.exists(path) for _ in range(10)))
        assert (answers, sent) == ([False] * 10, ["fs/getMetadata"])
        # One that was asked before a change is not shared with those who ask after it.
        early = asyncio.ensure_future(files.exists(path))
        await asyncio.sleep(0)
        writing = asyncio.ensure_future(files.write(path, b"x"))
        await asyncio.sleep(0)
        assert await files.exists(path)
        assert not await early
        await writing

    drive_files(None, scenario)


# What goes wrong -----------------------------------------------------------------------------------


def test_errors_are_of_the_usual_kinds(place: Path) -> None:
    (place / "file").touch()

    async def scenario(client: Client, files: Files) -> None:
        missing = f"{place}/missing"
        for call in (files.read, files.metadata, files.list, files.canonicalize, files.walk):
            with pytest.raises(RemoteFileNotFound) as caught:
                await call(missing)
            assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, missing)
            assert str(caught.value) == f"{missing}: No such file or directory (os error 2)"
            assert isinstance(caught.value, FileNotFoundError)
        with pytest.raises(FileNotFoundError):
            await anext(files.stream(missing))
        with pytest.raises(FileNotFoundError):
            await files.write(f"{missing}/file", b"")
        with pytest.raises(FileNotFoundError):
            await files.download(missing, f"{place}/here")
        with pytest.raises(FileNotFoundError):
            await files.upload(missing, f"{place}/here")
        with pytest.raises(RemoteFileError, match="is not a file"):
            await files.read(str(place))
        with pytest.raises(IsADirectoryError):
            await files.write(str(place), b"")
        with pytest.raises(IsADirectoryError):
            await files.write_stream(str(place), [b"x"])
        with pytest.raises(NotADirectoryError):
            await files.list(f"{place}/file")

    drive_files(None, scenario)


def test_denied(place: Path) -> None:
    words = [COMMAND, "--listen", "stdio"]
    (place / "secret").write_text("x")
    (place / "secret").chmod(0)
    if os.getuid() == 0:
        # Nothing is denied to root, so the server is somebody else.
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv to give up root")
        for parent in (place, *place.parents[:3]):
            parent.chmod(parent.stat().st_mode | 0o055)
        words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *words]

    async def scenario(client: Client, files: Files) -> None:
        with pytest.raises(RemotePermissionDenied) as caught:
            await files.read(f"{place}/secret")
        assert isinstance(caught.value, PermissionError)
        assert caught.value.errno == errno.EACCES
        with pytest.raises(PermissionError):
            await anext(files.stream(f"{place}/secret"))

    drive_files(words, scenario)


# A server with less --------------------------------------------------------------------------------


def test_without_extensions(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(9 * MB)

    async def scenario(client: Client, files: Files) -> None:
        monkeypatch.setattr(client, "_capabilities", {})
        path = f"{place}/file"
        assert await files.write_stream(path, [data]) == len(data)
        assert await files.read(path) == data
        assert (await files.read_range(path, 5, 10)).data == data[5:15]
        for length in (10, BLOCK_BYTES, BLOCK_BYTES + 1):
            assert not (await files.read_range(path, len(data) - length - 1, length)).eof
            part = await files.read_range(path, len(data) - length, length)
            assert (part.data, part.eof) == (data[-length:], True), length
        await files.move(path, path, overwrite=True)
        assert os.path.getsize(path) == len(data)
        await files.write(f"{place}/other", b"x")
        with pytest.raises(FileExistsError):
            await files.move(path, f"{place}/other")
        await files.move(path, f"{place}/other", overwrite=True)
        assert (place / "other").read_bytes() == data
        assert not os.path.exists(path)
        with pytest.raises(Unsupported, match="at most"):
            await files.write(path, bytes(WHOLE_WRITE_BYTES + 1))
        with pytest.raises(Unsupported, match="cannot look for paths"):
            await files.glob(str(place), "*")
        with pytest.raises(Unsupported, match="cannot search"):
            await files.search(str(place), "x")
        with pytest.raises(Unsupported, match="cannot watch"):
            async with files.watch(str(place)):
                pass
        done = await files.upload(f"{place}/other", f"{place}/up")
        assert (done.bytes, (place / "up").read_bytes()) == (len(data), data)
        (place / "sparse").touch()
        os.truncate(place / "sparse", WHOLE_WRITE_BYTES + 1)
        with pytest.raises(Unsupported, match="at most"):
            await files.upload(f"{place}/sparse", f"{place}/up")

    drive_files(None, scenario)
