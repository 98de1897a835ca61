"""`client.files` against real servers: one suite, every transport; then what goes wrong."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import exec_server
from exec_server import Client, ConnectionLost, Unsupported
from exec_server.client import download, transfer, transfers, upload
from exec_server.client.errors import (
    RemoteFileError,
    RemoteFileNotFound,
    RemotePermissionDenied,
    TransferFailed,
)
from exec_server.client.files import BLOCK_BYTES, WHOLE_WRITE_BYTES, RemoteFiles
from exec_server.client.landing import part_name
from exec_server.services import Files, WalkEntry
from exec_server.wire.uri import path_to_uri
from support.server import COMMAND, RunningServer

Target = str | list[str] | None
Scenario = Callable[[Client, Files], Awaitable[None]]
Run = Callable[[Scenario], None]

MB = 1_000_000


@pytest.fixture(params=["local", "websocket", "unix", "stdio"])
def target(request: pytest.FixtureRequest, server: RunningServer, tmp_path: Path) -> Iterator[Target]:
    """Something to connect to."""
    with ExitStack() as stack:
        if request.param == "local":
            yield None
        elif request.param == "websocket":
            yield server.url
        elif request.param == "stdio":
            yield [COMMAND, "--listen", "stdio"]
        else:
            path = f"unix://{tmp_path}/sock"
            yield stack.enter_context(RunningServer(listen=path)).url


@pytest.fixture
def run(target: Target) -> Run:
    """Run a scenario with a client and its files."""
    return lambda scenario: drive(target, scenario)


def drive(target: Target, scenario: Scenario) -> None:
    async def main() -> None:
        async with asyncio.timeout(40), exec_server.connect(target) as client:
            await scenario(client, client.files)

    asyncio.run(main())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty directory."""
    directory = tmp_path / "place"
    directory.mkdir()
    return directory


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

    drive(server.url, scenario)


def test_what_was_written_is_read(run: Run, place: Path) -> None:
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


def test_more_than_a_message_holds(run: Run, place: Path) -> None:
    data = os.urandom(WHOLE_WRITE_BYTES + 5)

    async def scenario(client: Client, files: Files) -> None:
        path = str(place / "large")
        await files.write(path, data[:WHOLE_WRITE_BYTES])
        assert os.path.getsize(path) == WHOLE_WRITE_BYTES
        await files.write(path, data)
        assert await files.read(path) == data

    run(scenario)


def test_ranges(run: Run, place: Path) -> None:
    data = os.urandom(5 * BLOCK_BYTES)
    (place / "file").write_bytes(data)
    path = str(place / "file")

    async def scenario(client: Client, files: Files) -> None:
        part = await files.read_range(path, 10, 20)
        assert (part.data, part.eof) == (data[10:30], False)
        part = await files.read_range(path, 1, 3 * BLOCK_BYTES)
        assert (part.data, part.eof) == (data[1 : 3 * BLOCK_BYTES + 1], False)
        part = await files.read_range(path, len(data) - 3, 2 * BLOCK_BYTES)
        assert (part.data, part.eof) == (data[-3:], True)
        part = await files.read_range(path, len(data) - 3, 100)
        assert (part.data, part.eof) == (data[-3:], True)
        for length in (1, 5, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES, len(data)):
            part = await files.read_range(path, len(data) - length, length)
            assert (part.data, part.eof) == (data[-length:], True), length
            part = await files.read_range(path, len(data) - length, length - 1)
            assert (part.data, part.eof) == (data[len(data) - length : -1], False), length
        part = await files.read_range(path, 10**12, 5)
        assert (part.data, part.eof) == (b"", True)
        assert (await files.read_range(path, 10, 0)).data == b""
        with pytest.raises(ValueError, match="cannot be negative"):
            await files.read_range(path, -1, 5)

    run(scenario)


def test_a_stream_of_odd_pieces_is_written_whole(run: Run, place: Path) -> None:
    pieces = [os.urandom(size) for size in (1, 0, BLOCK_BYTES, 700_000, 3 * BLOCK_BYTES + 1, 9)]

    async def slowly() -> AsyncIterator[bytes]:
        for piece in pieces:
            await asyncio.sleep(0)
            yield piece

    async def scenario(client: Client, files: Files) -> None:
        whole = b"".join(pieces)
        for source in (pieces, slowly(), whole):
            assert await files.write_stream(str(place / "file"), source) == len(whole)
            assert (place / "file").read_bytes() == whole
        assert await files.write_stream(str(place / "file"), []) == 0
        assert (place / "file").read_bytes() == b""

    run(scenario)


def test_a_source_that_fails_ends_the_stream(run: Run, place: Path) -> None:
    def source() -> Iterator[bytes]:
        yield b"some" * BLOCK_BYTES
        raise RuntimeError("the source")

    async def scenario(client: Client, files: Files) -> None:
        with pytest.raises(RuntimeError, match="the source"):
            await files.write_stream(str(place / "file"), source())
        for number in range(130):  # more than there may be handles: each was given back
            with pytest.raises(RuntimeError):
                await files.write_stream(str(place / f"{number}"), _failing())
        await files.write(str(place / "file"), b"still works")

    run(scenario)


