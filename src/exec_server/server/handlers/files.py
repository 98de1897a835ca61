"""`fs/*`: decode, decide who does it, and give it to the connection's lane (local/files/lane.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from ...local.files.access import require_plain
from ...local.files.cached import cached_metadata, cached_read_file
from ...local.files.copy import copy
from ...local.files.directory import create_directory, read_directory
from ...local.files.handles import Handles, handle_path
from ...local.files.lane import Lane, Touch, reads, writes
from ...local.files.metadata import canonicalize, get_metadata
from ...local.files.paths import to_native
from ...local.files.read import read_file
from ...local.files.remove import remove
from ...local.files.walk import walk
from ...local.files.write import write_file
from ...loop import Pending
from ...wire import files as wire
from ...wire.errors import invalid_request
from ..connection import Connection
from ..dispatch import Method

__all__ = ["METHODS"]

P = TypeVar("P")

FAMILY: Final = "filesystem"


class _Files:
    """What belongs to one connection and ends with it."""

    def __init__(self, connection: Connection) -> None:
        self.handles = Handles()
        self.lane = Lane(connection.server.loop, where=self.handles.where)

    def close(self) -> None:
        self.lane.close()
        self.handles.end()


_open: dict[Connection, _Files] = {}


def _files(connection: Connection) -> _Files:
    files = _open.get(connection)
    if files is None:
        files = _open[connection] = _Files(connection)
        connection.on_end.append(lambda: _open.pop(connection).close())
    return files


def _do_read_file(connection: Connection, params: wire.ReadFileParams) -> Any:
    path = to_native(params.path)
    require_plain(params.sandbox, changes=False)
    lane = _files(connection).lane
    if params.follow_symlinks and lane.free_for_reading:
        content = cached_read_file(path)
        if content is not None:
            return content
    return lane.submit(reads(path), read_file, path, params.follow_symlinks)


def _do_get_metadata(connection: Connection, params: wire.MetadataParams) -> Any:
    path = to_native(params.path)
    require_plain(params.sandbox, changes=False)
    lane = _files(connection).lane
    if params.follow_symlinks and lane.free_for_reading:
        metadata = cached_metadata(path)
        if metadata is not None:
            return metadata
    return lane.submit(reads(path), get_metadata, path, params.follow_symlinks)


def _do_canonicalize(connection: Connection, params: wire.PathParams) -> Pending[Any]:
    path = to_native(params.path)
    require_plain(params.sandbox, changes=False)
    return _files(connection).lane.submit(reads(path), canonicalize, path)


def _do_read_directory(connection: Connection, params: wire.PathParams) -> Pending[Any]:
    path = to_native(params.path)
    require_plain(params.sandbox, changes=False)
    return _files(connection).lane.submit(reads(path), read_directory, path)


def _do_walk(connection: Connection, params: wire.WalkParams) -> Pending[Any]:
    path = to_native(params.path)
    require_plain(params.sandbox, changes=False)
    return _files(connection).lane.submit(reads(path), walk, path, params.path, params.options)


def _do_create_directory(connection: Connection, params: wire.CreateDirectoryParams) -> Pending[Any]:
    path = to_native(params.path)
    require_plain(params.sandbox, changes=True)
    return _files(connection).lane.submit(
        writes(*_with_parents(path)) if params.recursive else writes(path),
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
    path = to_native(params.path)
    require_plain(params.sandbox, changes=True)
    return _files(connection).lane.submit(
        writes(path), write_file, path, params.data_base64, params.follow_symlinks
    )


def _do_remove(connection: Connection, params: wire.RemoveParams) -> Pending[Any]:
    path = to_native(params.path)
    require_plain(params.sandbox, changes=True)
    return _files(connection).lane.submit(
        writes(path), remove, path, params.recursive, params.force, params.follow_symlinks
    )


def _do_copy(connection: Connection, params: wire.CopyParams) -> Pending[Any]:
    source, target = to_native(params.source_path), to_native(params.destination_path)
    require_plain(params.sandbox, changes=True)
    touches = (Touch(source, False), *writes(*_with_parents(target)))
    return _files(connection).lane.submit(touches, copy, source, target, params.recursive)


def _do_open(connection: Connection, params: wire.OpenParams) -> Pending[Any]:
    path = to_native(params.path)
    changes = params.mode == "replace"
    require_plain(params.sandbox, changes=changes)
    files = _files(connection)
    touches = (*writes(handle_path(params.handle_id)), Touch(path, changes))
    return files.lane.submit(touches, files.handles.open, params.handle_id, path, params.mode)


def _do_read_block(connection: Connection, params: wire.ReadBlockParams) -> Pending[Any]:
    files = _files(connection)
    touches = reads(handle_path(params.handle_id))
    return files.lane.submit(touches, files.handles.read, params.handle_id, params.offset, params.len)


def _do_write_block(connection: Connection, params: wire.WriteBlockParams) -> Pending[Any]:
    files = _files(connection)
    touches = writes(handle_path(params.handle_id))
    return files.lane.submit(touches, files.handles.write, params.handle_id, params.offset, params.chunk)


def _do_close(connection: Connection, params: wire.CloseParams) -> Pending[Any]:
    files = _files(connection)
    return files.lane.submit(writes(handle_path(params.handle_id)), files.handles.close, params.handle_id)


def _method(
    decode: Callable[[Any], P],
    run: Callable[[Connection, P], Any],
    *,
    control: bool = False,
    extension: bool = False,
) -> Method:
    """A method whose params are decoded by its own table, before the handshake is looked at."""

    def decode_and_run(connection: Connection, params: Any) -> Any:
        decoded = decode(params)
        if connection.session is None:
            raise invalid_request(f"client must call initialize before using {FAMILY} methods")
        if not connection.initialized:
            raise invalid_request(f"client must send initialized before using {FAMILY} methods")
        return run(connection, decoded)

    return Method(object, decode_and_run, family=None, control=control, extension=extension)


METHODS: Final = {
    "fs/readFile": _method(wire.decode_read_file, _do_read_file),
    "fs/getMetadata": _method(wire.decode_metadata, _do_get_metadata),
    "fs/canonicalize": _method(wire.decode_path, _do_canonicalize),
    "fs/readDirectory": _method(wire.decode_path, _do_read_directory),
    "fs/walk": _method(wire.decode_walk, _do_walk),
    "fs/createDirectory": _method(wire.decode_create_directory, _do_create_directory),
    "fs/writeFile": _method(wire.decode_write_file, _do_write_file),
    "fs/remove": _method(wire.decode_remove, _do_remove),
    "fs/copy": _method(wire.decode_copy, _do_copy),
    "fs/open": _method(wire.decode_open, _do_open),
    "fs/readBlock": _method(wire.decode_read_block, _do_read_block),
    "fs/writeBlock": _method(wire.decode_write_block, _do_write_block),
    "fs/close": _method(wire.decode_close, _do_close, control=True),
}
