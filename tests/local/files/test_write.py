"""Writing: the whole new content or the whole old one, in the same place, looking the same."""

from __future__ import annotations

import base64
import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.files import content, paths, write
from exec_server.local.files.lane import Abandoned, Turn
from exec_server.local.files.write import PINS, TEMPORARY_PREFIX, replace_file, write_all, write_file
from exec_server.wire.errors import RpcError
from support.wait import eventually

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def put(path: Path, data: bytes, follow: bool = True) -> None:
    assert write_file(os.fsencode(path), base64.b64encode(data).decode(), follow) == {}


def number(*args: Any) -> int | None:
    with pytest.raises(OSError) as caught:
        put(*args)
    return caught.value.errno


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A directory without links above it, in which no temporary file may be left."""
    yield tmp_path.resolve()
    left = [name for name in os.listdir(os.fsencode(tmp_path)) if name.startswith(TEMPORARY_PREFIX)]
    assert not left


@pytest.fixture(params=["unnamed", "named"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without files that have no name."""
    if request.param == "named":
        monkeypatch.setattr(write, "_UNNAMED", 0)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize("size", [0, 1, 1000, content.PIECE_BYTES, content.PIECE_BYTES * 2 + 5])
def test_new_and_old(root: Path, follow: bool, size: int) -> None:
    data = os.urandom(size)
    put(root / "f", data, follow)
    assert (root / "f").read_bytes() == data
    os.chmod(root / "f", 0o4751)
    put(root / "f", data[::-1], follow)
    assert (root / "f").read_bytes() == data[::-1]
    assert stat.S_IMODE((root / "f").stat().st_mode) == (0o4751 if os.geteuid() == 0 else 0o751)


def test_new_files_obey_the_umask(root: Path) -> None:
    old = os.umask(0o027)
    try:
        put(root / "f", b"x")
        put(root / "g", b"x", follow=False)
    finally:
        os.umask(old)
    assert [stat.S_IMODE((root / name).stat().st_mode) for name in "fg"] == [0o640, 0o640]


@pytest.mark.usefixtures("either_way")
def test_links(root: Path) -> None:
    (root / "d").mkdir()
    (root / "f").write_text("old")
    (root / "link").symlink_to("f")
    (root / "dangling").symlink_to("d/new")
    (root / "chain").symlink_to("dangling")
    (root / "nowhere").symlink_to("missing/new")
    put(root / "link", b"through")
    assert (root / "link").is_symlink()
    assert (root / "f").read_bytes() == b"through"
    put(root / "chain", b"made")
    assert (root / "chain").is_symlink()
    assert (root / "d" / "new").read_bytes() == b"made"
    assert number(root / "nowhere", b"x") == errno.ENOENT
    assert number(root / "link", b"x", False) == errno.ELOOP
    assert (root / "f").read_bytes() == b"through"


def test_links_that_turn_back(root: Path) -> None:
    """What the kernel would not create is not created: `..` needs a directory before it."""
    (root / "link").symlink_to("missing/../new")
    assert number(root / "link", b"x") == errno.ENOENT
    assert os.listdir(root) == ["link"]


def test_links_end_where_the_kernel_says(root: Path) -> None:
    (root / "d" / "e").mkdir(parents=True)
    (root / "to-d").symlink_to("d/e")
    for target, where in (
        ("to-d/../new", "d/new"),
        (f"{root}/to-d/new", "d/e/new"),
        ("to-d/second", "d/e/new"),
    ):
        (root / "d" / "e" / "second").unlink(missing_ok=True)
        (root / "d" / "e" / "second").symlink_to("../../d/e/new")
        (root / "link").unlink(missing_ok=True)
        (root / "link").symlink_to(target)
        put(root / "link", b"x")
        assert (root / where).read_bytes() == b"x"
        (root / where).unlink()
    for target, code in (("d/new/", errno.EISDIR), ("missing/..", errno.ENOENT), ("link", errno.ELOOP)):
        (root / "link").unlink()
        (root / "link").symlink_to(target)
        assert number(root / "link", b"x") == code


def test_refusals(root: Path) -> None:
    (root / "d").mkdir()
    (root / "f").touch()
    os.mkfifo(root / "fifo")
    for follow in (True, False):
        assert number(root / "d", b"x", follow) == errno.EISDIR
        assert number(root / "missing" / "f", b"x", follow) == errno.ENOENT
        assert number(root / "f" / "g", b"x", follow) == errno.ENOTDIR
        assert number(root / "fifo", b"x", follow) == errno.ENXIO
    with pytest.raises(RpcError, match="path is not a regular file"):
        put(Path("/dev/null"), b"x", follow=False)
    put(Path("/dev/null"), b"x")
    assert number(Path("/dev/full"), b"x") == errno.ENOSPC


