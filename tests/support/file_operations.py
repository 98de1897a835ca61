"""The same file operations for everybody: the model, this machine's own functions, and clients of servers.

An operation is the name of a method and its arguments. `outcome` of each performer gives what came of it in
one form: the value, or the code of the error with the errno if the operating system named one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hypothesis import strategies as st

from exec_server.client.errors import RemoteFileError
from exec_server.local.files.copy import copy
from exec_server.local.files.directory import create_directory, read_directory
from exec_server.local.files.errors import failure
from exec_server.local.files.handles import Handles
from exec_server.local.files.metadata import canonicalize, get_metadata
from exec_server.local.files.move import move
from exec_server.local.files.read import read_file, read_range
from exec_server.local.files.remove import remove
from exec_server.local.files.walk import walk
from exec_server.local.files.write import write_file
from exec_server.services import Files
from exec_server.wire.errors import RpcError
from exec_server.wire.files import WalkOptions
from exec_server.wire.uri import native_path, path_to_uri
from support.file_model import Model, Refused, Undefined
from support.rpc import b64, unb64

__all__ = ["BLOCK", "Local", "Operation", "Remote", "behave_alike", "operations"]

NAMES = ["a", "b", "ü %41#", ".h"]
"""Few, so that operations meet. One looks escaped and has to be in a URI, one is hidden."""

BLOCK = 1024 * 1024
"""What travels in one piece; a file of more takes another way through client and server."""


class Operation(NamedTuple):
    """What to do. The paths in it are below a root."""

    method: str
    arguments: tuple[Any, ...]

    def __repr__(self) -> str:
        shown = (f"{arg[:9]!r}*{len(arg)}" if isinstance(arg, bytes) else repr(arg) for arg in self.arguments)
        return f"{self.method}({', '.join(shown)})"


def operations(*, renames: bool = True, most: int = 30) -> st.SearchStrategy[list[Operation]]:
    """Lists of them; without `renames`, only those that servers without extensions have."""
    path = st.one_of(
        st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
    )
    up = st.lists(st.just(".."), max_size=2)
    target = st.builds(
        lambda up, down, absolute: ("/" if absolute else "") + "/".join([*([] if absolute else up), *down]),
        up,
        st.lists(st.sampled_from([*NAMES, ".."]), min_size=1, max_size=3),
        st.booleans(),
    )
    size = st.sampled_from([0, 1, 5, 4096, BLOCK, BLOCK + 1])
    data = st.builds(lambda size, byte: bytes([byte]) * size, size, st.sampled_from(b"xyz"))
    yes = st.booleans()
    at = st.sampled_from([0, 1, 4, 5, 6, 4096, BLOCK - 1, BLOCK, 2 * BLOCK])
    length = st.sampled_from([1, 4, 5, 4096, BLOCK, BLOCK + 1])
    limit = st.sampled_from([1, 2, 3, 1000])
    creations = [
        _operation("write", path, data),
        _operation("symlink", path, target),
        _operation("make_directory", path, st.just(True)),
    ]
    kinds = [
        *creations,
        _operation("write_stream", path, data),
        _operation("make_directory", path, yes),
        _operation("read", path),
        _operation("read_range", path, at, length),
        _operation("metadata", path, yes),
        _operation("list", path),
        _operation("canonicalize", path),
        _operation("walk", path, st.sampled_from([0, 1, 64]), limit, limit, yes, yes),
        _operation("remove", path, yes, yes),
        _operation("copy", path, path, yes),
    ]
    if renames:
        kinds.append(_operation("move", path, path, yes))
    # In an empty tree nearly everything fails in the same way, so there is something in it first.
    begin, rest = st.lists(st.one_of(creations), max_size=10), st.lists(st.one_of(kinds), max_size=most)
    return st.tuples(begin, rest).map(lambda both: both[0] + both[1])


def _operation(method: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Operation]:
    return st.tuples(*arguments).map(lambda chosen: Operation(method, chosen))


class Performer(Protocol):
    """Somebody who does operations below a root of his own."""

    root: Path

    async def outcome(self, operation: Operation) -> Any: ...


async def behave_alike(
    steps: Sequence[Operation],
    performers: Sequence[Performer],
    undefined: Callable[[Model, Operation], bool] = lambda _model, _operation: False,
) -> None:
    """Every performer answers as the model does, step by step, and leaves the same tree behind.

    `undefined` says which further operations are left out.
    """
    model = Model()
    done: list[Operation] = []
    for step in steps:
        trial = deepcopy(model)
        try:
            if undefined(trial, step):
                continue
            expected = _outcome_of(trial, step)
        except Undefined:
            continue
        if step.method == "symlink" and isinstance(expected, tuple):
            continue
        model = trial
        done.append(step)
        for performer in performers:
            found = await performer.outcome(step)
            assert found == expected, f"{type(performer).__name__} {performer.root}, after {done}"
    for performer in performers:
        assert _tree(performer.root) == model.tree(), f"{type(performer).__name__}, after {done}"


def _outcome_of(model: Model, operation: Operation) -> Any:
    try:
        return getattr(model, operation.method)(*operation.arguments)
    except Refused as refused:
        return (refused.code, refused.number)


def _tree(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if path.is_symlink():
            target = os.readlink(path)
            found[name] = f"-> {target.removeprefix(str(root))}"
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def _make_link(root: Path, path: str, target: str) -> None:
    """No method of the protocol does this: somebody on that machine did."""
    os.symlink(f"{root}{target}" if target.startswith("/") else target, root / path)


def _below(root: Path, path: str) -> str:
    """The path from the root on, which itself is nothing."""
    name = str(Path(path).relative_to(root))
    return "" if name == "." else name


def _kind(is_directory: bool, is_file: bool) -> str:
    assert is_directory != is_file
    return "directory" if is_directory else "file"


def _error(code: int, message: str) -> tuple[int, int | None]:
    found = re.search(r"\(os error (\d+)\)$", message)
    return (code, int(found[1]) if found else None)


class Local:
    """The functions of exec_server.local.files, called one after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._handles = Handles()

    async def outcome(self, operation: Operation) -> Any:
        try:
            return getattr(self, "_" + operation.method)(*operation.arguments)
        except RpcError as error:
            return _error(error.code, error.message)
        except OSError as error:
            refused = failure(error)
            return _error(refused.code, refused.message)

    def _path(self, name: str) -> bytes:
        return os.fsencode(self.root / name)

    def _name(self, uri: str) -> str:
        return _below(self.root, native_path(uri))

    def _symlink(self, path: str, target: str) -> None:
        _make_link(self.root, path, target)

    def _read(self, path: str) -> bytes:
        return unb64(json.loads(bytes(read_file(self._path(path), True)))["dataBase64"])

    def _read_range(self, path: str, offset: int, length: int) -> tuple[bytes, bool]:
        result = json.loads(bytes(read_range(self._path(path), True, offset, length)))
        return unb64(result["dataBase64"]), result["eof"]

    def _write(self, path: str, data: bytes) -> None:
        assert write_file(self._path(path), b64(data), True) == {}

    def _write_stream(self, path: str, data: bytes) -> int:
        self._handles.open("h", self._path(path), "replace")
        for offset in range(0, len(data), BLOCK):
            assert self._handles.write("h", offset, b64(data[offset : offset + BLOCK])) == {}
        assert self._handles.close("h") == {}
        return len(data)

    def _metadata(self, path: str, follow: bool) -> tuple[str, bool, int | None]:
        found = get_metadata(self._path(path), follow)
        kind = _kind(found.is_directory, found.is_file)
        return kind, found.is_symlink, found.size if found.is_file else None

    def _list(self, path: str) -> list[tuple[str, str]]:
        entries = json.loads(bytes(read_directory(self._path(path))))["entries"]
        return sorted((each["fileName"], _kind(each["isDirectory"], each["isFile"])) for each in entries)

    def _canonicalize(self, path: str) -> str:
        return self._name(canonicalize(self._path(path)).path)

    def _walk(self, path: str, *limits: Any) -> tuple[list[tuple[str, str]], bool]:
        options = WalkOptions(*limits)
        result = json.loads(bytes(walk(self._path(path), path_to_uri(self._path(path)), options)))
        assert result["errors"] == []
        entries = [(self._name(entry["path"]), entry["kind"]) for entry in result["entries"]]
        return entries, result["truncated"]

    def _make_directory(self, path: str, recursive: bool) -> None:
        assert create_directory(self._path(path), recursive, True) == {}

    def _remove(self, path: str, recursive: bool, force: bool) -> None:
        assert remove(self._path(path), recursive, force, True) == {}

    def _copy(self, source: str, target: str, recursive: bool) -> None:
        assert copy(self._path(source), self._path(target), recursive) == {}

    def _move(self, source: str, target: str, overwrite: bool) -> None:
        assert move(self._path(source), self._path(target), overwrite) == {}


