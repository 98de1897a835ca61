"""What a user has for every agent, in the home directory: instructions, and skills. Read where we run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from .. import log

__all__ = ["OwnSkill", "fields_of", "home_instructions", "home_skills"]

NAMES: Final = ("AGENTS.override.md", "AGENTS.md")
"""Of these the first that is there and says something counts, in every directory."""

MAX_INSTRUCTION_BYTES: Final = 32 * 1024
MAX_HEAD_BYTES: Final = 8 * 1024
"""Most of a skill that is read to know what it is about."""

MAX_SKILLS: Final = 200
MAX_DEPTH: Final = 6
"""How deep skills are looked for, as in the reference."""

_FIELD: Final = re.compile(r"^(name|description):\s*(.+?)\s*$", re.MULTILINE)


class OwnSkill(Struct, frozen=True):
    """A skill of the user's."""

    name: str
    description: str
    path: str


def home_instructions(home: str) -> str | None:
    """What the user says to every agent; None if that is nothing."""
    for name in NAMES:
        text = _beginning(os.path.join(home, name), MAX_INSTRUCTION_BYTES)
        if text is not None and text.strip():
            return text.strip()
    return None


def home_skills(home: str) -> list[OwnSkill]:
    """The user's skills, by their paths. Hidden ones are the reference's own, and written for its tools."""
    skills: list[OwnSkill] = []
    for path in _skill_files(os.path.join(home, "skills")):
        text = _beginning(path, MAX_HEAD_BYTES)
        if text is None:
            continue
        fields = fields_of(text)
        if "description" not in fields:
            log.warning("a skill does not say what it is for", path=path)
            continue
        name = fields.get("name") or os.path.basename(os.path.dirname(path))
        skills.append(OwnSkill(name, fields["description"], path))
        if len(skills) >= MAX_SKILLS:
            break
    return skills


def fields_of(text: str) -> dict[str, str]:
    """What a skill says of itself, at its beginning."""
    head = text.partition("---")[2].partition("---")[0]
    return {name: value.strip("\"'") for name, value in _FIELD.findall(head)}


def _skill_files(top: str) -> Iterator[str]:
    seen: set[str] = set()
    for place, directories, files in os.walk(top, followlinks=True):
        real = os.path.realpath(place)
        deep = os.path.relpath(place, top).count(os.sep) + 1 >= MAX_DEPTH
        if real in seen:
            directories.clear()  # a link that leads back up
            continue
        seen.add(real)
        directories[:] = [] if deep else sorted(name for name in directories if not name.startswith("."))
        if "SKILL.md" in files:
            yield os.path.join(place, "SKILL.md")


def _beginning(path: str, most: int) -> str | None:
    """The first bytes of a file as text; None if there is none that can be read."""
    try:
        # Not to wait, if it is no file but something that others write to.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, most).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(fd)
