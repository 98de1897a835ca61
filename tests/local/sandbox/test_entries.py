"""From entries to rules: what each name stands for on this machine."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.local.sandbox.entries import Policy, Rule, Unsuitable, resolve_entries
from support.profiles import context, path, pattern, special
from support.tree import Tree

TREE = Tree({"/tmp": None, "/w": None})
ROOTS = {"workspaceRoots": ["file:///w", "file:///v"]}


def resolved(*entries: Any, tmpdir: bytes | None = None, tree: Tree = TREE, **more: Any) -> Policy:
    return resolve_entries(context(*entries, **more), tree, b"/here", tmpdir)


def rules(*entries: Any, **more: Any) -> list[tuple[bytes, str]]:
    return [(rule.path, rule.access) for rule in resolved(*entries, **more).rules]


def test_paths_and_root() -> None:
    assert rules(path("/x y", "read"), special("root", "deny")) == [(b"/x y", "read"), (b"/", "deny")]
    assert resolved(path("/x", "write")).rules == (Rule(b"/x", "write"),)


def test_project_roots_are_each_workspace_root() -> None:
    assert rules(special("project_roots", "write"), **ROOTS) == [(b"/w", "write"), (b"/v", "write")]
    assert rules(special("project_roots", "read", subpath=".git"), **ROOTS) == [
        (b"/w/.git", "read"),
        (b"/v/.git", "read"),
    ]
    assert rules(special("project_roots", "write"), cwd="file:///w") == []


@pytest.mark.parametrize("outside", ["..", "../x", "a/../../x"])
def test_a_subpath_that_leads_out_grants_nothing_but_denies(outside: str) -> None:
    for access in ("read", "write"):
        assert rules(special("project_roots", access, subpath=outside), workspaceRoots=["file:///w/p"]) == []
    denied = rules(special("project_roots", "deny", subpath=outside), workspaceRoots=["file:///w/p"])
    assert [access for _, access in denied] == ["deny"]


def test_an_absolute_subpath_is_below_the_root() -> None:
    absolute = special("project_roots", "write", subpath="/tmp")
    assert rules(absolute, workspaceRoots=["file:///w"]) == [(b"/w/tmp", "write")]


def test_temporary_directories() -> None:
    assert rules(special("slash_tmp", "write")) == [(b"/tmp", "write")]
    assert rules(special("slash_tmp", "write"), tree=Tree({})) == []
    assert rules(special("slash_tmp", "write"), tree=Tree({"/tmp": b"a file"})) == []
    assert rules(special("tmpdir", "write")) == []
    assert rules(special("tmpdir", "write"), tmpdir=b"") == []
    assert rules(special("tmpdir", "write"), tmpdir=b"relative") == []
    assert rules(special("tmpdir", "write"), tmpdir=b"/t//x/../y/") == [(b"/t/y", "write")]
    both = resolved(special("tmpdir", "write"), special("slash_tmp", "write"), tmpdir=b"/t")
    assert [rule.trusted for rule in both.rules] == [False, True]


def test_minimal_and_unknown() -> None:
    assert resolved(special("minimal", "read")).minimal
    assert resolved(special("minimal", "write")).minimal
    assert not resolved(special("minimal", "deny")).minimal
    assert rules(special("minimal", "read"), special("unknown", "write", path="x")) == []


def test_patterns() -> None:
    found = resolved(
        pattern("**/*.env"),
        pattern("/a/./b//*"),
        pattern("../x/*"),
        pattern("codex-project-roots://**/*.key"),
        pattern("ignored/*", "read"),
        depth=3,
        **ROOTS,
    )
    assert found.patterns == (b"/here/**/*.env", b"/a/b/*", b"/x/*", b"/w/**/*.key", b"/v/**/*.key")
    assert found.pattern_depth == 3
    assert resolved(pattern("*.env"), cwd="file:///c").patterns == (b"/c/*.env",)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"cwd": "file:///C:/x"}, "cwd"),
        ({"workspaceRoots": ["file:///C:/x"]}, "workspace root"),
        ({"policyContext": {"cwd": "file:///C:/x"}}, "cwd"),
    ],
)
def test_other_kinds_of_machine(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(Unsuitable) as caught:
        resolved(**fields)
    assert (caught.value.part, caught.value.uri) == (part, "file:///C:/x")
    assert str(caught.value) == "'file:///C:/x' is invalid on 'linux'"


def test_an_entry_of_another_kind_of_machine() -> None:
    with pytest.raises(Unsuitable) as caught:
        resolved({"path": {"type": "path", "path": "file:///C:/x"}, "access": "read"})
    assert caught.value.part == "entry"
