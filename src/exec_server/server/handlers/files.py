"""`fs/*`: decode, decide who does it, and give it to the connection's lane (local/files/lane.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Final

from ...local.files.access import confinement, keeps_off_proc
from ...local.files.cached import cached_metadata, cached_read_file, cached_read_range
from ...local.files.copy import copy
from ...local.files.directory import create_directory, read_directory, read_directory_page
from ...local.files.errors import failure
from ...local.files.glob import glob
from ...local.files.handles import handle_path, open_part
from ...local.files.lane import ANSWERS, SEARCHES, Gate, Lane, Touch, Turn, reads, writes
from ...local.files.metadata import canonicalize, get_metadata
from ...local.files.missing import MAX_MISSING, MissingWatch, watch_missing
from ...local.files.move import move
from ...local.files.paths import to_native, to_uri
from ...local.files.procfs import OnProc, lies_on_proc
from ...local.files.read import open_for_reading, read_file, read_range
from ...local.files.remove import remove
from ...local.files.replacement import ReplacingHandles
from ...local.files.walk import walk
from ...local.files.watch import FileWatch
from ...local.files.write import decode_content, write_file
from ...local.process.tree import SessionTags
from ...loop import Loop, Pending, after
from ...wire import files as wire
from ...wire.envelope import encode_notification
from ...wire.errors import RpcError, invalid_request
from ...wire.sandbox import SandboxContext
from ..connection import Connection
from ..dispatch import Method

__all__ = ["METHODS", "files_of"]

FAMILY: Final = "filesystem"

HELPER_SECONDS: Final = 0.0002
"""Twice what a helper takes for a small file."""

SEARCHES_AT_ONCE: Final = 4
"""Of one connection. More would only share the same processors, and take the threads of other calls."""

MAX_WATCHES: Final = 512
"""Of one connection, set with `fs/watch`."""


class _Files:
    """What belongs to one connection and ends with it."""

    def __init__(self, connection: Connection) -> None:
        self.handles = ReplacingHandles()
        self.missing = _MissingWatcher(connection)
        self.watches: dict[str, FileWatch] = {}
        gates = {
            ANSWERS: Gate(connection.server.limits.outgoing_limit, connection.room),
            SEARCHES: Gate(SEARCHES_AT_ONCE),
        }
        self.lane = Lane(connection.server.loop, where=self.handles.where, gates=gates)
        self._connection = connection

    @cached_property
    def search_tags(self) -> SessionTags | None:
        """Marks for the programs that search, which die with the server however it dies."""
        machine = self._connection.server.machine
        machine.guard.start()
        return machine.tags.open_session() if machine.tag_trees else None

    def close(self) -> None:
        self.lane.close()
        tags = self.__dict__.get("search_tags")
        if tags is not None:
            tags.release()
        self.handles.end()
        self.missing.end()
        for watch in self.watches.values():
            watch.close()
        self.watches.clear()


class _MissingWatcher:
    """At most one watch for missing files; a later one takes the place of an earlier one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._highest_id = 0
        self._watch: MissingWatch | None = None
        self._ended = False

    def newer(self, watch_id: int) -> bool:
        """Whether this id may watch. If so, whoever did before it does no longer."""
        if watch_id <= self._highest_id:
            return False
        self._highest_id = watch_id
        self._end_watch()
        return True

    def answer(self, watch_id: int, watch: MissingWatch | None) -> dict[str, bool]:
        """What to tell the client; listening begins when it has been told."""
        if watch is None:
            return {"watching": False}
        if self._ended or watch_id != self._highest_id:
            watch.close()
        else:
            self._watch = watch
            loop = self._connection.server.loop
            loop.call_soon(watch.listen, loop, lambda: self._say_changed(watch_id))
        return {"watching": True}

    def end(self) -> None:
        self._ended = True
        self._end_watch()

    def _say_changed(self, watch_id: int) -> None:
        self._watch = None
        message = encode_notification("fs/missingChanged", {"watchId": watch_id})
        self._connection.channel.send(message)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


_open: dict[Connection, _Files] = {}


