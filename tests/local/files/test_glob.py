"""Finding paths by pattern."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.files.glob import glob
from exec_server.wire.errors import RpcError
from exec_server.wire.files import GlobParams


def found(root: Path, pattern: str, **more: Any) -> list[str]:
    result: Any = glob(os.fsencode(root), GlobParams(path=root.as_uri(), pattern=pattern, **more))
    assert not result["truncated"]
    return [path.removeprefix(root.as_uri() + "/") for path in result["paths"]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a.py", "src/b.py", "src/deep/c.py", "src/deep/d.txt", ".git/e.py", "src/.h.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("src")
    (tmp_path / "src" / "up").symlink_to("..")
    return tmp_path


def test_files(root: Path) -> None:
    assert found(root, "**/*.py") == ["a.py", "src/b.py", "src/deep/c.py"]
    assert found(root, "*.py") == ["a.py"]
    assert found(root, "src/*.{py,txt}") == ["src/b.py"]
    assert found(root, "**/*.py", hidden=True) == [
        ".git/e.py",
        "a.py",
        "src/.h.py",
        "src/b.py",
        "src/deep/c.py",
    ]
    assert found(root, ".git/*") == [".git/e.py"]
    assert found(root, "*.nothing") == []


def test_kinds_and_links(root: Path) -> None:
    assert found(root, "*", kind="directory") == ["link", "src"]
    assert found(root, "s*/d*", kind="any") == ["src/deep"]
    assert found(root, "link/*.py") == []
    assert found(root, "link/*.py", follow_symlinks=True) == ["link/b.py"]
    assert found(root, "*/") == ["link", "src"]
    assert found(root, "**/", kind="any") == ["link", "src", "src/deep", "src/up"]


def test_links_are_followed_until_they_come_back(root: Path) -> None:
    """Every way to a directory counts, but for those that go through it twice."""
    assert found(root, "**/c.py", follow_symlinks=True) == ["link/deep/c.py", "src/deep/c.py"]
    (root / "other").mkdir()
    (root / "other" / "to").symlink_to("../src")
    (root / "src" / "back").symlink_to("../other")
    assert found(root, "**/b.py", follow_symlinks=True) == [
        "link/b.py",
        "other/to/b.py",
        "src/b.py",
    ]


def test_limits(root: Path) -> None:
    result: Any = glob(os.fsencode(root), GlobParams(path=root.as_uri(), pattern="**/*.py", max_results=2))
    assert len(result["paths"]) == 2
    assert result["truncated"]
    for most in (0, 50_001):
        with pytest.raises(RpcError, match="maxResults must be between 1 and 50000"):
            found(root, "*", max_results=most)
    with pytest.raises(RpcError, match=r"invalid glob pattern `\.\./x`"):
        found(root, "../x")
    with pytest.raises(NotADirectoryError):
        found(root / "a.py", "*")
