"""Files across a connection: every operation of services.Files as calls that any server understands.

Where a server has more (its flags say so), that is used; where it has less, the same is done with
what there is, or Unsupported is raised. Large contents always travel in blocks (blocks.py).
"""

from __future__ import annotations

import asyncio
import copy
import errno
import os
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from ..limits import MAX_FRAME_BYTES
from ..services import (
    DirectoryEntry,
    FileMetadata,
    FilePart,
    FilePath,
    Files,
    GlobFound,
    Progress,
    SearchFound,
    Transferred,
    Walked,
)
from ..wire import base64
from ..wire.files import CanonicalizeResult, MetadataResult
from ..wire.sandbox import SandboxContext
from .blocks import BLOCK_BYTES, BlockReader, Blocks, BlockWriter, reblocked
from .errors import (
    RemoteFileError,
    RemoteFileNotFound,
    RemoteNotADirectory,
    ServerRejected,
    Unsupported,
    file_error,
)
from .file_answers import ListedAnswer, SearchAnswer, WalkAnswer, metadata_of, native
from .file_calls import FileCalls
from .watch import RemoteWatch, RemoteWatches

if TYPE_CHECKING:
    from .client import Client
    from .unlinked import UnlinkedFiles

__all__ = ["WHOLE_WRITE_BYTES", "RemoteFiles"]

WHOLE_WRITE_BYTES: Final = (MAX_FRAME_BYTES - 64 * 1024) // 4 * 3
"""The largest content of one `fs/writeFile`: more, in base64, does not fit into one frame."""

SMALL_BYTES: Final = 256 * 1024
"""Files up to this size are read in one call."""


