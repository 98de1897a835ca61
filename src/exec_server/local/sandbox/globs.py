"""Patterns of files to deny, looked up once: a view can only cover what exists when it is made."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import Final

from .look import Machine
from .plan import PlanError

__all__ = ["expand", "search_root"]

MAX_MATCHES: Final = 8192
"""Files that one profile may cover. The reference's number."""

_WILD: Final = re.compile(rb"[*?\[\]{]")

MAX_ALTERNATIVES: Final = 256
"""That one pattern may stand for."""


def expand(patterns: tuple[bytes, ...], depth: int | None, machine: Machine) -> list[bytes]:
    """The files that fit, links among them, in no particular order."""
    found: dict[bytes, None] = {}
    for pattern in patterns:
        start = search_root(pattern)
        _search(start, _expression(pattern), depth, machine, found)
    return list(found)


def search_root(pattern: bytes) -> bytes:
    """The directory that everything which fits is in: what comes before the first wildcard."""
    wild = _WILD.search(pattern)
    start = pattern[: pattern.rindex(b"/", 0, wild.start())] if wild is not None else b""
    if not start:
        raise PlanError(
            f"unreadable glob `{pattern.decode('utf-8', 'replace')}` cannot be safely expanded; "
            "use a pattern with a non-root directory prefix"
        )
    return start


def _search(
    start: bytes,
    expression: re.Pattern[str],
    depth: int | None,
    machine: Machine,
    found: dict[bytes, None],
) -> None:
    level, remaining = [start], depth
    while level and (remaining is None or remaining > 0):
        following: list[bytes] = []
        for directory in level:
            for name, is_directory in machine.entries(directory):
                path = directory + b"/" + name
                if is_directory:
                    following.append(path)
                elif expression.fullmatch(os.fsdecode(path)):
                    found[path] = None
                    if len(found) > MAX_MATCHES:
                        raise PlanError(f"unreadable globs match more than {MAX_MATCHES} files")
        level = following
        remaining = None if remaining is None else remaining - 1


@lru_cache(maxsize=64)
def _expression(pattern: bytes) -> re.Pattern[str]:
    text = os.fsdecode(pattern)
    # The reference takes braces for braces, most others for alternatives: whatever fits either is denied.
    spelled = dict.fromkeys([text, *_alternatives(text)])
    return re.compile("|".join([f"(?:{_text_of(one)})" for one in spelled]), re.DOTALL)


def _text_of(pattern: str) -> str:
    parts = pattern.split("/")[1:]
    text = ""
    for index, part in enumerate(parts):
        if part == "**":
            text += "/.*" if index == len(parts) - 1 else "(?:/[^/]+)*"
        else:
            text += "/" + _component(part)
    return text


_INNERMOST: Final = re.compile(r"\{([^{}]*)\}")


def _alternatives(pattern: str) -> list[str]:
    """What a pattern with braces stands for: one without, for each choice."""
    done: list[str] = []
    todo = [pattern]
    while todo:
        one = todo.pop()
        braces = _INNERMOST.search(one)
        if braces is None:
            done.append(one)
        else:
            todo += [one[: braces.start()] + choice + one[braces.end() :] for choice in braces[1].split(",")]
        if len(done) + len(todo) > MAX_ALTERNATIVES:
            raise PlanError(f"unreadable glob `{pattern}` has more than {MAX_ALTERNATIVES} alternatives")
    return done


_GROUP: Final = re.compile(r"(?P<not>[!^]?)(?P<items>\]?[^\]]*)\]")


def _component(part: str) -> str:
    """One name: nothing in it crosses a slash, and a bracket that is never closed is a bracket."""
    text = ""
    position = 0
    while position < len(part):
        character = part[position]
        position += 1
        if character == "*":
            text += "[^/]*"
        elif character == "?":
            text += "[^/]"
        elif character == "[" and (group := _GROUP.match(part, position)) is not None:
            position = group.end()
            text += _set(bool(group["not"]), group["items"])
        else:
            text += re.escape(character)
    return text


def _set(negated: bool, items: str) -> str:
    inside = ""
    position = 0
    while position < len(items):
        first = last = items[position]
        if items[position + 1 : position + 2] == "-" and position + 2 < len(items):
            last = items[position + 2]
            position += 2
        position += 1
        if first <= last:
            inside += f"{re.escape(first)}-{re.escape(last)}"
    if negated:
        return f"[^/{inside}]"
    return f"(?!/)[{inside}]" if inside else "(?!)"
