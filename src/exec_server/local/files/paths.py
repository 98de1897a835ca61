"""From path URIs to native paths (bytes, always), and ways to reach a file that no link can bend."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ...wire.errors import invalid_request
from ...wire.uri import ForeignPath, native_path, path_to_uri

__all__ = [
    "lossy",
    "open_directory",
    "opened",
    "parent_without_links",
    "real_path",
    "resolved",
    "to_native",
    "to_uri",
]

SEARCH: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
"""To open a directory only for what is below it."""


_LOOK: Final = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC
"""To open anything only to see which it is."""

_REMOVED: Final = b" (deleted)"
"""What the kernel puts behind the path of a file that has lost its name; a name may end like that, too."""


def to_native(uri: str) -> bytes:
    """The path that a URI in normal form names here."""
    try:
        return native_path(uri).encode("utf-8", "surrogateescape")
    except ForeignPath as error:
        raise invalid_request(str(error)) from None


def to_uri(path: bytes) -> str:
    """The URI of an absolute path."""
    return path_to_uri(path)


def lossy(path: bytes) -> str:
    """For messages: what is not UTF-8 becomes U+FFFD."""
    return path.decode("utf-8", "replace")


def real_path(descriptor: int) -> bytes | None:
    """Where an open file is, with every link resolved; None where that cannot be known."""
    try:
        path = os.readlink(b"/proc/self/fd/%d" % descriptor)
    except OSError:
        return None
    return path if path.startswith(b"/") else None


def resolved(path: bytes) -> bytes:
    """The path of what is there, with every link resolved by the kernel itself.

    os.path.realpath would take `x/..` in a link for nothing, whatever x is.
    """
    with opened(os.open(path, _LOOK)) as descriptor:
        real = real_path(descriptor)
        if real is not None and real.endswith(_REMOVED):
            info = os.fstat(descriptor)
            if not info.st_nlink:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return os.path.realpath(path, strict=True) if real is None else real


def open_directory(path: bytes) -> int:
    """A descriptor to reach what is in a directory; the way there may lead through links."""
    return os.open(path, SEARCH)


@contextmanager
def opened(descriptor: int) -> Iterator[int]:
    """Close it in the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_without_links(path: bytes) -> int:
    """A descriptor of a directory; ENOTDIR when any part of its path is a link."""
    current = os.open(b"/", SEARCH)
    for part in path.split(b"/"):
        if part:
            try:
                following = os.open(part, SEARCH | os.O_NOFOLLOW, dir_fd=current)
            finally:
                os.close(current)
            current = following
    return current


@contextmanager
def parent_without_links(path: bytes) -> Iterator[tuple[int, bytes]]:
    """The directory of an entry, reached through no link, and the entry's name in it."""
    parent, name = os.path.split(path)
    if not name:
        raise invalid_request("path must name an entry")
    with opened(open_without_links(parent)) as descriptor:
        yield descriptor, name
