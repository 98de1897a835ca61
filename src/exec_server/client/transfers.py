"""Files and trees from here to there and back: in order, in constant memory, compared on arrival.

A file is first `NAME.part` and gets its name when it is whole (uploads of up to PART_BYTES excepted, which
are one message). A `.part` that an earlier transfer left is taken up if the bytes in it are still the
right ones. The digest of the far side is computed there, by a command; where none can be run, what
arrived is read back. Nothing is fsynced here, and permissions and times are not brought along: what
arrives has those of a new file.

Links to files are followed. Links to directories, and what is neither file nor directory, are left out
and reported.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from ..services import Progress, Transferred
from .errors import ExecServerError, RemoteFileError, RemoteFileNotFound, TransferFailed, Unsupported
from .files import BLOCK_BYTES, WHOLE_WRITE_BYTES, RemoteFiles

if TYPE_CHECKING:
    from .client import Client

__all__ = ["Download", "Upload"]

T = TypeVar("T")

PART_BYTES: Final = 4 * 1024 * 1024
"""Uploads up to this size are one `fs/writeFile`; there is nothing worth resuming."""

BATCH_FILES: Final = 64
BATCH_BYTES: Final = 8 * 1024 * 1024
"""Small files that are compared by one command."""

FILES_AT_ONCE: Final = 4
"""Files of a batch on their way at the same time."""

LOOKS_AT_ONCE: Final = 32
"""Questions about entries of a tree on their way at the same time."""

PART: Final = ".part"

_DIGEST_COMMANDS: Final = (["sha256sum", "--"], ["shasum", "-a", "256", "--"])
_PREFIX_DIGEST: Final = 'head -c "$1" -- "$2" | {}'
_APPEND: Final = 'exec head -c "$1" >> "$2"'
"""Takes exactly as much as is missing, so that it ends on servers that cannot close a stdin, too."""


class _Item(NamedTuple):
    """One file to bring over."""

    source: str
    target: str
    size: int


class _Digest(Protocol):
    """What hashlib makes."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Transfer:
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

    async def _bring(self, items: list[_Item]) -> Transferred:
        self._total = sum(item.size for item in items)
        if items:
            self._say(items[0].source)
        for batch in _batches(items):
            await self._bring_batch(batch)
        return Transferred(
            self._count, self._directories, self._done, self._resumed, self._verified, self._skipped
        )

    async def _bring_batch(self, batch: list[_Item]) -> None:
        arrived: dict[_Item, str] = {}

        async def first(item: _Item) -> None:
            arrived[item] = await self._send(item, resume=True)

        await _each(batch, first, FILES_AT_ONCE)
        if self._verify:
            digests = await self._digests([self._far(item) for item in batch])
            for item, digest in zip(batch, digests, strict=True):
                if digest != arrived[item]:
                    await self._again(item)
        for item in batch:
            await self._finish(item)
            self._count += 1

    async def _again(self, item: _Item) -> None:
        """What arrived is wrong: it changed meanwhile, or a part was resumed that was another's."""
        self._done -= item.size
        digest = await self._send(item, resume=False)
        (there,) = await self._digests([self._far(item)])
        if there != digest:
            await self._discard(item)
            raise TransferFailed(
                f"{item.source}: what arrived differs from what was sent"
                f" (SHA-256 {digest} here, {there} there); does something write to it?"
            )

    def _far(self, item: _Item) -> str:
        """Which file there has to be equal to what was hashed here."""
        raise NotImplementedError

    async def _send(self, item: _Item, resume: bool) -> str:
        """Bring one file over, all but its name; the SHA-256 of what went through here."""
        raise NotImplementedError

    async def _finish(self, item: _Item) -> None:
        """Give it its name."""
        raise NotImplementedError

    async def _discard(self, item: _Item) -> None:
        """Remove what is left of it."""
        raise NotImplementedError

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


