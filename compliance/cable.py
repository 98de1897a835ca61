"""A TCP cable between a program and the rendezvous that can be pulled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

__all__ = ["Cable"]

START_DEADLINE = 5.0
"""Seconds for it to be there."""


class Cable:
    """Runs in a thread of its own; `url` leads through it."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = ""
        self.pulled = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(START_DEADLINE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(START_DEADLINE)

    def pull(self) -> None:
        """Cut every connection, without a word to either side."""
        done = threading.Event()

        def cut() -> None:
            self.pulled += self._cut()
            done.set()

        self._loop.call_soon_threadsafe(cut)
        assert done.wait(START_DEADLINE)

    def _cut(self) -> int:
        cut, self._writers = self._writers, set()
        for writer in cut:
            writer.transport.abort()
        return len(cut)

    def _run(self) -> None:
        async def serve() -> None:
            server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()
            await self._end.wait()
            server.close()
            self._cut()
            passing = asyncio.all_tasks() - {asyncio.current_task()}
            for task in passing:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)

        self._loop.run_until_complete(serve())
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            host, port = self._target.hostname, self._target.port
            their_reader, their_writer = await asyncio.open_connection(host, port)
            self._writers |= {writer, their_writer}
            await asyncio.gather(self._pass(reader, their_writer), self._pass(their_reader, writer))
        writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)
