"""Who does an operation: this process, or somebody with fewer rights.

`require_plain` is the one place where that is decided, and every operation on a path asks it first.
Today there is only this process, so whatever asks for less than everything is refused; a sandbox is
added by giving back who performs the operation instead of refusing it.
"""

from __future__ import annotations

from typing import Any, Final

from ...wire.errors import invalid_params

__all__ = ["require_plain"]

LEVELS: Final = ("disabled", "restricted-token", "elevated", "mxc")


def require_plain(sandbox: dict[str, Any] | None, *, changes: bool) -> None:
    """Return if this process may do it with all of its own rights, and raise RpcError if not.

    `changes` is whether the operation may change anything: a profile that lets everything be read
    needs no sandbox for reading.
    """
    if sandbox is None:
        return
    permissions = sandbox.get("permissions")
    if not isinstance(permissions, dict):
        raise invalid_params("missing field `permissions`")
    kind = permissions.get("type")
    if kind not in ("managed", "disabled", "external"):
        raise invalid_params("missing field `type`" if kind is None else _unknown_kind(kind))
    if sandbox.get("windowsSandboxLevel") not in LEVELS:
        raise invalid_params("missing field `windowsSandboxLevel`")
    if kind != "managed" or _covers_everything(permissions.get("file_system"), changes):
        return
    raise invalid_params("sandbox intent cannot be enforced on this executor")


def _unknown_kind(kind: Any) -> str:
    return f"unknown variant `{kind}`, expected one of `managed`, `disabled`, `external`"


def _covers_everything(file_system: Any, changes: bool) -> bool:
    """Whether a managed profile restricts nothing that matters here. In doubt it does."""
    if not isinstance(file_system, dict):
        return False
    if file_system.get("type") == "unrestricted":
        return True
    entries = file_system.get("entries")
    if file_system.get("type") != "restricted" or not isinstance(entries, list):
        return False
    enough = ("write",) if changes else ("read", "write")
    return any(_is_root(entry, enough) for entry in entries) and all(
        isinstance(entry, dict) and _never_narrows(entry, enough) for entry in entries
    )


def _is_root(entry: Any, enough: tuple[str, ...]) -> bool:
    return isinstance(entry, dict) and _special(entry) == "root" and entry.get("access") in enough


def _never_narrows(entry: dict[str, Any], enough: tuple[str, ...]) -> bool:
    return entry.get("access") in enough and _special(entry) is not None


def _special(entry: dict[str, Any]) -> str | None:
    """The name of a special path that needs no working directory to be understood."""
    path = entry.get("path")
    if isinstance(path, dict) and path.get("type") == "special" and isinstance(path.get("value"), dict):
        name = path["value"].get("kind")
        return name if name in ("root", "minimal", "tmpdir", "slash_tmp") else None
    return None
