"""Files across a connection: every operation of services.Files as calls that any server understands.

Where a server has more (its flags say so), that is used; where it has less, the same is done with
what there is, or Unsupported is raised. Large contents always travel in blocks, and all streams of a
connection together have only a few blocks in flight, so that a small call waits for little.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast
from urllib.parse import quote, unquote_to_bytes
from uuid import uuid4

import msgspec
from msgspec import Raw, Struct

from ..limits import MAX_FRAME_BYTES
from ..services import (
    Change,
    DirectoryEntry,
    FileMetadata,
    FilePart,
    FilePath,
    Files,
    GlobFound,
    Progress,
    SearchFound,
    SearchLine,
    SearchMatch,
    Transferred,
    Walked,
    WalkEntry,
    WalkError,
)
from ..wire import base64, binary
from ..wire.errors import METHOD_NOT_FOUND, RpcError
from ..wire.files import CanonicalizeResult, MetadataResult, OpenMode, OpenResult
from ..wire.sandbox import SandboxContext
from ..wire.uri import ForeignPath, native_path, parse, path_to_uri
from .blocks import BLOCK_BYTES, BLOCKS_IN_FLIGHT, BlockReader, Blocks, BlockWriter, part_of, reblocked
from .errors import (
    ConnectionLost,
    ExecServerError,
    RemoteFileError,
    RemoteFileNotFound,
    RemoteNotADirectory,
    ServerRejected,
    Unsupported,
    file_error,
)

if TYPE_CHECKING:
    from .client import Client
    from .rpc import Take

__all__ = ["BLOCKS_IN_FLIGHT", "BLOCK_BYTES", "WHOLE_WRITE_BYTES", "RemoteFiles", "RemoteWatch"]

T = TypeVar("T")

WHOLE_WRITE_BYTES: Final = (MAX_FRAME_BYTES - 64 * 1024) // 4 * 3
"""The largest content of one `fs/writeFile`: more, in base64, does not fit into one frame."""

SMALL_BYTES: Final = 256 * 1024
"""Files up to this size are read in one call."""

MAX_WAITING_CHANGES: Final = 1024
"""Change notifications that may wait for their reader; beyond, they become one that says `overflowed`."""


class _ListedEntry(Struct, rename="camel"):
    file_name: str
    is_directory: bool
    is_file: bool
    name: str | None = None
    """As in a URI, where it is not UTF-8."""


class _Listed(Struct):
    entries: list[_ListedEntry]
    more: bool = False


class _Walked(Struct):
    entries: list[WalkEntry]
    errors: list[WalkError]
    truncated: bool


class _Span(Struct):
    start: int
    end: int


class _Match(Struct, rename="camel"):
    path: str
    line_number: int
    byte_offset: int
    line: str
    submatches: list[_Span]
    line_truncated: bool = False


class _Context(Struct, rename="camel"):
    path: str
    line_number: int
    line: str


class _Searched(Struct):
    matches: list[_Match]
    context: list[_Context]
    truncated: bool


class _ChangedParams(Struct, rename="camel"):
    watch_id: str
    changed_paths: list[str]
    overflowed: bool = False


class _MissingChangedParams(Struct, rename="camel"):
    watch_id: int


class _Watching(Struct):
    watching: bool


class RemoteFiles:
    """Implements services.Files; `client.files` is one. See there for what each method promises.

    On servers without our extensions (the reference): `move` copies and removes, `glob`, `search` and
    `watch` raise Unsupported, and without `fileWriteStreaming` at most WHOLE_WRITE_BYTES can be written.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._blocks = asyncio.Semaphore(BLOCKS_IN_FLIGHT)
        self._looking: dict[str, asyncio.Future[MetadataResult]] = {}
        self._watches: dict[str, RemoteWatch] = {}
        self._watch_ids = count(1)
        self._missing: tuple[int, asyncio.Future[None]] | None = None
        self._rearming: set[asyncio.Future[None]] = set()
        client.listen("fs/changed", self._changed, self._lost, self._resumed)
        client.listen("fs/missingChanged", self._missing_changed, lambda _: None)

    def under(self, sandbox: SandboxContext) -> RemoteFiles:
        """The same files, seen and changed through a sandbox that the server enforces for each call."""
        from .sandbox import ConfinedClient

        confined = copy.copy(self)
        confined._client = cast("Client", ConfinedClient(self._client, sandbox))
        confined._looking = {}  # what one may see says nothing about another
        return confined

    # Reading -------------------------------------------------------------------------------------

    async def read(self, path: FilePath) -> bytes:
        """All of a file. A large one comes in blocks: it delays nobody, but it has to fit into memory."""
        uri = self.uri(path)
        if self._client.has("fsReadRange"):
            params = {"path": uri, "offset": 0, "length": SMALL_BYTES}
            part = await self._part("fs/readFile", params, path)
            if part.eof:
                return bytes(part.data)
        reader = BlockReader(self, uri, path, 0, None)
        try:
            return await reader.gather()
        finally:
            reader.close()

    async def read_range(self, path: FilePath, offset: int, length: int) -> FilePart:
        """Up to `length` bytes from `offset` on; fewer only at the end. `eof`: nothing follows them."""
        if offset < 0 or length < 0:
            raise ValueError("offset and length of a range cannot be negative")
        uri = self.uri(path)
        if length == 0:
            return FilePart(b"", False)
        if length <= BLOCK_BYTES and self._client.has("fsReadRange"):
            params = {"path": uri, "offset": offset, "length": length}
            part = await self._part("fs/readFile", params, path)
            return FilePart(bytes(part.data), part.eof)
        # One byte more than asked for, because a block that is full does not say whether more follows.
        reader = BlockReader(self, uri, path, offset, offset + length + 1)
        try:
            data = b"".join([block async for block in reader.blocks()])
        finally:
            reader.close()
        return FilePart(data[:length], len(data) <= length)

    async def stream(self, path: FilePath, offset: int = 0) -> AsyncIterator[bytes]:
        """A file of any size in blocks of up to 1 MiB, a few of them fetched ahead.

        The handle pins the file: it may be removed or replaced by rename meanwhile, and what comes is still
        the old one.
        """
        reader = BlockReader(self, self.uri(path), path, offset, None)
        try:
            async for block in reader.blocks():
                yield block
        finally:
            reader.close()

    # Writing -------------------------------------------------------------------------------------

    async def write(self, path: FilePath, data: bytes) -> None:
        """Make a file have this content, creating it if need be; its directory must exist.

        Our servers replace the file whole or not at all. Up to WHOLE_WRITE_BYTES (about 12 MB) go in one
        message, more is streamed as by `write_stream`.
        """
        if len(data) > WHOLE_WRITE_BYTES:
            view = memoryview(data)
            await self.write_stream(
                path, (view[at : at + BLOCK_BYTES] for at in range(0, len(view), BLOCK_BYTES))
            )
            return
        params = {"path": self.uri(path), "dataBase64": base64.encode(data)}
        await self._change("fs/writeFile", params, path)

    async def write_stream(self, path: FilePath, blocks: Blocks, *, atomic: bool = True) -> int:
        """Make what comes the content of the file, in constant memory; returns the number of bytes.

        Pieces may be of any size. The file has its old content until all of the new one is there, and keeps
        it if the source or the connection fails. With `atomic=False`, and on servers without
        `fsAtomicStreams`, the file is emptied first and grows in place, and what was written until then
        stays. On a server that cannot stream, content up to WHOLE_WRITE_BYTES is written at the end in one
        piece, and more is Unsupported (nothing is written then).
        """
        if not self._client.has("fileWriteStreaming"):
            return await self._write_gathered(path, blocks)
        atomic = atomic and self._client.has("fsAtomicStreams")
        handle = self._new_handle()
        writer = BlockWriter(self, handle, path)
        self._looking.clear()
        await self._open(handle, self.uri(path), path, "replace", atomic)
        try:
            async for block in reblocked(blocks):
                await writer.put(block)
            await writer.finish()
            self._require_open(handle, path)
            await self._change("fs/close", {"handleId": handle}, path)
        except BaseException:
            writer.cancel()
            self._client.tell("fs/close", {"handleId": handle, **({"discard": True} if atomic else {})})
            raise
        return writer.offset

    async def open_part(self, path: FilePath, *, keep: bool) -> str:
        """A handle of what a transfer writes to before it gets its name; see docs/protocol.md, `fsParts`."""
        handle = self._new_handle()
        self._looking.clear()
        await self._open(handle, self.uri(path), path, "replace", part="keep" if keep else "empty")
        return handle

    async def write_part(self, handle: str, path: FilePath, blocks: Blocks, offset: int) -> None:
        """Write from an offset on; the handle stays open."""
        writer = BlockWriter(self, handle, path)
        writer.offset = offset
        try:
            async for block in reblocked(blocks):
                await writer.put(block)
            await writer.finish()
            self._require_open(handle, path)
        except BaseException:
            writer.cancel()
            raise

    def close_part(self, handle: str) -> None:
        """Without waiting for it. The server would do it, too, when the connection ends."""
        self._client.tell("fs/close", {"handleId": handle})

    async def _write_gathered(self, path: FilePath, blocks: Blocks) -> int:
        data = bytearray()
        async for block in reblocked(blocks):
            data += block
            if len(data) > WHOLE_WRITE_BYTES:
                raise Unsupported(
                    f"this server takes files of at most {WHOLE_WRITE_BYTES} bytes:"
                    " it does not announce fileWriteStreaming"
                )
        await self.write(path, bytes(data))
        return len(data)

    # Looking -------------------------------------------------------------------------------------

    async def metadata(self, path: FilePath, follow_symlinks: bool = True) -> FileMetadata:
        """What a path is. With `follow_symlinks=False` a link anywhere in the path is an error.

        Callers that ask for the same at the same time share one request.
        """
        uri = self.uri(path)
        if not follow_symlinks:
            params = {"path": uri, "followSymlinks": False}
            found = await self._call("fs/getMetadata", params, MetadataResult, path)
        else:
            looking = self._looking.get(uri)
            if looking is None:
                call = self._client.call("fs/getMetadata", {"path": uri}, MetadataResult)
                looking = self._looking[uri] = asyncio.ensure_future(call)
                looking.add_done_callback(lambda done: self._looked(uri, done))
            try:
                found = await asyncio.shield(looking)
            except ServerRejected as error:
                raise file_error(error, path) from None
        return FileMetadata(
            found.is_directory,
            found.is_file,
            found.is_symlink,
            found.size,
            found.created_at_ms,
            found.modified_at_ms,
        )

    def _looked(self, uri: str, done: asyncio.Future[MetadataResult]) -> None:
        if self._looking.get(uri) is done:
            del self._looking[uri]
        if not done.cancelled():
            done.exception()  # whoever asked may have gone

    async def exists(self, path: FilePath) -> bool:
        """Whether there is something, at the end of all links."""
        try:
            await self.metadata(path)
        except (RemoteFileNotFound, RemoteNotADirectory):
            return False
        return True

    async def list(self, path: FilePath) -> list[DirectoryEntry]:
        """The names in a directory, sorted.

        Other servers than ours leave out links that lead nowhere, write U+FFFD for what is not UTF-8, and
        refuse directories of more than 50,000 entries.
        """
        params: dict[str, Any] = {"path": self.uri(path)}
        if self._client.has("fsListPages"):
            params["after"] = ""
        entries: list[DirectoryEntry] = []
        while True:
            found = await self._call("fs/readDirectory", params, _Listed, path)
            entries += [
                DirectoryEntry(_listed_name(item), item.is_directory, item.is_file) for item in found.entries
            ]
            if not found.more or not found.entries:
                break
            last = found.entries[-1]
            params["after"] = last.name or quote(last.file_name)
        entries.sort(key=lambda entry: entry.name)
        return entries

    async def walk(
        self,
        path: FilePath,
        *,
        max_depth: int = 64,
        max_directories: int = 10_000,
        max_entries: int = 50_000,
        follow_directory_symlinks: bool = False,
        prune_hidden_directories: bool = False,
    ) -> Walked:
        """The tree below a directory, level by level. The defaults are the most a server does."""
        options = {
            "maxDepth": max_depth,
            "maxDirectories": max_directories,
            "maxEntries": max_entries,
            "followDirectorySymlinks": follow_directory_symlinks,
            "pruneHiddenDirectories": prune_hidden_directories,
        }
        found = await self._call("fs/walk", {"path": self.uri(path), "options": options}, _Walked, path)
        return Walked(
            [WalkEntry(_native(entry.path), entry.kind) for entry in found.entries],
            [WalkError(_native(error.path), error.message) for error in found.errors],
            found.truncated,
        )

    async def canonicalize(self, path: FilePath) -> str:
        """The path with every link resolved; it must exist."""
        found = await self._call("fs/canonicalize", {"path": self.uri(path)}, CanonicalizeResult, path)
        return _native(found.path)

    async def glob(
        self,
        path: FilePath,
        pattern: str,
        *,
        kind: Literal["file", "directory", "any"] = "file",
        hidden: bool = False,
        follow_symlinks: bool = False,
        max_results: int = 1000,
    ) -> GlobFound:
        """Paths below a directory that fit a pattern such as `src/**/*.{py,pyi}`."""
        self._require("fsGlob", "look for paths by pattern")
        params = {
            "path": self.uri(path),
            "pattern": pattern,
            "kind": kind,
            "hidden": hidden,
            "followSymlinks": follow_symlinks,
            "maxResults": max_results,
        }
        found = await self._call("fs/glob", params, GlobFound, path)
        return GlobFound([_native(uri) for uri in found.paths], found.truncated)

    async def search(
        self,
        path: FilePath,
        pattern: str,
        *,
        fixed_strings: bool = False,
        ignore_case: bool = False,
        whole_words: bool = False,
        globs: Sequence[str] = (),
        hidden: bool = False,
        no_ignore: bool = False,
        before_context: int = 0,
        after_context: int = 0,
        max_results: int = 1000,
    ) -> SearchFound:
        """Lines that match a regular expression, in a file or in all files below a directory.

        `globs` say which files (`*.py`) or, with a leading `!`, which not. Hidden files, and what
        `.gitignore` excludes, are left out unless asked for.
        """
        self._require("fsSearch", "search files")
        params = {
            "path": self.uri(path),
            "pattern": pattern,
            "fixedStrings": fixed_strings,
            "ignoreCase": ignore_case,
            "wholeWords": whole_words,
            "globs": [*globs],
            "hidden": hidden,
            "noIgnore": no_ignore,
            "beforeContext": before_context,
            "afterContext": after_context,
            "maxResults": max_results,
        }
        found = await self._call("fs/search", params, _Searched, path)
        matches = [
            SearchMatch(
                _native(match.path),
                match.line_number,
                match.line,
                match.byte_offset,
                [(span.start, span.end) for span in match.submatches],
                match.line_truncated,
            )
            for match in found.matches
        ]
        context = [SearchLine(_native(line.path), line.line_number, line.line) for line in found.context]
        return SearchFound(matches, context, found.truncated)

    # Changing ------------------------------------------------------------------------------------

    async def make_directory(self, path: FilePath, recursive: bool = True) -> None:
        """Make a directory; `recursive` makes its parents too and does not mind if it is there."""
        await self._change("fs/createDirectory", {"path": self.uri(path), "recursive": recursive}, path)

    async def remove(self, path: FilePath, recursive: bool = False, force: bool = False) -> None:
        """Remove a file, a link or an empty directory; with `recursive` a whole tree."""
        params = {"path": self.uri(path), "recursive": recursive, "force": force}
        await self._change("fs/remove", params, path)

    async def copy(self, source: FilePath, destination: FilePath, recursive: bool = False) -> None:
        """Copy on that machine. A directory needs `recursive` and is merged into an existing one."""
        params = {
            "sourcePath": self.uri(source),
            "destinationPath": self.uri(destination),
            "recursive": recursive,
        }
        await self._change("fs/copy", params, source)

    async def move(
        self,
        source: FilePath,
        destination: FilePath,
        overwrite: bool = False,
        *,
        keep_attributes: bool = False,
    ) -> None:
        """Rename; what has the new name already is replaced only if told to.

        With `keep_attributes`, a file that replaces another gets its mode, owner and extended attributes.
        A server that cannot rename, or not across its file systems, copies and then removes: others may
        see it half done, times are not kept, and a directory is merged into an existing one.
        """
        if self._client.has("fsMove"):
            params: dict[str, Any] = {
                "sourcePath": self.uri(source),
                "destinationPath": self.uri(destination),
                "overwrite": overwrite,
            }
            if keep_attributes:
                params["keepAttributes"] = True
            try:
                await self._change("fs/move", params, source)
            except RemoteFileError as error:
                if error.errno != errno.EXDEV:
                    raise
            else:
                return
        if await self.exists(destination):
            if await self.canonicalize(source) == await self.canonicalize(destination):
                return  # some servers empty a file that is copied onto itself
            if not overwrite:
                text = "File exists (os error 17)"
                raise file_error(ServerRejected("fs/move", -32603, text), destination)
        await self.copy(source, destination, recursive=True)
        await self.remove(source, recursive=True)

    # Watching ------------------------------------------------------------------------------------

    def watch(self, path: FilePath, recursive: bool = False) -> RemoteWatch:
        """`async with files.watch(path) as changes: async for change in changes: ...`

        The path need not exist. A directory reports itself and its entries, or with `recursive` all below
        it. What happens within 200 ms is told as one change. The iteration ends with the context. After a
        connection was lost and made again, a change says `overflowed`; if there is no way back, the
        iteration raises ConnectionLost.
        """
        return RemoteWatch(self, path, recursive)

    async def watch_missing(
        self, missing: Sequence[FilePath], present: FilePath | None = None
    ) -> asyncio.Future[None] | None:
        """A future that is done once one of the missing paths may exist, or `present` has changed.

        None if the server does not watch that (one of them exists, or is reached through a link). A
        connection has one such watch: a new one ends the one before, whose future is cancelled.
        """
        if not self._client.has("fsWatchMissing"):
            return None
        watch_id = next(self._watch_ids)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._missing is not None:
            self._missing[1].cancel()
        self._missing = (watch_id, future)
        params: dict[str, Any] = {"watchId": watch_id, "missing": [self.uri(path) for path in missing]}
        if present is not None:
            params["present"] = self.uri(present)
        reply = await self._call("fs/watchMissing", params, _Watching, missing[0] if missing else "")
        return future if reply.watching else None

    def _changed(self, params: Raw) -> None:
        change = msgspec.json.decode(params, type=_ChangedParams)
        watch = self._watches.get(change.watch_id)
        if watch is not None:
            watch.put(Change([_native(uri) for uri in change.changed_paths], change.overflowed))

    def _missing_changed(self, params: Raw) -> None:
        changed = msgspec.json.decode(params, type=_MissingChangedParams)
        if self._missing is not None and self._missing[0] == changed.watch_id:
            if not self._missing[1].done():
                self._missing[1].set_result(None)
            self._missing = None

    def _resumed(self) -> None:
        """A new connection: watches are set up again, and whoever waits is told to look at everything."""
        for watch in list(self._watches.values()):
            task = asyncio.ensure_future(watch.rearm())
            self._rearming.add(task)
            task.add_done_callback(self._rearming.discard)
        if self._missing is not None:
            if not self._missing[1].done():
                self._missing[1].set_result(None)
            self._missing = None

    def _lost(self, reason: str) -> None:
        for watch in list(self._watches.values()):
            watch.end(reason)
        if self._missing is not None and not self._missing[1].done():
            self._missing[1].set_exception(ConnectionLost(reason))
            self._missing[1].exception()

    # Whole trees ---------------------------------------------------------------------------------

    async def upload(
        self, local: FilePath, remote: FilePath, progress: Progress | None = None, *, verify: bool = True
    ) -> Transferred:
        """Bring a file or a tree of this machine there, as `remote`; see client/transfers.py."""
        from .transfers import Upload

        return await Upload(self._client, self, progress, verify).run(os.fsdecode(local), os.fsdecode(remote))

    async def download(
        self, remote: FilePath, local: FilePath, progress: Progress | None = None, *, verify: bool = True
    ) -> Transferred:
        """Bring a file or a tree from there to this machine, as `local`; see client/transfers.py."""
        from .transfers import Download

        download = Download(self._client, self, progress, verify)
        return await download.run(os.fsdecode(remote), os.fsdecode(local))

    # Calls ---------------------------------------------------------------------------------------

    def uri(self, path: FilePath) -> str:
        """The URI of a path as callers write it."""
        path = os.fsdecode(path)
        if path.startswith("file:"):
            try:
                return parse(path)
            except RpcError as error:
                raise ValueError(f"{path!r} is not a path: {error.message}") from None
        if "\0" in path or not path:
            raise ValueError(f"{path!r} is not a path")
        if path.startswith("/"):
            return path_to_uri(path)
        base = self._client.info.cwd
        if not isinstance(base, str):
            raise ValueError(f"{path!r} is relative, and this server does not say to what")
        return path_to_uri(f"{native_path(base).rstrip('/')}/{path}")

    def native(self, path: FilePath) -> str:
        """The native path of a path as callers write it."""
        return _native(self.uri(path))

    def _require(self, capability: str, what: str) -> None:
        if not self._client.has(capability):
            raise Unsupported(f"this server cannot {what}: it does not announce {capability}")

    async def _call(self, method: str, params: Any, kind: type[T], path: FilePath) -> T:
        try:
            return await self._client.call(method, params, kind)
        except ServerRejected as error:
            if error.code == METHOD_NOT_FOUND:
                raise Unsupported(f"this server has no `{method}`") from None
            raise file_error(error, path) from None

    async def _change(self, method: str, params: Any, path: FilePath) -> None:
        # What was asked before this may be answered with how it was; nobody who asks later may share it.
        self._looking.clear()
        await self._call(method, params, dict[str, Any], path)

    async def _open(
        self,
        handle: str,
        uri: str,
        path: FilePath,
        mode: OpenMode,
        atomic: bool = False,
        part: Literal["keep", "empty"] | None = None,
    ) -> None:
        params: dict[str, Any] = {"handleId": handle, "path": uri}
        if part is not None:
            params["part"] = part
        if mode != "read":
            params["mode"] = mode
        if atomic:
            params["atomic"] = True
        await self._call("fs/open", params, OpenResult, path)

    def _new_handle(self) -> str:
        """A name for an open file; its end says which connection the file belongs to."""
        return f"{uuid4().hex[:24]}{self._client.losses % 2**32:08x}"

    def _require_open(self, handle: str, path: FilePath) -> None:
        """A server forgets open files with their connection, and closing an unknown one is no error to it."""
        if int(handle[-8:], 16) != self._client.losses % 2**32:
            raise ConnectionLost(f"{path} was open on a connection that is gone; open it again")

    async def _part(
        self, method: str, params: dict[str, Any], path: FilePath, take: Take | None = None
    ) -> binary.FilePart:
        """A part of a file, or what `take` leaves of it, and whether the file ends with it."""
        try:
            answer = await self._client.call_for_part(method, params, take)
        except ServerRejected as error:
            raise file_error(error, path) from None
        if isinstance(answer, binary.FilePart):
            return answer
        part = part_of(method, answer)
        return part if take is None else take(part)

    async def _read_block(self, params: dict[str, Any], path: FilePath, take: Take) -> binary.FilePart:
        """`fs/readBlock`; there are never more than a few blocks on their way."""
        async with self._blocks:
            self._require_open(params["handleId"], path)
            return await self._part("fs/readBlock", params, path, take)

    async def _write_block(self, handle: str, offset: int, block: bytes | memoryview, path: FilePath) -> None:
        """`fs/writeBlock`; likewise."""
        async with self._blocks:
            self._require_open(handle, path)
            if not self._client.binary_files:
                params = {"handleId": handle, "offset": offset, "chunk": base64.encode(block)}
                await self._call("fs/writeBlock", params, dict[str, Any], path)
                return
            try:
                await self._client.put_block(handle, offset, block)
            except ServerRejected as error:
                raise file_error(error, path) from None