def files_of(connection: Connection) -> _Files:
    """What this connection has open. Made with its first call."""
    files = _open.get(connection)
    if files is None:
        files = _open[connection] = _Files(connection)
        connection.on_end.append(lambda: _open.pop(connection).close())
    return files


def _in_sandbox(
    connection: Connection, touches: tuple[Touch, ...], confined: SandboxContext, name: str, params: Any
) -> Pending[Any]:
    """In its turn like any other call, but by somebody with fewer rights."""
    sandboxed = connection.server.sandboxed_files
    return files_of(connection).lane.submit(touches, sandboxed.perform, confined, name, params)


def _read_in_sandbox(
    connection: Connection, path: bytes, confined: SandboxContext, name: str, params: Any
) -> Pending[Any]:
    """The same for calls that are short and change nothing: if nothing is in the way, at once."""
    server, lane = connection.server, files_of(connection).lane
    begun = server.sandboxed_files.begin(confined, name, params, server.loop, lane, reads(path))
    if begun is None:
        return _in_sandbox(connection, reads(path), confined, name, params)
    server.loop.call_soon(server.linger.expect, HELPER_SECONDS)
    return begun


def _here_unless_on_proc(
    connection: Connection, path: bytes, name: str, params: Any, here: Callable[[Turn], Any]
) -> Pending[Any]:
    """By this process, or, if it raises OnProc, by somebody who sees another `/proc` (procfs.py)."""
    sandboxed, context = connection.server.sandboxed_files, params.sandbox

    def run(turn: Turn) -> Any:
        try:
            return here(turn)
        except OnProc:
            return sandboxed.perform(context, name, params, turn)

    return files_of(connection).lane.submit(reads(path), run)


_BELOW: Final = ("fs/walk", "fs/glob")
"""Calls that tell of everything below a path; below the root there is `/proc`."""


def _tell_of(
    connection: Connection, path: bytes, name: str, params: Any, here: Callable[[Turn], Any]
) -> Pending[Any]:
    """A call that tells names and sizes of what is at a path: here, unless this is about `/proc`."""
    if not keeps_off_proc(params.sandbox):
        return files_of(connection).lane.submit(reads(path), here)

    def checked(turn: Turn) -> Any:
        if lies_on_proc(path) or (name in _BELOW and os.path.realpath(path) == b"/"):
            raise OnProc
        return here(turn)

    return _here_unless_on_proc(connection, path, name, params, checked)


def _do_read_file(connection: Connection, params: wire.ReadFileParams) -> Any:
    confined = confinement(params.sandbox, changes=False)
    path = to_native(params.path)
    if confined is not None:
        return _read_in_sandbox(connection, path, confined, "fs/readFile", params)
    off_proc = keeps_off_proc(params.sandbox)
    lane = files_of(connection).lane
    if params.offset is not None or params.length is not None:
        wanted = (params.offset or 0, params.length, connection.binary_files)
        if params.follow_symlinks and lane.free_for_reading:
            part = cached_read_range(path, *wanted)
            if part is not None:
                return part
        ranged = partial(read_range, path, params.follow_symlinks, *wanted, off_proc=off_proc)
        return _here_unless_on_proc(connection, path, "fs/readFile", params, ranged)
    if params.follow_symlinks and lane.free_for_reading:
        content = cached_read_file(path)
        if content is not None:
            return content
    whole = partial(read_file, path, params.follow_symlinks, off_proc=off_proc)
    return _here_unless_on_proc(connection, path, "fs/readFile", params, whole)


def _do_get_metadata(connection: Connection, params: wire.MetadataParams) -> Any:
    confined = confinement(params.sandbox, changes=False)
    path = to_native(params.path)
    if confined is not None:
        return _read_in_sandbox(connection, path, confined, "fs/getMetadata", params)
    lane = files_of(connection).lane
    if params.follow_symlinks and lane.free_for_reading:
        metadata = cached_metadata(path, off_proc=keeps_off_proc(params.sandbox))
        if metadata is not None:
            return metadata
    here = partial(get_metadata, path, params.follow_symlinks)
    return _tell_of(connection, path, "fs/getMetadata", params, here)


