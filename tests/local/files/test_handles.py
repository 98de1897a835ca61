"""Open files: blocks at any offset, one namespace, one limit, nothing left open."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path
from typing import Any

from exec_server.local.files.handles import MAX_BLOCK_BYTES, MAX_HANDLES, Handles, handle_path
from exec_server.wire.errors import RpcError


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def block(handles: Handles, handle_id: str, offset: int, length: int) -> tuple[bytes, bool]:
    result = json.loads(bytes(handles.read(handle_id, offset, length)))
    return base64.b64decode(result["chunk"]), result["eof"]


def put(handles: Handles, handle_id: str, offset: int, data: bytes) -> None:
    assert handles.write(handle_id, offset, base64.b64encode(data).decode()) == {}


def refused(call: Any, *args: Any) -> tuple[int | None, str]:
    try:
        call(*args)
    except RpcError as error:
        return error.code, error.message
    except OSError as error:
        return error.errno, ""
    raise AssertionError("it was done")


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    handles = Handles()
    assert handles.open("h", os.fsencode(path), "read").handle_id == "h"
    assert block(handles, "h", 0, 4) == (b"0123", False)
    assert block(handles, "h", 6, 4) == (b"6789", False)
    assert block(handles, "h", 6, 5) == (b"6789", True)
    assert block(handles, "h", 10, 1) == (b"", True)
    assert block(handles, "h", 10**12, 1) == (b"", True)
    os.unlink(path)
    assert block(handles, "h", 0, MAX_BLOCK_BYTES) == (b"0123456789", True)
    handles.close("h")
    handles.close("h")
    assert refused(handles.read, "h", 0, 1) == (-32004, "unknown file handle `h`")


def test_writing(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    handles = Handles()
    handles.open("w", os.fsencode(path), "replace")
    assert path.read_bytes() == b""
    put(handles, "w", 3, b"def")
    put(handles, "w", 0, b"abc")
    put(handles, "w", 8, b"!")
    assert path.read_bytes() == b"abcdef\0\0!"
    handles.open("n", os.fsencode(tmp_path / "new"), "replace")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) & 0o600 == 0o600
    handles.end()


def test_refusals(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "f")
    (tmp_path / "f").touch()
    handles = Handles()
    handles.open("", path, "read")
    assert refused(handles.open, "", path + b"x", "read") == (-32600, "file handle `` already exists")
    too_long = (-32600, "file handle ID must not exceed 32 bytes")
    for call in (
        lambda: handles.open("ü" * 17, path, "read"),
        lambda: handles.read("x" * 33, 0, 0),
        lambda: handles.write("x" * 33, 0, "!"),
        lambda: handles.close("x" * 33),
    ):
        assert refused(call) == too_long
    for length in (0, MAX_BLOCK_BYTES + 1):
        assert (
            refused(handles.read, "?", 0, length)[1] == "file read block length must be between 1 and 1048576"
        )
    assert refused(handles.write, "?", 0, "!") == (-32602, "Invalid symbol 33, offset 0.")
    assert refused(handles.write, "?", 0, "")[1] == "file write block length must be between 1 and 1048576"
    assert refused(handles.write, "?", 2**63 - 1, "AA==") == (
        -32600,
        "file write range exceeds the signed 64-bit file offset limit",
    )
    assert refused(handles.write, "?", 2**63 - 2, "AA==") == (-32004, "unknown file handle `?`")
    handles.end()


def test_a_failed_read_closes_and_a_failed_write_does_not(tmp_path: Path) -> None:
    handles = Handles()
    handles.open("w", os.fsencode(tmp_path / "f"), "replace")
    handles.open("r", os.fsencode(tmp_path / "f"), "read")
    assert refused(handles.write, "r", 0, "AA==")[0] == 9
    assert block(handles, "r", 0, 1) == (b"", True)
    assert refused(handles.read, "w", 0, 1)[0] == 9
    assert refused(handles.write, "w", 0, "AA==") == (-32004, "unknown file handle `w`")
    assert refused(handles.read, "r", 2**63, 1)[0] == 22
    assert len(handles) == 0


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    handles = Handles()
    for mode in ("read", "replace"):
        assert refused(handles.open, "h", b"/dev/null", mode) == (-32600, "path `/dev/null` is not a file")
    assert refused(handles.open, "h", os.fsencode(tmp_path), "replace")[0] == 21
    assert refused(handles.open, "h", os.fsencode(tmp_path / "fifo"), "replace")[0] == 6
    assert refused(handles.open, "h", os.fsencode(tmp_path / "x" / "y"), "replace")[0] == 2
    assert len(handles) == 0


def test_the_limit_and_the_end(tmp_path: Path) -> None:
    before = descriptors()
    (tmp_path / "f").touch()
    handles = Handles()
    for index in range(MAX_HANDLES):
        handles.open(str(index), os.fsencode(tmp_path / "f"), "read" if index % 2 else "replace")
    assert refused(handles.open, "more", os.fsencode(tmp_path / "new"), "replace") == (
        -32600,
        "at most 128 file handles may be open per connection",
    )
    assert not (tmp_path / "new").exists()
    assert descriptors() == before + MAX_HANDLES
    handles.end()
    assert descriptors() == before
    handles.open("late", os.fsencode(tmp_path / "f"), "read")
    assert descriptors() == before


def test_where_a_handle_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("f")
    handles = Handles()
    assert handles.where(handle_path("h")) is None
    handles.open("h", os.fsencode(tmp_path / "link"), "replace")
    assert handles.where(handle_path("h")) == os.fsencode(tmp_path.resolve() / "f")
    handles.end()
