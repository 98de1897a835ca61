"""Directories: what is in one, and making them."""

from __future__ import annotations

import os
from heapq import nsmallest
from itertools import islice
from typing import Final
from urllib.parse import unquote_to_bytes

from ...wire.envelope import Encoded
from ...wire.errors import internal_error
from ...wire.files import directory_page_result, directory_result
from .lane import ALONE, Turn
from .paths import SEARCH, open_without_links, opened, parent_without_links

__all__ = ["MAX_ENTRIES", "create_directory", "read_directory", "read_directory_page"]

MAX_ENTRIES: Final = 50_000
"""Entries of one directory that are answered in one message."""

MANY_ENTRIES: Final = 1_000
"""A directory with more than this is listed outside of the lane."""

ATTEMPTS: Final = 16
"""How often to begin again when somebody else removes the directory at the same time."""


def read_directory(path: bytes, turn: Turn = ALONE) -> Encoded:
    """One level, in the operating system's order; links are what they lead to, and left out if nowhere."""
    directories: list[bytes] = []
    files: list[bytes] = []
    others: list[bytes] = []
    too_many = 0
    with os.scandir(path) as entries:
        first = True
        while batch := list(islice(entries, MANY_ENTRIES)):
            if first and len(batch) == MANY_ENTRIES:
                turn.leave(os.path.realpath(path))
            first = False
            turn.check()
            # Most entries are files, and most batches nothing but files.
            try:
                names = [entry.name for entry in batch if entry.is_file()]
            except OSError:
                names = []
            files += names if len(names) == len(batch) else _sort_out(batch, directories, others)
            kept = len(directories) + len(files) + len(others)
            if too_many or kept > MAX_ENTRIES:
                too_many += kept
                for kind in (directories, files, others):
                    kind.clear()
    if too_many:
        raise internal_error(f"fs/readDirectory returned {too_many} entries; limit is {MAX_ENTRIES}")
    return directory_result(directories, files, others)


def read_directory_page(path: bytes, after: str, turn: Turn = ALONE) -> Encoded:
    """One level in pages, sorted by the bytes of the names: what comes after a name, written as in a URI.

    Links that lead nowhere are there, too, as something that is neither file nor directory.
    """
    last = unquote_to_bytes(after)
    later: list[os.DirEntry[bytes]] = []
    with os.scandir(path) as entries:
        first = True
        while batch := list(islice(entries, MANY_ENTRIES)):
            if first and len(batch) == MANY_ENTRIES:
                turn.leave(os.path.realpath(path))
            first = False
            turn.check()
            later += [entry for entry in batch if entry.name > last]
            if len(later) > 4 * MAX_ENTRIES:
                later = nsmallest(MAX_ENTRIES + 1, later, key=_name)
    later.sort(key=_name)
    page = [(entry.name, _kind(entry)) for entry in later[:MAX_ENTRIES]]
    return directory_page_result(page, more=len(later) > MAX_ENTRIES)


def _name(entry: os.DirEntry[bytes]) -> bytes:
    return entry.name


def _kind(entry: os.DirEntry[bytes]) -> int:
    try:
        return 1 if entry.is_file() else 0 if entry.is_dir() else 2
    except OSError:
        return 2


def _sort_out(batch: list[os.DirEntry[bytes]], directories: list[bytes], others: list[bytes]) -> list[bytes]:
    """The names of those that are files; what is something else goes where it belongs."""
    files: list[bytes] = []
    for entry in batch:
        try:
            if entry.is_file():
                kind = files
            elif entry.is_dir():
                kind = directories
            else:
                entry.stat()
                kind = others
        except OSError:
            continue  # it leads nowhere, or is gone
        kind.append(entry.name)
    return files


def create_directory(path: bytes, recursive: bool, follow: bool, turn: Turn = ALONE) -> dict[str, str]:
    """Make a directory, and those above it if wanted."""
    del turn
    if follow:
        if recursive:
            make_directories(path)
        else:
            os.mkdir(path)
    elif recursive:
        _make_directories_without_links(path)
    elif path == b"/":
        raise internal_error("directory already exists")
    else:
        with parent_without_links(path) as (parent, name):
            os.mkdir(name, dir_fd=parent)
    return {}


def make_directories(path: bytes) -> None:
    """As `mkdir -p` does: what is a directory already, or a link to one, is fine."""
    missing: list[bytes] = []
    current = path
    while True:
        try:
            _make_directory(current)
            break
        except FileNotFoundError:
            parent = os.path.dirname(current)
            if parent == current:
                raise
            missing.append(current)
            current = parent
    for current in reversed(missing):
        _make_directory(current)


def _make_directory(path: bytes) -> None:
    """Unless it is there. One that vanishes between making and looking is made again."""
    for attempt in range(ATTEMPTS):
        try:
            os.mkdir(path)
            return
        except FileNotFoundError:
            raise
        except OSError as error:
            if os.path.isdir(path):
                return
            gone = isinstance(error, FileExistsError) and not os.path.lexists(path)
            if not gone or attempt == ATTEMPTS - 1:
                raise


def _make_directories_without_links(path: bytes) -> None:
    current = open_without_links(b"/")
    for part in path.split(b"/"):
        if not part:
            continue
        with opened(current):
            try:
                following = os.open(part, SEARCH | os.O_NOFOLLOW, dir_fd=current)
            except FileNotFoundError:
                try:
                    os.mkdir(part, dir_fd=current)
                except FileExistsError:
                    pass  # somebody else was faster
                following = os.open(part, SEARCH | os.O_NOFOLLOW, dir_fd=current)
        current = following
    os.close(current)