def _do_canonicalize(connection: Connection, params: wire.PathParams) -> Pending[Any]:
    confined = confinement(params.sandbox, changes=False)
    path = to_native(params.path)
    if confined is not None:
        return _in_sandbox(connection, reads(path), confined, "fs/canonicalize", params)
    return _tell_of(connection, path, "fs/canonicalize", params, partial(canonicalize, path))


def _do_read_directory(connection: Connection, params: wire.ReadDirectoryParams) -> Pending[Any]:
    confined = confinement(params.sandbox, changes=False)
    path = to_native(params.path)
    if params.after is not None and connection.extensions:
        if confined is not None:
            raise invalid_request("fs/readDirectory has no pages in a sandbox")
        page = partial(read_directory_page, path, params.after)
        return _tell_of(connection, path, "fs/readDirectory", params, page)
    if confined is not None:
        return _in_sandbox(connection, reads(path), confined, "fs/readDirectory", params)
    return _tell_of(connection, path, "fs/readDirectory", params, partial(read_directory, path))


def _do_walk(connection: Connection, params: wire.WalkParams) -> Pending[Any]:
    confined = confinement(params.sandbox, changes=False)
    path = to_native(params.path)
    if confined is not None:
        return _in_sandbox(connection, reads(path), confined, "fs/walk", params)
    return _tell_of(connection, path, "fs/walk", params, partial(walk, path, params.path, params.options))


def _do_create_directory(connection: Connection, params: wire.CreateDirectoryParams) -> Pending[Any]:
    confined = confinement(params.sandbox, changes=True)
    path = to_native(params.path)
    touches = writes(*_with_parents(path)) if params.recursive else writes(path)
    if confined is not None:
        return _in_sandbox(connection, touches, confined, "fs/createDirectory", params)
    return files_of(connection).lane.submit(
        touches,
        create_directory,
        path,
        params.recursive,
        params.follow_symlinks,
    )


def _with_parents(path: bytes) -> list[bytes]:
    """All that `mkdir -p` may have to make."""
    parts = path.split(b"/")
    return [b"/".join(parts[:count]) for count in range(2, len(parts) + 1)] or [path]


def _do_write_file(connection: Connection, params: wire.WriteFileParams) -> Pending[Any]:
    try:
        confined = confinement(params.sandbox, changes=True)
    except RpcError:
        decode_content(params.data_base64)  # peers look at that first
        raise
    path = to_native(params.path)
    if confined is not None:
        return _in_sandbox(connection, writes(path), confined, "fs/writeFile", params)
    return files_of(connection).lane.submit(
        writes(path), write_file, path, params.data_base64, params.follow_symlinks
    )


def _do_remove(connection: Connection, params: wire.RemoveParams) -> Pending[Any]:
    confined = confinement(params.sandbox, changes=True)
    path = to_native(params.path)
    if confined is not None:
        return _in_sandbox(connection, writes(path), confined, "fs/remove", params)
    return files_of(connection).lane.submit(
        writes(path), remove, path, params.recursive, params.force, params.follow_symlinks
    )


def _do_copy(connection: Connection, params: wire.CopyParams) -> Pending[Any]:
    confined = confinement(params.sandbox, changes=True)
    source, target = to_native(params.source_path), to_native(params.destination_path)
    touches = (Touch(source, False), *writes(*_with_parents(target)))
    if confined is not None:
        return _in_sandbox(connection, touches, confined, "fs/copy", params)
    return files_of(connection).lane.submit(touches, copy, source, target, params.recursive)


