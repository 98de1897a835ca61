"""From the entries of a profile to rules about paths: what each name stands for on this machine.

Nothing here follows links; that is done where rules meet the file system (`compile.py`).
"""

from __future__ import annotations

import os
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from ...wire.sandbox import (
    PROJECT_ROOTS_PREFIX,
    Access,
    Entry,
    GlobPattern,
    PathEntry,
    SandboxContext,
    Special,
    SpecialPath,
)
from ...wire.uri import ForeignPath, native_path
from .look import Machine
from .plan import PlanError

__all__ = [
    "Policy",
    "Rule",
    "Unsuitable",
    "check_entries",
    "check_places",
    "has_full_read",
    "has_full_write",
    "resolve_entries",
]

MINIMAL_ROOTS: Final = (
    b"/bin",
    b"/sbin",
    b"/usr",
    b"/etc",
    b"/lib",
    b"/lib64",
    b"/nix/store",
    b"/run/current-system/sw",
)
"""What a program needs that is linked to libraries of the system, where it exists."""


class Unsuitable(Exception):
    """A path that names nothing on this kind of machine. Whoever answers words it."""

    def __init__(self, part: Literal["entry", "cwd", "workspace root"], uri: str, reason: str) -> None:
        super().__init__(reason)
        self.part = part
        self.uri = uri


class Rule(NamedTuple):
    """What may be done with a path as it was written, and all below it."""

    path: bytes
    access: Access
    trusted: bool = True
    """Whether somebody outside may trust what is in it, as in a project. Of TMPDIR nobody expects that."""


class Policy(Struct, frozen=True):
    """A profile in the terms of this machine."""

    rules: tuple[Rule, ...]
    patterns: tuple[bytes, ...]
    """Absolute; what fits them is denied."""
    pattern_depth: int | None
    minimal: bool
    """Whether the system's programs and libraries can be read, where not everything can."""


def check_entries(context: SandboxContext) -> None:
    """Unsuitable, if an entry is about another kind of machine."""
    for entry in context.entries or ():
        if isinstance(entry.path, PathEntry):
            _native(entry.path.path, "entry")


def check_places(context: SandboxContext) -> None:
    """Unsuitable, if the profile's directories are of another kind of machine."""
    if context.policy_cwd is not None:
        _native(context.policy_cwd, "cwd")
    for root in context.project_roots:
        _native(root, "workspace root")


def has_full_read(context: SandboxContext) -> bool:
    """Whether a profile keeps nothing from being read."""
    entries = context.entries
    if entries is None:
        return True
    return any(_is_root(entry) and entry.access != "deny" for entry in entries) and not any(
        entry.access == "deny" for entry in entries
    )


def has_full_write(context: SandboxContext) -> bool:
    """Whether a profile keeps nothing from being changed."""
    entries = context.entries
    if entries is None:
        return True
    expanded = [entry for entry in entries if not _vanishes(entry, context)]
    written = {entry.path for entry in expanded if entry.access == "write"}
    return any(_is_root(entry) and entry.access == "write" for entry in expanded) and not any(
        _narrows(entry, written) for entry in expanded
    )


def _is_root(entry: Entry) -> bool:
    return isinstance(entry.path, SpecialPath) and entry.path.value.kind == "root"


def _vanishes(entry: Entry, context: SandboxContext) -> bool:
    """Project roots of a project without roots are no paths."""
    return (
        isinstance(entry.path, SpecialPath)
        and entry.path.value.kind == "project_roots"
        and not context.project_roots
    )


def _narrows(entry: Entry, written: set[PathEntry | GlobPattern | SpecialPath]) -> bool:
    if isinstance(entry.path, GlobPattern):
        return True
    if isinstance(entry.path, SpecialPath):
        kind = entry.path.value.kind
        if kind in ("minimal", "unknown"):
            return False
        if kind == "root":
            return entry.access == "deny"
    return entry.access == "deny" or (entry.access == "read" and entry.path not in written)


def resolve_entries(context: SandboxContext, machine: Machine, cwd: bytes, tmpdir: bytes | None) -> Policy:
    """The rules of a restricted profile. `cwd` is what patterns are relative to if the profile does not
    say, `tmpdir` the TMPDIR of whoever is to run in the sandbox."""
    check_entries(context)
    if context.policy_cwd is not None:
        cwd = _native(context.policy_cwd, "cwd")
    roots = [_native(uri, "workspace root") for uri in context.project_roots]
    rules: list[Rule] = []
    patterns: list[bytes] = []
    minimal = False
    for entry in context.entries or ():
        match entry.path:
            case PathEntry(uri):
                rules.append(Rule(_native(uri, "entry"), entry.access))
            case GlobPattern(pattern):
                if entry.access == "deny":
                    patterns += _absolute(pattern, cwd, roots)
            case SpecialPath(special):
                minimal = minimal or (special.kind == "minimal" and entry.access != "deny")
                rules += [
                    Rule(path, entry.access, special.kind != "tmpdir")
                    for path in _special(special, entry.access, machine, roots, tmpdir)
                ]
    depth = getattr(getattr(context.permissions, "file_system", None), "glob_scan_max_depth", None)
    return Policy(tuple(rules), tuple(dict.fromkeys(patterns)), depth, minimal)


def _special(
    special: Special, access: Access, machine: Machine, roots: list[bytes], tmpdir: bytes | None
) -> list[bytes]:
    match special.kind:
        case "root":
            return [b"/"]
        case "slash_tmp":
            return [b"/tmp"] if machine.look(b"/tmp").kind in ("directory", "link") else []
        case "tmpdir":
            return [_normal(tmpdir)] if tmpdir is not None and tmpdir.startswith(b"/") else []
        case "project_roots":
            return [path for root in roots if (path := _below(root, special.subpath, access)) is not None]
        case _:
            return []


def _below(root: bytes, subpath: str | None, access: Access) -> bytes | None:
    """A path in a project. One that leads out of it grants nothing, but what it denies is denied."""
    if "\0" in (subpath or ""):
        raise PlanError(f"a subpath of a project has a NUL in it: {subpath!r}")
    path = _normal(root + b"/" + os.fsencode(subpath or ""))
    outside = path != root and root != b"/" and not path.startswith(root + b"/")
    return None if outside and access != "deny" else path


def _absolute(pattern: str, cwd: bytes, roots: list[bytes]) -> list[bytes]:
    if pattern.startswith(PROJECT_ROOTS_PREFIX):
        rest = os.fsencode(pattern.removeprefix(PROJECT_ROOTS_PREFIX).lstrip("/"))
        return [_normal(root + b"/" + rest) for root in roots]
    return [_normal(os.path.join(cwd, os.fsencode(pattern)))]


def _normal(path: bytes) -> bytes:
    return b"/" + os.path.normpath(path).lstrip(b"/")


def _native(uri: str, part: Literal["entry", "cwd", "workspace root"]) -> bytes:
    try:
        return os.fsencode(native_path(uri))
    except ForeignPath as error:
        raise Unsuitable(part, uri, str(error)) from None
