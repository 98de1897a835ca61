"""Files and trees from here to there and back: in order, in constant memory, compared on arrival.

A file is first a part beside its place (`part_name` in landing.py) and gets its name when it is whole;
uploads of up to PART_BYTES excepted, which are one message. A part that an earlier transfer of the same
file left is taken up if the bytes in it are still the right ones. The digest of the far side is computed
there, by a command; where none can be run, what arrived is read back. Nothing is fsynced here, and
permissions and times are not brought along: what arrives has those of the file it replaces, or of a new one.

Links to files are followed, on both sides. What is neither file nor directory is written in place if it is
a target. Links to directories, and what is neither file nor directory, are left out of trees and reported.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from ..services import Progress, Transferred
from .errors import ExecServerError, RemoteFileError, RemoteFileNotFound, TransferFailed, Unsupported
from .files import BLOCK_BYTES, WHOLE_WRITE_BYTES, RemoteFiles
from .landing import Landing, part_name

if TYPE_CHECKING:
    from .client import Client

__all__ = ["LEFT_OUT", "Download", "Upload"]

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

READER_SECONDS: Final = 0.1
"""How often to look whether somebody reads the FIFO that is to be written to."""

LINK_TO_DIRECTORY: Final = "a link to a directory"
NO_FILE: Final = "neither a file nor a directory"
LEADS_NOWHERE: Final = "a link that leads nowhere"
LEFT_OUT: Final = frozenset({LINK_TO_DIRECTORY, NO_FILE})
"""Reasons to skip something that are no failure: such things are never brought over."""

_NO_PART: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Why there can be no part beside a file which can perhaps still be written."""

_Way = Literal["whole", "part", "stream", "pipe"]
"""How an upload goes: in one message, by a part, straight into the file, through a command into a device."""

_DIGEST_COMMANDS: Final = (["sha256sum", "--"], ["shasum", "-a", "256", "--"])
_PREFIX_DIGEST: Final = 'head -c "$1" -- "$2" | {}'
_APPEND: Final = 'exec head -c "$1" >> "$2"'
_PUT: Final = 'exec head -c "$1" > "$2"'
"""Take exactly as much as is to come, so that they end on servers that cannot close a stdin, too."""


class _Item(NamedTuple):
    """One file to bring over."""

    source: str
    target: str
    size: int


