"""Large contents in blocks: read ahead, written behind, a few of them on their way at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, Final

from ..wire.binary import FilePart
from .errors import ProtocolError
from .file_calls import BLOCKS_IN_FLIGHT
from .gathered import Gathered

if TYPE_CHECKING:
    from ..services import FilePath
    from .file_calls import FileCalls

__all__ = ["BLOCK_BYTES", "BlockReader", "BlockWriter", "Blocks", "reblocked"]

Blocks = AsyncIterable[bytes] | AsyncIterable[memoryview] | Iterable[bytes] | Iterable[memoryview]
"""Content that is written piece by piece. A piece must not change until it has been written."""

BLOCK_BYTES: Final = 1024 * 1024
"""Of one read or write of a stream: the most the protocol allows."""


class BlockReader:
    """The blocks of one file in order, fetched ahead as far as they are taken."""

    def __init__(self, calls: FileCalls, uri: str, path: FilePath, start: int, stop: int | None) -> None:
        self._calls = calls
        self._uri = uri
        self._path = path
        self._start = self._next = start
        self._gathered: Gathered | None = None
        self._stop = stop
        self._handle = calls.new_handle()
        self._fetching: deque[asyncio.Future[tuple[bytes, bool]]] = deque()
        self._opening: asyncio.Future[None] | None = None

    def blocks(self) -> AsyncIterator[bytes]:
        """The blocks, none of them empty."""
        return self._blocks(gather=False)

    async def _blocks(self, gather: bool) -> AsyncIterator[bytes]:
        # The first block is asked for along with the file: a small one costs one round trip.
        opening = self._calls.open(self._handle, self._uri, self._path, "read")
        self._opening = asyncio.ensure_future(opening)
        ahead = 1
        self._fetch(ahead, gather)
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
            self._fetch(ahead, gather)
            yield data

    async def gather(self) -> bytes:
        """All of it in one piece; each block goes from its message straight to its place."""
        async for _ in self._blocks(gather=True):
            pass
        return b"" if self._gathered is None else self._gathered.finish()

    def _fetch(self, ahead: int, gather: bool) -> None:
        while len(self._fetching) < ahead and (self._stop is None or self._next < self._stop):
            length = BLOCK_BYTES if self._stop is None else min(BLOCK_BYTES, self._stop - self._next)
            self._fetching.append(asyncio.ensure_future(self._read(self._next, length, gather)))
            self._next += length

    async def _read(self, offset: int, length: int, gather: bool) -> tuple[bytes, bool]:
        params = {"handleId": self._handle, "offset": offset, "len": length}
        count = 0

        def take(part: FilePart) -> FilePart:
            nonlocal count
            count = len(part.data)
            if not gather or count > length:
                return part._replace(data=bytes(part.data))
            if self._gathered is None:
                self._gathered = Gathered(part.size - self._start)
            self._gathered.put(offset - self._start, part.data)
            return part._replace(data=b"")

        part = await self._calls.read_block(params, self._path, take)
        if count > length:
            raise ProtocolError(f"`fs/readBlock` of {length} bytes was answered with {count}")
        if not count and not part.eof:
            raise ProtocolError("`fs/readBlock` was answered with nothing before the end of the file")
        return bytes(part.data), part.eof

    def close(self) -> None:
        """Give the handle back without waiting; what is still coming is dropped."""
        for task in self._fetching:
            _abandon(task)
        if self._opening is not None:
            _abandon(self._opening)
            self._calls.close(self._handle)


class BlockWriter:
    """Blocks on their way into one file."""

    def __init__(self, calls: FileCalls, handle: str, path: FilePath) -> None:
        self._calls = calls
        self._handle = handle
        self._path = path
        self._sending: deque[asyncio.Future[None]] = deque()
        self.offset = 0

    async def put(self, block: bytes | memoryview) -> None:
        """Send a block, when those before it leave room."""
        while len(self._sending) >= BLOCKS_IN_FLIGHT:
            await self._sending[0]
            self._sending.popleft()
        writing = self._calls.write_block(self._handle, self.offset, block, self._path)
        self._sending.append(asyncio.ensure_future(writing))
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


async def reblocked(blocks: Blocks) -> AsyncIterator[bytes | memoryview]:
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


async def _pieces(blocks: Blocks) -> AsyncIterator[bytes | memoryview]:
    if isinstance(blocks, bytes | bytearray | memoryview):
        yield bytes(blocks)  # iterating over it would give numbers
    elif isinstance(blocks, AsyncIterable):
        async for piece in blocks:
            yield piece
    else:
        for piece in blocks:
            yield piece
