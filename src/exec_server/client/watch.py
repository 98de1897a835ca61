"""Watches across a connection: set up again after it was lost, and told then to look at everything."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import msgspec
from msgspec import Raw, Struct

from ..services import Change
from .errors import ConnectionLost, ExecServerError
from .file_answers import native

if TYPE_CHECKING:
    from ..services import FilePath
    from .client import Client
    from .file_calls import FileCalls

__all__ = ["MAX_WAITING_CHANGES", "RemoteWatch", "RemoteWatches"]

MAX_WAITING_CHANGES: Final = 1024
"""Change notifications that may wait for their reader; beyond, they become one that says `overflowed`."""


class _ChangedParams(Struct, rename="camel"):
    watch_id: str
    changed_paths: list[str]
    overflowed: bool = False


class _MissingChangedParams(Struct, rename="camel"):
    watch_id: int


class _Watching(Struct):
    watching: bool


class RemoteWatches:
    """All watches of one client, whatever sandbox they are in: who is told what the server says."""

    def __init__(self, client: Client) -> None:
        self._watches: dict[str, RemoteWatch] = {}
        self._missing_ids = count(1)
        self._missing: tuple[int, asyncio.Future[None]] | None = None
        self._rearming: set[asyncio.Future[None]] = set()
        client.listen("fs/changed", self._changed, self._lost, self._resumed)
        client.listen("fs/missingChanged", self._missing_changed, lambda _: None)

    def add(self, watch_id: str, watch: RemoteWatch) -> None:
        """From now on, it is told."""
        self._watches[watch_id] = watch

    def remove(self, watch_id: str) -> bool:
        """Whether there was one."""
        return self._watches.pop(watch_id, None) is not None

    async def missing(
        self, calls: FileCalls, missing: Sequence[FilePath], present: FilePath | None
    ) -> asyncio.Future[None] | None:
        """See `RemoteFiles.watch_missing`."""
        if not calls.client.has("fsWatchMissing"):
            return None
        watch_id = next(self._missing_ids)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._missing is not None:
            self._missing[1].cancel()
        self._missing = (watch_id, future)
        params: dict[str, Any] = {"watchId": watch_id, "missing": [calls.uri(path) for path in missing]}
        if present is not None:
            params["present"] = calls.uri(present)
        reply = await calls.call("fs/watchMissing", params, _Watching, missing[0] if missing else "")
        return future if reply.watching else None

    def _changed(self, params: Raw) -> None:
        change = msgspec.json.decode(params, type=_ChangedParams)
        watch = self._watches.get(change.watch_id)
        if watch is not None:
            watch.put(Change([native(uri) for uri in change.changed_paths], change.overflowed))

    def _missing_changed(self, params: Raw) -> None:
        changed = msgspec.json.decode(params, type=_MissingChangedParams)
        if self._missing is not None and self._missing[0] == changed.watch_id:
            self._look_for_missing()

    def _look_for_missing(self) -> None:
        if self._missing is not None:
            if not self._missing[1].done():
                self._missing[1].set_result(None)
            self._missing = None

    def _resumed(self) -> None:
        """A new connection: watches are set up again, and whoever waits is told to look at everything."""
        for watch in list(self._watches.values()):
            task = asyncio.ensure_future(watch.rearm())
            self._rearming.add(task)
            task.add_done_callback(self._rearming.discard)
        self._look_for_missing()

    def _lost(self, reason: str) -> None:
        for watch in list(self._watches.values()):
            watch.end(reason)
        if self._missing is not None and not self._missing[1].done():
            self._missing[1].set_exception(ConnectionLost(reason))
            self._missing[1].exception()


class RemoteWatch:
    """A watch, and the changes it reports. Made by `RemoteFiles.watch`."""

    def __init__(self, watches: RemoteWatches, calls: FileCalls, path: FilePath, recursive: bool) -> None:
        self._watches = watches
        self._calls = calls
        self._path = path
        self._recursive = recursive
        self._id = uuid4().hex
        self._changes: deque[Change] = deque()
        self._news = asyncio.Event()
        self._armed = False
        """The server has it, so it is missed when the connection is gone."""
        self._ended = False
        self._failure: str | None = None

    async def __aenter__(self) -> RemoteWatch:
        self._calls.require("fsWatch", "watch files")
        params = self._params()
        self._watches.add(self._id, self)
        try:
            await self._calls.call("fs/watch", params, dict[str, Any], self._path)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        self._armed = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watches.remove(self._id):
            self._calls.client.tell("fs/unwatch", {"watchId": self._id})
        self.end(None)

    def __aiter__(self) -> RemoteWatch:
        return self

    async def __anext__(self) -> Change:
        while not self._changes:
            if self._failure is not None:
                raise ConnectionLost(self._failure)
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._changes.popleft()

    async def rearm(self) -> None:
        """Watch again over a new connection. What happened in between is unknown, so look everywhere."""
        if not self._armed:
            return  # whoever sets it up waited for this connection, and asks by itself
        try:
            await self._calls.call("fs/watch", self._params(), dict[str, Any], self._path)
        except ConnectionLost:
            return  # the next connection tries again, or there is none and everybody is told
        except ExecServerError as error:
            self.end(f"the watch could not be set up again after a lost connection: {error}")
        else:
            self.put(Change([self._calls.native(self._path)], True))

    def _params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"watchId": self._id, "path": self._calls.uri(self._path)}
        if self._recursive:
            params["recursive"] = True
        return params

    def put(self, change: Change) -> None:
        """Something changed. A reader that does not read is told, later, to look at everything."""
        if len(self._changes) >= MAX_WAITING_CHANGES:
            self._changes.clear()
            change = Change([self._calls.native(self._path)], True)
        self._changes.append(change)
        self._news.set()

    def end(self, failure: str | None) -> None:
        """No more will come."""
        self._ended = True
        self._failure = self._failure or failure
        self._news.set()
