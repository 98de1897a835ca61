"""Files and trees from here to there; see transfers.py."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import stat
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final, Literal

from ..services import Progress, Transferred
from .blocks import BLOCK_BYTES
from .errors import RemoteFileError, RemoteFileNotFound, TransferFailed, Unsupported
from .files import WHOLE_WRITE_BYTES, RemoteFiles
from .landing import part_name
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

__all__ = ["PART_BYTES", "Upload"]

PART_BYTES: Final = 4 * 1024 * 1024
"""Uploads up to this size are one `fs/writeFile`; there is nothing worth resuming."""

_NO_PART: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Why there can be no part beside a file which can perhaps still be written."""

_Way = Literal["whole", "part", "stream", "pipe"]
"""How an upload goes: in one message, by a part, straight into the file, through a command into a device."""

_APPEND: Final = 'exec head -c "$1" >> "$2"'
_PUT: Final = 'exec head -c "$1" > "$2"'
"""Take exactly as much as is to come, so that they end on servers that cannot close a stdin, too."""


class Upload(Transfer):
    """From here to there."""

    def __init__(self, client: Client, files: RemoteFiles, progress: Progress | None, verify: bool) -> None:
        super().__init__(client, files, progress, verify)
        self._ways: dict[Item, _Way] = {}
        self._unread: set[Item] = set()
        """What cannot be compared, because reading a device gives something else than was written."""
        self._handles: dict[Item, str] = {}

    async def run(self, local: str, remote: str) -> Transferred:
        """Bring `local` over as `remote`."""
        remote = self._files.native(remote)
        info = await asyncio.to_thread(os.stat, local)
        if stat.S_ISREG(info.st_mode):
            return await self._bring(await self._resolved([Item(local, remote, info.st_size)]))
        if not stat.S_ISDIR(info.st_mode):
            raise ValueError(f"{local} is neither a file nor a directory")
        items, directories = await asyncio.to_thread(self._scan, local, remote)
        for directory in directories:
            await self._files.make_directory(directory)
        self._directories = len(directories)
        return await self._bring(await self._resolved(items))

    async def _resolved(self, items: list[Item]) -> list[Item]:
        """Decide for each how it goes; links are resolved where a file will be renamed, and stay links."""

        async def resolve(index: int) -> None:
            item = items[index]
            way: _Way = "whole" if self._small(item) else "part"
            try:
                found = await self._files.metadata(item.target)
            except RemoteFileNotFound:
                if way == "part" and await self._is_link(item.target):
                    way = "stream"
            except RemoteFileError:
                pass  # whoever writes it will hear the same
            else:
                if not found.is_file and not found.is_directory:
                    way = "whole" if item.size <= WHOLE_WRITE_BYTES else "pipe"
                    self._unread.add(item)
                elif found.is_symlink and way == "part":
                    item = items[index] = item._replace(target=await self._files.canonicalize(item.target))
            self._ways[item] = way

        await each(range(len(items)), resolve, LOOKS_AT_ONCE)
        return items

    async def _is_link(self, path: str) -> bool:
        """Whether there is a link that leads nowhere. Only asking for no links can tell it from nothing."""
        directory, _, name = path.rpartition("/")
        try:
            place = join(await self._files.canonicalize(directory or "/"), name)
            await self._files.metadata(place, follow_symlinks=False)
        except RemoteFileNotFound:
            return False
        except RemoteFileError:
            pass
        return True

    def _scan(self, local: str, remote: str) -> tuple[list[Item], list[str]]:
        items: list[Item] = []
        directories: list[str] = []
        todo = [(local, remote)]
        while todo:
            here, there = todo.pop()
            directories.append(there)
            with os.scandir(here) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    target = join(there, entry.name)
                    try:
                        if entry.is_file():
                            items.append(Item(entry.path, target, entry.stat().st_size))
                        elif entry.is_dir(follow_symlinks=False):
                            todo.append((entry.path, target))
                        elif entry.is_dir():
                            self._skipped.append((entry.path, LINK_TO_DIRECTORY))
                        else:
                            nowhere = entry.is_symlink() and not os.path.exists(entry.path)
                            self._skipped.append((entry.path, LEADS_NOWHERE if nowhere else NO_FILE))
                    except OSError as error:
                        self._skipped.append((entry.path, error.strerror or str(error)))
        return items, directories

    def _small(self, item: Item) -> bool:
        """Whether it goes in one message."""
        return item.size <= PART_BYTES or (
            item.size <= WHOLE_WRITE_BYTES and not self._client.has("fileWriteStreaming")
        )

    def _part(self, item: Item) -> str:
        return part_name(item.target, f"{os.uname().nodename}:{os.path.abspath(item.source)}")

    def _far(self, item: Item) -> str | None:
        if item in self._unread:
            return None
        return self._part(item) if self._ways[item] == "part" else item.target

    async def _send(self, item: Item, resume: bool) -> str:
        digest = self._new_digest()
        way = self._ways[item]
        if way == "whole":
            data = await asyncio.to_thread(_content, item.source, item.size, digest)
            await self._files.write(item.target, data)
            self._advance(len(data), item.source)
            return digest.hexdigest()
        if way != "pipe" and not self._client.has("fileWriteStreaming"):
            raise Unsupported(
                f"{item.source}: this server takes files of at most {WHOLE_WRITE_BYTES} bytes:"
                " it does not announce fileWriteStreaming"
            )
        with await asyncio.to_thread(open, item.source, "rb") as file:
            if way == "pipe":
                await self._through(_PUT, item.target, item, file.fileno(), 0, digest)
                return digest.hexdigest()
            if way == "part":
                try:
                    return await self._send_part(item, file.fileno(), resume)
                except RemoteFileError as error:
                    if error.errno not in _NO_PART or item in self._handles:
                        raise
                    self._ways[item] = "stream"  # no part in that directory; perhaps the file itself
            await self._files.write_stream(item.target, self._blocks(item, file.fileno(), 0, digest))
        return digest.hexdigest()

    async def _send_part(self, item: Item, source: int, resume: bool) -> str:
        part = self._part(item)
        digest: Digest = hashlib.sha256()  # what an earlier transfer left is compared in any case
        have = await self._usable(part, item, source, digest) if resume else 0
        if not have:
            digest = self._new_digest()
        ours = self._client.has("fsParts")
        if ours:
            if item in self._handles:
                self._files.close_part(self._handles.pop(item))
            # Locked until it has its name, so that no other transfer writes to it meanwhile.
            handle = self._handles[item] = await self._files.open_part(part, keep=have > 0)
        else:
            await self._require_plain(part)
        if have:
            self._resumed += have
            self._advance(have, item.source)
        if ours:
            await self._files.write_part(handle, part, self._blocks(item, source, have, digest), have)
        elif have:
            # Blocks can only be written to a file that was emptied, so a command appends the rest.
            await self._through(_APPEND, part, item, source, have, digest)
        else:
            # In place: what has arrived when the connection breaks is where the next attempt goes on.
            await self._files.write_stream(part, self._blocks(item, source, 0, digest), atomic=False)
        return digest.hexdigest()

    async def _require_plain(self, part: str) -> None:
        """As far as other servers can say it: nobody has put a link there, or something that is no file."""
        directory, _, name = part.rpartition("/")
        place = join(await self._files.canonicalize(directory or "/"), name)
        try:
            plain = (await self._files.metadata(place, follow_symlinks=False)).is_file
        except RemoteFileNotFound:
            return
        except RemoteFileError:
            plain = False
        if not plain:
            raise TransferFailed(f"{part} is not a plain file, so nothing is written to it; remove it")

    async def _usable(self, part: str, item: Item, source: int, digest: Digest) -> int:
        """How much of what an earlier transfer left is the beginning of this file; `digest` takes it in."""
        try:
            found = await self._files.metadata(part)
        except RemoteFileNotFound:
            return 0
        if not found.is_file or not 0 < found.size <= item.size:
            return 0
        theirs = await self._prefix_digest(part, found.size)
        if theirs is None:
            return 0  # and nothing could be appended either
        await asyncio.to_thread(hash_prefix, source, found.size, digest)
        return found.size if digest.hexdigest() == theirs else 0

    async def _through(
        self, script: str, path: str, item: Item, source: int, have: int, digest: Digest
    ) -> None:
        """By a command there, which takes the rest of the file."""
        if have == item.size:
            return
        argv = ["sh", "-c", script, "sh", str(item.size - have), self._files.native(path)]
        async with await self._client.start(argv, stdin=True) as process:
            async for block in self._blocks(item, source, have, digest):
                await process.write(block)
            status = await process.wait()
        if status.exit_code != 0:
            raise TransferFailed(f"{path}: the rest could not be written (exit code {status.exit_code})")

    async def _blocks(self, item: Item, source: int, at: int, digest: Digest) -> AsyncIterator[bytes]:
        while at < item.size:
            block = await asyncio.to_thread(_load, source, min(BLOCK_BYTES, item.size - at), at, digest)
            if not block:
                raise TransferFailed(f"{item.source} became shorter while it was read: {at} bytes")
            yield block
            at += len(block)
            self._advance(len(block), item.source)

    async def _finish(self, item: Item) -> None:
        if self._ways[item] == "part":
            await self._files.move(self._part(item), item.target, overwrite=True, keep_attributes=True)

    async def _discard(self, item: Item) -> None:
        if self._ways[item] == "part":
            await self._files.remove(self._part(item), force=True)

    def _release(self) -> None:
        while self._handles:
            self._files.close_part(self._handles.popitem()[1])


def _load(descriptor: int, length: int, at: int, digest: Digest) -> bytes:
    data = os.pread(descriptor, length, at)
    digest.update(data)
    return data


def _content(path: str, size: int, digest: Digest) -> bytes:
    with open(path, "rb") as file:
        data = file.read(max(size, PART_BYTES) + 1)
    if len(data) > max(size, PART_BYTES):
        raise TransferFailed(f"{path} became longer while it was read")
    digest.update(data)
    return data