class Download(_Transfer):
    """From there to here."""

    async def run(self, remote: str, local: str) -> Transferred:
        """Bring `remote` over as `local`."""
        remote = self._files.native(remote)
        found = await self._files.metadata(remote)
        if found.is_file:
            return await self._bring([_Item(remote, local, found.size)])
        if not found.is_directory:
            raise ValueError(f"{remote} is neither a file nor a directory")
        return await self._bring(await self._scan(remote, local))

    async def _scan(self, remote: str, local: str) -> list[_Item]:
        items: list[_Item] = []
        level = [(remote, local)]
        while level:
            below: list[tuple[str, str]] = []
            for directory, here in level:
                await asyncio.to_thread(os.makedirs, here, exist_ok=True)
                self._directories += 1
                await self._look(directory, here, items, below)
            level = below
        items.sort()
        return items

    async def _look(
        self, directory: str, here: str, items: list[_Item], below: list[tuple[str, str]]
    ) -> None:
        async def look(name: str) -> None:
            path, target = _join(directory, name), os.path.join(here, name)
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                # A server may say anything; it must not choose where we write.
                self._skipped.append((path, "not a name"))
                return
            try:
                found = await self._files.metadata(path)
            except RemoteFileError as error:
                self._skipped.append((path, error.message))
                return
            if found.is_file:
                items.append(_Item(path, target, found.size))
            elif not found.is_directory:
                self._skipped.append((path, "neither a file nor a directory"))
            elif found.is_symlink:
                self._skipped.append((path, "a link to a directory"))
            else:
                below.append((path, target))

        names = [entry.name for entry in await self._files.list(directory)]
        await _each(names, look, LOOKS_AT_ONCE)
        below.sort()

    def _far(self, item: _Item) -> str:
        return item.source

    async def _send(self, item: _Item, resume: bool) -> str:
        part = item.target + PART
        digest: _Digest = hashlib.sha256()
        have = await self._usable(part, item) if resume else 0
        file = await asyncio.to_thread(open, part, "r+b" if have else "wb")  # closed below
        try:
            if have:
                await asyncio.to_thread(_hash_prefix, file.fileno(), have, digest)
                self._resumed += have
                self._advance(have, item.source)
            at = have
            async for block in self._files.stream(item.source, have):
                await asyncio.to_thread(_store, file.fileno(), block, at, digest)
                at += len(block)
                self._advance(len(block), item.source)
            await asyncio.to_thread(file.truncate, at)
        finally:
            await asyncio.to_thread(file.close)
        if at < item.size:
            raise TransferFailed(f"{item.source} became shorter while it was read: {at} of {item.size} bytes")
        return digest.hexdigest()

    async def _usable(self, part: str, item: _Item) -> int:
        """How much of what an earlier transfer left is the beginning of this file."""
        try:
            info = os.lstat(part)
        except OSError:
            return 0
        if not stat.S_ISREG(info.st_mode) or not 0 < info.st_size <= item.size:
            return 0
        have = info.st_size
        theirs = await self._prefix_digest(item.source, have)
        if theirs is not None:
            return have if theirs == await asyncio.to_thread(_prefix_of, part, have) else 0
        # Without a command only the end of it is compared; the whole is when everything is here.
        length = min(have, BLOCK_BYTES)
        there = await self._files.read_range(item.source, have - length, length)
        return have if there.data == await asyncio.to_thread(_tail, part, length) else 0

    async def _finish(self, item: _Item) -> None:
        await asyncio.to_thread(os.replace, item.target + PART, item.target)

    async def _discard(self, item: _Item) -> None:
        await asyncio.to_thread(os.unlink, item.target + PART)


