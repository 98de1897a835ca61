"""Contents of `client.files` that are large: in blocks, in constant memory, in nobody's way."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from exec_server import Client
from exec_server.client.blocks import BLOCK_BYTES
from exec_server.client.files import WHOLE_WRITE_BYTES
from exec_server.services import Files
from support.client import MB, FilesRun
from support.server import RunningServer


def test_more_than_a_message_holds(run: FilesRun, place: Path) -> None:
    data = os.urandom(WHOLE_WRITE_BYTES + 5)

    async def scenario(client: Client, files: Files) -> None:
        path = str(place / "large")
        await files.write(path, data[:WHOLE_WRITE_BYTES])
        assert os.path.getsize(path) == WHOLE_WRITE_BYTES
        await files.write(path, data)
        assert await files.read(path) == data

    run(scenario)


def test_ranges(run: FilesRun, place: Path) -> None:
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


def test_a_stream_of_odd_pieces_is_written_whole(run: FilesRun, place: Path) -> None:
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


def test_a_source_that_fails_ends_the_stream(run: FilesRun, place: Path) -> None:
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


def test_a_stream_replaces_the_file_whole_or_not_at_all(run: FilesRun, place: Path) -> None:
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


def test_streams_that_are_dropped_give_their_handles_back(run: FilesRun, place: Path) -> None:
    (place / "file").write_bytes(bytes(BLOCK_BYTES + 1))

    async def scenario(client: Client, files: Files) -> None:
        for _ in range(130):  # more than there may be handles
            stream = files.stream(str(place / "file"), BLOCK_BYTES)
            assert await anext(stream) == b"\0"
            await stream.aclose()  # type: ignore[attr-defined]

    run(scenario)


def test_small_calls_are_not_delayed_by_a_large_transfer(run: FilesRun, place: Path) -> None:
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
