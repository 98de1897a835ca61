"""Plugins and skills below a root."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.files import discovery
from exec_server.local.files.discovery import basename_of, child_of, discover_root, discover_roots, parent_of
from exec_server.local.files.lane import Turn
from exec_server.wire.capabilities import CapabilityRoot, DiscoveredRoot
from exec_server.wire.errors import RpcError

MANIFEST = ".codex-plugin/plugin.json"


def put(root: Path, **files: str | bytes) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def found(root: Path) -> DiscoveredRoot:
    return discover_root(CapabilityRoot(id="r", path=root.as_uri()))


def test_uris() -> None:
    assert child_of("file:///", "a b/./c") == "file:///a%20b/c"
    assert child_of("file:///x/", "c:/d") == "file:///x/c:/d"
    assert parent_of("file:///a/b/") == "file:///a"
    assert parent_of("file:///a") == "file:///"
    assert parent_of("file:///") is None
    assert parent_of("file:///%00/bad/path/L3o6") is None
    assert basename_of("file:///a/b%20c/") == "b c"


def test_a_plugin(tmp_path: Path) -> None:
    manifest = json.dumps({"mcpServers": "./mcp.json", "apps": "./missing.json"})
    put(
        tmp_path,
        **{
            MANIFEST: manifest,
            ".claude-plugin/plugin.json": "{}",
            "mcp.json": "servers",
            "skills/one/SKILL.md": "1",
            "skills/one/agents/openai.yaml": "meta",
            "skills/two/SKILL.md": "2",
            "inner/.cursor-plugin/plugin.json": "inner",
            "skills/three/skill.md": "not one",
        },
    )
    result = found(tmp_path)
    base = tmp_path.as_uri()
    assert result.plugin is not None
    assert result.plugin.manifest.contents == manifest
    assert result.plugin.mcp_config is not None
    assert result.plugin.mcp_config.contents == "servers"
    assert result.plugin.apps_config is None
    assert [skill.instructions.path for skill in result.skills] == [
        f"{base}/skills/one/SKILL.md",
        f"{base}/skills/two/SKILL.md",
    ]
    assert [skill.metadata and skill.metadata.contents for skill in result.skills] == ["meta", None]
    assert [file.path for file in result.namespace_manifests] == [
        f"{base}/{MANIFEST}",
        f"{base}/inner/.cursor-plugin/plugin.json",
    ]
    assert (result.warnings, result.error) == ([], None)


def test_a_manifest_above(tmp_path: Path) -> None:
    put(tmp_path, **{MANIFEST: "{}", "a/b/SKILL.md": "x"})
    result = found(tmp_path / "a" / "b")
    assert result.plugin is None
    assert [file.path for file in result.namespace_manifests] == [f"{tmp_path.as_uri()}/{MANIFEST}"]


def test_what_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    assert found(tmp_path / "f").error == f"capability root {tmp_path.as_uri()}/f is not a directory"
    missing = tmp_path / "missing"
    assert found(missing).error == (
        f"failed to inspect capability root {missing.as_uri()}: No such file or directory (os error 2)"
    )
    foreign = discover_root(CapabilityRoot(id="r", path="file:///C:/x"))
    assert foreign.error == (
        "failed to inspect capability root file:///C:/x: 'file:///C:/x' is invalid on 'linux'"
    )


def test_a_root_that_somebody_else_has_to_look_at(tmp_path: Path) -> None:
    root = CapabilityRoot(id="r", path=tmp_path.as_uri())

    def refuse(root: CapabilityRoot, turn: Turn) -> None:
        raise RpcError(-32603, "no")

    (refused,) = discover_roots([root], refuse)["roots"]
    assert refused.error == f"failed to inspect capability root {tmp_path.as_uri()}: no"
    assert discover_roots([root], lambda *_: "seen")["roots"] == ["seen"]
    (own,) = discover_roots([root], lambda *_: None)["roots"]
    assert own.error is None


@pytest.mark.parametrize(
    ("declared", "warning"),
    [
        ("mcp.json", "path must start with `./`"),
        ("./", "path must remain below the capability root"),
        ("./a/../../b", "path must remain below the capability root"),
        ("./a\\..\\b", "path must remain below the capability root"),
        (".//etc/passwd", "path must remain below the capability root"),
    ],
)
def test_declared_paths_that_lead_out(tmp_path: Path, declared: str, warning: str) -> None:
    manifest = json.dumps({"mcpServers": declared, "apps": declared})
    put(tmp_path, **{MANIFEST: manifest, ".mcp.json": "by custom"})
    result = found(tmp_path)
    uri = f"{tmp_path.as_uri()}/{MANIFEST}"
    assert result.warnings == [
        f"ignoring mcpServers in {uri}: {warning}",
        f"ignoring apps in {uri}: {warning}",
    ]
    assert result.plugin is not None
    assert result.plugin.mcp_config is not None
    assert result.plugin.mcp_config.contents == "by custom"


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"\xffbad", "invalid utf-8 sequence of 1 bytes from index 0"),
        (b"ab\xe2\x82", "incomplete utf-8 byte sequence from index 2"),
        (b"\xf0\x90\x28", "invalid utf-8 sequence of 2 bytes from index 0"),
    ],
)
def test_what_is_not_text(tmp_path: Path, raw: bytes, problem: str) -> None:
    put(tmp_path, **{"SKILL.md": raw})
    result = found(tmp_path)
    assert result.skills == []
    assert result.warnings == [f"capability file {tmp_path.as_uri()}/SKILL.md is not UTF-8: {problem}"]


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MAX_FILE_BYTES", 10)
    monkeypatch.setattr(discovery, "MAX_BUNDLE_BYTES", 25)
    put(
        tmp_path,
        **{f"{name}/SKILL.md": "x" * size for name, size in zip("abcde", (10, 11, 10, 6, 5), strict=True)},
    )
    result = found(tmp_path)
    base = tmp_path.as_uri()
    assert [skill.instructions.path for skill in result.skills] == [
        f"{base}/{name}/SKILL.md" for name in "ace"
    ]
    assert result.warnings == [
        f"capability file {base}/b/SKILL.md exceeds the 10-byte limit",
        "capability root bundle exceeds the 25-byte limit",
    ]


def test_odd_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "SKILL.md")
    (tmp_path / MANIFEST).mkdir(parents=True)
    result = found(tmp_path)
    assert (result.skills, result.plugin, result.warnings) == ([], None, [])


@pytest.mark.parametrize("manifest", ["[]", "{", "null", '{"mcpServers": 5}'])
def test_manifests_that_declare_nothing(tmp_path: Path, manifest: str) -> None:
    put(tmp_path, **{MANIFEST: manifest, ".mcp.json": "by custom"})
    plugin: Any = found(tmp_path).plugin
    assert plugin.mcp_config.contents == "by custom"


def test_order(tmp_path: Path) -> None:
    roots = [CapabilityRoot(id=str(index), path=tmp_path.as_uri()) for index in range(5)]
    assert [root.id for root in discover_roots(roots)["roots"]] == ["0", "1", "2", "3", "4"]