def test_base64_is_looked_at_first(root: Path) -> None:
    (root / "d").mkdir()
    for text in ("!", "A" * content.PIECE_TEXT * 2 + "!", "A" * (content.PIECE_TEXT - 1) + "=" + "AAAA"):
        with pytest.raises(RpcError) as caught:
            write_file(os.fsencode(root / "d"), text, True)
        assert caught.value.message.startswith(
            "fs/writeFile requires valid base64 dataBase64: Invalid symbol"
        )


def test_hard_links_stay_together(root: Path) -> None:
    (root / "f").write_text("old content that is long")
    os.link(root / "f", root / "g")
    put(root / "f", b"new")
    assert (root / "g").read_bytes() == b"new"
    assert (root / "f").stat().st_ino == (root / "g").stat().st_ino


def test_a_file_that_a_stream_writes_to_stays_the_same_file(root: Path) -> None:
    (root / "f").write_text("old")
    info = (root / "f").stat()
    PINS.add(info)
    put(root / "f", b"new")
    PINS.remove(info)
    assert (root / "f").stat().st_ino == info.st_ino
    put(root / "f", b"newer")
    assert (root / "f").stat().st_ino != info.st_ino
    assert (root / "f").read_bytes() == b"newer"


def test_readers_see_one_content_or_the_other(root: Path) -> None:
    path, stop = root / "f", threading.Event()
    versions = [bytes([65 + index]) * 300_000 for index in range(4)]
    put(path, versions[0])
    torn = []

    def look() -> None:
        while not stop.is_set():
            data = path.read_bytes()
            if data not in versions:
                torn.append(len(data))

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    for index in range(100):
        put(path, versions[index % 4])
    stop.set()
    for reader in readers:
        reader.join()
    assert torn == []


def test_a_file_that_is_replaced_between_two_looks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever still reads the one that was replaced reads its content to the end."""
    path = root / "f"
    path.write_text("old")
    looked = []

    def look(descriptor: int) -> bytes | None:
        if not looked:
            (root / "other").write_text("other")
            os.rename(root / "other", path)
        looked.append(paths.real_path(descriptor))
        return looked[-1]

    monkeypatch.setattr(write, "real_path", look)
    with path.open() as reader:
        put(path, b"new")
        assert reader.read() == "old"
    assert path.read_text() == "new"


@pytest.mark.usefixtures("either_way")
def test_a_hundred_writers_and_the_last_one_is_whole(root: Path) -> None:
    versions = [bytes([index]) * (200_000 + index) for index in range(100)]
    writers = [threading.Thread(target=put, args=(root / "f", data)) for data in versions]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (root / "f").read_bytes() in versions


@needs_root
def test_owner_and_attributes_are_kept(root: Path) -> None:
    path = root / "f"
    path.write_text("old")
    os.chown(path, 1234, 4321)
    os.chmod(path, 0o640)
    try:
        os.setxattr(path, "user.note", b"kept")
    except OSError:
        pytest.skip("no extended attributes here")
    before = path.stat()
    put(path, b"new")
    after = path.stat()
    assert after.st_ino != before.st_ino
    assert (after.st_uid, after.st_gid, after.st_mode) == (1234, 4321, before.st_mode)
    assert os.getxattr(path, "user.note") == b"kept"


@needs_root
def test_by_somebody_who_may_write_the_file_but_not_the_directory(tmp_path: Path) -> None:
    shared = Path("/var/tmp") / f"exec-server-test-{os.getpid()}"
    shared.mkdir(mode=0o755)
    try:
        (shared / "f").write_text("old")
        os.chmod(shared / "f", 0o666)
        (shared / "locked").write_text("old")
        done = _as_nobody(shared)
        assert done.stdout.split() == ["written", "13", "13"], done
        assert (shared / "f").read_text() == "new"
        assert os.listdir(shared) == ["f", "locked"] or sorted(os.listdir(shared)) == ["f", "locked"]
    finally:
        subprocess.run(["rm", "-rf", shared], check=True)


def _as_nobody(shared: Path) -> subprocess.CompletedProcess[str]:
    script = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from exec_server.local.files.write import write_file
os.setgroups([]); os.setgid(65534); os.setuid(65534)
write_file(b"{shared}/f", "bmV3", True)
print("written")
for name in (b"locked", b"new"):
    try:
        write_file(b"{shared}/" + name, "bmV3", True)
    except OSError as error:
        print(error.errno)
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        # To root, where runs count, not being able to is a failure: nothing else proves what happens then.
        (pytest.fail if os.getuid() == 0 else pytest.skip)(f"cannot mount: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("links", [1, 2])
@pytest.mark.parametrize("follow", [True, False])
def test_a_full_disk_leaves_the_old_content(small_disk: Path, links: int, follow: bool) -> None:
    path = small_disk.resolve() / "f"
    path.write_bytes(b"old" * 1000)
    if links == 2:
        os.link(path, small_disk / "g")
    assert number(path, os.urandom(2_000_000), follow) == errno.ENOSPC
    assert path.read_bytes() == b"old" * 1000
    assert number(small_disk.resolve() / "new", os.urandom(2_000_000), follow) == errno.ENOSPC
    assert sorted(os.listdir(small_disk)) == ["f", "g"][:links]
    put(path, b"fits", follow)
    assert path.read_bytes() == b"fits"


def test_a_directory_that_vanishes_on_the_way(root: Path) -> None:
    class Removing(Turn):
        def leave(self, *real_paths: bytes | None) -> None:
            (root / "d").rmdir()

    (root / "d").mkdir()
    data = base64.b64encode(bytes(content.LARGE_BYTES)).decode()
    with pytest.raises(OSError) as caught:
        write_file(os.fsencode(root / "d" / "f"), data, True, Removing())
    assert caught.value.errno == errno.ENOENT


def test_killed_in_the_middle(root: Path) -> None:
    """A process that dies while it writes leaves the old content and nothing else."""
    path = root / "f"
    path.write_bytes(b"old")
    script = f"""
