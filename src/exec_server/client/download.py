"""Files and trees from there to here; see transfers.py."""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import TYPE_CHECKING, Final

from ..services import Progress, Transferred
from .blocks import BLOCK_BYTES
from .errors import RemoteFileError, RemoteFileNotFound, TransferFailed
from .landing import Landing
from .transfer import (
    LEADS_NOWHERE,
    LINK_TO_DIRECTORY,
    LOOKS_AT_ONCE,
    NO_FILE,
    Digest,
    Item,
    Transfer,
    each,
    hash_prefix,
    join,
)

if TYPE_CHECKING:
    from .client import Client
    from .files import RemoteFiles

__all__ = ["Download"]

READER_SECONDS: Final = 0.1
"""How often to look whether somebody reads the FIFO that is to be written to."""


class Download(Transfer):
    """From there to here."""

    def __init__(self, client: Client, files: RemoteFiles, progress: Progress | None, verify: bool) -> None:
        super().__init__(client, files, progress, verify)
        self._landings: dict[Item, Landing] = {}

    async def run(self, remote: str, local: str) -> Transferred:
        """Bring `remote` over as `local`."""
        remote = self._files.native(remote)
        found = await self._files.metadata(remote)
        if found.is_file:
            return await self._bring([Item(remote, local, found.size)])
        if not found.is_directory:
            raise ValueError(f"{remote} is neither a file nor a directory")
        # All of it is looked at before anything is made here: it may be the tree that is being brought.
        items, directories = await self._scan(remote, local)
        for directory in directories:
            await asyncio.to_thread(os.makedirs, directory, exist_ok=True)
        self._directories = len(directories)
        return await self._bring(items)

    async def _scan(self, remote: str, local: str) -> tuple[list[Item], list[str]]:
        items: list[Item] = []
        directories: list[str] = []
        level = [(remote, local)]
        while level:
            below: list[tuple[str, str]] = []
            for directory, here in level:
                directories.append(here)
                await self._look(directory, here, items, below)
            level = below
        items.sort()
        return items, directories

    async def _look(self, directory: str, here: str, items: list[Item], below: list[tuple[str, str]]) -> None:
        async def look(name: str) -> None:
            path, target = join(directory, name), os.path.join(here, name)
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                # A server may say anything; it must not choose where we write.
                self._skipped.append((path, "not a name"))
                return
            try:
                found = await self._files.metadata(path)
            except RemoteFileNotFound:
                lossy = "\ufffd" in name and not self._client.has("fsListPages")
                reason = "its name is not UTF-8, and this server cannot say it" if lossy else LEADS_NOWHERE
                self._skipped.append((path, reason))
                return
            except RemoteFileError as error:
                self._skipped.append((path, error.message))
                return
            if found.is_file:
                items.append(Item(path, target, found.size))
            elif not found.is_directory:
                self._skipped.append((path, NO_FILE))
            elif found.is_symlink:
                self._skipped.append((path, LINK_TO_DIRECTORY))
            else:
                below.append((path, target))

        names = [entry.name for entry in await self._files.list(directory)]
        await each(names, look, LOOKS_AT_ONCE)
        below.sort()

    def _far(self, item: Item) -> str:
        return item.source

    def _can_repeat(self, item: Item) -> bool:
        return self._landings[item].part is not None

    async def _send(self, item: Item, resume: bool) -> str:
        landing = self._landings.get(item)
        if landing is None:
            landing = await asyncio.to_thread(Landing, item.target, item.source)
            self._landings[item] = landing
            while not await asyncio.to_thread(landing.open):
                await asyncio.sleep(READER_SECONDS)
        digest = self._new_digest()
        have = await self._usable(landing, item) if resume else 0
        if have:
            await asyncio.to_thread(hash_prefix, landing.descriptor, have, digest)
            self._resumed += have
            self._advance(have, item.source)
        elif landing.part is not None:
            await asyncio.to_thread(landing.end_at, 0)
        at = have
        try:
            async for block in self._files.stream(item.source, have):
                await asyncio.to_thread(_store, landing, block, at, digest)
                at += len(block)
                self._advance(len(block), item.source)
        except asyncio.CancelledError:
            landing.give_up()
            raise
        await asyncio.to_thread(landing.end_at, at)
        if at < item.size:
            raise TransferFailed(f"{item.source} became shorter while it was read: {at} of {item.size} bytes")
        return digest.hexdigest()

    async def _usable(self, landing: Landing, item: Item) -> int:
        """How much of what an earlier transfer left is the beginning of this file."""
        have = landing.size()
        if not 0 < have <= item.size:
            return 0
        theirs = await self._prefix_digest(item.source, have)
        if theirs is not None:
            return have if theirs == await asyncio.to_thread(_prefix_of, landing.descriptor, have) else 0
        # Without a command only the end of it is compared; the whole is when everything is here.
        length = min(have, BLOCK_BYTES)
        there = await self._files.read_range(item.source, have - length, length)
        ours = await asyncio.to_thread(os.pread, landing.descriptor, length, have - length)
        return have if there.data == ours else 0

    async def _finish(self, item: Item) -> None:
        await asyncio.to_thread(self._landings[item].finish)

    async def _discard(self, item: Item) -> None:
        await asyncio.to_thread(self._landings[item].discard)

    def _release(self) -> None:
        while self._landings:
            self._landings.popitem()[1].close()


def _store(landing: Landing, data: bytes, at: int, digest: Digest) -> None:
    digest.update(data)
    landing.write(data, at)


def _prefix_of(descriptor: int, length: int) -> str:
    digest = hashlib.sha256()
    hash_prefix(descriptor, length, digest)
    return digest.hexdigest()
