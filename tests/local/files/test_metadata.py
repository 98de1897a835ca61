"""What is known of a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from exec_server.local.files.metadata import canonicalize, get_metadata
from exec_server.local.files.paths import to_native
from exec_server.wire.errors import RpcError


def test_kinds(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "f").write_text("hello")
    (root / "link").symlink_to("f")
    os.mkfifo(root / "fifo")

    def kind(name: str, follow: bool = True) -> tuple[bool, bool, bool]:
        result = get_metadata(os.fsencode(root / name), follow)
        return result.is_directory, result.is_file, result.is_symlink

    assert kind("") == (True, False, False)
    assert kind("f") == kind("f", follow=False) == (False, True, False)
    assert kind("link") == (False, True, True)
    assert kind("fifo") == (False, False, False)
    with pytest.raises(RpcError, match="path contains a symbolic link"):
        kind("link", follow=False)
    with pytest.raises(FileNotFoundError):
        kind("missing")
    assert get_metadata(b"/", follow=False).is_directory


def test_size_and_times(tmp_path: Path) -> None:
    path = tmp_path.resolve() / "f"
    before = time.time() * 1000
    path.write_text("hello")
    os.utime(path, ns=(0, 981173106_789_999_999))
    result = get_metadata(os.fsencode(path), True)
    assert (result.size, result.modified_at_ms) == (5, 981173106_789)
    assert result.created_at_ms == 0 or before - 5000 < result.created_at_ms < before + 60_000
    assert result == get_metadata(os.fsencode(path), False)


def test_before_1970(tmp_path: Path) -> None:
    path = tmp_path.resolve() / "f"
    path.touch()
    os.utime(path, ns=(0, -1_500_000_000))
    assert get_metadata(os.fsencode(path), True).modified_at_ms == 0
    assert get_metadata(os.fsencode(path), False).modified_at_ms == -1500


def test_canonicalize(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "d").mkdir()
    (root / "d" / "f").touch()
    (root / "link").symlink_to("d")
    (root / "loop").symlink_to("loop")
    assert canonicalize(os.fsencode(root / "link" / "f")).path == f"file://{root}/d/f"
    for name, number in (("missing", 2), ("loop", 40), ("d/f/x", 20)):
        with pytest.raises(OSError) as caught:
            canonicalize(os.fsencode(root / name))
        assert caught.value.errno == number


def test_links_that_turn_back(tmp_path: Path) -> None:
    """`..` is taken where it stands, as the kernel does: what comes before it must be a directory."""
    root = tmp_path.resolve()
    (root / "d" / "e").mkdir(parents=True)
    (root / "f").touch()
    for name, target in (("good", "d/e/../../f"), ("file", "f/../d"), ("none", "missing/../d")):
        (root / name).symlink_to(target)
    assert canonicalize(os.fsencode(root / "good")).path == f"file://{root}/f"
    for name, number in (("file", 20), ("none", 2)):
        with pytest.raises(OSError) as caught:
            canonicalize(os.fsencode(root / name))
        assert caught.value.errno == number


def test_canonical_names_are_bytes_and_may_look_removed(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path.resolve())
    for name in (b"x\xff", b"gone (deleted)", b"new\nline"):
        os.mkdir(os.path.join(root, name))
        assert to_native(canonicalize(os.path.join(root, name)).path) == os.path.join(root, name)
