"""URIs to native paths, and ways without links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exec_server.local.files.paths import (
    lossy,
    open_without_links,
    parent_without_links,
    real_path,
    to_native,
    to_uri,
)
from exec_server.wire.errors import RpcError


def test_native_paths_are_bytes() -> None:
    assert to_native("file:///a%FF/b%20c") == b"/a\xff/b c"
    assert to_uri(b"/a\xff/b c") == "file:///a%FF/b%20c"
    assert lossy(b"/a\xff") == "/a\ufffd"
    for foreign in ("file:///C:/x", "file://host/x"):
        with pytest.raises(RpcError) as caught:
            to_native(foreign)
        assert (caught.value.code, caught.value.message) == (-32600, f"'{foreign}' is invalid on 'linux'")


def test_where_a_descriptor_is(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    (tmp_path / "link").symlink_to("f")
    descriptor = os.open(tmp_path / "link", os.O_RDONLY)
    assert real_path(descriptor) == os.fsencode(tmp_path.resolve() / "f")
    os.close(descriptor)
    read, write = os.pipe()
    assert real_path(read) is None
    os.close(read)
    os.close(write)
    assert real_path(99999) is None


def test_without_links(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "d").mkdir()
    (root / "link").symlink_to("d")
    descriptor = open_without_links(os.fsencode(root / "d"))
    assert real_path(descriptor) == os.fsencode(root / "d")
    os.close(descriptor)
    with parent_without_links(os.fsencode(root / "d" / "x")) as (parent, name):
        assert (real_path(parent), name) == (os.fsencode(root / "d"), b"x")
    before = len(os.listdir("/proc/self/fd"))
    for path in (root / "link", root / "link" / "x"):
        with pytest.raises(NotADirectoryError):
            open_without_links(os.fsencode(path))
    with pytest.raises(RpcError, match="path must name an entry"), parent_without_links(b"/"):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
