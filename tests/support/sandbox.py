"""Profiles as they travel, and running commands under them through a server."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from .rpc import Peer, Record

__all__ = [
    "FORBIDDING",
    "entry",
    "full_access",
    "needs_bubblewrap",
    "profile",
    "read_only",
    "run_in",
    "scoped",
    "start_in",
    "workspace_write",
]

FORBIDDING = [sys.executable, "-I", str(Path(__file__).with_name("forbidding.py"))]
"""Prefix of a command that must do without user namespaces, as in many containers."""


@pytest.fixture(scope="session")
def needs_bubblewrap() -> None:
    """Where a sandbox is what is tested, a machine without one is a failure, not an excuse."""
    assert shutil.which("bwrap"), "bubblewrap is not installed: `make setup` does, or apt install bubblewrap"


def entry(where: str | Path, access: str, **more: Any) -> dict[str, Any]:
    """About a path, or about a special one: `:root`, `:tmpdir`, `:project_roots`, ..."""
    name = str(where)
    if name.startswith(":"):
        path: dict[str, Any] = {"type": "special", "value": {"kind": name[1:], **more}}
    elif "*" in name:
        path = {"type": "glob_pattern", "pattern": name}
    else:
        path = {"type": "path", "path": f"file://{name}"}
    return {"path": path, "access": access}


def profile(
    entries: Iterable[dict[str, Any]] | None, *, network: bool = False, roots: Iterable[Path | str] = ()
) -> dict[str, Any]:
    """A managed profile; without entries every file may be written."""
    files = {"type": "unrestricted"} if entries is None else {"type": "restricted", "entries": list(entries)}
    workspace = [f"file://{root}" for root in roots]
    return {
        "windowsSandboxLevel": "disabled",
        "permissions": {
            "type": "managed",
            "file_system": files,
            "network": "enabled" if network else "restricted",
        },
        "workspaceRoots": workspace,
        **({"cwd": workspace[0]} if workspace else {}),
    }


def read_only(**more: Any) -> dict[str, Any]:
    return profile([entry(":root", "read")], **more)


def workspace_write(
    *roots: Path | str, more: Iterable[dict[str, Any]] = (), **options: Any
) -> dict[str, Any]:
    entries = [entry(":root", "read"), entry(":project_roots", "write"), *more]
    return profile(entries, roots=roots, **options)


def scoped(*readable: Path | str, **options: Any) -> dict[str, Any]:
    return profile([entry(":minimal", "read"), *(entry(path, "read") for path in readable)], **options)


def full_access() -> dict[str, Any]:
    return {"windowsSandboxLevel": "disabled", "permissions": {"type": "disabled"}}


def start_in(peer: Peer, sandbox: dict[str, Any] | None, *argv: str, **more: Any) -> str:
    """Start a command in a sandbox; its id."""
    params = peer.start_params(argv, **more)
    if sandbox is not None:
        params["sandbox"] = sandbox
    result = peer.call("process/start", params)
    kind = "none" if sandbox is None else "linuxSeccomp"
    assert result == {"processId": params["processId"], "sandboxType": kind}
    process_id: str = params["processId"]
    return process_id


def run_in(peer: Peer, sandbox: dict[str, Any] | None, *argv: str, **more: Any) -> Record:
    """The same, and wait for the end."""
    return peer.finished(start_in(peer, sandbox, *argv, **more))