def _do_open(connection: Connection, params: wire.OpenParams) -> Pending[Any]:
    changes = params.mode == "replace"
    confined = confinement(params.sandbox, changes=changes)
    path = to_native(params.path)
    files = files_of(connection)
    touches = (*writes(handle_path(params.handle_id)), Touch(path, changes))
    if params.part is not None and changes:
        if confined is not None:
            raise invalid_request("fs/open cannot keep a part in a sandbox")
        keep = params.part == "keep"
        part = partial(files.handles.open, opener=lambda path, _mode, _turn: open_part(path, keep=keep))
        return files.lane.submit(touches, part, params.handle_id, path, params.mode)
    if confined is not None:
        sandboxed = connection.server.sandboxed_files
        opened = partial(
            files.handles.open, opener=lambda _path, _mode, turn: sandboxed.open(confined, params, turn)
        )
        return files.lane.submit(touches, opened, params.handle_id, path, params.mode)
    if not changes and keeps_off_proc(params.sandbox):
        opened = partial(files.handles.open, opener=partial(_open_off_proc, connection, params))
        return files.lane.submit(touches, opened, params.handle_id, path, params.mode)
    if changes and params.atomic:
        return files.lane.submit(touches, files.handles.open_atomic, params.handle_id, path)
    return files.lane.submit(touches, files.handles.open, params.handle_id, path, params.mode)


def _open_off_proc(
    connection: Connection, params: wire.OpenParams, path: bytes, mode: wire.OpenMode, turn: Turn
) -> int:
    """A descriptor for reading; of a file of `/proc`, that of a sandbox (procfs.py)."""
    del mode
    try:
        return open_for_reading(path, off_proc=True)
    except OnProc:
        if params.sandbox is None:
            raise
        return connection.server.sandboxed_files.open(params.sandbox, params, turn)


def _do_read_block(connection: Connection, params: wire.ReadBlockParams) -> Pending[Any]:
    files = files_of(connection)
    touches = reads(handle_path(params.handle_id))
    wanted = (params.handle_id, params.offset, params.len, connection.binary_files)
    return files.lane.submit(touches, files.handles.read, *wanted)


def _do_write_block(connection: Connection, params: wire.WriteBlockParams) -> Pending[Any]:
    files = files_of(connection)
    touches = writes(handle_path(params.handle_id))
    return files.lane.submit(touches, files.handles.write, params.handle_id, params.offset, params.chunk)


def _do_close(connection: Connection, params: wire.CloseParams) -> Pending[Any]:
    files = files_of(connection)
    touches = writes(handle_path(params.handle_id))
    return files.lane.submit(touches, files.handles.finish, params.handle_id, params.discard)


def _do_watch_missing(connection: Connection, params: wire.WatchMissingParams) -> Any:
    confined = confinement(params.sandbox, changes=False)
    files = files_of(connection)
    if not files.missing.newer(params.watch_id) or confined is not None:
        return {"watching": False}  # in a sandbox that hides files, nobody tells whether they are there
    try:
        missing = [to_native(uri) for uri in params.missing]
        present = None if params.present is None else to_native(params.present)
    except RpcError:
        return {"watching": False}  # a path of another kind of machine
    touched = reads(*missing[: MAX_MISSING + 1], *([] if present is None else [present]))
    watch = files.lane.submit(touched, watch_missing, missing, present)
    return after(watch, lambda: files.missing.answer(params.watch_id, watch.result()))


def _do_watch(connection: Connection, params: wire.WatchParams) -> Pending[Any]:
    confined = confinement(params.sandbox, changes=False)
    path = to_native(params.path)
    if confined is not None:
        raise invalid_request("fs/watch cannot be enforced in a sandbox that hides files: poll instead")
    files, watch_id = files_of(connection), params.watch_id
    if watch_id in files.watches:
        raise invalid_request(f"watchId already exists: {watch_id}")
    if len(files.watches) >= MAX_WATCHES:
        raise invalid_request(f"at most {MAX_WATCHES} watches may be open per connection")

    def say(changed: list[bytes], overflowed: bool) -> Pending[None] | None:
        params: dict[str, Any] = {"watchId": watch_id, "changedPaths": sorted(map(to_uri, changed))}
        if overflowed:
            params["overflowed"] = True
        connection.channel.send(encode_notification("fs/changed", params))
        return connection.room()

    loop = connection.server.loop
    try:
        watch = files.watches[watch_id] = FileWatch(loop, path, params.recursive, say)
    except OSError as error:
        raise failure(error) from None
    started = files.lane.submit(reads(path), watch.start)
    return after(started, lambda: _watch_started(files, watch_id, watch, started, path, loop))


