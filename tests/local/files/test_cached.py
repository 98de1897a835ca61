"""Answers from memory are the same as those from a thread, or none."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from exec_server.local.files import cached
from exec_server.local.files.cached import cached_metadata, cached_read_file, cached_read_range
from exec_server.local.files.content import MAX_BLOCK_BYTES, MAX_READ_BYTES
from exec_server.local.files.metadata import get_metadata
from exec_server.local.files.read import read_file, read_range
from exec_server.wire.binary import FilePart
from exec_server.wire.errors import RpcError
from support.wait import eventually

works = pytest.mark.skipif(cached._mounts.resolve() is None, reason="the root file system is not local")

ANYWHERE = cached.RESOLVE_CACHED | cached.RESOLVE_NO_MAGICLINKS


@works
@pytest.mark.parametrize("size", [0, 1, 1000, cached.SMALL_BYTES])
def test_small_files(tmp_path: Path, size: int) -> None:
    path = os.fsencode(tmp_path / "f")
    (tmp_path / "f").write_bytes(os.urandom(size))
    (tmp_path / "link").symlink_to("f")
    expected = bytes(read_file(path, True))
    for name in (path, os.fsencode(tmp_path / "link")):
        # The first to follow a new link writes its access time, which the kernel does not do in passing.
        assert bytes(read_file(name, True)) == expected
        # What was just written is in memory; a rename anywhere at the same time is in the way.
        found = eventually(lambda name=name: cached_read_file(name), "an answer")
        assert bytes(found) == expected
    for name in (path, os.fsencode(tmp_path)):
        assert eventually(lambda name=name: cached_metadata(name)) == get_metadata(name, True)


@works
@pytest.mark.parametrize("size", [0, 10, cached.SMALL_BYTES])
@pytest.mark.parametrize("binary", [True, False])
def test_parts_of_small_files(tmp_path: Path, size: int, binary: bool) -> None:
    path = os.fsencode(tmp_path / "f")
    (tmp_path / "f").write_bytes(os.urandom(size))
    lengths = [None, 0, 1, size // 2, size, size + 1]
    lengths += [MAX_BLOCK_BYTES, MAX_BLOCK_BYTES + 1, MAX_READ_BYTES, 2**62]
    for offset in (0, 1, size // 2, size, size + 1, 2**63 - 1, 2**63, 2**64 - 1):
        for length in lengths:
            expected = read_range(path, True, offset, length, binary)
            found = eventually(lambda at=(offset, length): cached_read_range(path, *at, binary))
            assert type(found) is type(expected)
            if isinstance(found, FilePart):
                assert found == expected
            else:
                assert bytes(found) == bytes(expected)


@works
def test_what_is_not_there(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "missing")
    assert not os.path.exists(path)
    for call in (cached_read_file, cached_metadata):
        with pytest.raises(RpcError) as caught:
            eventually(lambda call=call: call(path))
        assert (caught.value.code, caught.value.message) == (
            -32004,
            "No such file or directory (os error 2)",
        )


@works
def test_what_is_left_to_a_thread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(bytes(cached.SMALL_BYTES + 1))
    (tmp_path / "link").symlink_to("large")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("fifo", "large", "", "loop", "large/x"):
        assert cached_read_file(os.fsencode(tmp_path / name)) is None
        assert cached_read_range(os.fsencode(tmp_path / name), 0, 1, True) is None
    for name in ("link", "loop", "large/x"):
        assert cached_metadata(os.fsencode(tmp_path / name)) is None
    assert cached_read_file(b"/proc/self/status") is None
    assert cached_read_file(b"/dev/zero") is None


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    before = len(os.listdir("/proc/self/fd"))
    for name in ("f", ""):
        cached_read_file(os.fsencode(tmp_path / name))
        cached_metadata(os.fsencode(tmp_path / name))
    assert len(os.listdir("/proc/self/fd")) == before


TABLE = b"""22 1 254:0 / / rw,relatime - %b /dev/vda rw
23 22 0:20 / /proc rw,nosuid - proc proc rw
24 22 0:21 / /home/a\\040b rw shared:1 master:2 - %b source rw
"""


@pytest.mark.parametrize(
    ("root", "other", "flags"),
    [
        (b"ext4", b"tmpfs", ANYWHERE),
        (b"ext4", b"fuse.sshfs", ANYWHERE | cached.RESOLVE_NO_XDEV),
        (b"xfs", b"nfs4", ANYWHERE | cached.RESOLVE_NO_XDEV),
        (b"fuse.fuse-overlayfs", b"tmpfs", None),
        (b"nfs", b"proc", None),
    ],
)
def test_what_is_mounted_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: bytes, other: bytes, flags: int | None
) -> None:
    (tmp_path / "mountinfo").write_bytes(TABLE % (root, other))
    monkeypatch.setattr(cached, "_MOUNTS", str(tmp_path / "mountinfo"))
    mounts = cached._Mounts()
    assert mounts.resolve() == flags
    mounts.never()
    assert mounts.resolve() is None


def test_a_descriptor_that_is_missing_now_may_be_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mountinfo").write_bytes(TABLE % (b"ext4", b"tmpfs"))
    monkeypatch.setattr(cached, "_MOUNTS", str(tmp_path / "mountinfo"))
    now = 100.0
    monkeypatch.setattr(cached, "monotonic", lambda: now)
    mounts = cached._Mounts()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert mounts.resolve() is None
        now += 2 * cached.LOOK_SECONDS
        assert mounts.resolve() is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert mounts.resolve() is None, "it does not try with every call"
    now += 2 * cached.LOOK_SECONDS
    assert mounts.resolve() == ANYWHERE
    mounts.never()


def test_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "_MOUNTS", "/nonexistent")
    assert cached._Mounts().resolve() is None


def test_without_the_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(cached, "openat2", refuse)
    monkeypatch.setattr(cached, "_mounts", cached._Mounts())
    (tmp_path / "f").touch()
    assert cached_read_file(os.fsencode(tmp_path / "f")) is None
    assert cached._mounts.resolve() is None
