"""Who may do it: everything, or somebody else later, and in doubt not we."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.local.files.access import require_plain
from exec_server.wire.errors import RpcError


def sandbox(permissions: Any, **more: Any) -> dict[str, Any]:
    return {"permissions": permissions, "windowsSandboxLevel": "disabled", **more}


def managed(*entries: Any) -> dict[str, Any]:
    return sandbox(
        {
            "type": "managed",
            "file_system": {"type": "restricted", "entries": list(entries)},
            "network": "restricted",
        }
    )


def special(kind: str, access: str) -> dict[str, Any]:
    return {"path": {"type": "special", "value": {"kind": kind}}, "access": access}


ROOT_READ, ROOT_WRITE = special("root", "read"), special("root", "write")
PATH_DENY = {"path": {"type": "path", "path": "file:///x"}, "access": "deny"}
PATH_WRITE = {"path": {"type": "path", "path": "file:///x"}, "access": "write"}


@pytest.mark.parametrize(
    "allowed",
    [
        None,
        sandbox({"type": "disabled"}),
        sandbox({"type": "external", "network": "restricted"}),
        sandbox({"type": "managed", "file_system": {"type": "unrestricted"}, "network": "enabled"}),
        managed(ROOT_WRITE),
        managed(ROOT_WRITE, special("tmpdir", "write")),
    ],
)
def test_full_access(allowed: Any) -> None:
    require_plain(allowed, changes=True)
    require_plain(allowed, changes=False)


def test_full_read() -> None:
    require_plain(managed(ROOT_READ), changes=False)
    with pytest.raises(RpcError, match="sandbox intent cannot be enforced on this executor"):
        require_plain(managed(ROOT_READ), changes=True)


@pytest.mark.parametrize(
    "refused",
    [
        managed(),
        managed(ROOT_WRITE, PATH_DENY),
        managed(PATH_WRITE),
        managed(special("minimal", "read")),
        managed(ROOT_READ, special("slash_tmp", "deny")),
        managed(ROOT_WRITE, special("project_roots", "write")),
        managed(ROOT_WRITE, {"path": {"type": "glob_pattern", "pattern": "/x/*"}, "access": "deny"}),
        managed(ROOT_WRITE, "nonsense"),
        managed(ROOT_WRITE, {}),
        sandbox({"type": "managed"}),
        sandbox({"type": "managed", "file_system": {"type": "new kind"}}),
        sandbox({"type": "strange"}),
        sandbox({}),
        sandbox(None),
        {"permissions": {"type": "disabled"}},
        {"permissions": {"type": "disabled"}, "windowsSandboxLevel": "x"},
        {},
    ],
)
def test_anything_else_is_refused(refused: Any) -> None:
    for changes in (False, True):
        with pytest.raises(RpcError) as caught:
            require_plain(refused, changes=changes)
        assert caught.value.code == -32602
