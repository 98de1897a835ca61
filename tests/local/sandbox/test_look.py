"""Asking this machine, and asking again."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.sandbox import look, probe
from exec_server.local.sandbox.compile import compile_plan
from exec_server.local.sandbox.links import Look
from exec_server.local.sandbox.look import Recorder, ThisMachine, keep_private, keep_secret, secret_files
from exec_server.local.sandbox.mounts import Mounts
from exec_server.local.sandbox.plan import PlanError
from support.profiles import context, path, pattern, special
from support.tree import Tree
from support.wait import eventually

HERE = ThisMachine()


@pytest.fixture
def folder(tmp_path: Path) -> bytes:
    return os.path.realpath(os.fsencode(tmp_path))


def test_what_is_there(folder: bytes) -> None:
    os.mkdir(folder + b"/d")
    Path(os.fsdecode(folder + b"/f")).write_bytes(b"content")
    Path(os.fsdecode(folder + b"/empty")).touch()
    blank = os.open(folder + b"/blank", os.O_CREAT, 0o444)
    os.fchmod(blank, 0o444)
    os.close(blank)
    os.symlink(b"d", folder + b"/l")
    os.mkfifo(folder + b"/p")
    looks = {
        name: HERE.look(folder + b"/" + name) for name in (b"d", b"f", b"empty", b"blank", b"l", b"p", b"x")
    }
    assert looks == {
        b"d": Look("directory"),
        b"f": Look("file"),
        b"empty": Look("file"),
        b"blank": Look("file", blank=True),
        b"l": Look("link", b"d"),
        b"p": Look("other"),
        b"x": Look("missing"),
    }
    assert HERE.look(folder + b"/f/below") == Look("missing")
    listed = {(b"d", True), (b"f", False), (b"empty", False), (b"blank", False), (b"l", False), (b"p", False)}
    assert set(HERE.entries(folder)) == listed
    assert HERE.entries(folder + b"/x") == HERE.entries(folder + b"/f") == ()
    assert HERE.is_empty(folder + b"/d")
    assert not HERE.is_empty(folder)
    assert HERE.maker(folder) == "anybody"


def test_what_could_be_made_where(folder: bytes) -> None:
    """Root's special rights are not taken into a sandbox, so they do not count; an owner's right to change
    the mode does."""
    assert HERE.maker(folder) == "anybody"
    os.chmod(folder, 0o555)
    assert HERE.maker(folder) == ("owner alone" if os.getuid() else "owner")
    if os.getuid() == 0:
        os.chown(folder, 1234, 1234)
        for mode, maker in ((0o755, "nobody"), (0o775, "nobody"), (0o777, "anybody")):
            os.chmod(folder, mode)
            assert HERE.maker(folder) == maker
        os.chown(folder, 1234, 0)
        os.chmod(folder, 0o775)
        assert HERE.maker(folder) == "anybody"
    os.chmod(folder, 0o755)


def test_private_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "_private", ())
    keep_private(b"/run/x")
    keep_private(b"/run/y")
    assert HERE.private() == Recorder(HERE).private() == (b"/run/x", b"/run/y")


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_files_that_are_kept_secret(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Where they can be hidden at all."""
    monkeypatch.setattr(look, "_secret", ())
    monkeypatch.setattr(probe, "backend", lambda: probe.Backend(name=backend))
    assert secret_files() == ()
    keep_secret(b"/keys/one")
    assert secret_files() == ((b"/keys/one",) if backend == "bubblewrap" else ())


def test_mounts_are_asked_for_again() -> None:
    tree = Tree({"/w": None})
    recorder = Recorder(tree)
    compile_plan(context(path("/w", "write")), recorder, cwd=b"/")
    assert recorder.still_true()
    tree.mounted = Mounts(b"others", False)
    assert not recorder.still_true()
    assert HERE.mounts() == HERE.mounts()


def test_heads(folder: bytes) -> None:
    Path(os.fsdecode(folder + b"/f")).write_bytes(b"gitdir: x\n" + bytes(10_000))
    os.mkfifo(folder + b"/p")
    os.symlink(b"f", folder + b"/l")
    assert HERE.head(folder + b"/f").startswith(b"gitdir: x\n\0")
    assert len(HERE.head(folder + b"/f")) == 4096
    assert HERE.head(folder + b"/p") == HERE.head(folder + b"/l") == HERE.head(folder + b"/x") == b""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(folder + b"/s")
        assert HERE.head(folder + b"/s") == b""


