"""Which files a search looks at, as ripgrep decides it: by globs, by ignore files, and by a leading dot.

Globs and the lines of ignore files have one grammar, that of `.gitignore`: the last one that fits decides,
one without a slash is about names and not about places, a slash at the end means directories only, and what
is below a directory that is left out is left out with it. For machines without ripgrep; imports little,
because the search program uses it in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from exec_server.local.files.pattern import BadPattern, PathPattern, check_closed

__all__ = ["Rules", "selected_files"]

IGNORE_FILES = (b".rgignore", b".ignore", b".gitignore")
"""The first one that says something about a path decides, however far above it is."""

MAX_IGNORE_BYTES = 1024 * 1024
"""Of one such file; what is longer is not read, because somebody else wrote it."""


class _Rule:
    """One line."""

    def __init__(self, text: str) -> None:
        self.negated = text.startswith("!")
        text = text.removeprefix("!")
        self._directories = text.endswith("/")
        anchored = text.startswith("/")
        text = text.removeprefix("/").rstrip("/")
        self._by_name = not anchored and "/" not in text
        if text.endswith("/**"):
            text += "/*"  # what is in it, and not the directory itself
        check_closed(text)
        self._pattern = PathPattern(text)

    def fits(self, path: str, directory: bool) -> bool:
        if self._directories and not directory:
            return False
        return self._pattern.fits(path.rpartition("/")[2] if self._by_name else path)


class Rules:
    """Lines in their order. BadPattern for one that is none, unless they are `forgiving`."""

    def __init__(self, lines: Iterable[str], forgiving: bool = False) -> None:
        self._rules: list[_Rule] = []
        for line in lines:
            text = line if line.endswith("\\ ") else line.rstrip()
            if not text or text.startswith("#"):
                continue
            try:
                self._rules.append(_Rule(text))
            except BadPattern as error:
                if not forgiving:
                    raise BadPattern(f"`{line}`: {error}") from None
        self._rules.reverse()
        self.plain = any(not rule.negated for rule in self._rules)
        """Whether there is one without an exclamation mark."""

    def __bool__(self) -> bool:
        return bool(self._rules)

    def last(self, path: str, directory: bool) -> str:
        """`!` or `+` for what the last rule that fits begins with; nothing if none does."""
        for rule in self._rules:
            if rule.fits(path, directory):
                return "!" if rule.negated else "+"
        return ""


class _Level:
    """A directory on the way down, and what its ignore files say."""

    def __init__(self, path: bytes, above: _Level | None, present: Iterable[bytes]) -> None:
        names = frozenset(present)
        self.above = above
        self.has_git = b".git" in names
        self.in_git: bool = self.has_git or (above is not None and above.in_git)
        self.rules = {name: _read(os.path.join(path, name)) for name in IGNORE_FILES if name in names}
        self.exclude = _read(os.path.join(path, b".git", b"info", b"exclude")) if self.has_git else None

    def ignores(self, names: list[str], directory: bool) -> str:
        """What is said of a path, given as the names below `/`: `+` to ignore it, `!` not to."""
        said = dict.fromkeys(IGNORE_FILES, "")
        excluded, outside = "", not self.in_git
        level: _Level | None = self
        depth = len(names) - 1
        while level is not None:
            below = "/".join(names[depth:]) if level.rules or level.exclude else ""
            for name, rules in level.rules.items():
                if not said[name] and not (outside and name == b".gitignore"):
                    said[name] = rules.last(below, directory)
            if level.exclude and not outside and not excluded:
                excluded = level.exclude.last(below, directory)
            outside |= level.has_git  # what is above a repository says nothing about it
            level, depth = level.above, depth - 1
        return next(filter(None, said.values()), excluded)


def selected_files(path: bytes, globs: Rules, hidden: bool, ignores: bool) -> Iterator[bytes]:
    """Regular files below a directory, sorted. One that is named itself is wanted, whatever is said of it."""
    if not os.path.isdir(path):
        yield path
        return
    start, top = _above(path) if ignores else ([], None)
    todo: list[tuple[bytes, str, list[str], _Level | None]] = [(path, "", start, top)]
    while todo:
        directory, prefix, names, above = todo.pop()
        try:
            with os.scandir(directory) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            continue  # gone, or not ours to read
        level = _Level(directory, above, (entry.name for entry in entries)) if ignores else None
        below: list[tuple[bytes, str, list[str], _Level | None]] = []
        for entry in entries:
            is_directory = entry.is_dir(follow_symlinks=False)
            if not is_directory and not entry.is_file(follow_symlinks=False):
                continue
            name = entry.name.decode("utf-8", "surrogateescape")
            place = [*names, name]
            said = globs.last(prefix + name, is_directory)
            if said == "!" or (not said and globs.plain and not is_directory):
                continue
            if not said:
                ignored = "" if level is None else level.ignores(place, is_directory)
                if ignored == "+" or (not ignored and not hidden and name.startswith(".")):
                    continue
            if is_directory:
                below.append((entry.path, f"{prefix}{name}/", place, level))
            else:
                yield entry.path
        todo += reversed(below)


def _above(path: bytes) -> tuple[list[str], _Level | None]:
    """The names that lead to a directory, and the directories above it."""
    names = [name for name in os.path.realpath(path).split(b"/") if name]
    level: _Level | None = None
    for depth in range(len(names)):
        place = b"/" + b"/".join(names[:depth])
        present = [name for name in (*IGNORE_FILES, b".git") if os.path.lexists(os.path.join(place, name))]
        level = _Level(place, level, present)
    return [name.decode("utf-8", "surrogateescape") for name in names], level


def _read(path: bytes) -> Rules:
    try:
        # Without waiting: it may be a FIFO.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(MAX_IGNORE_BYTES + 1)
    except OSError:
        return Rules(())
    if len(content or b"") > MAX_IGNORE_BYTES:
        return Rules(())
    lines = (content or b"").removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape").split("\n")
    return Rules(lines, forgiving=True)
