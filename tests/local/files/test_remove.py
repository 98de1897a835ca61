"""Removing: no more than was asked for, however deep, whoever interferes."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.files.lane import Abandoned, Turn
from exec_server.local.files.remove import remove
from exec_server.wire.errors import RpcError


def rm(path: Path, recursive: bool = True, force: bool = True, follow: bool = True) -> None:
    assert remove(os.fsencode(path), recursive, force, follow) == {}


def number(*args: Any) -> int | None:
    with pytest.raises(OSError) as caught:
        rm(*args)
    return caught.value.errno


def test_a_tree(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    tree = tmp_path / "tree"
    for index in range(30):
        (tree / f"d{index}" / "e" / "f").mkdir(parents=True)
        (tree / f"d{index}" / "file").touch()
        (tree / f"d{index}" / "link").symlink_to(outside)
    os.mkfifo(tree / "fifo")
    rm(tree)
    assert os.listdir(tmp_path) == ["outside"]
    assert (outside / "kept").exists()


def test_deeper_than_a_path_can_say(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    os.mkdir("top", dir_fd=descriptor)
    for _ in range(1500):
        below = os.open("top", os.O_RDONLY, dir_fd=descriptor)
        os.mkdir("top", dir_fd=below)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    rm(tmp_path / "top")
    assert os.listdir(tmp_path) == []


def test_one_entry(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "d").mkdir()
    (root / "d" / "f").touch()
    (root / "link").symlink_to("d")
    assert number(root / "d", False) == 39
    rm(root / "link")
    assert (root / "d" / "f").exists()
    rm(root / "d" / "f", False, True, False)
    rm(root / "d", False, True, False)
    assert os.listdir(root) == []


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    rm(tmp_path / "missing")
    rm(tmp_path / "missing" / "deeper")
    assert number(tmp_path / "missing", True, False) == 2
    assert number(tmp_path / "f" / "x") == 20


def test_without_following(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "f").touch()
    (root / "link").symlink_to("f")
    with pytest.raises(RpcError, match="recursive no-follow removal is unsupported"):
        rm(root / "f", True, True, False)
    with pytest.raises(RpcError, match="path contains a symbolic link"):
        rm(root / "link", False, True, False)
    assert sorted(os.listdir(root)) == ["f", "link"]


def test_the_root_is_not_removed() -> None:
    assert number(Path("/")) == 16


def test_it_stops_when_nobody_waits(tmp_path: Path) -> None:
    class Gone(Turn):
        def check(self) -> None:
            raise Abandoned

    (tmp_path / "d").mkdir()
    with pytest.raises(Abandoned):
        remove(os.fsencode(tmp_path / "d"), True, True, True, Gone())
    assert (tmp_path / "d").exists()


def test_a_directory_exchanged_for_a_link_saves_what_it_leads_to(tmp_path: Path) -> None:
    """The classic: while a tree is removed, its directories are flipped to links to something dear."""
    dear = tmp_path / "dear"
    dear.mkdir()
    names = [f"keep{index}" for index in range(20)]
    for name in names:
        (dear / name).touch()
    for round_ in range(60):
        tree, stop = tmp_path / f"tree{round_}", threading.Event()
        for index in range(10):
            (tree / f"d{index}" / "e").mkdir(parents=True)

        def flip(tree: Path = tree, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                for index in range(10):
                    try:
                        os.rename(tree / f"d{index}", tree / "moved")
                        os.symlink(dear, tree / f"d{index}")
                        os.unlink(tree / f"d{index}")
                        os.rename(tree / "moved", tree / f"d{index}")
                    except OSError:
                        pass

        thread = threading.Thread(target=flip)
        thread.start()
        try:
            rm(tree)
        except OSError:
            pass
        stop.set()
        thread.join()
    assert sorted(os.listdir(dear)) == sorted(names)


def test_someone_else_removes_too(tmp_path: Path) -> None:
    for _ in range(20):
        for index in range(20):
            (tmp_path / "t" / f"{index}" / "x").mkdir(parents=True)
        helper = threading.Thread(target=lambda: subprocess.run(["rm", "-rf", tmp_path / "t"], check=False))
        helper.start()
        try:
            rm(tmp_path / "t")
        except OSError:
            pass  # gone under our hands
        helper.join()
        subprocess.run(["rm", "-rf", tmp_path / "t"], check=True)
        assert not (tmp_path / "t").exists()
