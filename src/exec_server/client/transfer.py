"""What both directions of a transfer share: counting, comparing, and asking the far side for digests."""

from __future__ import annotations

import asyncio
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from ..services import Progress, Transferred
from .blocks import BLOCK_BYTES
from .errors import ExecServerError, TransferFailed

if TYPE_CHECKING:
    from .client import Client
    from .files import RemoteFiles

__all__ = [
    "LEADS_NOWHERE",
    "LEFT_OUT",
    "LINK_TO_DIRECTORY",
    "LOOKS_AT_ONCE",
    "NO_FILE",
    "Digest",
    "Item",
    "Transfer",
    "each",
    "hash_prefix",
    "join",
]

T = TypeVar("T")

BATCH_FILES: Final = 64
BATCH_BYTES: Final = 8 * 1024 * 1024
"""Small files that are compared by one command."""

FILES_AT_ONCE: Final = 4
"""Files of a batch on their way at the same time."""

LOOKS_AT_ONCE: Final = 32
"""Questions about entries of a tree on their way at the same time."""

LINK_TO_DIRECTORY: Final = "a link to a directory"
NO_FILE: Final = "neither a file nor a directory"
LEADS_NOWHERE: Final = "a link that leads nowhere"
LEFT_OUT: Final = frozenset({LINK_TO_DIRECTORY, NO_FILE})
"""Reasons to skip something that are no failure: such things are never brought over."""

_DIGEST_COMMANDS: Final = (["sha256sum", "--"], ["shasum", "-a", "256", "--"])
_PREFIX_DIGEST: Final = 'head -c "$1" -- "$2" | {}'


class Item(NamedTuple):
    """One file to bring over."""

    source: str
    target: str
    size: int


class Digest(Protocol):
    """What hashlib makes."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class _NoDigest:
    """In its place where nothing will be compared."""

    def update(self, data: bytes, /) -> None:
        """Hashing costs more than everything else that is done here."""

    def hexdigest(self) -> str:
        return ""


class Transfer(ABC):
    """What both directions share: counting, comparing, and asking the far side for digests."""

    def __init__(self, client: Client, files: RemoteFiles, progress: Progress | None, verify: bool) -> None:
        self._client = client
        self._files = files
        self._progress = progress
        self._verify = verify
        self._done = 0
        self._total = 0
        self._resumed = 0
        self._count = 0
        self._directories = 0
        self._skipped: list[tuple[str, str]] = []
        self._verified: Literal["digest", "reread", "no"] = "digest" if verify else "no"
        self._commands = list(_DIGEST_COMMANDS)

    async def _bring(self, items: list[Item]) -> Transferred:
        self._total = sum(item.size for item in items)
        if items:
            self._say(items[0].source)
        for batch in _batches(items):
            await self._bring_batch(batch)
        return Transferred(
            self._count, self._directories, self._done, self._resumed, self._verified, self._skipped
        )

    async def _bring_batch(self, batch: list[Item]) -> None:
        arrived: dict[Item, str] = {}

        async def first(item: Item) -> None:
            arrived[item] = await self._send(item, resume=True)

        try:
            await each(batch, first, FILES_AT_ONCE)
            if self._verify:
                await self._compare(batch, arrived)
            for item in batch:
                await self._finish(item)
                self._count += 1
        finally:
            self._release()

    async def _compare(self, batch: list[Item], arrived: dict[Item, str]) -> None:
        there = {item: path for item in batch if (path := self._far(item)) is not None}
        if len(there) < len(batch):
            self._verified = "no"  # a device, for one
        digests = await self._digests(list(there.values())) if there else []
        for item, digest in zip(there, digests, strict=True):
            if digest != arrived[item]:
                await self._again(item, there[item], arrived[item], digest)

    async def _again(self, item: Item, far: str, here: str, there: str) -> None:
        """What arrived is wrong: it changed meanwhile, or a part was resumed that was another's."""
        if self._can_repeat(item):
            self._done -= item.size
            here = await self._send(item, resume=False)
            (there,) = await self._digests([far])
            if here == there:
                return
            await self._discard(item)
        raise TransferFailed(
            f"{item.source}: what arrived differs from what was sent"
            f" (SHA-256 {here} here, {there} there); does something write to it?"
        )

    def _new_digest(self) -> Digest:
        """Of what goes through here."""
        return hashlib.sha256() if self._verify else _NoDigest()

    @abstractmethod
    def _far(self, item: Item) -> str | None:
        """Which file there has to be equal to what was hashed here; None if it cannot be read."""

    def _can_repeat(self, item: Item) -> bool:
        """Whether sending it once more can make it right."""
        del item
        return True

    @abstractmethod
    def _release(self) -> None:
        """Close what is still open of a batch."""

    @abstractmethod
    async def _send(self, item: Item, resume: bool) -> str:
        """Bring one file over, all but its name; the SHA-256 of what went through here."""

    @abstractmethod
    async def _finish(self, item: Item) -> None:
        """Give it its name."""

    @abstractmethod
    async def _discard(self, item: Item) -> None:
        """Remove what is left of it."""

    def _advance(self, count: int, path: str) -> None:
        self._done += count
        self._total = max(self._total, self._done)
        self._say(path)

    def _say(self, path: str) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total, path)

    # Digests of the far side -----------------------------------------------------------------------

    async def _digests(self, paths: list[str]) -> list[str]:
        """By a command there if that is possible, by reading everything back if not."""
        while self._commands:
            lines = await self._output([*self._commands[0], *map(self._files.native, paths)])
            if lines is not None and len(lines) == len(paths):
                return [_hex(line) for line in lines]
            # Perhaps it is only this file; but then reading it back will say so.
            self._commands.pop(0)
        self._verified = "reread"
        return [await self._reread(path) for path in paths]

    async def _reread(self, path: str) -> str:
        digest = hashlib.sha256()
        async for block in self._files.stream(path):
            await asyncio.to_thread(digest.update, block)
        return digest.hexdigest()

    async def _prefix_digest(self, path: str, length: int) -> str | None:
        """Of the first bytes of a file there; None where no command can say it."""
        for command in self._commands:
            script = _PREFIX_DIGEST.format(" ".join(command[:-1]))
            lines = await self._output(["sh", "-c", script, "sh", str(length), self._files.native(path)])
            if lines:
                return _hex(lines[0])
        return None

    async def _output(self, argv: list[str]) -> list[bytes] | None:
        try:
            done = await self._client.run(argv)
        except (ExecServerError, UnicodeError, msgspec.MsgspecError):
            if not self._client.connected:
                raise
            return None  # no commands on that machine, no such program, or a name that cannot be said
        return done.stdout.splitlines() if done.exit_code == 0 else None


def join(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}"


def _hex(line: bytes) -> str:
    """The digest at the start of a line; a backslash before it marks a name with odd characters."""
    return line.lstrip(b"\\")[:64].decode("ascii", "replace")


def _batches(items: list[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        if batch and (len(batch) == BATCH_FILES or size + item.size > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.size
    if batch:
        yield batch


async def each(items: Iterable[T], work: Callable[[T], Awaitable[None]], at_once: int) -> None:
    """Do it for all, some at a time; the first failure ends the rest and is raised."""
    rest = iter(items)

    async def worker() -> None:
        for item in rest:
            await work(item)

    workers = [asyncio.ensure_future(worker()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def hash_prefix(descriptor: int, length: int, digest: Digest) -> None:
    at = 0
    while at < length:
        data = os.pread(descriptor, min(BLOCK_BYTES, length - at), at)
        if not data:
            return
        digest.update(data)
        at += len(data)
