"""local/sandbox/inspection.py: what was mounted is what was planned, or the command does not begin."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from exec_server.local.process.spawn import Spawned, SpawnSpec, spawn
from exec_server.local.sandbox import inspection, launch, mountpoints, probe
from exec_server.local.sandbox.compile import compile_plan
from exec_server.local.sandbox.look import ThisMachine
from exec_server.local.sandbox.plan import Plan
from exec_server.wire.sandbox import decode_sandbox
from support.sandbox import entry, workspace_write
from support.wait import eventually

pytestmark = pytest.mark.usefixtures("needs_bubblewrap", "fresh_log")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "shared" / "workspace").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    return tmp_path


NAMES = (".git", ".agents", ".codex", ".aws")


def planned(folder: Path, *, protected: bool = True) -> Plan:
    """`protected`: with names that must not be made, and something to be mounted upon for each."""
    more = () if protected else [entry(folder / name, "write") for name in NAMES]
    context = decode_sandbox(workspace_write(folder, more=more))
    return compile_plan(context, ThisMachine(), cwd=os.fsencode(folder))


def turn(place: Path) -> None:
    """Put a link in the place of the workspace, as somebody could who may write to what it is in."""
    workspace = place / "shared" / "workspace"
    workspace.rename(place / "shared" / "away")
    workspace.symlink_to("../outside")


def run(plan: Plan) -> tuple[int, str]:
    spec = SpawnSpec(
        argv=["sh", "-c", "echo > x; echo done"], cwd="/", env={"PATH": "/bin"}, tty=False, pipe_stdin=False
    )
    spec.prepare = lambda spec: launch.carry_out(plan, probe.backend(), spec)
    child: Spawned = spawn(spec)
    said = ""
    for _, fd in child.outputs:
        os.set_blocking(fd, True)
        with open(fd) as stream:
            said += stream.read()
    assert child.pidfd is not None
    os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
    if child.release is not None:
        child.release(child.pidfd)
    _, status = os.waitpid(child.pid, 0)
    os.close(child.pidfd)
    return os.waitstatus_to_exitcode(status), said


@pytest.fixture
def neighbour(place: Path) -> Iterator[None]:
    """A sandbox that runs and may write to the directory that the workspace is in."""
    token = object()
    launch._live[token] = planned(place / "shared")
    yield
    del launch._live[token]


@pytest.mark.parametrize("protected", [True, False])
def test_turned_while_it_was_being_made(place: Path, neighbour: None, protected: bool) -> None:
    """Either nothing can be made to mount upon where it was planned, or what was mounted is looked at."""
    plan = planned(place / "shared" / "workspace", protected=protected)
    turn(place)
    code, said = run(plan)
    assert code != 0
    assert "workspace is not what it was when the sandbox was planned" in said
    assert "done" not in said
    assert list((place / "outside").iterdir()) == []


def test_without_anybody_who_could_nobody_looks(place: Path) -> None:
    """Which shows what happens when nobody looks."""
    plan = planned(place / "shared" / "workspace", protected=False)
    turn(place)
    code, said = run(plan)
    assert (code, said) == (0, "done\n")
    assert [path.name for path in (place / "outside").iterdir()] == ["x"]


def test_as_planned(place: Path, neighbour: None) -> None:
    workspace = place / "shared" / "workspace"
    assert run(planned(workspace)) == (0, "done\n")
    assert [path.name for path in workspace.iterdir()] == ["x"]


def test_who_could_turn_a_path(place: Path) -> None:
    shared = planned(place / "shared")
    path = os.fsencode(place / "shared")
    assert launch._could_turn(shared, path + b"/workspace")
    assert launch._could_turn(shared, path + b"/workspace/deep/er")
    assert not launch._could_turn(shared, path), "it is a mount itself"
    assert not launch._could_turn(shared, path + b"/.git"), "so is this"
    assert not launch._could_turn(shared, os.fsencode(place / "outside"))


def test_a_sandbox_that_never_was(place: Path, neighbour: None) -> None:
    """Nobody waits for ever, and nothing stays open."""
    before = len(os.listdir("/proc/self/fd"))
    plan = planned(place / "shared" / "workspace")
    (place / "shared" / "workspace").rmdir()
    code, said = run(plan)
    assert code == 1
    assert said.startswith("bwrap: ")
    eventually(lambda: len(os.listdir("/proc/self/fd")) == before, "the end of the pipes")


def test_who_has_ended_is_not_waited_for() -> None:
    """Even if nobody has reaped it."""
    with subprocess.Popen(["true"]) as gone:
        eventually(lambda: not mountpoints.is_running(gone.pid), "it has ended")
        assert os.path.exists(f"/proc/{gone.pid}")
        with pytest.raises(ProcessLookupError):
            inspection._is_complete(gone.pid)
