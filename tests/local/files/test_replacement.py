"""Streams that replace a file whole when they are closed."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from exec_server.local.files import replacement, write
from exec_server.local.files.handles import MAX_HANDLES
from exec_server.local.files.paths import real_path
from exec_server.local.files.replacement import ReplacingHandles
from exec_server.local.files.write import PINS, write_file
from exec_server.wire.errors import RpcError
from support.rpc import b64

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(params=["unnamed", "named"], autouse=True)
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without files that have no name."""
    if request.param == "named":
        monkeypatch.setattr(write, "_UNNAMED", 0)


@pytest.fixture
def handles() -> Iterator[ReplacingHandles]:
    """Of a connection that ends with the test, and leaves no descriptor open."""
    before = set(os.listdir("/proc/self/fd"))
    handles = ReplacingHandles()
    yield handles
    handles.end()
    assert set(os.listdir("/proc/self/fd")) == before


def stream(handles: ReplacingHandles, path: Path, *blocks: bytes) -> None:
    """Open and write; not closed."""
    handles.open_atomic("h", os.fsencode(path))
    offset = 0
    for block in blocks:
        handles.write("h", offset, b64(block))
        offset += len(block)


def close(handles: ReplacingHandles, discard: bool = False) -> None:
    assert handles.finish("h", discard) == {}


