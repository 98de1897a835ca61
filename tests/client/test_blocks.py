"""client/blocks.py: large contents in blocks, as they are and in base64."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

import exec_server
from exec_server.client.blocks import BLOCK_BYTES, reblocked
from exec_server.client.errors import ProtocolError
from exec_server.client.file_answers import part_of
from exec_server.wire.binary import FilePart
from support.server import RunningServer


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("size", [0, 1, 300_000, BLOCK_BYTES, 13 * BLOCK_BYTES, 14 * BLOCK_BYTES + 5])
def test_there_and_back(server: RunningServer, tmp_path: Path, binary: bool, size: int) -> None:
    content = os.urandom(size)
    path = str(tmp_path / "f")

    async def scenario() -> None:
        async with exec_server.connect(server.url, binary_output=binary) as client:
            assert client.binary_files is binary
            await client.files.write(path, content)
            assert Path(path).read_bytes() == content
            found = await client.files.read(path)
            assert type(found) is bytes
            assert found == content
            blocks = [block async for block in client.files.stream(path)]
            assert all(type(block) is bytes and block for block in blocks)
            assert b"".join(blocks) == content
            middle = await client.files.read_range(path, size // 3, 2 * BLOCK_BYTES)
            assert middle.data == content[size // 3 :][: 2 * BLOCK_BYTES]
            assert middle.eof is (size - size // 3 <= 2 * BLOCK_BYTES)

    asyncio.run(scenario())


def test_a_file_that_does_not_say_its_size(server: RunningServer) -> None:
    async def scenario() -> None:
        async with exec_server.connect(server.url) as client:
            assert (await client.files.read("/proc/self/status")).startswith(b"Name:")

    asyncio.run(scenario())


@given(st.lists(st.integers(0, BLOCK_BYTES + 2), max_size=4), st.booleans())
def test_blocks_of_one_size(sizes: list[int], asynchronous: bool) -> None:
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]

    async def later() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def gather() -> list[Any]:
        return [block async for block in reblocked(later() if asynchronous else pieces)]

    blocks = asyncio.run(gather())
    assert b"".join(blocks) == b"".join(pieces)
    assert all(len(block) == BLOCK_BYTES for block in blocks[:-1])


def test_answers_in_json() -> None:
    assert part_of("m", Raw(b'{"chunk":"QQ==","eof":false}')) == FilePart(b"A", False)
    assert part_of("m", Raw(b'{"dataBase64":"QQ==","eof":false}')) == FilePart(b"A", False)
    assert part_of("m", Raw(b'{"dataBase64":""}')) == FilePart(b"", True)
    for bad in (b"{}", b"[]", b'{"chunk":1}', b'{"chunk":"QQ","eof":true}', b'{"chunk":"QQ==","eof":1}'):
        with pytest.raises(ProtocolError):
            part_of("m", Raw(bad))
