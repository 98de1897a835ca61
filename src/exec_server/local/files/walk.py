"""Walking a tree: breadth first, names sorted, with limits on everything.

Nearly every entry is plain: no link, a name that needs no escaping. For those there is one formatted
string per entry and nothing else; kinds come from the directory itself, without a stat.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import deque
from typing import Final

from ...wire.envelope import Encoded
from ...wire.errors import invalid_request
from ...wire.files import WalkOptions, walk_result
from ...wire.uri import PLATFORM, is_opaque
from .errors import text
from .lane import ALONE, Turn
from .paths import to_uri

__all__ = ["walk"]

MAX_DEPTH: Final = 64
MAX_DIRECTORIES: Final = 10_000
MAX_ENTRIES: Final = 50_000

RESPONSE_BUDGET: Final = 4 * 1024 * 1024
"""Bytes of one answer, roughly."""

ITEM_COST: Final = 64
"""What an item costs of the budget, besides its URI and message."""

_PLAIN = re.compile(rb"[A-Za-z0-9!$&'()*+,\-.:;=@\[\]^_|~]*")
"""Names that are spelled in a URI as they are."""

_FILE: Final = b'{"path":"%b","kind":"file"}'
_DIRECTORY: Final = b'{"path":"%b","kind":"directory"}'


def walk(path: bytes, uri: str, options: WalkOptions, turn: Turn = ALONE) -> Encoded:
    """Files and directories below a directory. `uri` is how the caller spelled it."""
    if not options.max_directories or not options.max_entries:
        raise invalid_request("filesystem walk limits must be greater than zero")
    if (
        options.max_depth > MAX_DEPTH
        or options.max_directories > MAX_DIRECTORIES
        or options.max_entries > MAX_ENTRIES
    ):
        raise invalid_request(
            "filesystem walk limits exceed maximums: "
            f"depth={MAX_DEPTH}, directories={MAX_DIRECTORIES}, entries={MAX_ENTRIES}"
        )
    if not stat.S_ISDIR(os.stat(path).st_mode):
        return walk_result((), [], False)
    if not options.follow_directory_symlinks and stat.S_ISLNK(os.lstat(path).st_mode):
        return walk_result((), [], False)
    turn.leave(os.path.realpath(path))
    walker = _Walk(options, turn)
    walker.run(path, uri)
    return walk_result(walker.entries, walker.errors, walker.truncated)


class _Full(Exception):
    """A limit that ends the walk."""


class _Walk:
    def __init__(self, options: WalkOptions, turn: Turn) -> None:
        self.entries: list[bytes] = []
        self.errors: list[tuple[str, str]] = []
        self.truncated = False
        self._options = options
        self._turn = turn
        self._budget = RESPONSE_BUDGET
        self._examined = 0
        self._directories = 1
        self._seen: set[bytes] = set()
        self._queue: deque[tuple[bytes, bytes, int]] = deque()

    def run(self, path: bytes, uri: str) -> None:
        self._first(path)
        self._queue.append((path, b"file://" if path == b"/" else uri.rstrip("/").encode(), 0))
        try:
            while self._queue:
                self._turn.check()
                self._directory(*self._queue.popleft())
        except _Full:
            self.truncated = True

    def _directory(self, path: bytes, uri: bytes, depth: int) -> None:
        try:
            with os.scandir(path) as found:
                listed = [
                    (entry.name, entry)
                    for entry in found
                    if not entry.is_symlink() or _leads_somewhere(entry)
                ]
        except OSError as error:
            self._error(uri or b"file:///", text(error.errno or errno.EIO))
            return
        listed.sort(key=_by_name)
        denied = _denied(listed[0][1]) if listed else None
        opaque = is_opaque(uri.decode())
        prefix, base = uri + b"/", (path if path.endswith(b"/") else path + b"/")
        plain = _PLAIN.fullmatch
        most, follow = self._options.max_entries, self._options.follow_directory_symlinks
        deeper = depth < self._options.max_depth
        entries, room, examined = self.entries, self._budget - ITEM_COST, self._examined
        try:
            for name, entry in listed:
                if examined >= most:
                    raise _Full
                examined += 1
                if plain(name) and not opaque and (depth or len(prefix) > 8 or b":" not in name):
                    child = prefix + name
                else:
                    self._budget = room + ITEM_COST
                    joined = self._join(prefix, base, name, opaque)
                    room = self._budget - ITEM_COST
                    if joined is None:
                        continue
                    child = joined
                if denied is not None:
                    self._budget = room + ITEM_COST
                    self._error(child, denied)
                    room = self._budget - ITEM_COST
                    continue
                if entry.is_symlink():
                    if not follow or not _is_directory(entry):
                        continue
                    directory = True
                elif entry.is_file():
                    directory = False
                elif entry.is_dir():
                    directory = True
                else:
                    continue
                room -= ITEM_COST + len(child)
                if room + ITEM_COST < 0:
                    raise _Full
                if not directory:
                    entries.append(_FILE % child)
                    continue
                entries.append(_DIRECTORY % child)
                if deeper:
                    self._descend(base + name, child, name, depth + 1)
        finally:
            self._examined = examined
            self._budget = room + ITEM_COST

    def _descend(self, path: bytes, uri: bytes, name: bytes, depth: int) -> None:
        if self._options.prune_hidden_directories and name.startswith(b"."):
            return
        if not self._first(path):
            return
        if self._directories >= self._options.max_directories:
            self.truncated = True
            return
        self._directories += 1
        self._queue.append((path, uri, depth))

    def _first(self, path: bytes) -> bool:
        """Whether this directory was not entered before. Without links there is one way to each."""
        if not self._options.follow_directory_symlinks:
            return True
        real = os.path.realpath(path)
        if real in self._seen:
            return False
        self._seen.add(real)
        return True

    def _join(self, prefix: bytes, base: bytes, name: bytes, opaque: bool) -> bytes | None:
        """The URI of an entry with an unusual name; None after saying why it has none."""
        if opaque:
            parent = prefix[:-1]
            self._error(parent, f"'{parent.decode()}' is invalid on '{PLATFORM}'")
            return None
        try:
            name.decode()
        except UnicodeDecodeError:
            self._error(prefix + _escaped(name.decode("utf-8", "replace").encode()), text(errno.ENOENT))
            return None
        return to_uri(base + name).encode() if prefix == b"file:///" else prefix + _escaped(name)

    def _error(self, uri: bytes, message: str) -> None:
        self._budget -= ITEM_COST + len(uri) + len(message)
        if self._budget < 0:
            raise _Full
        self.errors.append((uri.decode(), message))


def _escaped(name: bytes) -> bytes:
    """A name as it is spelled in a URI, anywhere but at the root."""
    return to_uri(b"/_/" + name)[len("file:///_/") :].encode()


def _by_name(item: tuple[bytes, object]) -> bytes:
    return item[0]


def _leads_somewhere(entry: os.DirEntry[bytes]) -> bool:
    try:
        entry.stat()
    except OSError:
        return False
    return True


def _denied(entry: os.DirEntry[bytes]) -> str | None:
    """Why nothing in this entry's directory may be looked at. One speaks for all: it is the directory's."""
    try:
        os.lstat(entry.path)
    except PermissionError as error:
        return text(error.errno or errno.EACCES)
    except OSError:
        pass  # it is gone, say; the others are not
    return None


def _is_directory(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
