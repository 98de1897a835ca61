"""From a profile to a helper: every call gets its plan afresh, cheaply where nothing has changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exec_server.limits import Limits
from exec_server.local.process.machine import ProcessMachine
from exec_server.local.sandbox.files import SandboxedFiles
from exec_server.local.sandbox.look import ThisMachine
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