def test_the_old_content_stays_until_the_end(handles: ReplacingHandles, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    stream(handles, path, b"new ", b"content")
    assert path.read_text() == "old"
    close(handles)
    assert path.read_text() == "new content"
    assert os.listdir(tmp_path) == ["f"]


def test_a_new_file_appears_whole(handles: ReplacingHandles, tmp_path: Path) -> None:
    stream(handles, tmp_path / "f", b"new")
    assert not (tmp_path / "f").exists()
    close(handles)
    assert (tmp_path / "f").read_text() == "new"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o666 & ~mask


def test_blocks_at_any_offset(handles: ReplacingHandles, tmp_path: Path) -> None:
    handles.open_atomic("h", os.fsencode(tmp_path / "f"))
    for offset, data in ((6, b"world"), (0, b"HELLO"), (0, b"hello")):
        handles.write("h", offset, b64(data))
    close(handles)
    assert (tmp_path / "f").read_bytes() == b"hello\0world"


@pytest.mark.parametrize("how", ["discarded", "connection ended"])
def test_what_is_not_finished_never_was(tmp_path: Path, how: str) -> None:
    handles = ReplacingHandles()
    (tmp_path / "f").write_text("old")
    for name in ("f", "new"):
        stream(handles, tmp_path / name, b"x" * 10_000)
        if how == "discarded":
            close(handles, discard=True)
        else:
            handles.end()
            handles = ReplacingHandles()
    assert os.listdir(tmp_path) == ["f"]
    assert (tmp_path / "f").read_text() == "old"
    handles.end()


def test_a_link_stays_and_what_it_leads_to_is_replaced(handles: ReplacingHandles, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("old")
    (tmp_path / "link").symlink_to("d/f")
    stream(handles, tmp_path / "link", b"new")
    close(handles)
    assert os.readlink(tmp_path / "link") == "d/f"
    assert (tmp_path / "d" / "f").read_text() == "new"
    assert os.listdir(tmp_path / "d") == ["f"]


def test_a_link_to_nowhere_gets_its_file(handles: ReplacingHandles, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("f")
    stream(handles, tmp_path / "link", b"new")
    close(handles)
    assert (tmp_path / "f").read_text() == "new"
    assert (tmp_path / "link").is_symlink()


def test_mode_and_attributes_are_kept(handles: ReplacingHandles, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    path.chmod(0o751)
    try:
        os.setxattr(path, "user.note", b"kept")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    stream(handles, path, b"new")
    close(handles)
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert os.getxattr(path, "user.note") == b"kept"


@needs_root
def test_the_owner_is_kept(handles: ReplacingHandles, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    os.chown(path, 1234, 4321)
    stream(handles, path, b"new")
    close(handles)
    assert (path.stat().st_uid, path.stat().st_gid, path.read_text()) == (1234, 4321, "new")


def test_files_with_two_names_are_written_in_place(handles: ReplacingHandles, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a long old content")
    os.link(tmp_path / "f", tmp_path / "g")
    stream(handles, tmp_path / "f", b"new")
    close(handles)
    assert (tmp_path / "g").read_text() == "new"
    assert os.path.samefile(tmp_path / "f", tmp_path / "g")


def test_a_file_that_another_stream_writes_to(handles: ReplacingHandles, tmp_path: Path) -> None:
    """It stays the same file, as the other stream expects."""
    path = tmp_path / "f"
    handles.open("other", os.fsencode(path), "replace")
    handles.write("other", 0, b64(b"other"))
    stream(handles, path, b"new")
    close(handles)
    handles.write("other", 5, b64(b"!"))
    handles.finish("other", False)
    assert path.read_bytes() == b"new\0\0!"
    assert not PINS._counts


def test_the_last_one_to_close_has_it(handles: ReplacingHandles, tmp_path: Path) -> None:
    path = tmp_path / "f"
    stream(handles, path, b"first")
    handles.open_atomic("second", os.fsencode(path))
    handles.write("second", 0, b64(b"second"))
    write_file(os.fsencode(path), b64(b"meanwhile"), True)
    handles.finish("second", False)
    assert path.read_text() == "second"
    close(handles)
    assert path.read_text() == "first"


def test_a_file_that_is_replaced_between_two_looks(
    handles: ReplacingHandles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel calls the old one `f (deleted)` then, and nothing of that name may come of it."""
    path = tmp_path / "f"
    path.write_text("old")
    looked = []

    def look(descriptor: int) -> bytes | None:
        if not looked:
            (tmp_path / "other").write_text("other")
            os.rename(tmp_path / "other", path)
        looked.append(real_path(descriptor))
        return looked[-1]

    monkeypatch.setattr(replacement, "real_path", look)
    stream(handles, path, b"new")
    close(handles)
    assert looked[0] == os.fsencode(f"{path.resolve()} (deleted)")
    assert (os.listdir(tmp_path), path.read_text()) == (["f"], "new")


def test_a_parent_that_vanishes(handles: ReplacingHandles, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    stream(handles, tmp_path / "d" / "f", b"new")
    for left in (tmp_path / "d").iterdir():
        left.unlink()
    (tmp_path / "d").rmdir()
    with pytest.raises(FileNotFoundError):
        close(handles)
    assert not len(handles)


def test_a_directory_that_takes_the_name_meanwhile(handles: ReplacingHandles, tmp_path: Path) -> None:
    stream(handles, tmp_path / "f", b"new")
    (tmp_path / "f").mkdir()
    with pytest.raises(IsADirectoryError):
        close(handles)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@needs_root
def test_a_mount_point_is_written_in_place(handles: ReplacingHandles, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("inside")
    (tmp_path / "g").write_text("mounted")
    subprocess.run(["mount", "--bind", tmp_path / "g", tmp_path / "f"], check=True)
    try:
        stream(handles, tmp_path / "f", b"new")
        close(handles)
    finally:
        subprocess.run(["umount", tmp_path / "f"], check=True)
    assert ((tmp_path / "f").read_text(), (tmp_path / "g").read_text()) == ("inside", "new")


def test_refusals(handles: ReplacingHandles, tmp_path: Path) -> None:
    """The same as for any stream, in the same order."""
    with pytest.raises(IsADirectoryError):
        stream(handles, tmp_path)
    with pytest.raises(FileNotFoundError):
        stream(handles, tmp_path / "none" / "f")
    with pytest.raises(RpcError, match="is not a file"):
        stream(handles, Path("/dev/null"))
    with pytest.raises(RpcError, match="must not exceed 32 bytes"):
        handles.open_atomic("x" * 33, b"/none/none")
    stream(handles, tmp_path / "f")
    with pytest.raises(RpcError, match="already exists"):
        handles.open_atomic("h", b"/none/none")
    for number in range(MAX_HANDLES - 1):
        handles.open_atomic(str(number), os.fsencode(tmp_path / "f"))
    with pytest.raises(RpcError, match="at most 128"):
        handles.open_atomic("one more", b"/none/none")
