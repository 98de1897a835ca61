"""Copying files, links and trees."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.files.copy import copy
from exec_server.wire.errors import RpcError


def cp(source: Path, target: Path, recursive: bool = True) -> None:
    assert copy(os.fsencode(source), os.fsencode(target), recursive) == {}


def number(*args: Any) -> int | None:
    with pytest.raises(OSError) as caught:
        cp(*args)
    return caught.value.errno


def message(*args: Any) -> str:
    with pytest.raises(RpcError) as caught:
        cp(*args)
    assert caught.value.code == -32600
    return caught.value.message


def test_a_file(tmp_path: Path) -> None:
    data = os.urandom(100_000)
    (tmp_path / "f").write_bytes(data)
    os.chmod(tmp_path / "f", 0o751)
    (tmp_path / "old").write_text("longer than nothing")
    (tmp_path / "link").symlink_to("old")
    for target in ("new", "link"):
        cp(tmp_path / "f", tmp_path / target, recursive=False)
    for name in ("new", "old"):
        assert (tmp_path / name).read_bytes() == data
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o751
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "d").mkdir()
    assert number(tmp_path / "f", tmp_path / "d") == 21
    assert number(tmp_path / "f", tmp_path / "missing" / "x") == 2
    assert number(tmp_path / "missing", tmp_path / "x") == 2


def test_files_that_do_not_know_their_size(tmp_path: Path) -> None:
    cp(Path("/proc/version"), tmp_path / "v")
    assert (tmp_path / "v").read_bytes() == Path("/proc/version").read_bytes()


def test_onto_itself_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("precious")
    os.link(path, tmp_path / "hard")
    (tmp_path / "soft").symlink_to("f")
    for target in (path, tmp_path / "hard", tmp_path / "soft"):
        before = path.stat()
        cp(path, target)
        assert path.read_text() == "precious"
        assert path.stat() == before


def test_links_are_copied_as_links(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    cp(tmp_path / "dangling", tmp_path / "copy", recursive=False)
    assert os.readlink(tmp_path / "copy") == "nowhere"
    assert number(tmp_path / "dangling", tmp_path / "copy") == 17


def test_what_is_neither(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "f").touch()
    only = "fs/copy only supports regular files, directories, and symlinks"
    assert message(tmp_path / "fifo", tmp_path / "x") == only
    assert message(Path("/dev/null"), tmp_path / "x") == only
    assert number(tmp_path / "f", tmp_path / "fifo") == 6


def tree(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in path.rglob("*"):
        name = str(entry.relative_to(path))
        if entry.is_symlink():
            found[name] = "-> " + os.readlink(entry)
        else:
            found[name] = entry.read_bytes() if entry.is_file() else None
    return found


def test_a_tree(tmp_path: Path) -> None:
    source = tmp_path / "s"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "f").write_bytes(os.urandom(10))
    (source / "a" / "b" / "g").write_bytes(b"")
    (source / "link").symlink_to("a/f")
    os.mkfifo(source / "a" / "fifo")
    expected = {name: value for name, value in tree(source).items() if name != "a/fifo"}
    cp(source, tmp_path / "new" / "deep")
    assert tree(tmp_path / "new" / "deep") == expected
    merged = tmp_path / "m"
    (merged / "a").mkdir(parents=True)
    (merged / "a" / "f").write_text("replaced")
    (merged / "own").write_text("stays")
    cp(source, merged)
    assert tree(merged) == {**expected, "own": b"stays"}
    assert number(source, merged) == 17  # the link is there already
    assert message(source, tmp_path / "x", False) == (
        "fs/copy requires recursive: true when sourcePath is a directory"
    )
    (tmp_path / "file").touch()
    assert number(source, tmp_path / "file") == 17


def test_into_itself(tmp_path: Path) -> None:
    source = tmp_path / "s"
    (source / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to("s")
    for target in ("s", "s/sub", "s/new/deep", "link/x", "link"):
        assert message(source, tmp_path / target) == (
            "fs/copy cannot copy a directory to itself or one of its descendants"
        )
    assert tree(source) == {"sub": None}
    cp(source, tmp_path / "s2")
    assert (tmp_path / "s2" / "sub").is_dir()


def test_into_a_link_that_turns_back(tmp_path: Path) -> None:
    """A link through `file/..` leads nowhere, so it is no way into the source."""
    (tmp_path / "d").mkdir()
    (tmp_path / "f").touch()
    (tmp_path / "link").symlink_to("f/../d")
    assert number(tmp_path / "d", tmp_path / "link") == errno.EEXIST
