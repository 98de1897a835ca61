"""Text that is not ours, as people are shown it: it must not steer the terminal it is shown on."""

from __future__ import annotations

import re
import sys
from typing import Final, TextIO

__all__ = ["on_one_line", "printable", "shown", "without_surrogates"]

_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Controls, and marks that end a line or turn the direction of what follows."""


def printable(text: str) -> str:
    """Whatever a terminal would not show as it is, escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def without_surrogates(path: str) -> str:
    """Names that are not UTF-8 can be written nowhere as they are."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def shown(text: str, stream: TextIO | None = None) -> str:
    """For people. A name is anybody's choice: on a terminal it must not move the cursor or set a title."""
    text = without_surrogates(text)
    if not (stream or sys.stdout).isatty():
        return text
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def on_one_line(name: str) -> str:
    """A name in a list. Also in a pipe, one with a line break in it must not look like two."""
    return shown(name).replace("\n", r"\n").replace("\r", r"\r")