def _watch_started(
    files: _Files, watch_id: str, watch: FileWatch, started: Pending[None], path: bytes, loop: Loop
) -> dict[str, str]:
    try:
        started.result()
    except BaseException:
        watch.close()
        if files.watches.get(watch_id) is watch:
            del files.watches[watch_id]
        raise
    loop.call_soon(watch.listen)  # when the answer has been sent
    return {"path": to_uri(path)}


def _do_unwatch(connection: Connection, params: wire.UnwatchParams) -> dict[str, str]:
    watch = files_of(connection).watches.pop(params.watch_id, None)
    if watch is not None:
        watch.close()
    return {}


def _do_move(connection: Connection, params: wire.MoveParams) -> Pending[Any]:
    confined = confinement(params.sandbox, changes=True)
    source, target = to_native(params.source_path), to_native(params.destination_path)
    if confined is not None:
        return _in_sandbox(connection, writes(source, target), confined, "fs/move", params)
    renamed = partial(move, keep_attributes=params.keep_attributes)
    return files_of(connection).lane.submit(writes(source, target), renamed, source, target, params.overwrite)


def _do_glob(connection: Connection, params: wire.GlobParams) -> Pending[Any]:
    confined = confinement(params.sandbox, changes=False)
    path = to_native(params.path)
    if confined is None and params.follow_symlinks and keeps_off_proc(params.sandbox):
        confined = params.sandbox  # links may lead to `/proc`, and from there anywhere
    if confined is not None:
        return _in_sandbox(connection, reads(path), confined, "fs/glob", params)
    return _tell_of(connection, path, "fs/glob", params, partial(glob, path, params))


def _do_search(connection: Connection, params: wire.SearchParams) -> Pending[Any]:
    from ...local.files.search import search  # starts processes, which few clients ask for

    confined = confinement(params.sandbox, changes=False)
    path = to_native(params.path)
    if confined is None and keeps_off_proc(params.sandbox):
        confined = params.sandbox  # programs that search ask nobody what they come upon
    if confined is not None:
        return _in_sandbox(connection, reads(path), confined, "fs/search", params)
    files = files_of(connection)
    tags = files.search_tags

    def gated(path: bytes, params: wire.SearchParams, turn: Turn) -> dict[str, Any]:
        return search(path, params, turn, None if tags is None else tags.new())

    return files.lane.submit(reads(path), gated, path, params)


METHODS: Final = {
    "fs/readFile": Method(wire.decode_read_file, _do_read_file, FAMILY),
    "fs/getMetadata": Method(wire.decode_metadata, _do_get_metadata, FAMILY),
    "fs/canonicalize": Method(wire.decode_path, _do_canonicalize, FAMILY),
    "fs/readDirectory": Method(wire.decode_read_directory, _do_read_directory, FAMILY),
    "fs/walk": Method(wire.decode_walk, _do_walk, FAMILY),
    "fs/createDirectory": Method(wire.decode_create_directory, _do_create_directory, FAMILY),
    "fs/writeFile": Method(wire.decode_write_file, _do_write_file, FAMILY),
    "fs/remove": Method(wire.decode_remove, _do_remove, FAMILY),
    "fs/copy": Method(wire.decode_copy, _do_copy, FAMILY),
    "fs/open": Method(wire.decode_open, _do_open, FAMILY),
    "fs/readBlock": Method(wire.decode_read_block, _do_read_block, FAMILY),
    "fs/writeBlock": Method(wire.decode_write_block, _do_write_block, FAMILY),
    "fs/close": Method(wire.decode_close, _do_close, FAMILY),
    "fs/watchMissing": Method(wire.decode_watch_missing, _do_watch_missing, FAMILY),
    "fs/watch": Method(wire.decode_watch, _do_watch, FAMILY, extension=True),
    "fs/unwatch": Method(wire.decode_unwatch, _do_unwatch, FAMILY, extension=True),
    "fs/move": Method(wire.decode_move, _do_move, FAMILY, extension=True),
    "fs/glob": Method(wire.decode_glob, _do_glob, FAMILY, extension=True),
    "fs/search": Method(wire.decode_search, _do_search, FAMILY, extension=True),
}
