"""System calls that Python does not have."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from exec_server.local.files import kernel
from exec_server.local.files.kernel import RENAME_NOREPLACE, birth_time_ms, openat2, renameat2


def test_openat2(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    try:
        descriptor = openat2(os.fsencode(tmp_path / "f"), os.O_RDONLY, 0)
    except OSError as error:
        pytest.skip(f"an old kernel: {error}")
    assert os.read(descriptor, 10) == b"x"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        openat2(os.fsencode(tmp_path / "g"), os.O_RDONLY, 0)
    with pytest.raises(OSError) as caught:
        openat2(b"/proc/self", os.O_RDONLY, kernel.RESOLVE_NO_XDEV)
    assert caught.value.errno == errno.EXDEV


def test_birth_time(tmp_path: Path) -> None:
    before = int(time.time() * 1000)
    path = tmp_path / "f"
    path.touch()
    (tmp_path / "link").symlink_to("f")
    born = birth_time_ms(os.fsencode(path))
    if not born:
        pytest.skip("this file system does not know")
    assert before - 1000 <= born <= time.time() * 1000 + 1000
    assert birth_time_ms(os.fsencode(tmp_path / "link")) == born
    directory = os.open(tmp_path, os.O_PATH)
    assert birth_time_ms(b"f", dir_fd=directory, follow=False) == born
    assert birth_time_ms(b"", dir_fd=directory) == birth_time_ms(os.fsencode(tmp_path))
    os.close(directory)
    assert birth_time_ms(b"/nonexistent") == 0


def test_rename_without_replacing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    directory = os.open(tmp_path, os.O_PATH)
    with pytest.raises(FileExistsError):
        renameat2(directory, b"a", directory, b"b", RENAME_NOREPLACE)
    renameat2(directory, b"a", directory, b"c", RENAME_NOREPLACE)
    os.close(directory)
    assert (tmp_path / "c").read_text() == "a"