class Upload(_Transfer):
    """From here to there."""

    async def run(self, local: str, remote: str) -> Transferred:
        """Bring `local` over as `remote`."""
        remote = self._files.native(remote)
        info = await asyncio.to_thread(os.stat, local)
        if stat.S_ISREG(info.st_mode):
            return await self._bring(await self._resolved([_Item(local, remote, info.st_size)]))
        if not stat.S_ISDIR(info.st_mode):
            raise ValueError(f"{local} is neither a file nor a directory")
        items, directories = await asyncio.to_thread(self._scan, local, remote)
        for directory in directories:
            await self._files.make_directory(directory)
        self._directories = len(directories)
        return await self._bring(await self._resolved(items))

    async def _resolved(self, items: list[_Item]) -> list[_Item]:
        """Links resolved where a file will be renamed: a link stays, and what it leads to is replaced."""

        async def resolve(index: int) -> None:
            item = items[index]
            try:
                if (await self._files.metadata(item.target)).is_symlink:
                    items[index] = item._replace(target=await self._files.canonicalize(item.target))
            except RemoteFileNotFound:
                pass  # new, or a link to nowhere, which is replaced

        large = [index for index, item in enumerate(items) if not self._whole(item)]
        await _each(large, resolve, LOOKS_AT_ONCE)
        return items

    def _scan(self, local: str, remote: str) -> tuple[list[_Item], list[str]]:
        items: list[_Item] = []
        directories: list[str] = []
        todo = [(local, remote)]
        while todo:
            here, there = todo.pop()
            directories.append(there)
            with os.scandir(here) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    target = _join(there, entry.name)
                    try:
                        if entry.is_file():
                            items.append(_Item(entry.path, target, entry.stat().st_size))
                        elif entry.is_dir(follow_symlinks=False):
                            todo.append((entry.path, target))
                        elif entry.is_dir():
                            self._skipped.append((entry.path, "a link to a directory"))
                        else:
                            self._skipped.append((entry.path, "neither a file nor a directory"))
                    except OSError as error:
                        self._skipped.append((entry.path, error.strerror or str(error)))
        return items, directories

    def _whole(self, item: _Item) -> bool:
        """Whether it goes in one message."""
        return item.size <= PART_BYTES or (
            item.size <= WHOLE_WRITE_BYTES and not self._client.has("fileWriteStreaming")
        )

    def _far(self, item: _Item) -> str:
        return item.target if self._whole(item) else item.target + PART

    async def _send(self, item: _Item, resume: bool) -> str:
        digest: _Digest = hashlib.sha256()
        if self._whole(item):
            data = await asyncio.to_thread(_content, item.source, item.size, digest)
            await self._files.write(item.target, data)
            self._advance(len(data), item.source)
            return digest.hexdigest()
        if not self._client.has("fileWriteStreaming"):
            raise Unsupported(
                f"{item.source}: this server takes files of at most {WHOLE_WRITE_BYTES} bytes:"
                " it does not announce fileWriteStreaming"
            )
        part = item.target + PART
        with await asyncio.to_thread(open, item.source, "rb") as file:
            have = await self._usable(part, item, file.fileno(), digest) if resume else 0
            if have:
                self._resumed += have
                self._advance(have, item.source)
                await self._append(part, item, file.fileno(), have, digest)
            else:
                digest = hashlib.sha256()
                await self._files.write_stream(part, self._blocks(item, file.fileno(), 0, digest))
        return digest.hexdigest()

    async def _usable(self, part: str, item: _Item, source: int, digest: _Digest) -> int:
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
        await asyncio.to_thread(_hash_prefix, source, found.size, digest)
        return found.size if digest.hexdigest() == theirs else 0

    async def _append(self, part: str, item: _Item, source: int, have: int, digest: _Digest) -> None:
        """Blocks can only be written to a file that was emptied, so a command appends the rest."""
        if have == item.size:
            return
        argv = ["sh", "-c", _APPEND, "sh", str(item.size - have), self._files.native(part)]
        async with await self._client.start(argv, stdin=True) as process:
            async for block in self._blocks(item, source, have, digest):
                await process.write(block)
            status = await process.wait()
        if status.exit_code != 0:
            raise TransferFailed(f"{part}: the rest could not be appended (exit code {status.exit_code})")

    async def _blocks(self, item: _Item, source: int, at: int, digest: _Digest) -> AsyncIterator[bytes]:
        while at < item.size:
            block = await asyncio.to_thread(_load, source, min(BLOCK_BYTES, item.size - at), at, digest)
            if not block:
                raise TransferFailed(f"{item.source} became shorter while it was read: {at} bytes")
            yield block
            at += len(block)
            self._advance(len(block), item.source)

    async def _finish(self, item: _Item) -> None:
        if not self._whole(item):
            await self._files.move(item.target + PART, item.target, overwrite=True)

    async def _discard(self, item: _Item) -> None:
        if not self._whole(item):
            await self._files.remove(item.target + PART, force=True)


# Small things --------------------------------------------------------------------------------------


def _join(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}"


def _hex(line: bytes) -> str:
    """The digest at the start of a line; a backslash before it marks a name with odd characters."""
    return line.lstrip(b"\\")[:64].decode("ascii", "replace")


def _batches(items: list[_Item]) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    size = 0
    for item in items:
        if batch and (len(batch) == BATCH_FILES or size + item.size > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.size
    if batch:
        yield batch


async def _each(items: Iterable[T], work: Callable[[T], Awaitable[None]], at_once: int) -> None:
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


def _store(descriptor: int, data: bytes, at: int, digest: _Digest) -> None:
    digest.update(data)
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        view = view[count:]
        at += count


def _load(descriptor: int, length: int, at: int, digest: _Digest) -> bytes:
    data = os.pread(descriptor, length, at)
    digest.update(data)
    return data


def _content(path: str, size: int, digest: _Digest) -> bytes:
    with open(path, "rb") as file:
        data = file.read(max(size, PART_BYTES) + 1)
    if len(data) > max(size, PART_BYTES):
        raise TransferFailed(f"{path} became longer while it was read")
    digest.update(data)
    return data


def _hash_prefix(descriptor: int, length: int, digest: _Digest) -> None:
    at = 0
    while at < length:
        data = os.pread(descriptor, min(BLOCK_BYTES, length - at), at)
        if not data:
            return
        digest.update(data)
        at += len(data)


def _prefix_of(path: str, length: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        _hash_prefix(file.fileno(), length, digest)
    return digest.hexdigest()


def _tail(path: str, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(-length, os.SEEK_END)
        return file.read(length)
