"""Directories: what is in one, and making them."""

from __future__ import annotations

import os
from typing import Final

from msgspec import Raw

from ...wire.errors import internal_error
from ...wire.files import directory_result
from .lane import ALONE, Turn
from .paths import SEARCH, open_without_links, opened, parent_without_links

__all__ = ["MAX_ENTRIES", "create_directory", "read_directory"]

MAX_ENTRIES: Final = 50_000
"""Entries of one directory that are answered in one message."""

MANY_ENTRIES: Final = 1_000
"""A directory with more than this is listed outside of the lane."""


def read_directory(path: bytes, turn: Turn = ALONE) -> Raw:
    """One level, in the operating system's order; links are what they lead to, and left out if nowhere."""
    directories: list[bytes] = []
    files: list[bytes] = []
    others: list[bytes] = []
    count = 0
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                if entry.is_file():
                    kind = files
                elif entry.is_dir():
                    kind = directories
                else:
                    entry.stat()
                    kind = others
            except OSError:
                continue
            count += 1
            if count <= MAX_ENTRIES:
                kind.append(entry.name)
            if not count % MANY_ENTRIES:
                turn.check()
                if count == MANY_ENTRIES:
                    turn.leave(os.path.realpath(path))
    if count > MAX_ENTRIES:
        raise internal_error(f"fs/readDirectory returned {count} entries; limit is {MAX_ENTRIES}")
    return directory_result(directories, files, others)


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
            os.mkdir(current)
            break
        except FileNotFoundError:
            parent = os.path.dirname(current)
            if parent == current:
                raise
            missing.append(current)
            current = parent
        except OSError:
            if not os.path.isdir(current):
                raise
            break
    for current in reversed(missing):
        try:
            os.mkdir(current)
        except OSError:
            if not os.path.isdir(current):
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