class Remote:
    """`client.files` of a connection."""

    def __init__(self, files: Files, root: Path) -> None:
        self._files = files
        self.root = root.resolve()

    async def outcome(self, operation: Operation) -> Any:
        perform: Callable[..., Awaitable[Any]] = getattr(self, "_" + operation.method)
        try:
            return await perform(*operation.arguments)
        except RemoteFileError as error:
            return _error(error.code, error.message)

    def _path(self, name: str) -> str:
        return str(self.root / name)

    def _name(self, path: str) -> str:
        return _below(self.root, path)

    async def _symlink(self, path: str, target: str) -> None:
        _make_link(self.root, path, target)

    async def _read(self, path: str) -> bytes:
        return await self._files.read(self._path(path))

    async def _read_range(self, path: str, offset: int, length: int) -> tuple[bytes, bool]:
        part = await self._files.read_range(self._path(path), offset, length)
        return part.data, part.eof

    async def _write(self, path: str, data: bytes) -> None:
        await self._files.write(self._path(path), data)

    async def _write_stream(self, path: str, data: bytes) -> int:
        return await self._files.write_stream(self._path(path), [data])

    async def _metadata(self, path: str, follow: bool) -> tuple[str, bool, int | None]:
        found = await self._files.metadata(self._path(path), follow)
        kind = _kind(found.is_directory, found.is_file)
        return kind, found.is_symlink, found.size if found.is_file else None

    async def _list(self, path: str) -> list[tuple[str, str]]:
        entries = await self._files.list(self._path(path))
        return [(entry.name, _kind(entry.is_directory, entry.is_file)) for entry in entries]

    async def _canonicalize(self, path: str) -> str:
        return self._name(await self._files.canonicalize(self._path(path)))

    async def _walk(
        self, path: str, depth: int, directories: int, entries: int, follow: bool, prune: bool
    ) -> tuple[list[tuple[str, str]], bool]:
        found = await self._files.walk(
            self._path(path),
            max_depth=depth,
            max_directories=directories,
            max_entries=entries,
            follow_directory_symlinks=follow,
            prune_hidden_directories=prune,
        )
        assert found.errors == []
        return [(self._name(entry.path), entry.kind) for entry in found.entries], found.truncated

    async def _make_directory(self, path: str, recursive: bool) -> None:
        await self._files.make_directory(self._path(path), recursive)

    async def _remove(self, path: str, recursive: bool, force: bool) -> None:
        await self._files.remove(self._path(path), recursive, force)

    async def _copy(self, source: str, target: str, recursive: bool) -> None:
        await self._files.copy(self._path(source), self._path(target), recursive)

    async def _move(self, source: str, target: str, overwrite: bool) -> None:
        await self._files.move(self._path(source), self._path(target), overwrite)
