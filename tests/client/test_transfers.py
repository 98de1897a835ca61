"""What transfers do to what is in their way: devices, links, other people's files, other transfers."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Awaitable
from pathlib import Path

import pytest

import exec_server
from exec_server import Client
from exec_server.client.errors import TransferFailed
from exec_server.client.transfers import LEADS_NOWHERE, PART_BYTES
from exec_server.services import Files
from support.client import down_part, drive_files, up_part

LARGE = PART_BYTES + 1_000_000
SIZES = (10, LARGE)


def source_of(place: Path, size: int) -> bytes:
    data = os.urandom(size)
    (place / "source").write_bytes(data)
    return data


async def bring(files: Files, place: Path, way: str, target: str) -> exec_server.services.Transferred:
    move = files.upload if way == "up" else files.download
    return await move(f"{place}/source", f"{place}/{target}")


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("size", SIZES)
def test_a_fifo_stays_one_and_gets_the_content(place: Path, way: str, size: int) -> None:
    data = source_of(place, size)
    os.mkfifo(place / "fifo")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append((place / "fifo").read_bytes()), daemon=True)
    reader.start()
    drive_files(None, lambda _client, files: _fifo(files, place, way))
    reader.join(20)
    assert got == [data]
    assert stat.S_ISFIFO((place / "fifo").stat().st_mode)
    assert sorted(os.listdir(place)) == ["fifo", "source"]


async def _fifo(files: Files, place: Path, way: str) -> None:
    # Uploads of little say ENXIO where nobody reads yet; the reader above is about to.
    for _ in range(200):
        try:
            await bring(files, place, way, "fifo")
        except OSError as error:
            if "os error 6" not in str(error):
                raise
            await asyncio.sleep(0.05)
        else:
            return
    raise AssertionError("nobody read the FIFO")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("size", SIZES)
def test_a_device_stays_one(place: Path, way: str, size: int) -> None:
    source_of(place, size)
    try:
        os.mknod(place / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        (place / "null").write_bytes(b"x")
    except PermissionError:
        pytest.skip("no devices here")

    async def scenario(_client: Client, files: Files) -> None:
        await bring(files, place, way, "null")
        assert stat.S_ISCHR((place / "null").lstat().st_mode)
        assert sorted(os.listdir(place)) == ["null", "source"]

    drive_files(None, scenario)


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("size", SIZES)
def test_links_and_names_stay(place: Path, way: str, size: int) -> None:
    data = source_of(place, size)
    (place / "file").write_bytes(b"old")
    (place / "file").chmod(0o640)
    if os.geteuid() == 0:
        os.chown(place / "file", 12345, 12346)
    (place / "link").symlink_to("file")
    (place / "one").write_bytes(b"old")
    os.link(place / "one", place / "other")
    (place / "nowhere").symlink_to("made")
    before = (place / "file").stat()

    async def scenario(_client: Client, files: Files) -> None:
        for target in ("link", "one", "nowhere", "new"):
            await bring(files, place, way, target)
            assert (place / target).read_bytes() == data, target

    drive_files(None, scenario)
    assert (place / "link").is_symlink()
    after = (place / "file").stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert (place / "other").read_bytes() == data
    assert (place / "nowhere").is_symlink()
    (place / "usual").touch()
    assert (place / "new").stat().st_mode == (place / "usual").stat().st_mode
    assert not list(place.glob(".*"))


@pytest.mark.parametrize("way", ["up", "down"])
def test_nothing_is_written_through_a_link_where_the_part_should_be(place: Path, way: str) -> None:
    source_of(place, LARGE)
    (place / "precious").write_bytes(b"precious")
    part = (up_part if way == "up" else down_part)(place, "copy")

    async def scenario(_client: Client, files: Files) -> None:
        part.symlink_to("precious")
        with pytest.raises((TransferFailed, OSError), match="is not a plain file"):
            await bring(files, place, way, "copy")
        part.unlink()
        os.mkfifo(part)
        with pytest.raises((TransferFailed, OSError), match="is not a plain file"):
            await bring(files, place, way, "copy")
        part.unlink()
        os.link(place / "precious", part)
        with pytest.raises((TransferFailed, OSError), match="is not a plain file"):
            await bring(files, place, way, "copy")

    drive_files(None, scenario)
    assert (place / "precious").read_bytes() == b"precious"


def test_nor_on_servers_that_know_nothing_of_parts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source_of(place, LARGE)
    (place / "precious").write_bytes(b"precious")
    up_part(place, "copy").symlink_to("precious")

    async def scenario(client: Client, files: Files) -> None:
        monkeypatch.setattr(client, "_capabilities", {"fileWriteStreaming": True})
        with pytest.raises(TransferFailed, match="is not a plain file"):
            await bring(files, place, "up", "copy")

    drive_files(None, scenario)
    assert (place / "precious").read_bytes() == b"precious"


@pytest.mark.parametrize("way", ["up", "down"])
def test_what_is_called_part_is_somebodys(place: Path, way: str) -> None:
    data = source_of(place, LARGE)
    (place / "doc.part").write_bytes(b"mine")
    drive_files(None, lambda _client, files: _done(bring(files, place, way, "doc")))
    assert (place / "doc").read_bytes() == data
    assert (place / "doc.part").read_bytes() == b"mine"


async def _done(work: Awaitable[object]) -> None:
    await work


@pytest.mark.parametrize("way", ["up", "down"])
def test_two_transfers_to_one_name_do_not_mix(place: Path, way: str) -> None:
    one, two = os.urandom(LARGE), os.urandom(LARGE)
    (place / "source").write_bytes(one)
    (place / "another").write_bytes(two)

    async def scenario(_client: Client, files: Files) -> None:
        move = files.upload if way == "up" else files.download
        # Of different files: each has its own part, and whoever takes the name last has it whole.
        await asyncio.gather(
            move(f"{place}/source", f"{place}/copy"), move(f"{place}/another", f"{place}/copy")
        )
        assert (place / "copy").read_bytes() in (one, two)
        # Of one file: the second is told so.
        results = await asyncio.gather(
            move(f"{place}/source", f"{place}/copy"),
            move(f"{place}/source", f"{place}/copy"),
            return_exceptions=True,
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        assert len(failed) == 1
        assert "another transfer writes to" in str(failed[0])
        assert (place / "copy").read_bytes() == one

    drive_files(None, scenario)
    assert sorted(os.listdir(place)) == ["another", "copy", "source"]


def test_long_names_have_parts_too(place: Path) -> None:
    data = source_of(place, LARGE)
    name = "é" * 127

    async def scenario(_client: Client, files: Files) -> None:
        await bring(files, place, "down", name)
        await bring(files, place, "up", f"{name}x")

    drive_files(None, scenario)
    assert (place / name).read_bytes() == data == (place / f"{name}x").read_bytes()


@pytest.mark.usefixtures("needs_bubblewrap")
def test_nothing_is_left_where_nothing_arrived(place: Path) -> None:
    source_of(place, 10)
    box = exec_server.Sandbox.read_only().denying(f"{place}/source")

    async def scenario(client: Client, _files: Files) -> None:
        with pytest.raises(exec_server.RemoteFileError, match="Permission denied"):
            await client.files.under(box).download(f"{place}/source", f"{place}/copy")

    drive_files(None, scenario)
    assert os.listdir(place) == ["source"]


def test_a_full_disk_says_so(place: Path) -> None:
    """A limit on the size of files stands in for the disk: both come as an error of the write."""
    import resource
    import signal

    source_of(place, LARGE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    async def scenario(_client: Client, files: Files) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, limits[1]))
        try:
            for _ in range(2):  # begun, then taken up
                with pytest.raises(OSError, match=r"File too large: .*exec-server-part"):
                    await bring(files, place, "down", "copy")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    try:
        drive_files(None, scenario)
    finally:
        signal.signal(signal.SIGXFSZ, handler)


def test_trees_with_odd_things_in_them(place: Path) -> None:
    tree = os.fsencode(place / "tree")
    os.mkdir(tree)
    with open(tree + b"/bad\xff", "wb") as file:
        file.write(b"bytes")
    os.symlink(b"nowhere", tree + b"/dangling")
    os.symlink(b"loop", tree + b"/loop")

    async def scenario(_client: Client, files: Files) -> None:
        names = [entry.name for entry in await files.list(f"{place}/tree")]
        assert names == sorted([os.fsdecode(b"bad\xff"), "dangling", "loop"])
        down = await files.download(f"{place}/tree", f"{place}/back")
        up = await files.upload(f"{place}/back", f"{place}/again")
        assert (down.files, up.files) == (1, 1)
        reasons = {os.path.basename(path): reason for path, reason in down.skipped}
        assert reasons["dangling"] == LEADS_NOWHERE
        assert "loop" in reasons
        up = await files.upload(f"{place}/tree", f"{place}/more")
        assert sorted(os.path.basename(path) for path, _ in up.skipped) == ["dangling", "loop"]

    drive_files(None, scenario)
    for copy in (b"back", b"again", b"more"):
        with open(os.fsencode(place) + b"/" + copy + b"/bad\xff", "rb") as brought:
            assert brought.read() == b"bytes"


def test_a_tree_into_itself(place: Path) -> None:
    (place / "tree" / "deep").mkdir(parents=True)
    (place / "tree" / "deep" / "file").write_text("x")

    async def scenario(_client: Client, files: Files) -> None:
        await files.download(f"{place}/tree", f"{place}/tree/tree")

    drive_files(None, scenario)
    found = sorted(str(path.relative_to(place)) for path in place.rglob("file"))
    assert found == ["tree/deep/file", "tree/tree/deep/file"]


def test_a_directory_larger_than_an_answer(place: Path) -> None:
    many = place / "many"
    many.mkdir()
    for number in range(50_500):
        os.close(os.open(f"{many}/{number}", os.O_WRONLY | os.O_CREAT))

    async def scenario(_client: Client, files: Files) -> None:
        entries = await files.list(str(many))
        assert [entry.name for entry in entries] == sorted(map(str, range(50_500)))
        assert all(entry.is_file for entry in entries)

    drive_files(None, scenario)