class RemoteWatch:
    """A watch, and the changes it reports. Made by `RemoteFiles.watch`."""

    def __init__(self, files: RemoteFiles, path: FilePath, recursive: bool) -> None:
        self._files = files
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
        files = self._files
        files._require("fsWatch", "watch files")
        params = self._params()
        files._watches[self._id] = self
        try:
            await files._call("fs/watch", params, dict[str, Any], self._path)
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
        if self._files._watches.pop(self._id, None) is not None:
            self._files._client.tell("fs/unwatch", {"watchId": self._id})
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
            await self._files._call("fs/watch", self._params(), dict[str, Any], self._path)
        except ConnectionLost:
            return  # the next connection tries again, or there is none and everybody is told
        except ExecServerError as error:
            self.end(f"the watch could not be set up again after a lost connection: {error}")
        else:
            self.put(Change([self._files.native(self._path)], True))

    def _params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"watchId": self._id, "path": self._files.uri(self._path)}
        if self._recursive:
            params["recursive"] = True
        return params

    def put(self, change: Change) -> None:
        """Something changed. A reader that does not read is told, later, to look at everything."""
        if len(self._changes) >= MAX_WAITING_CHANGES:
            self._changes.clear()
            change = Change([self._files.native(self._path)], True)
        self._changes.append(change)
        self._news.set()

    def end(self, failure: str | None) -> None:
        """No more will come."""
        self._ended = True
        self._failure = self._failure or failure
        self._news.set()


def _listed_name(entry: _ListedEntry) -> str:
    return entry.file_name if entry.name is None else os.fsdecode(unquote_to_bytes(entry.name))


def _native(uri: str) -> str:
    """The native path, or the URI itself where this kind of machine has no such path."""
    try:
        return native_path(uri)
    except (ForeignPath, RpcError):
        return uri


if TYPE_CHECKING:
    _IS_COMPLETE: type[Files] = RemoteFiles
