"""Finding paths by pattern. Directories in which nothing can match are not entered."""

from __future__ import annotations

import os
from typing import Final

from ...wire.errors import invalid_request
from ...wire.files import GlobParams
from .lane import ALONE, Turn
from .paths import to_uri
from .pattern import BadPattern, PathPattern, States

__all__ = ["MAX_RESULTS", "glob"]

MAX_RESULTS: Final = 50_000
"""Paths of one answer."""

MAX_EXAMINED: Final = 1_000_000
"""Entries looked at for one answer."""


def glob(path: bytes, params: GlobParams, turn: Turn = ALONE) -> dict[str, object]:
    """Paths below a directory that fit, sorted; those of unreadable directories are left out."""
    if not 1 <= params.max_results <= MAX_RESULTS:
        raise invalid_request(f"maxResults must be between 1 and {MAX_RESULTS}")
    try:
        pattern = PathPattern(params.pattern)
    except BadPattern as error:
        raise invalid_request(f"invalid glob pattern `{params.pattern}`: {error}") from None
    os.scandir(path).close()  # it must be a directory, and readable
    turn.leave(os.path.realpath(path))
    found: list[bytes] = []
    examined = 0
    truncated = False
    seen = {os.path.realpath(path)}
    todo: list[tuple[bytes, States]] = [(path, pattern.start())]
    while todo and not truncated:
        turn.check()
        directory, states = todo.pop()
        for entry, following in _fitting(directory, states, pattern, params.hidden):
            examined += 1
            if pattern.matches(following) and _is_kind(entry, params.kind):
                if len(found) == params.max_results:
                    truncated = True
                    break
                found.append(entry.path)
            if pattern.goes_on(following) and _may_enter(entry, params.follow_symlinks, seen):
                todo.append((entry.path, following))
        truncated |= examined > MAX_EXAMINED
    return {"paths": sorted(map(to_uri, found)), "truncated": truncated}


def _fitting(
    directory: bytes, states: States, pattern: PathPattern, hidden: bool
) -> list[tuple[os.DirEntry[bytes], States]]:
    fitting: list[tuple[os.DirEntry[bytes], States]] = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                following = pattern.step(states, entry.name.decode("utf-8", "surrogateescape"), hidden)
                if following:
                    fitting.append((entry, following))
    except OSError:
        pass  # gone, or not ours to read
    fitting.sort(key=lambda item: item[0].name)
    return fitting


def _is_kind(entry: os.DirEntry[bytes], kind: str) -> bool:
    try:
        if kind == "file":
            return entry.is_file()
        return kind == "any" or entry.is_dir()
    except OSError:
        return False


def _may_enter(entry: os.DirEntry[bytes], follow: bool, seen: set[bytes]) -> bool:
    try:
        if not entry.is_dir(follow_symlinks=follow):
            return False
    except OSError:
        return False
    if not follow:
        return True
    real = os.path.realpath(entry.path)
    if real in seen:
        return False
    seen.add(real)
    return True
