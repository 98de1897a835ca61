"""Finding paths by pattern. Directories in which nothing can match are not entered."""

from __future__ import annotations

import os
from time import monotonic
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

MAX_SECONDS: Final = 30.0
"""After which what was found is all: what changes the same files waits for that long."""

_Above = tuple[tuple[int, int], "_Above | None"]
"""A directory and those it was reached through."""


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
    end = monotonic() + MAX_SECONDS
    kind = "directory" if params.pattern.endswith("/") else params.kind
    todo: list[tuple[bytes, States, _Above]] = [(path, pattern.start(), (_identity(os.stat(path)), None))]
    while todo and not truncated:
        turn.check()
        directory, states, above = todo.pop()
        for entry, following in _fitting(directory, states, pattern, params.hidden):
            examined += 1
            if pattern.matches(following) and _is_kind(entry, kind):
                if len(found) == params.max_results:
                    truncated = True
                    break
                found.append(entry.path)
            if pattern.goes_on(following):
                chain = _entered(entry, params.follow_symlinks, above)
                if chain is not None:
                    todo.append((entry.path, following, chain))
        truncated |= examined > MAX_EXAMINED or monotonic() > end
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


def _entered(entry: os.DirEntry[bytes], follow: bool, above: _Above) -> _Above | None:
    """The way to a directory, itself first; None for what is not to be entered.

    Links may lead to one directory by several ways, and each of them counts. Only a way that comes back to
    where it has been would never end.
    """
    try:
        if not entry.is_dir(follow_symlinks=follow):
            return None
        if not follow:
            return above
        identity = _identity(entry.stat())
    except OSError:
        return None
    earlier: _Above | None = above
    while earlier is not None:
        if earlier[0] == identity:
            return None
        earlier = earlier[1]
    return identity, above


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino
