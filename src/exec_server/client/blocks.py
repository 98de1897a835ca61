"""Large contents in blocks: read ahead, written behind, a few of them on their way at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from ..wire import base64
from ..wire.files import BlockResult
from .errors import ProtocolError

if TYPE_CHECKING:
    from .files import RemoteFiles

__all__ = ["BLOCKS_IN_FLIGHT", "BLOCK_BYTES", "BlockReader", "BlockWriter", "decoded", "reblocked"]

BLOCK_BYTES: Final = 1024 * 1024
"""Of one read or write of a stream: the most the protocol allows."""

BLOCKS_IN_FLIGHT: Final = 4
"""Blocks asked for or sent and not answered, of all streams of a connection together."""


class BlockReader:
    """The blocks of one file in order, fetched ahead as far as they are taken."""

    def __init__(self, files: RemoteFiles, uri: str, path: str, start: int, stop: int | None) -> None:
        self._files = files
        self._uri = uri
        self._path = path
        self._next = start
        self._stop = stop
        self._handle = uuid4().hex
        self._fetching: deque[asyncio.Future[tuple[bytes, bool]]] = deque()
        self._opening: asyncio.Future[None] | None = None

    async def blocks(self) -> AsyncIterator[bytes]:
        # The first block is asked for along with the file: a small one costs one round trip.
        opening = self._files._open(self._handle, self._uri, self._path, "read")
        self._opening = asyncio.ensure_future(opening)
        ahead = 1
        self._fetch(ahead)
        await self._opening
        while self._fetching:
            data, eof = await self._fetching[0]
            self._fetching.popleft()
            if eof:
                if data:
                    yield data
                return
            # One that turns out to be long is worth more and more of an effort.
            ahead = min(ahead * 2, BLOCKS_IN_FLIGHT)
            self._fetch(ahead)
            yield data

    def _fetch(self, ahead: int) -> None:
        while len(self._fetching) < ahead and (self._stop is None or self._next < self._stop):
            length = BLOCK_BYTES if self._stop is None else min(BLOCK_BYTES, self._stop - self._next)
            self._fetching.append(asyncio.ensure_future(self._read(self._next, length)))
            self._next += length

    async def _read(self, offset: int, length: int) -> tuple[bytes, bool]:
        params = {"handleId": self._handle, "offset": offset, "len": length}
        block = await self._files._block("fs/readBlock", params, BlockResult, self._path)
        data = decoded(block.chunk)
        if len(data) > length:
            raise ProtocolError(f"`fs/readBlock` of {length} bytes was answered with {len(data)}")
        if not data and not block.eof:
            raise ProtocolError("`fs/readBlock` was answered with nothing before the end of the file")
        return data, block.eof

    def close(self) -> None:
        """Give the handle back without waiting; what is still coming is dropped."""
        for task in self._fetching:
            _abandon(task)
        if self._opening is not None:
            _abandon(self._opening)
            self._files._client.tell("fs/close", {"handleId": self._handle})


class BlockWriter:
    """Blocks on their way into one file."""

    def __init__(self, files: RemoteFiles, handle: str, path: str) -> None:
        self._files = files
        self._handle = handle
        self._path = path
        self._sending: deque[asyncio.Future[dict[str, Any]]] = deque()
        self.offset = 0

    async def put(self, block: bytes) -> None:
        """Send a block, when those before it leave room."""
        while len(self._sending) >= BLOCKS_IN_FLIGHT:
            await self._sending[0]
            self._sending.popleft()
        params = {"handleId": self._handle, "offset": self.offset, "chunk": base64.encode(block)}
        call = self._files._block("fs/writeBlock", params, dict[str, Any], self._path)
        self._sending.append(asyncio.ensure_future(call))
        self.offset += len(block)

    async def finish(self) -> None:
        """Until every block was taken."""
        while self._sending:
            await self._sending[0]
            self._sending.popleft()

    def cancel(self) -> None:
        for task in self._sending:
            _abandon(task)


def _abandon(task: asyncio.Future[Any]) -> None:
    task.cancel()
    task.add_done_callback(_seen)


def _seen(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


def decoded(text: str) -> bytes:
    try:
        return base64.decode(text)
    except ValueError as error:
        raise ProtocolError(f"the server sent file content that is not base64: {error}") from None


async def reblocked(blocks: AsyncIterable[bytes] | Iterable[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in pieces of BLOCK_BYTES, the last one as it comes."""
    waiting = bytearray()
    async for piece in _pieces(blocks):
        if not waiting and len(piece) == BLOCK_BYTES:
            yield piece
            continue
        waiting += piece
        while len(waiting) >= BLOCK_BYTES:
            yield bytes(waiting[:BLOCK_BYTES])
            del waiting[:BLOCK_BYTES]
    if waiting:
        yield bytes(waiting)


async def _pieces(blocks: AsyncIterable[bytes] | Iterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(blocks, bytes | bytearray | memoryview):
        yield bytes(blocks)  # iterating over it would give numbers
    elif isinstance(blocks, AsyncIterable):
        async for piece in blocks:
            yield piece
    else:
        for piece in blocks:
            yield piece
