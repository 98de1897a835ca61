"""local/sandbox/probe.py: what is chosen, and in which words it is said why."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from exec_server.local.sandbox import landlock, probe


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all there is to find programs in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(folder: Path, script: str, name: str = "bwrap") -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


KNOWS = "--perms --args --seccomp --cap-drop --die-with-parent"


def test_real(needs_bubblewrap: None) -> None:
    found = probe.probe()
    assert found.name == "bubblewrap"
    assert found.version.startswith("bubblewrap ")
    assert found.program is not None
    assert os.access(found.program, os.X_OK)
    assert found.filters
    assert found.reasons == () or not found.proc


def test_mounts_can_be_kept_out(needs_bubblewrap: None) -> None:
    program = probe.find_program("bwrap")
    assert program is not None
    found = probe.try_partition(program)
    assert found.problem == ""
    assert found.prefix[0].endswith("/unshare")
    assert "private" in found.prefix
    assert probe.try_partition("/no/such/bwrap").problem != ""


def test_mounts_cannot_be_kept_out(path: Path) -> None:
    assert "util-linux" in probe.try_partition("/bin/true").problem
    install(path, "echo unshare: no >&2; exit 1", name="unshare")
    assert probe.try_partition("/bin/true") == probe.Partition(problem=f"{path}/unshare: unshare: no")


def test_not_installed(path: Path) -> None:
    del path
    found = probe.probe()
    assert found.name == ("landlock" if landlock.abi() >= 3 else "filter")
    assert "bubblewrap is not installed" in found.reasons[0]


def test_too_old(path: Path) -> None:
    install(path, "echo --ro-bind --args --seccomp --cap-drop --die-with-parent")
    (reason, *_) = probe.probe().reasons
    assert reason.endswith("does not know --perms; bubblewrap 0.5 or later is needed")


def test_cannot_run(path: Path) -> None:
    install(path, f'case $1 in --help) echo {KNOWS};; *) echo "bwrap: No permissions" >&2; exit 1;; esac')
    found = probe.probe()
    assert found.name != "bubblewrap"
    assert "cannot make a sandbox: bwrap: No permissions" in found.reasons[0]


def test_no_fresh_proc(path: Path) -> None:
    """Some containers forbid it; everything else works."""
    proc = "echo bwrap: Can\\'t mount proc on /newroot/proc: Operation not permitted >&2; exit 1"
    install(
        path, f'case "$*" in --help) echo {KNOWS} --argv0;; --version) echo x 1;; *--proc*) {proc};; esac'
    )
    found = probe.probe()
    assert (found.name, found.proc, found.argv0) == ("bubblewrap", False, True)
    assert "no fresh /proc" in found.reasons[0]


def test_does_not_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TRIAL_SECONDS", 0.1)
    install(path, f"case $1 in --help) echo {KNOWS};; *) exec /bin/sleep 1000;; esac")
    assert probe.try_run([str(path / "bwrap")], 0.1).code is None


def test_no_landlock_either(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del path
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    found = probe.probe()
    assert found.name == "filter"
    assert "no Landlock" in found.reasons[1]
    monkeypatch.setattr(landlock, "abi", lambda: 2)
    assert "too old (version 2" in probe.probe().reasons[1]


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    found = probe.probe()
    assert found.name == "none"
    assert "darwin" in found.reasons[0]


def test_programs_of_a_project_are_not_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(path, "exit 0")
    assert probe.find_program("bwrap") == str((path / "bwrap").resolve())
    monkeypatch.chdir(path.parent)
    assert probe.find_program("bwrap") is None
    monkeypatch.setenv("PATH", "bin:.:")
    assert probe.find_program("bwrap") is None


def test_trials_have_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    done = probe.try_run(["/bin/sh", "-c", "echo out; echo err >&2; echo [$SECRET]; exit 3"])
    assert done == probe.Trial(3, "out\nerr\n[]\n")
    assert probe.try_run(["/no/such/program"]).code is None
