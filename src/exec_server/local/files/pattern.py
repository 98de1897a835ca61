"""Patterns for paths: `*`, `?`, `[a-z]`, `{a,b}` within a name, and `**` for any number of directories.

Imports nothing but `re`: the search program uses it too. A pattern is matched name by name, so that
directories in which nothing can match are never entered.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["BadPattern", "PathPattern", "States", "check_closed"]

MAX_ALTERNATIVES: Final = 256
"""What the braces of one pattern may expand to."""

_DEEP: Final = None
"""Stands for `**` among the compiled names."""

States = frozenset[tuple[int, int]]
"""Which alternative of the pattern, and how many of its names have matched."""

_LAST_BRACES = re.compile(r"\{([^{}]*)\}")


class BadPattern(ValueError):
    """Not a pattern; says why."""


class PathPattern:
    """A compiled pattern. States say how far a path has matched; those without any are dead ends."""

    def __init__(self, text: str) -> None:
        self._names: list[list[tuple[re.Pattern[str], bool] | None]] = []
        for alternative in _expand(text):
            names: list[tuple[re.Pattern[str], bool] | None] = []
            for part in alternative.split("/"):
                if part in ("", "."):
                    continue
                if part == "..":
                    raise BadPattern("a pattern must stay below its directory: `..` is not allowed")
                names.append(_DEEP if part == "**" else (_compile(part), part.startswith(".")))
            if not names:
                raise BadPattern("a pattern must name something")
            self._names.append(names)

    def start(self) -> States:
        """The state of the directory that the pattern is relative to."""
        return self._close({(index, 0) for index in range(len(self._names))})

    def step(self, states: States, name: str, hidden: bool) -> States:
        """The state of an entry. A leading dot is matched only if `hidden`, or by one in the pattern."""
        following: set[tuple[int, int]] = set()
        dotted = name.startswith(".")
        for index, position in states:
            names = self._names[index]
            if position == len(names):
                continue
            wanted = names[position]
            if wanted is _DEEP:
                if hidden or not dotted:
                    following.add((index, position))
            elif (hidden or not dotted or wanted[1]) and wanted[0].fullmatch(name):
                following.add((index, position + 1))
        return self._close(following)

    def matches(self, states: States) -> bool:
        """Whether the path as a whole fits."""
        return any(position == len(self._names[index]) for index, position in states)

    def goes_on(self, states: States) -> bool:
        """Whether something below it may fit."""
        return any(position < len(self._names[index]) for index, position in states)

    def fits(self, path: str, hidden: bool = True) -> bool:
        """Whether a whole relative path fits."""
        states = self.start()
        for name in path.split("/"):
            states = self.step(states, name, hidden)
        return self.matches(states)

    def _close(self, states: set[tuple[int, int]]) -> States:
        """`**` also stands for no directory at all."""
        todo = list(states)
        while todo:
            index, position = todo.pop()
            names = self._names[index]
            if position < len(names) and names[position] is _DEEP and (index, position + 1) not in states:
                states.add((index, position + 1))
                todo.append((index, position + 1))
        return frozenset(states)


def check_closed(text: str) -> None:
    """BadPattern for a bracket or brace without its other half. It would stand for itself, as in a shell."""
    depth = position = 0
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1
        elif char == "[":
            position = _end_of_set(text, position + 1)
            if position < 0:
                raise BadPattern("a `[` is not closed; write `[[]` for the character itself")
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth < 0:
                raise BadPattern("a `}` has no `{`; write `[}]` for the character itself")
        position += 1
    if depth:
        raise BadPattern("a `{` is not closed; write `[{]` for the character itself")


def _expand(text: str) -> list[str]:
    """Every alternative of `{a,b}`, innermost braces first. Braces without a comma are themselves."""
    done: list[str] = []
    todo = [text]
    while todo:
        current = todo.pop()
        braces = next((match for match in _LAST_BRACES.finditer(current) if "," in match[1]), None)
        if braces is None:
            done.append(current)
        else:
            todo += [
                current[: braces.start()] + choice + current[braces.end() :]
                for choice in braces[1].split(",")
            ]
        if len(done) + len(todo) > MAX_ALTERNATIVES:
            raise BadPattern(f"a pattern may have at most {MAX_ALTERNATIVES} alternatives")
    return done


def _compile(name: str) -> re.Pattern[str]:
    """One name. A star takes the shortest text after which the pattern goes on, and never thinks again."""
    parts: list[str] = []
    pieces = _pieces(name)
    stars = [index for index, piece in enumerate(pieces) if piece == "*"]
    if not stars:
        return re.compile("".join(pieces), re.DOTALL)
    parts.append("".join(pieces[: stars[0]]))
    for index, star in enumerate(stars[:-1]):
        between = "".join(pieces[star + 1 : stars[index + 1]])
        parts.append(f"(?>.*?{between})")
    parts.append(".*" + "".join(pieces[stars[-1] + 1 :]))
    return re.compile("".join(parts), re.DOTALL)


def _pieces(name: str) -> list[str]:
    """`*`, or a regular expression for exactly one character."""
    pieces: list[str] = []
    position = 0
    while position < len(name):
        char = name[position]
        position += 1
        if char == "*":
            if not pieces or pieces[-1] != "*":
                pieces.append("*")
        elif char == "?":
            pieces.append(".")
        elif char == "\\" and position < len(name):
            pieces.append(re.escape(name[position]))
            position += 1
        elif char == "[" and (end := _end_of_set(name, position)) > 0:
            pieces.append(_one_of(name[position:end]))
            position = end + 1
        else:
            pieces.append(re.escape(char))
    return pieces


def _end_of_set(name: str, start: int) -> int:
    """Where the set that starts here is closed; a bracket that comes first is in the set."""
    negated = name[start : start + 1] in ("!", "^")
    return name.find("]", start + 1 + negated)


def _one_of(inside: str) -> str:
    negated = inside[:1] in ("!", "^")
    body = inside[1:] if negated else inside
    escaped = re.sub(r"([\\\[\]^&~|])", r"\\\1", body)
    result = f"[{'^' if negated else ''}{escaped}]"
    try:
        re.compile(result)
    except re.error:
        raise BadPattern(f"`[{inside}]` is not a set of characters") from None
    return result
