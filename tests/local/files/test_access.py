"""Who does a file call: this process where nothing can be forbidden, a helper in every other case."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.local.files.access import confinement
from exec_server.local.sandbox import look
from exec_server.wire.errors import INVALID_REQUEST, RpcError
from exec_server.wire.sandbox import decode_sandbox
from support.profiles import managed, path, pattern, sandbox, special

ROOT_READ, ROOT_WRITE = special("root", "read"), special("root", "write")
ROOTS = {"workspaceRoots": ["file:///w"], "cwd": "file:///w"}


def needs_helper(value: Any, *, changes: bool) -> bool:
    return confinement(decode_sandbox(value), changes=changes) is not None


def test_no_sandbox_at_all() -> None:
    assert confinement(None, changes=True) is None


@pytest.mark.parametrize(
    "everything",
    [
        sandbox({"type": "disabled"}),
        sandbox({"type": "external", "network": "restricted"}),
        sandbox({"type": "managed", "file_system": {"type": "unrestricted"}, "network": "restricted"}),
        managed(ROOT_WRITE),
        managed(ROOT_WRITE, special("minimal", "read")),
        managed(ROOT_WRITE, special("unknown", "deny", path="x")),
        managed(ROOT_WRITE, path("/x", "write")),
        managed(ROOT_WRITE, path("/x", "read"), path("/x", "write")),
        managed(ROOT_WRITE, special("project_roots", "read")),  # of a project without roots
    ],
    ids=range(9),
)
def test_profiles_that_forbid_nothing(everything: Any) -> None:
    assert not needs_helper(everything, changes=True)
    # A deny of any form keeps reading from being done here, even one that resolves to nothing.
    denied = any(item["access"] == "deny" for item in _entries(everything))
    assert needs_helper(everything, changes=False) is False or denied


def _entries(value: Any) -> list[Any]:
    found: list[Any] = value["permissions"].get("file_system", {}).get("entries", [])
    return found


@pytest.mark.parametrize(
    "readable",
    [
        managed(ROOT_READ),
        managed(ROOT_READ, path("/x", "write")),
        managed(ROOT_READ, special("project_roots", "write"), **ROOTS),
        managed(ROOT_WRITE, path("/x", "read")),
        managed(ROOT_WRITE, special("tmpdir", "read")),
        managed(ROOT_WRITE, pattern("/x/*", "read")),
    ],
    ids=range(6),
)
def test_profiles_that_hide_nothing(readable: Any) -> None:
    assert not needs_helper(readable, changes=False)
    assert needs_helper(readable, changes=True)


@pytest.mark.parametrize(
    "scoped",
    [
        managed(),
        managed(special("minimal", "read")),
        managed(path("/", "write")),  # spelled as a path it is one like any other
        managed(path("/x", "write")),
        managed(ROOT_READ, path("/x", "deny")),
        managed(ROOT_WRITE, path("/x", "deny"), path("/x", "write")),
        managed(ROOT_WRITE, special("root", "deny")),
        managed(ROOT_READ, pattern("/x/*")),
        managed(ROOT_READ, special("slash_tmp", "deny")),
    ],
    ids=range(9),
)
def test_profiles_that_hide_something(scoped: Any) -> None:
    assert needs_helper(scoped, changes=False)
    assert needs_helper(scoped, changes=True)


FOREIGN = "file:///C:/x"
INVALID = "'file:///C:/x' is invalid on 'linux'"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (managed(ROOT_WRITE, path("/C:/x", "write")), None),
        (
            managed(ROOT_WRITE, {"path": {"type": "path", "path": FOREIGN}, "access": "write"}),
            f"invalid sandbox permission path URI: {INVALID}",
        ),
        (managed(cwd=FOREIGN), INVALID),
        (
            managed(workspaceRoots=[FOREIGN]),
            f"file system sandbox workspace root is not native to this exec-server host: {INVALID}",
        ),
        # Where no helper is needed nobody looks at these.
        (managed(ROOT_READ, cwd=FOREIGN, workspaceRoots=[FOREIGN]), None),
    ],
    ids=range(5),
)
def test_profiles_for_other_machines(value: Any, words: str | None) -> None:
    if words is None:
        assert not needs_helper(value, changes=False)
        return
    with pytest.raises(RpcError) as caught:
        needs_helper(value, changes=False)
    assert (caught.value.code, caught.value.message) == (INVALID_REQUEST, words)


def test_files_that_nobody_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then even who may read everything needs a helper, but not who may change everything."""
    reading = managed(ROOT_READ)
    assert not needs_helper(reading, changes=False)
    monkeypatch.setattr(look, "secret_files", lambda: (b"/key",))
    assert needs_helper(reading, changes=False)
    assert not needs_helper(managed(ROOT_WRITE), changes=False)
    assert not needs_helper(sandbox({"type": "disabled"}), changes=False)
