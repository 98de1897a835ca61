"""Listing and making directories."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.files import directory
from exec_server.local.files.directory import create_directory, read_directory
from exec_server.wire.errors import RpcError


def listed(path: Path) -> dict[str, tuple[bool, bool]]:
    entries = json.loads(bytes(read_directory(os.fsencode(path))))["entries"]
    return {entry["fileName"]: (entry["isDirectory"], entry["isFile"]) for entry in entries}


def number(call: Any, *args: Any) -> int | None:
    with pytest.raises(OSError) as caught:
        call(*args)
    return caught.value.errno


def test_one_level_of_everything(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "deeper").touch()
    (tmp_path / ".hidden").touch()
    (tmp_path / 'q"uo\\te\n').touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to file").symlink_to(".hidden")
    (tmp_path / "to dir").symlink_to("d")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")).touch()
    assert listed(tmp_path) == {
        "d": (True, False),
        ".hidden": (False, True),
        'q"uo\\te\n': (False, True),
        "fifo": (False, False),
        "to file": (False, True),
        "to dir": (True, False),
        "bad\ufffd": (False, True),
    }


def test_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    assert number(read_directory, os.fsencode(tmp_path / "f")) == 20
    assert number(read_directory, os.fsencode(tmp_path / "missing")) == 2


def test_too_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_ENTRIES", 10)
    for index in range(10):
        (tmp_path / str(index)).touch()
    assert len(listed(tmp_path)) == 10
    (tmp_path / "straw").touch()
    with pytest.raises(RpcError, match="fs/readDirectory returned 11 entries; limit is 10"):
        listed(tmp_path)


def make(path: Path, recursive: bool = True, follow: bool = True) -> None:
    assert create_directory(os.fsencode(path), recursive, follow) == {}


@pytest.mark.parametrize("follow", [True, False])
def test_making(tmp_path: Path, follow: bool) -> None:
    root = tmp_path.resolve()
    make(root / "a" / "b" / "c", follow=follow)
    make(root / "a" / "b" / "c", follow=follow)
    assert (root / "a" / "b" / "c").is_dir()
    assert number(make, root / "a", False, follow) == 17
    assert number(make, root / "x" / "y", False, follow) == 2
    make(root / "x", False, follow)
    make(Path("/"), follow=follow)
    (root / "f").touch()
    assert number(make, root / "f" / "g", True, follow) == 20


def test_making_where_links_are(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "d").mkdir()
    (root / "link").symlink_to("d")
    (root / "dangling").symlink_to("nowhere")
    make(root / "link")
    make(root / "link" / "sub")
    assert (root / "d" / "sub").is_dir()
    assert number(make, root / "dangling") == 17
    for name in ("link", "link/new", "dangling"):
        assert number(make, root / name, True, False) == 20
    assert sorted(os.listdir(root / "d")) == ["sub"]
    with pytest.raises(RpcError, match="directory already exists"):
        make(Path("/"), False, False)


def test_a_directory_that_vanishes_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was there when it was to be made, and is not when it is looked at: then it is made again."""
    (tmp_path / "d").mkdir()
    really_make = os.mkdir
    vanished = []

    def make(path: bytes) -> None:
        try:
            really_make(path)
        except FileExistsError:
            if not vanished:
                os.rmdir(path)
                vanished.append(path)
            raise

    monkeypatch.setattr(os, "mkdir", make)
    assert create_directory(os.fsencode(tmp_path / "d"), True, True) == {}
    assert vanished
    assert (tmp_path / "d").is_dir()
