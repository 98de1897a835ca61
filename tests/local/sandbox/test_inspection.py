"""local/sandbox/inspection.py: what was mounted is what was planned, or the command does not begin."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from exec_server.local.files.kernel import birth_time
from exec_server.local.process.spawn import Spawned, SpawnSpec, spawn
from exec_server.local.sandbox import inspection, launch, mountpoints, probe
from exec_server.local.sandbox.compile import compile_plan
from exec_server.local.sandbox.look import ThisMachine
from exec_server.local.sandbox.plan import Plan
from exec_server.wire.sandbox import decode_sandbox
from support.sandbox import entry, profile, workspace_write
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


def run(
    plan: Plan, again: Callable[[], Plan] | None = None, script: str = "echo > x; echo done"
) -> tuple[int, str]:
    spec = SpawnSpec(argv=["sh", "-c", script], cwd="/", env={"PATH": "/bin"}, tty=False, pipe_stdin=False)
    spec.prepare = lambda spec: launch.carry_out(plan, probe.backend(), spec, again=again)
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


@pytest.mark.parametrize("protected", [True, False])
def test_turned_while_it_was_being_made(place: Path, protected: bool) -> None:
    """Either nothing can be made to mount upon where it was planned, or what was mounted is looked at."""
    plan = planned(place / "shared" / "workspace", protected=protected)
    turn(place)
    code, said = run(plan)
    assert code != 0
    assert "workspace is not what it was when the sandbox was planned" in said
    assert "done" not in said
    assert list((place / "outside").iterdir()) == []


def test_what_is_turned_back_was_mounted_elsewhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time somebody looks the file is the right one again. But nothing is mounted there."""
    plan = planned(place / "shared" / "workspace", protected=False)
    workspace = place / "shared" / "workspace"
    turn(place)
    looked = inspection._is_complete

    def turn_back(pid: int) -> bool:
        complete = looked(pid)
        if complete and workspace.is_symlink():
            workspace.unlink()
            (place / "shared" / "away").rename(workspace)
        return complete

    monkeypatch.setattr(inspection, "_is_complete", turn_back)
    code, said = run(plan)
    assert code != 0
    assert "is not what it was when the sandbox was planned" in said
    assert list((place / "outside").iterdir()) == []


@pytest.mark.parametrize("writable", [True, False])
def test_what_is_denied_and_moved_meanwhile(place: Path, writable: bool) -> None:
    """The name that is covered is that of another file by now."""
    shared = place / "shared"
    for name in ("a", "b"):
        (shared / name).mkdir()
    (shared / "a/x.env").write_text("secret")
    deny = entry(f"{shared}/*/x.env", "deny")
    box = workspace_write(shared, more=[deny]) if writable else profile([entry(":root", "read"), deny])
    context = decode_sandbox(box)

    def again() -> Plan:
        return compile_plan(context, ThisMachine(), cwd=os.fsencode(shared))

    plan = again()
    assert "done\n" in run(plan, again, "cat */x.env; echo done")[1]
    (shared / "a").rename(shared / "c")
    (shared / "b").rename(shared / "a")
    (shared / "c").rename(shared / "b")
    (shared / "a/x.env").write_text("")
    code, said = run(plan, again, "cat */x.env")
    assert code != 0
    assert "secret" not in said


def test_what_is_denied_and_was_missed(place: Path) -> None:
    """It was moved just when the plan was made."""
    shared = place / "shared"
    (shared / "old.env").write_text("secret")
    os.utime(shared / "old.env")
    context = decode_sandbox(workspace_write(shared, more=[entry(f"{shared}/*.env", "deny")]))
    (shared / "old.env").rename(shared / "hidden")
    plan = compile_plan(context, ThisMachine(), cwd=os.fsencode(shared))
    (shared / "hidden").rename(shared / "old.env")
    eventually(lambda: born_before(shared / "old.env", 0.2), "the file is not new")
    code, said = run(plan, lambda: compile_plan(context, ThisMachine(), cwd=os.fsencode(shared)), "cat *.env")
    assert code != 0
    assert "secret" not in said


def born_before(file: Path, seconds: float) -> bool:
    return time.time() - birth_time(os.fsencode(file)) / 1e9 > seconds


def test_as_planned(place: Path) -> None:
    workspace = place / "shared" / "workspace"
    assert run(planned(workspace)) == (0, "done\n")
    assert [path.name for path in workspace.iterdir()] == ["x"]


def test_a_sandbox_that_never_was(place: Path) -> None:
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
