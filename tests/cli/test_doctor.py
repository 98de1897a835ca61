"""cli/doctor.py: what a person reads, and what a program does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.sandbox import FORBIDDING
from support.server import COMMAND, server_environment


def doctor(*arguments: str, prefix: list[str] | None = None, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [*(prefix or []), COMMAND, "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=server_environment(**env),
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_all_is_well(needs_bubblewrap: None) -> None:
    code, text = doctor()
    assert code == 0, text
    assert "Backend in use: bubblewrap." in text
    for line in ("ok  bubblewrap", "ok  user namespaces", "ok  seccomp"):
        assert line in text
    code, text = doctor("--json")
    report = json.loads(text)
    assert report["backend"] == "bubblewrap"
    assert {finding["name"] for finding in report["findings"]} >= {
        "system",
        "bubblewrap",
        "Landlock",
        "seccomp",
    }


def test_bubblewrap_is_missing(tmp_path: Path) -> None:
    code, text = doctor(PATH=str(tmp_path))
    assert code == 1
    assert "--  bubblewrap" in text
    assert "apt install bubblewrap" in text
    assert "Backend in use: landlock" in text or "Backend in use: filter" in text


def test_user_namespaces_are_forbidden(needs_bubblewrap: None) -> None:
    """As in a container with the usual seccomp profile."""
    code, text = doctor("--json", prefix=FORBIDDING)
    assert code == 1
    report = json.loads(text)
    assert report["backend"] in ("landlock", "filter")
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert findings["bubblewrap"]["verdict"] == "missing"
    assert "cannot make a sandbox" in findings["bubblewrap"]["found"]
    assert findings["user namespaces"]["found"] == "cannot be made: Operation not permitted"
    assert "container" in findings["user namespaces"]["cure"]


def test_switches_of_the_kernel(tmp_path: Path) -> None:
    """By a file of numbers instead of the kernel's, which nobody may change for a test."""
    code = (
        "import sys; from exec_server.cli import doctor\n"
        "values = {'max_user_namespaces': 0, 'unprivileged_userns_clone': 0,"
        " 'apparmor_restrict_unprivileged_userns': 1}\n"
        "doctor._number = lambda path: values.get(path.rpartition('/')[2])\n"
        "for finding in doctor._settings(): print(finding.name, '|', finding.cure)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=os.environ
    )
    lines = dict(line.split(" | ") for line in done.stdout.splitlines())
    assert lines["user.max_user_namespaces"].startswith("sysctl user.max_user_namespaces=")
    assert "unprivileged_userns_clone=1" in lines["kernel.unprivileged_userns_clone"]
    assert "userns," in lines["AppArmor"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_mounts_are_shared(needs_bubblewrap: None, tmp_path: Path) -> None:
    """In a mount namespace of its own: this machine's mounts stay as they are."""
    shared = ["/bin/sh", "-c", 'mount --make-rshared / && PATH=$WITH exec "$0" "$@"']
    prefix = ["unshare", "--mount", "--propagation", "private", *shared]
    code, text = doctor(prefix=prefix, WITH=os.environ["PATH"])
    assert code == 0, text
    assert "shared, and kept out of sandboxes by unshare" in text
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    (tmp_path / "bwrap").symlink_to(bwrap)
    code, text = doctor(prefix=prefix, WITH=str(tmp_path))
    assert code == 1
    assert "--  mounts" in text
    assert "install util-linux" in text
