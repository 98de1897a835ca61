"""Sandbox objects as clients send them."""

from __future__ import annotations

import os
from typing import Any

from exec_server.wire.sandbox import SandboxContext, decode_sandbox
from exec_server.wire.uri import path_to_uri

__all__ = ["context", "managed", "path", "pattern", "sandbox", "special"]


def sandbox(permissions: Any, **more: Any) -> dict[str, Any]:
    """The outer object."""
    return {"permissions": permissions, "windowsSandboxLevel": "disabled", **more}


def managed(
    *entries: Any, network: str = "restricted", depth: int | None = None, **more: Any
) -> dict[str, Any]:
    """A profile with these entries."""
    file_system: dict[str, Any] = {"type": "restricted", "entries": list(entries)}
    if depth is not None:
        file_system["glob_scan_max_depth"] = depth
    return sandbox({"type": "managed", "file_system": file_system, "network": network}, **more)


def context(*entries: Any, **more: Any) -> SandboxContext:
    """The same, decoded."""
    return decode_sandbox(managed(*entries, **more))


def path(place: str | bytes | os.PathLike[str], access: str, **more: Any) -> dict[str, Any]:
    """An entry for a path."""
    return {"path": {"type": "path", "path": path_to_uri(os.fsencode(place))}, "access": access, **more}


def special(kind: str, access: str, **more: Any) -> dict[str, Any]:
    """An entry for a path with a name."""
    return {"path": {"type": "special", "value": {"kind": kind, **more}}, "access": access}


def pattern(text: str, access: str = "deny") -> dict[str, Any]:
    """An entry for what fits a pattern."""
    return {"path": {"type": "glob_pattern", "pattern": text}, "access": access}
