"""What is known of a file without reading it."""

from __future__ import annotations

import os
import stat

from ...wire.errors import invalid_request
from ...wire.files import CanonicalizeResult, MetadataResult
from .kernel import birth_time_ms
from .lane import ALONE, Turn
from .paths import parent_without_links, resolved, to_uri

__all__ = ["canonicalize", "get_metadata", "metadata_result"]


def get_metadata(path: bytes, follow: bool, turn: Turn = ALONE) -> MetadataResult:
    """Kind, size and times; of what a link leads to, or refusing links."""
    del turn
    if not follow:
        return _metadata_without_links(path)
    info = os.lstat(path)
    is_link = stat.S_ISLNK(info.st_mode)
    if is_link:
        info = os.stat(path)
    return metadata_result(info, is_link, birth_time_ms(path))


def metadata_result(info: os.stat_result, is_link: bool, born: int) -> MetadataResult:
    """Times before 1970 count as 1970."""
    mode, modified = info.st_mode, info.st_mtime_ns // 1_000_000
    return MetadataResult(
        stat.S_ISDIR(mode), stat.S_ISREG(mode), is_link, info.st_size, max(born, 0), max(modified, 0)
    )


def _metadata_without_links(path: bytes) -> MetadataResult:
    """Here times before 1970 stay what they are."""
    if path == b"/":
        info, born = os.lstat(path), birth_time_ms(path)
    else:
        with parent_without_links(path) as (parent, name):
            info = os.stat(name, dir_fd=parent, follow_symlinks=False)
            born = birth_time_ms(name, dir_fd=parent, follow=False)
    mode = info.st_mode
    if stat.S_ISLNK(mode):
        raise invalid_request("path contains a symbolic link")
    return MetadataResult(
        stat.S_ISDIR(mode), stat.S_ISREG(mode), False, info.st_size, born, info.st_mtime_ns // 1_000_000
    )


def canonicalize(path: bytes, turn: Turn = ALONE) -> CanonicalizeResult:
    """The path with every link resolved. It must exist."""
    del turn
    return CanonicalizeResult(to_uri(resolved(path)))