def _failing() -> Iterator[bytes]:
    yield b"x"
    raise RuntimeError("the source")


def test_a_stream_replaces_the_file_whole_or_not_at_all(run: Run, place: Path) -> None:
    path = place / "file"
    path.write_bytes(b"old")
    path.chmod(0o751)
    new = os.urandom(3 * BLOCK_BYTES + 5)

    async def scenario(client: Client, files: Files) -> None:
        seen = []

        async def source(fails: bool) -> AsyncIterator[bytes]:
            for at in range(0, len(new), BLOCK_BYTES):
                yield new[at : at + BLOCK_BYTES]
                seen.append(path.read_bytes())
            if fails:
                raise RuntimeError("the source")

        with pytest.raises(RuntimeError, match="the source"):
            await files.write_stream(str(path), source(fails=True))
        # A call that comes after the abandoned stream's end: its remains are gone by now.
        assert [entry.name for entry in await files.list(str(place))] == ["file"]
        assert path.read_bytes() == b"old"
        assert await files.write_stream(str(path), source(fails=False)) == len(new)
        assert set(seen) == {b"old"}
        assert path.read_bytes() == new
        assert path.stat().st_mode & 0o777 == 0o751
        await files.write(str(path), bytes(WHOLE_WRITE_BYTES + 1))
        assert path.stat().st_mode & 0o777 == 0o751
        assert os.listdir(place) == ["file"]

    run(scenario)


def test_streams_that_are_dropped_give_their_handles_back(run: Run, place: Path) -> None:
    (place / "file").write_bytes(bytes(BLOCK_BYTES + 1))

    async def scenario(client: Client, files: Files) -> None:
        for _ in range(130):  # more than there may be handles
            stream = files.stream(str(place / "file"), BLOCK_BYTES)
            assert await anext(stream) == b"\0"
            await stream.aclose()  # type: ignore[attr-defined]

    run(scenario)


def test_directories_and_what_is_in_them(run: Run, place: Path) -> None:
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


def test_copy_move_and_remove(run: Run, place: Path) -> None:
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


def test_glob_and_search(run: Run, place: Path) -> None:
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


def test_watching(run: Run, place: Path) -> None:
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


def test_waiting_for_what_is_missing(run: Run, place: Path) -> None:
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


def test_trees_go_there_and_come_back(run: Run, place: Path) -> None:
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


def up_part(place: Path, name: str) -> Path:
    """What an upload of `source` leaves beside its target when it breaks."""
    return Path(part_name(f"{place}/{name}", f"{os.uname().nodename}:{place}/source"))


def down_part(place: Path, name: str, source: str = "source") -> Path:
    return Path(part_name(f"{place}/{name}", f"{place}/{source}"))


def test_a_broken_transfer_is_taken_up(run: Run, place: Path) -> None:
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

    drive("in-process:", scenario)
    assert (place / "back").read_bytes() == content
    assert hashed == (2 * size if verify else 0)


def test_an_upload_leaves_the_mode_of_what_it_replaces(run: Run, place: Path) -> None:
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


def test_small_calls_are_not_delayed_by_a_large_transfer(run: Run, place: Path) -> None:
    size = 60 * MB
    with (place / "large").open("wb") as file:
        file.truncate(size)

    async def scenario(client: Client, files: Files) -> None:
        loop = asyncio.get_running_loop()

        async def download() -> int:
            return sum([len(block) async for block in files.stream(f"{place}/large")])

        transfer = asyncio.ensure_future(download())
        waits: list[float] = []
        while not transfer.done():
            before = loop.time()
            await files.exists(str(place))
            waits.append(loop.time() - before)
        assert await transfer == size
        waits.sort()
        assert len(waits) > 10
        assert waits[len(waits) // 2] < 0.1, waits

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

    drive(None, scenario)


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

    drive(None, scenario)


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

    drive(None, scenario)


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

    drive(words, scenario)


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

    drive(None, scenario)


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

    drive(None, scenario)


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

    drive(None, scenario)


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

    drive(None, scenario)


# Constant memory -----------------------------------------------------------------------------------

MEASURED = """
import asyncio, hashlib, resource, sys
import exec_server

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

async def main():
    url, large, copy = sys.argv[1:]
    async with exec_server.connect(url) as client:
        await client.files.upload("/etc/hostname", copy)  # whatever is imported late
        before, digest = peak(), hashlib.sha256()

        async def through():
            async for block in client.files.stream(large):
                digest.update(block)
                yield block

        await client.files.write_stream(copy, through())
        print(digest.hexdigest(), peak() - before)

asyncio.run(main())
"""


def test_200_mb_in_constant_memory(server: RunningServer, place: Path) -> None:
    block, digest = os.urandom(MB), hashlib.sha256()
    with (place / "large").open("wb") as file:
        for _ in range(200):
            file.write(block)
            digest.update(block)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, server.url, str(place / "large"), str(place / "copy")],
        capture_output=True,
        text=True,
        timeout=40,
        check=True,
    )
    received, grown = done.stdout.split()
    assert received == digest.hexdigest()
    assert int(grown) < 60, "MB more than before, for 200 MB that were read and written"
    assert subprocess.run(["cmp", place / "large", place / "copy"]).returncode == 0
