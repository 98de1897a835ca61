"""Where an answer is written to: what has the name stays what it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from exec_server.cli.exec_output import write_answer


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "answer"
    path.write_text("an older one, and longer")
    path.chmod(0o640)
    write_answer(str(path), "é")
    assert path.read_text(encoding="utf-8") == "é"
    assert path.stat().st_mode & 0o777 == 0o640
    write_answer(str(path), None)
    assert path.read_bytes() == b""
    assert os.listdir(tmp_path) == ["answer"]


def test_a_new_file_is_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other").touch()
    write_answer("answer", "x")
    assert Path("answer").read_text() == "x"
    assert Path("answer").stat().st_mode == Path("other").stat().st_mode


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "new").symlink_to("later")
    write_answer(str(tmp_path / "link"), "x")
    write_answer(str(tmp_path / "new"), "y")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "x"
    assert (tmp_path / "later").read_text() == "y"


def test_a_fifo_is_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_answer(str(path), "x")
        assert os.read(reader, 100) == b"x"
    finally:
        os.close(reader)
    assert path.is_fifo()
    write_answer(str(path), "x")
    assert "could not be written" in capsys.readouterr().err, "nobody reads it"
    assert path.is_fifo()


def test_a_device_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "null"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")
    write_answer(str(path), "x")
    assert stat.S_ISCHR(path.stat().st_mode)
