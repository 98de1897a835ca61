"""Moving."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.files import move as module
from exec_server.local.files.move import move


def mv(source: Path, target: Path, overwrite: bool = False) -> None:
    assert move(os.fsencode(source), os.fsencode(target), overwrite) == {}


def number(*args: Any) -> int | None:
    with pytest.raises(OSError) as caught:
        mv(*args)
    return caught.value.errno


@pytest.fixture(params=["renameat2", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":

        def refuse(*_: object) -> None:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(module, "renameat2", refuse)


@pytest.mark.usefixtures("kernel")
def test_names_change(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    (tmp_path / "d" / "e").mkdir(parents=True)
    mv(tmp_path / "a", tmp_path / "c")
    assert number(tmp_path / "c", tmp_path / "b") == 17
    assert (tmp_path / "b").read_text() == "b"
    mv(tmp_path / "c", tmp_path / "b", True)
    assert (tmp_path / "b").read_text() == "a"
    mv(tmp_path / "d", tmp_path / "dd")
    assert (tmp_path / "dd" / "e").is_dir()
    assert number(tmp_path / "missing", tmp_path / "x") == 2
    assert number(tmp_path / "dd", tmp_path / "dd" / "e" / "f") == 22
    assert number(tmp_path / "b", tmp_path / "dd", True) == 21


def test_to_another_file_system(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other file system")
    target = elsewhere / f"exec-server-test-{os.getpid()}"
    source = tmp_path / "f"
    source.write_text("x")
    os.chmod(source, 0o640)
    os.utime(source, ns=(1_000_000_000, 2_000_000_000))
    try:
        mv(source, target)
        assert not source.exists()
        assert (target.read_text(), target.stat().st_mtime_ns, target.stat().st_mode & 0o777) == (
            "x",
            2_000_000_000,
            0o640,
        )
        source.write_text("y")
        assert number(source, target) == 17
        mv(source, target, True)
        assert target.read_text() == "y"
        (tmp_path / "link").symlink_to("nowhere")
        mv(tmp_path / "link", target, True)
        assert os.readlink(target) == "nowhere"
        (tmp_path / "d").mkdir()
        assert number(tmp_path / "d", elsewhere / "d-of-test") == 18
    finally:
        target.unlink(missing_ok=True)


def test_keeping_what_is_replaced(tmp_path: Path) -> None:
    """Mode, attributes and, where that may be given, owner of the file that had the name before."""
    for keep in (True, False):
        (tmp_path / "new").write_text("new")
        (tmp_path / "new").chmod(0o640)
        (tmp_path / "old").write_text("old")
        (tmp_path / "old").chmod(0o751)
        if os.getuid() == 0:
            os.chown(tmp_path / "old", 1234, 4321)
        before = (tmp_path / "old").stat()
        source, target = os.fsencode(tmp_path / "new"), os.fsencode(tmp_path / "old")
        assert move(source, target, True, keep_attributes=keep) == {}
        after = (tmp_path / "old").stat()
        assert (tmp_path / "old").read_text() == "new"
        kept = (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
        assert kept == keep
        assert os.listdir(tmp_path) == ["old"]


def test_there_may_be_nothing_to_keep(tmp_path: Path) -> None:
    """A name that is free, a link, a directory: then it is a rename as ever."""
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "d").mkdir()
    for name in ("free", "link"):
        (tmp_path / "new").write_text("new")
        move(os.fsencode(tmp_path / "new"), os.fsencode(tmp_path / name), True, keep_attributes=True)
        assert (tmp_path / name).read_text() == "new"
    (tmp_path / "source").mkdir()
    move(os.fsencode(tmp_path / "source"), os.fsencode(tmp_path / "d"), True, keep_attributes=True)
    assert sorted(os.listdir(tmp_path)) == ["d", "free", "link"]
