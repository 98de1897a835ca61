"""local/sandbox/confine.py: what a thread gives up, its child does not have, and nobody else misses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.sandbox import landlock, seccomp
from exec_server.local.sandbox.confine import Confinement, can_filter
from exec_server.local.sandbox.plan import Identity, Plan

pytestmark = pytest.mark.skipif(landlock.abi() < landlock.MINIMUM_ABI, reason="this kernel has no Landlock")


def plan(**more: Any) -> Plan:
    return Plan(kind="view", network=more.pop("network", "closed"), **more)


def run(confinement: Confinement, script: str) -> str:
    """What a shell says that such a thread starts."""
    ours, theirs = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, theirs, 1), (os.POSIX_SPAWN_DUP2, theirs, 2)]
    argv = ["sh", "-c", script]
    pid = confinement.run(lambda: os.posix_spawn("/bin/sh", argv, os.environ, file_actions=actions))
    os.close(theirs)
    with open(ours) as output:
        said = output.read()
    os.waitpid(pid, 0)
    return said


def confined(what: Plan) -> Confinement:
    program = seccomp.program(what.network, landlock=True)
    return Confinement(program, landlock.grants(what), network=what.network == "open")


def test_files(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
    what = plan(readable=(b"/",), writable=(os.fsencode(inside),))
    script = f"echo 1 > {inside}/x; echo 2 > {outside}/x; cat {inside}/x; echo > /dev/null && echo null"
    said = run(confined(what), script)
    assert "Permission denied" in said
    assert said.endswith("1\nnull\n")
    assert not (outside / "x").exists()


def test_only_what_is_readable(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    what = plan(readable=(b"/usr", b"/bin", b"/lib", b"/lib64", b"/etc"))
    assert "secret" not in run(confined(what), f"cat < {secret}").replace(str(secret), "")
    assert "secret" in run(confined(plan(readable=(b"/",))), f"cat < {secret}")


def test_capabilities_are_gone_and_stay_gone() -> None:
    said = run(confined(plan(readable=(b"/",))), "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status")
    found = dict(line.split(":\t") for line in said.splitlines())
    assert {found[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    if os.geteuid() == 0:
        assert found["CapBnd"] == "0" * 16
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")


def test_this_process_keeps_its_rights(tmp_path: Path) -> None:
    before = Path("/proc/thread-self/status").read_text()
    run(confined(plan(readable=(b"/",))), "true")
    after = Path("/proc/thread-self/status").read_text()
    for name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp"):
        lines = [
            next(line for line in text.splitlines() if line.startswith(name)) for text in (before, after)
        ]
        assert lines[0] == lines[1]
    (tmp_path / "x").touch()


def test_what_is_raised_inside_is_raised_outside() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Confinement(None, None, network=True).run(fail)


def test_another_file_by_the_same_path(tmp_path: Path) -> None:
    """Between the plan and the rule somebody has put a link in the place of a directory."""
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    place.mkdir()
    elsewhere.mkdir()
    info = place.stat()
    seen = (Identity(os.fsencode(place), info.st_dev, info.st_ino, 0),)
    what = plan(readable=(b"/",), writable=(os.fsencode(place),), seen=seen)
    assert run(confined(what), f"echo 1 > {place}/x; cat {place}/x") == "1\n"
    place.rename(tmp_path / "moved")
    place.symlink_to(elsewhere)
    with pytest.raises(OSError, match="not what it was"):
        confined(what).run(lambda: None)


def test_root_is_root_no_more() -> None:
    """Programs that root executes would get capabilities back, were that not switched off."""
    if os.geteuid() != 0:
        pytest.skip("only for root")
    said = run(confined(plan(readable=(b"/",))), "chroot / true; mount -t tmpfs none /mnt")
    assert "chroot: cannot change root directory" in said
    assert "mounted" not in Path("/proc/self/mounts").read_text().split()


def test_can_be_asked_from_anywhere() -> None:
    """Nothing of this is done to the main thread of whoever asks."""
    code = "from exec_server.local.sandbox.probe import probe; print(probe().name); open('/dev/null','w')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("bubblewrap", "landlock", "filter", "none")


def test_whether_filters_can_be_had() -> None:
    assert can_filter(seccomp.program("closed")) is None
    problem = can_filter(b"\0" * 8)  # a program without a return is none
    assert problem is not None
    assert "seccomp" in problem
