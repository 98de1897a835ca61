"""Whole files: small, large, growing, and everything that is none."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from pathlib import Path

import pytest

from exec_server.local.files import content
from exec_server.local.files.read import read_file, read_range
from exec_server.wire.errors import RpcError

SIZES = [0, 1, 2, 3, 1000, content.LARGE_BYTES - 1, content.LARGE_BYTES, content.PIECE_BYTES - 1]
SIZES += [content.PIECE_BYTES, content.PIECE_BYTES + 1, 3 * content.PIECE_BYTES + 7]


def read(path: Path, follow: bool = True) -> bytes:
    result = json.loads(bytes(read_file(os.fsencode(path), follow)))
    return base64.b64decode(result["dataBase64"], validate=True)


def refused(path: Path | str, follow: bool = True) -> tuple[int | None, str]:
    try:
        read_file(os.fsencode(path), follow)
    except RpcError as error:
        return error.code, error.message
    except OSError as error:
        return error.errno, ""
    raise AssertionError("it was read")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("follow", [True, False])
def test_contents(tmp_path: Path, size: int, follow: bool) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    assert read(tmp_path.resolve() / "f", follow) == data


def test_files_that_do_not_know_their_size() -> None:
    assert read(Path("/proc/self/status")).startswith(b"Name:")
    assert b"processor" in read(Path("/proc/cpuinfo")) or os.uname().machine != "x86_64"


def test_a_file_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a" * (content.LARGE_BYTES + 5))
    encode = content.encode_content

    def grow_behind(descriptor: int, start: int, most: int, turn: content.Turn) -> object:
        result = encode(descriptor, start, most, turn)
        with path.open("ab") as file:
            file.write(b"more")
        return result

    monkeypatch.setattr("exec_server.local.files.read.encode_content", grow_behind)
    assert read(path) == b"a" * (content.LARGE_BYTES + 5) + b"more"


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(os.urandom(content.PIECE_BYTES * 2))
    descriptor = os.open(path, os.O_RDONLY)
    os.truncate(path, 10)
    result = json.loads(bytes(content.encode_content(descriptor, 0, content.PIECE_BYTES * 2, content.Turn())))
    os.close(descriptor)
    assert base64.b64decode(result["dataBase64"]) == path.read_bytes()


def test_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    for name in ("", "fifo"):
        path = tmp_path / name
        assert refused(path) == (-32600, f"path `{path}` is not a file")
        assert refused(path.resolve(), follow=False) == (-32600, "path is not a regular file")
    assert refused("/dev/null") == (-32600, "path `/dev/null` is not a file")
    assert refused(tmp_path / "socket") == (6, "")


def test_links(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "f").write_text("x")
    (root / "d").mkdir()
    (root / "d" / "g").write_text("y")
    (root / "link").symlink_to("f")
    (root / "dlink").symlink_to("d")
    assert read(root / "link") == b"x"
    assert read(root / "dlink" / "g") == b"y"
    assert refused(root / "link", follow=False) == (40, "")
    assert refused(root / "dlink" / "g", follow=False) == (20, "")
    assert refused("/", follow=False) == (-32600, "path must name an entry")


def test_too_large(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, content.MAX_READ_BYTES + 1)
    assert refused(path) == (-32600, "file is too large to read: limit is 536870912 bytes")


def test_a_link_exchanged_for_a_directory_leads_nowhere(tmp_path: Path) -> None:
    """Somebody flips a directory to a link and back: no-follow never reads through the link."""
    root = tmp_path.resolve()
    for name in ("real", "secret"):
        (root / name).mkdir()
        (root / name / "f").write_text(name)
    (root / "link").symlink_to("secret")
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            os.rename(root / "real", root / "away")
            os.rename(root / "link", root / "real")
            os.rename(root / "real", root / "link")
            os.rename(root / "away", root / "real")

    thread = threading.Thread(target=flip)
    thread.start()
    seen = set()
    try:
        for _ in range(3000):
            try:
                seen.add(read(root / "real" / "f", follow=False))
            except OSError as error:
                seen.add(error.errno)
    finally:
        stop.set()
        thread.join()
    assert seen <= {b"real", 2, 20}
    assert b"real" in seen


@pytest.mark.parametrize("size", [0, 10, content.PIECE_BYTES + 10])
def test_parts(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    for offset, length in (
        (0, None),
        (0, 5),
        (5, 5),
        (5, None),
        (0, size),
        (0, size + 1),
        (size, 1),
        (2**63, 1),
        (0, 2**62),
        (3, 2**64 - 1),
        (size // 2, None),
        (1, content.PIECE_BYTES),
        (0, 0),
    ):
        result = json.loads(bytes(read_range(os.fsencode(tmp_path / "f"), True, offset, length)))
        end = size if length is None else offset + length
        assert base64.b64decode(result["dataBase64"], validate=True) == data[offset:end]
        assert result["eof"] is (end >= size)


def test_a_range_is_cut_where_an_answer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exec_server.local.files.read.MAX_READ_BYTES", 10)
    (tmp_path / "f").write_bytes(b"0123456789abcdef")
    for offset, data, eof in ((0, b"0123456789", False), (10, b"abcdef", True)):
        result = json.loads(bytes(read_range(os.fsencode(tmp_path / "f"), True, offset, 2**62)))
        assert (base64.b64decode(result["dataBase64"]), result["eof"]) == (data, eof)


def test_a_part_of_a_file_that_is_too_large_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 2**40)
    result = json.loads(bytes(read_range(os.fsencode(path), True, 2**40 - 3, 10)))
    assert result == {"dataBase64": "AAAA", "eof": True}
    with pytest.raises(RpcError, match="file is too large to read"):
        read_range(os.fsencode(path), True, 0, None)
