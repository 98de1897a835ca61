"""Walking: order, limits, links, names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.files import walk as module
from exec_server.local.files.walk import walk
from exec_server.wire.errors import RpcError
from exec_server.wire.files import WalkOptions


def options(**more: Any) -> WalkOptions:
    settings = {
        "max_depth": 8,
        "max_directories": 100,
        "max_entries": 1000,
        "follow_directory_symlinks": False,
    }
    return WalkOptions(**{**settings, **more})


def walked(path: Path, **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(bytes(walk(os.fsencode(path), path.as_uri(), options(**more))))
    return result


def names(path: Path, **more: Any) -> list[str]:
    prefix = len(path.as_uri()) + 1
    return [
        entry["path"][prefix:] + "/" * (entry["kind"] == "directory")
        for entry in walked(path, **more)["entries"]
    ]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "t"
    (root / "b" / "deep" / "er").mkdir(parents=True)
    (root / ".hid").mkdir()
    for name in ("a", "z", "b/f", "b/deep/er/g", ".hid/inner"):
        (root / name).touch()
    (root / "to-b").symlink_to("b")
    (root / "to-a").symlink_to("a")
    (root / "dangling").symlink_to("nowhere")
    (root / "b" / "up").symlink_to("..")
    os.mkfifo(root / "fifo")
    return root


def test_breadth_first_and_sorted(tree: Path) -> None:
    assert names(tree) == [
        ".hid/",
        "a",
        "b/",
        "z",
        ".hid/inner",
        "b/deep/",
        "b/f",
        "b/deep/er/",
        "b/deep/er/g",
    ]


def test_limits(tree: Path) -> None:
    assert names(tree, max_depth=0) == [".hid/", "a", "b/", "z"]
    assert names(tree, prune_hidden_directories=True)[4:6] == ["b/deep/", "b/f"]
    assert walked(tree, max_entries=3) == {
        "entries": walked(tree)["entries"][:3],
        "errors": [],
        "truncated": True,
    }
    few = walked(tree, max_directories=2)
    assert few["truncated"]
    assert len(few["entries"]) == 5
    # Everything counts that is not a link to nowhere: three hidden and plain, two links, a FIFO.
    assert not walked(tree, max_depth=0, max_entries=7)["truncated"]
    assert walked(tree, max_depth=0, max_entries=6)["truncated"]


def test_each_directory_is_entered_once(tree: Path) -> None:
    found = names(tree, follow_directory_symlinks=True)
    assert "to-b/" in found
    assert "to-b/f" not in found
    assert "to-a" not in found
    assert "b/up/" in found
    assert not any(name.startswith("b/up/") and name != "b/up/" for name in found)


def test_roots(tree: Path) -> None:
    nothing = {"entries": [], "errors": [], "truncated": False}
    assert walked(tree / "a") == nothing
    assert walked(tree / "to-b") == nothing
    assert "file" in {
        entry["kind"] for entry in walked(tree / "to-b", follow_directory_symlinks=True)["entries"]
    }
    for name in ("missing", "dangling"):
        with pytest.raises(FileNotFoundError):
            walked(tree / name)
    below_root = json.loads(bytes(walk(b"/", "file:///", options(max_depth=0))))
    assert {"path": "file:///etc", "kind": "directory"} in below_root["entries"]


def test_names(tmp_path: Path) -> None:
    for name in ("sp ace", 'q"', "tab\t", "ü", "a:b", "c: d", "100%"):
        (tmp_path / name).touch()
    open(os.fsencode(tmp_path) + b"/bad\xff", "w").close()
    result = walked(tmp_path)
    base = tmp_path.as_uri() + "/"
    assert [entry["path"].removeprefix(base) for entry in result["entries"]] == [
        "100%25",
        "a:b",
        "c:%20d",
        "q%22",
        "sp%20ace",
        "tab%09",
        "%C3%BC",
    ]
    assert result["errors"] == [
        {"path": base + "bad%EF%BF%BD", "message": "No such file or directory (os error 2)"}
    ]


def test_children_of_a_path_without_a_spelling(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    opaque = "file:///%00/bad/path/L3o6"
    result = json.loads(bytes(walk(os.fsencode(tmp_path), opaque, options())))
    assert result["errors"] == [{"path": opaque, "message": f"'{opaque}' is invalid on 'linux'"}]


def test_the_answer_has_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(10):
        (tmp_path / f"f{index}").touch()
    each = 64 + len(tmp_path.as_uri()) + 3
    for budget, count in ((each * 10, 10), (each * 10 - 1, 9), (each, 1), (0, 0)):
        monkeypatch.setattr(module, "RESPONSE_BUDGET", budget)
        result = walked(tmp_path)
        assert (len(result["entries"]), result["truncated"]) == (count, count < 10)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_entries": 0}, "filesystem walk limits must be greater than zero"),
        ({"max_directories": 0, "max_depth": 99}, "filesystem walk limits must be greater than zero"),
        (
            {"max_depth": 65},
            "filesystem walk limits exceed maximums: depth=64, directories=10000, entries=50000",
        ),
    ],
)
def test_impossible_limits(tmp_path: Path, more: dict[str, int], message: str) -> None:
    with pytest.raises(RpcError) as caught:
        walked(tmp_path, **more)
    assert (caught.value.code, caught.value.message) == (-32600, message)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_directories_are_reported(tree: Path) -> None:
    os.chmod(tree / "b", 0)
    result = walked(tree)
    os.chmod(tree / "b", 0o755)
    assert result["errors"] == [{"path": (tree / "b").as_uri(), "message": "Permission denied (os error 13)"}]