class RemoteFiles:
    """Implements services.Files; `client.files` is one. See there for what each method promises.

    On servers without our extensions (the reference): `move` copies and removes, `glob`, `search` and
    `watch` raise Unsupported, and without `fileWriteStreaming` at most WHOLE_WRITE_BYTES can be written.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._calls = FileCalls(client)
        self._looking: dict[str, asyncio.Future[MetadataResult]] = {}
        self._watches = RemoteWatches(client)

    def under(self, sandbox: SandboxContext) -> RemoteFiles:
        """The same files, seen and changed through a sandbox that the server enforces for each call."""
        confined = copy.copy(self)
        confined._calls = self._calls.under(sandbox)
        confined._client = confined._calls.client
        confined._looking = {}  # what one may see says nothing about another
        return confined

    def without_links(self) -> UnlinkedFiles:
        """The same files by paths in which no link is followed; see there for what it can do."""
        from .unlinked import UnlinkedFiles

        return UnlinkedFiles(self._calls)

    # Reading -------------------------------------------------------------------------------------

    async def read(self, path: FilePath) -> bytes:
        """All of a file. A large one comes in blocks: it delays nobody, but it has to fit into memory."""
        uri = self._calls.uri(path)
        if self._client.has("fsReadRange"):
            params = {"path": uri, "offset": 0, "length": SMALL_BYTES}
            part = await self._calls.part("fs/readFile", params, path)
            if part.eof:
                return bytes(part.data)
        reader = BlockReader(self._calls, uri, path, 0, None)
        try:
            return await reader.gather()
        finally:
            reader.close()

    async def read_range(self, path: FilePath, offset: int, length: int) -> FilePart:
        """Up to `length` bytes from `offset` on; fewer only at the end. `eof`: nothing follows them."""
        if offset < 0 or length < 0:
            raise ValueError("offset and length of a range cannot be negative")
        uri = self._calls.uri(path)
        if length == 0:
            return FilePart(b"", False)
        if length <= BLOCK_BYTES and self._client.has("fsReadRange"):
            params = {"path": uri, "offset": offset, "length": length}
            part = await self._calls.part("fs/readFile", params, path)
            return FilePart(bytes(part.data), part.eof)
        # One byte more than asked for, because a block that is full does not say whether more follows.
        reader = BlockReader(self._calls, uri, path, offset, offset + length + 1)
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
        reader = BlockReader(self._calls, self._calls.uri(path), path, offset, None)
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
        params = {"path": self._calls.uri(path), "dataBase64": base64.encode(data)}
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
        handle = self._calls.new_handle()
        writer = BlockWriter(self._calls, handle, path)
        self._looking.clear()
        await self._calls.open(handle, self._calls.uri(path), path, "replace", atomic=atomic)
        try:
            async for block in reblocked(blocks):
                await writer.put(block)
            await writer.finish()
            self._calls.require_open(handle, path)
            await self._change("fs/close", {"handleId": handle}, path)
        except BaseException:
            writer.cancel()
            self._calls.close(handle, discard=atomic)
            raise
        return writer.offset

    async def open_part(self, path: FilePath, *, keep: bool) -> str:
        """A handle of what a transfer writes to before it gets its name; see docs/protocol.md, `fsParts`."""
        handle = self._calls.new_handle()
        self._looking.clear()
        part: Literal["keep", "empty"] = "keep" if keep else "empty"
        await self._calls.open(handle, self._calls.uri(path), path, "replace", part=part)
        return handle

    async def write_part(self, handle: str, path: FilePath, blocks: Blocks, offset: int) -> None:
        """Write from an offset on; the handle stays open."""
        writer = BlockWriter(self._calls, handle, path)
        writer.offset = offset
        try:
            async for block in reblocked(blocks):
                await writer.put(block)
            await writer.finish()
            self._calls.require_open(handle, path)
        except BaseException:
            writer.cancel()
            raise

    def close_part(self, handle: str) -> None:
        """Without waiting for it. The server would do it, too, when the connection ends."""
        self._calls.close(handle)

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
        uri = self._calls.uri(path)
        if not follow_symlinks:
            params = {"path": uri, "followSymlinks": False}
            found = await self._calls.call("fs/getMetadata", params, MetadataResult, path)
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
        return metadata_of(found)

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
        params: dict[str, Any] = {"path": self._calls.uri(path)}
        if self._client.has("fsListPages"):
            params["after"] = ""
        entries: list[DirectoryEntry] = []
        while True:
            page = await self._calls.call("fs/readDirectory", params, ListedAnswer, path)
            entries += page.found()
            after = page.next_page()
            if after is None:
                break
            params["after"] = after
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
        params = {"path": self._calls.uri(path), "options": options}
        return (await self._calls.call("fs/walk", params, WalkAnswer, path)).found()

    async def canonicalize(self, path: FilePath) -> str:
        """The path with every link resolved; it must exist."""
        params = {"path": self._calls.uri(path)}
        found = await self._calls.call("fs/canonicalize", params, CanonicalizeResult, path)
        return native(found.path)

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
        self._calls.require("fsGlob", "look for paths by pattern")
        params = {
            "path": self._calls.uri(path),
            "pattern": pattern,
            "kind": kind,
            "hidden": hidden,
            "followSymlinks": follow_symlinks,
            "maxResults": max_results,
        }
        found = await self._calls.call("fs/glob", params, GlobFound, path)
        return GlobFound([native(uri) for uri in found.paths], found.truncated)

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
        self._calls.require("fsSearch", "search files")
        params = {
            "path": self._calls.uri(path),
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
        return (await self._calls.call("fs/search", params, SearchAnswer, path)).found()

    # Changing ------------------------------------------------------------------------------------

    async def make_directory(self, path: FilePath, recursive: bool = True) -> None:
        """Make a directory; `recursive` makes its parents too and does not mind if it is there."""
        params = {"path": self._calls.uri(path), "recursive": recursive}
        await self._change("fs/createDirectory", params, path)

    async def remove(self, path: FilePath, recursive: bool = False, force: bool = False) -> None:
        """Remove a file, a link or an empty directory; with `recursive` a whole tree."""
        params = {"path": self._calls.uri(path), "recursive": recursive, "force": force}
        await self._change("fs/remove", params, path)

    async def copy(self, source: FilePath, destination: FilePath, recursive: bool = False) -> None:
        """Copy on that machine. A directory needs `recursive` and is merged into an existing one."""
        params = {
            "sourcePath": self._calls.uri(source),
            "destinationPath": self._calls.uri(destination),
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
                "sourcePath": self._calls.uri(source),
                "destinationPath": self._calls.uri(destination),
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
        return RemoteWatch(self._watches, self._calls, path, recursive)

    async def watch_missing(
        self, missing: Sequence[FilePath], present: FilePath | None = None
    ) -> asyncio.Future[None] | None:
        """A future that is done once one of the missing paths may exist, or `present` has changed.

        None if the server does not watch that (one of them exists, or is reached through a link). A
        connection has one such watch: a new one ends the one before, whose future is cancelled.
        """
        return await self._watches.missing(self._calls, missing, present)

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

    # Paths ---------------------------------------------------------------------------------------

    def uri(self, path: FilePath) -> str:
        """The URI of a path as callers write it."""
        return self._calls.uri(path)

    def native(self, path: FilePath) -> str:
        """The native path of a path as callers write it."""
        return self._calls.native(path)

    async def _change(self, method: str, params: Any, path: FilePath) -> None:
        # What was asked before this may be answered with how it was; nobody who asks later may share it.
        self._looking.clear()
        await self._calls.call(method, params, dict[str, Any], path)


if TYPE_CHECKING:
    _IS_COMPLETE: type[Files] = RemoteFiles
