"""Patches that a model types as a command, whatever it is told. Pure."""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from .patch import PatchError
from .patching import VERIFICATION

__all__ = ["TypedPatch", "typed_patch"]

_TYPED: Final = re.compile(
    r"""\s*(?:cd\s+(?:(?P<plain>[^\s'"&;|<>$`]+)|'(?P<single>[^']+)'|"(?P<double>[^"\\$`]+)")\s*&&\s*)?
        (?:apply_patch|applypatch)\s*<<(?P<tabs>-?)\s*(?P<mark>['"]?)(?P<word>\w+)(?P=mark)[ \t]*\n
        (?P<body>.*?)\n[ \t]*(?P=word)(?:[ \t]+2>&1)?\s*""",
    re.DOTALL | re.VERBOSE,
)


class TypedPatch(Struct, frozen=True):
    """A patch that was written as a command line."""

    text: str
    directory: str | None
    """Where its paths are relative to, as typed, if it changes directory first."""


def typed_patch(cmd: str) -> TypedPatch | None:
    """The patch in a command that does nothing but apply one; models write that whatever they are told."""
    if cmd.lstrip().startswith("*** Begin Patch"):
        raise PatchError(
            f"{VERIFICATION}patch detected without explicit call to apply_patch."
            ' Rerun as ["apply_patch", "<patch>"]'
        )
    found = _TYPED.fullmatch(cmd)
    if found is None:
        return None
    body = re.sub(r"^\t+", "", found["body"], flags=re.MULTILINE) if found["tabs"] else found["body"]
    if found["word"] in body.split("\n"):
        return None  # that is where it ends, and something else follows
    return TypedPatch(body, found["plain"] or found["single"] or found["double"])