def test_identities_tell_files_apart(folder: bytes) -> None:
    name = folder + b"/f"
    Path(os.fsdecode(name)).write_bytes(b"1")
    first = HERE.identity(name)
    Path(os.fsdecode(name)).write_bytes(b"2")
    assert HERE.identity(name) == first
    for _ in range(20):  # file systems give a number out again soon
        os.unlink(name)
        Path(os.fsdecode(name)).write_bytes(b"1")
        assert HERE.identity(name) != first
    assert HERE.identity(folder + b"/x").inode == 0


def test_settled_paths_are_looked_at_again(folder: bytes) -> None:
    os.mkdir(folder + b"/a")
    os.mkdir(folder + b"/b")
    os.symlink(b"a", folder + b"/l")
    machine = ThisMachine()
    real, identity = machine.settled(folder + b"/l")
    assert (real.path, real.links) == (folder + b"/a", ((folder + b"/l", b"a"),))
    assert machine.settled(folder + b"/l") == (real, identity)
    os.unlink(folder + b"/l")
    os.symlink(b"b", folder + b"/l")
    eventually(lambda: machine.settled(folder + b"/l")[0].path == folder + b"/b", "it is looked at again")
    assert not machine.settled(folder + b"/x")[0].exists


def test_a_recorder_knows_when_something_has_changed() -> None:
    tree = Tree(
        {"/w/.git/config": b"", "/w/a.env": b"", "/o/x": b"", "/l": "w", "/usr": None, "/w/t/.git": b"x"}
    )
    profile = context(
        special("root", "read"),
        special("minimal", "read"),
        path("/l", "write"),
        path("/w/t", "write"),
        path("/w/later", "deny"),
        pattern("/w/**/*.env"),
    )

    def fresh() -> tuple[Recorder, object]:
        recorder = Recorder(tree)
        return recorder, compile_plan(profile, recorder, cwd=b"/")

    recorder, plan = fresh()
    assert recorder.still_true()
    # Somewhere nobody asked about.
    tree.nodes[b"/o/y"] = b""
    assert recorder.still_true()
    changes = [
        (b"/w/b.env", b""),  # one more match
        (b"/w/later", None),  # no longer missing
        (b"/w/.codex", None),
        (b"/w/t/.git", b"gitdir: /w/sub"),
    ]
    for name, value in changes:
        before = tree.nodes.get(name)
        tree.nodes[name] = value
        assert not recorder.still_true(), name
        if before is None:
            del tree.nodes[name]
        else:
            tree.nodes[name] = before
        assert recorder.still_true(), name
    tree.nodes[b"/l"] = "o"
    assert not recorder.still_true()
    assert fresh()[1] != plan


def test_what_cannot_be_listed_cannot_be_searched() -> None:
    """To root nothing is denied, so this is done by a child that gives root up."""
    folder = tempfile.mkdtemp()
    child = os.fork()
    if not child:
        try:
            os.chmod(folder, 0o100)
            if os.getuid() == 0:
                os.chown(folder, 65534, 65534)
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os._exit(_looks(os.fsencode(folder)))
        finally:
            os._exit(100)
    _, status = os.waitpid(child, 0)
    os.rmdir(folder)
    assert os.waitstatus_to_exitcode(status) == 0


def _looks(folder: bytes) -> int:
    """0 if what can be reached but not listed is an error, and so is what its owner could open."""
    try:
        HERE.entries(folder)
        return 1
    except PlanError as error:
        if "Permission denied" not in str(error):
            return 2
    os.chmod(folder, 0o555)
    if HERE.maker(folder) != "owner alone" or HERE.maker(b"/usr") != "nobody":
        return 4  # no special rights put anything there, and an owner has one
    os.chmod(folder, 0o000)
    try:
        HERE.entries(folder)
        return 5  # its owner can change the mode
    except PlanError as error:
        if "a command could change that" not in str(error):
            return 6
    missing = HERE.look(folder + b"/x").kind == "missing"
    os.chmod(folder, 0o700)
    return 0 if missing else 3


def test_a_directory_that_was_taken_away_in_between_is_empty(tmp_path: Path) -> None:
    """It stood for a name that must not be made, and whoever needed it has just ended."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    machine = ThisMachine()
    assert machine.is_empty(os.fsencode(tmp_path / "gone"))
    assert not machine.is_empty(os.fsencode(tmp_path / "full"))
    assert not machine.is_empty(os.fsencode(tmp_path / "full/x"))