import os, sys, time
sys.path[:0] = {sys.path!r}
from exec_server.local.files.write import replace_file
def fill(descriptor):
    os.write(descriptor, b"n" * 1000)
    print("half way", flush=True)
    time.sleep(60)
replace_file({os.fsencode(path)!r}, fill, 2000)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"half way\n"
    child.kill()
    child.wait()
    child.stdout.close()
    assert path.read_bytes() == b"old"
    assert os.listdir(root) == ["f"]


@needs_root
def test_a_mount_point_is_written_in_place(root: Path) -> None:
    (root / "f").write_text("inside")
    (root / "g").write_text("mounted")
    subprocess.run(["mount", "--bind", root / "g", root / "f"], check=True)
    try:
        put(root / "f", b"new")
    finally:
        subprocess.run(["umount", root / "f"], check=True)
    assert ((root / "f").read_text(), (root / "g").read_text()) == ("inside", "new")


def test_a_fifo_with_a_slow_reader_gets_everything(root: Path) -> None:
    os.mkfifo(root / "fifo")
    reader = os.open(root / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    data = os.urandom(300_000)
    writer = threading.Thread(target=put, args=(root / "fifo", data))
    writer.start()
    received = b""
    deadline = time.monotonic() + 20
    while len(received) < len(data) and time.monotonic() < deadline:
        try:
            received += os.read(reader, 65536)
        except BlockingIOError:
            time.sleep(0.001)
    writer.join()
    os.close(reader)
    assert received == data


def test_a_fifo_that_is_not_read_is_given_up_with_the_answer(root: Path) -> None:
    class Gone(Turn):
        def check(self) -> None:
            raise Abandoned

    os.mkfifo(root / "fifo")
    reader = os.open(root / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    descriptor = os.open(root / "fifo", write.WRITE)
    with pytest.raises(Abandoned):
        write_all(descriptor, bytes(1_000_000), Gone())
    os.close(descriptor)
    os.close(reader)


def test_a_failed_fill_leaves_nothing(root: Path) -> None:
    def fail(descriptor: int) -> None:
        os.write(descriptor, b"half")
        raise Abandoned

    (root / "f").write_text("old")
    for name in ("f", "new"):
        with pytest.raises(Abandoned):
            replace_file(os.fsencode(root / name), fail, 10)
    assert os.listdir(root) == ["f"]
    assert (root / "f").read_text() == "old"


def test_no_descriptor_is_left_open(root: Path) -> None:
    eventually(lambda: True)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        put(root / "f", b"x")
        number(root / "missing" / "f", b"x")
        put(root / "f", b"x", follow=False)
    assert len(os.listdir("/proc/self/fd")) == len(before)
