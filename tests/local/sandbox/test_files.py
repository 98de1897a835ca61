"""From a profile to a helper: every call gets its plan afresh, cheaply where nothing has changed."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exec_server.limits import Limits
from exec_server.local.files import cached
from exec_server.local.files.lane import Lane, reads
from exec_server.local.process.machine import ProcessMachine
from exec_server.local.sandbox.files import SandboxedFiles
from exec_server.local.sandbox.look import ThisMachine
from exec_server.loop import Pending
from exec_server.testing import ManualLoop
from exec_server.wire.errors import INTERNAL_ERROR, RpcError
from exec_server.wire.files import OpenParams, ReadFileParams, WriteFileParams
from support.profiles import context, path, pattern, special
from support.sandbox import needs_bubblewrap

__all__ = ["needs_bubblewrap"]

pytestmark = pytest.mark.usefixtures("needs_bubblewrap")


CONTENT = b'{"dataBase64":"eA=="}'


class Counting(ThisMachine):
    """Counts how often it was asked for the beginning of a file."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 0

    def head(self, file: bytes) -> bytes:
        self.heads += 1
        return super().head(file)


@pytest.fixture
def look() -> Counting:
    return Counting()


@pytest.fixture
def files(look: Counting) -> Iterator[SandboxedFiles]:
    machine = ProcessMachine(ManualLoop(), Limits())
    made = SandboxedFiles(machine, Limits(), look)
    yield made
    made.close()
    machine.close()
    assert made.helpers == 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    real = Path(os.path.realpath(tmp_path))
    (real / "f").write_bytes(b"x")
    return real


def reading(name: Path) -> ReadFileParams:
    return ReadFileParams(path=name.as_uri())


def test_one_plan_and_one_helper_for_calls_that_are_alike(files: SandboxedFiles, root: Path) -> None:
    box = context(path(root, "read"))
    for _ in range(3):
        assert bytes(files.perform(box, "fs/readFile", reading(root / "f"))) == CONTENT
    assert files.helpers == 1
    # Another profile that comes to the same.
    also = context(path(root, "read"), path(root / "f", "read"))
    assert bytes(files.perform(also, "fs/readFile", reading(root / "f"))) == CONTENT
    assert files.helpers == 1


def test_a_change_makes_another_plan(files: SandboxedFiles, root: Path) -> None:
    box = context(special("root", "read"), pattern(f"{root}/*.env"))
    files.perform(box, "fs/readFile", reading(root / "f"))
    (root / "x.env").write_bytes(b"secret")
    with pytest.raises(RpcError, match="Permission denied"):
        files.perform(box, "fs/readFile", reading(root / "x.env"))
    assert files.helpers == 2


def test_descriptors(files: SandboxedFiles, root: Path) -> None:
    box = context(path(root, "read"))
    descriptor = files.open(box, OpenParams(handle_id="h", path=(root / "f").as_uri()))
    with open(descriptor, "rb") as opened:
        assert opened.read() == b"x"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (lambda root: [pattern("/**/*")], "cannot be safely expanded"),
        (lambda root: [path(root, "write"), path(root / "link", "deny")], "crosses writable symlink"),
    ],
)
def test_no_plan_no_call(
    files: SandboxedFiles, root: Path, entries: Callable[[Path], list[Any]], words: str
) -> None:
    (root / "link").symlink_to("f")
    box = context(special("root", "read"), *entries(root))
    with pytest.raises(RpcError, match=words) as caught:
        files.perform(box, "fs/writeFile", WriteFileParams(path=(root / "f").as_uri(), data_base64="eQ=="))
    assert caught.value.code == INTERNAL_ERROR
    assert (root / "f").read_bytes() == b"x"
    assert files.helpers == 0


def test_a_plan_that_stops_being_possible_stops_the_next_call(files: SandboxedFiles, root: Path) -> None:
    box = context(special("root", "read"), path(root, "write"), path(root / "d", "deny"))
    (root / "d").mkdir()
    files.perform(box, "fs/readFile", reading(root / "f"))
    (root / "d").rmdir()
    (root / "d").symlink_to("f")
    with pytest.raises(RpcError, match="crosses writable symlink"):
        files.perform(box, "fs/readFile", reading(root / "f"))


def test_worktrees_are_looked_at_every_time(files: SandboxedFiles, look: Counting, root: Path) -> None:
    (root / ".git").write_bytes(b"gitdir: repository\n")
    (root / "repository").mkdir()
    box = context(special("root", "read"), path(root, "write"))
    target = WriteFileParams(path=(root / "repository/x").as_uri(), data_base64="eQ==")
    for _ in range(2):
        before = look.heads
        with pytest.raises(RpcError, match="Read-only file system"):
            files.perform(box, "fs/writeFile", target)
        assert look.heads > before
    (root / ".git").write_bytes(b"gitdir: elsewhere\n")
    assert bytes(files.perform(box, "fs/writeFile", target)) == b"{}"


def begin(files: SandboxedFiles, lane: Lane, loop: ManualLoop, box: Any, name: Path) -> Pending[Any] | None:
    return files.begin(box, "fs/readFile", reading(name), loop, lane, reads(os.fsencode(name)))


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is mounted on the machine that tests run on."""
    monkeypatch.setattr("exec_server.local.sandbox.files.nothing_hangs", lambda: True)


@pytest.mark.usefixtures("calm")
def test_directly_only_what_has_the_same_plan_as_before(files: SandboxedFiles, root: Path) -> None:
    """And a helper that is free. Everything else takes a thread, and may take its time."""
    loop = ManualLoop()
    lane = Lane(loop)
    (root / "secret").write_bytes(b"secret")
    box = context(path(root, "read"), path(root / "secret", "deny"))
    assert begin(files, lane, loop, box, root / "f") is None, "no plan"
    files.perform(box, "fs/readFile", reading(root / "f"))
    begun = begin(files, lane, loop, box, root / "f")
    assert begun is not None
    assert begin(files, lane, loop, box, root / "f") is None, "no helper"
    (answers,) = loop.readers
    assert select.select([answers], [], [], 30)[0]
    tell, _ = loop.readers[answers]
    tell()
    assert bytes(begun.result()) == CONTENT
    (root / "secret").rename(root / "public")
    (root / "secret").write_bytes(b"another secret")
    assert begin(files, lane, loop, box, root / "secret") is None, "another plan"
    with pytest.raises(RpcError, match="Permission denied"):
        files.perform(box, "fs/readFile", reading(root / "secret"))


@pytest.mark.usefixtures("calm")
def test_directly_nothing_that_takes_a_search(files: SandboxedFiles, root: Path) -> None:
    loop = ManualLoop()
    box = context(special("root", "read"), pattern(f"{root}/**/*.env"))
    files.perform(box, "fs/readFile", reading(root / "f"))
    assert begin(files, Lane(loop), loop, box, root / "f") is None


def test_directly_nothing_where_a_disk_may_hang(
    files: SandboxedFiles, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = ManualLoop()
    box = context(path(root, "read"))
    files.perform(box, "fs/readFile", reading(root / "f"))
    monkeypatch.setattr(cached, "LOCAL_KINDS", frozenset({"ext4"}))
    monkeypatch.setattr(cached, "_mounts", cached._Mounts())
    assert begin(files, Lane(loop), loop, box, root / "f") is None