class _Digest(Protocol):
    """What hashlib makes."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class _NoDigest:
    """In its place where nothing will be compared."""

    def update(self, data: bytes, /) -> None:
        """Hashing costs more than everything else that is done here."""

    def hexdigest(self) -> str:
        return ""


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

        try:
            await _each(batch, first, FILES_AT_ONCE)
            if self._verify:
                await self._compare(batch, arrived)
            for item in batch:
                await self._finish(item)
                self._count += 1
        finally:
            self._release()

    async def _compare(self, batch: list[_Item], arrived: dict[_Item, str]) -> None:
        there = {item: path for item in batch if (path := self._far(item)) is not None}
        if len(there) < len(batch):
            self._verified = "no"  # a device, for one
        digests = await self._digests(list(there.values())) if there else []
        for item, digest in zip(there, digests, strict=True):
            if digest != arrived[item]:
                await self._again(item, there[item], arrived[item], digest)

    async def _again(self, item: _Item, far: str, here: str, there: str) -> None:
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

    def _new_digest(self) -> _Digest:
        """Of what goes through here."""
        return hashlib.sha256() if self._verify else _NoDigest()

    def _far(self, item: _Item) -> str | None:
        """Which file there has to be equal to what was hashed here; None if it cannot be read."""
        raise NotImplementedError

    def _can_repeat(self, item: _Item) -> bool:
        """Whether sending it once more can make it right."""
        del item
        return True

    def _release(self) -> None:
        """Close what is still open of a batch."""
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

    def __init__(self, client: Client, files: RemoteFiles, progress: Progress | None, verify: bool) -> None:
        super().__init__(client, files, progress, verify)
        self._landings: dict[_Item, Landing] = {}

    async def run(self, remote: str, local: str) -> Transferred:
        """Bring `remote` over as `local`."""
        remote = self._files.native(remote)
        found = await self._files.metadata(remote)
        if found.is_file:
            return await self._bring([_Item(remote, local, found.size)])
        if not found.is_directory:
            raise ValueError(f"{remote} is neither a file nor a directory")
        # All of it is looked at before anything is made here: it may be the tree that is being brought.
        items, directories = await self._scan(remote, local)
        for directory in directories:
            await asyncio.to_thread(os.makedirs, directory, exist_ok=True)
        self._directories = len(directories)
        return await self._bring(items)

    async def _scan(self, remote: str, local: str) -> tuple[list[_Item], list[str]]:
        items: list[_Item] = []
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
            except RemoteFileNotFound:
                lossy = "\ufffd" in name and not self._client.has("fsListPages")
                reason = "its name is not UTF-8, and this server cannot say it" if lossy else LEADS_NOWHERE
                self._skipped.append((path, reason))
                return
            except RemoteFileError as error:
                self._skipped.append((path, error.message))
                return
            if found.is_file:
                items.append(_Item(path, target, found.size))
            elif not found.is_directory:
                self._skipped.append((path, NO_FILE))
            elif found.is_symlink:
                self._skipped.append((path, LINK_TO_DIRECTORY))
            else:
                below.append((path, target))

        names = [entry.name for entry in await self._files.list(directory)]
        await _each(names, look, LOOKS_AT_ONCE)
        below.sort()

    def _far(self, item: _Item) -> str:
        return item.source

    def _can_repeat(self, item: _Item) -> bool:
        return self._landings[item].part is not None

    async def _send(self, item: _Item, resume: bool) -> str:
        landing = self._landings.get(item)
        if landing is None:
            landing = await asyncio.to_thread(Landing, item.target, item.source)
            self._landings[item] = landing
            while not await asyncio.to_thread(landing.open):
                await asyncio.sleep(READER_SECONDS)
        digest = self._new_digest()
        have = await self._usable(landing, item) if resume else 0
        if have:
            await asyncio.to_thread(_hash_prefix, landing.descriptor, have, digest)
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

    async def _usable(self, landing: Landing, item: _Item) -> int:
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

    async def _finish(self, item: _Item) -> None:
        await asyncio.to_thread(self._landings[item].finish)

    async def _discard(self, item: _Item) -> None:
        await asyncio.to_thread(self._landings[item].discard)

    def _release(self) -> None:
        while self._landings:
            self._landings.popitem()[1].close()


class Upload(_Transfer):
    """From here to there."""

    def __init__(self, client: Client, files: RemoteFiles, progress: Progress | None, verify: bool) -> None:
        super().__init__(client, files, progress, verify)
        self._ways: dict[_Item, _Way] = {}
        self._unread: set[_Item] = set()
        """What cannot be compared, because reading a device gives something else than was written."""
        self._handles: dict[_Item, str] = {}

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

        await _each(range(len(items)), resolve, LOOKS_AT_ONCE)
        return items

    async def _is_link(self, path: str) -> bool:
        """Whether there is a link that leads nowhere. Only asking for no links can tell it from nothing."""
        directory, _, name = path.rpartition("/")
        try:
            place = _join(await self._files.canonicalize(directory or "/"), name)
            await self._files.metadata(place, follow_symlinks=False)
        except RemoteFileNotFound:
            return False
        except RemoteFileError:
            pass
        return True

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
                            self._skipped.append((entry.path, LINK_TO_DIRECTORY))
                        else:
                            nowhere = entry.is_symlink() and not os.path.exists(entry.path)
                            self._skipped.append((entry.path, LEADS_NOWHERE if nowhere else NO_FILE))
                    except OSError as error:
                        self._skipped.append((entry.path, error.strerror or str(error)))
        return items, directories

    def _small(self, item: _Item) -> bool:
        """Whether it goes in one message."""
        return item.size <= PART_BYTES or (
            item.size <= WHOLE_WRITE_BYTES and not self._client.has("fileWriteStreaming")
        )

    def _part(self, item: _Item) -> str:
        return part_name(item.target, f"{os.uname().nodename}:{os.path.abspath(item.source)}")

    def _far(self, item: _Item) -> str | None:
        if item in self._unread:
            return None
        return self._part(item) if self._ways[item] == "part" else item.target

    async def _send(self, item: _Item, resume: bool) -> str:
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

    async def _send_part(self, item: _Item, source: int, resume: bool) -> str:
        part = self._part(item)
        digest: _Digest = hashlib.sha256()  # what an earlier transfer left is compared in any case
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
        place = _join(await self._files.canonicalize(directory or "/"), name)
        try:
            plain = (await self._files.metadata(place, follow_symlinks=False)).is_file
        except RemoteFileNotFound:
            return
        except RemoteFileError:
            plain = False
        if not plain:
            raise TransferFailed(f"{part} is not a plain file, so nothing is written to it; remove it")

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

    async def _through(
        self, script: str, path: str, item: _Item, source: int, have: int, digest: _Digest
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

    async def _blocks(self, item: _Item, source: int, at: int, digest: _Digest) -> AsyncIterator[bytes]:
        while at < item.size:
            block = await asyncio.to_thread(_load, source, min(BLOCK_BYTES, item.size - at), at, digest)
            if not block:
                raise TransferFailed(f"{item.source} became shorter while it was read: {at} bytes")
            yield block
            at += len(block)
            self._advance(len(block), item.source)

    async def _finish(self, item: _Item) -> None:
        if self._ways[item] == "part":
            await self._files.move(self._part(item), item.target, overwrite=True, keep_attributes=True)

    async def _discard(self, item: _Item) -> None:
        if self._ways[item] == "part":
            await self._files.remove(self._part(item), force=True)

    def _release(self) -> None:
        while self._handles:
            self._files.close_part(self._handles.popitem()[1])


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


def _store(landing: Landing, data: bytes, at: int, digest: _Digest) -> None:
    digest.update(data)
    landing.write(data, at)


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


def _prefix_of(descriptor: int, length: int) -> str:
    digest = hashlib.sha256()
    _hash_prefix(descriptor, length, digest)
    return digest.hexdigest()
