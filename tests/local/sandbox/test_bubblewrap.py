"""local/sandbox/bubblewrap.py: which arguments a plan becomes, and that bubblewrap understands them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from exec_server.local.sandbox import bubblewrap, probe
from exec_server.local.sandbox.plan import (
    Bind,
    Directory,
    EmptyFile,
    Link,
    Plan,
    PrivateDevices,
    ReadOnly,
    Tmpfs,
)
from exec_server.local.sandbox.probe import Backend

BACKEND = Backend(name="bubblewrap", program="/usr/bin/bwrap", filters=True)
KERNEL = ["--proc", "/proc", *(["--ro-bind-try", "/proc/sys", "/proc/sys"] if os.geteuid() == 0 else [])]


def view(*steps: Any, network: Any = "closed", **more: Any) -> Plan:
    return Plan(kind="view", network=network, steps=steps, readable=(b"/",), **more)


@contextmanager
def arguments(plan: Plan, backend: Backend = BACKEND) -> Iterator[list[str]]:
    inherited: list[int] = []
    try:
        yield [os.fsdecode(word) for word in bubblewrap.arguments(plan, backend, inherited)]
    finally:
        for fd in inherited:
            os.close(fd)


def test_the_whole_line() -> None:
    plan = view(
        Bind(b"/", b"/"),
        PrivateDevices(),
        Bind(b"/w", b"/w", writable=True),
        Bind(b"/w/.git", b"/w/.git"),
        Tmpfs(b"/w/.codex", 0o555),
        ReadOnly(b"/w/.codex"),
        cwd=b"/w/a b",
    )
    with arguments(plan) as words:
        assert words == [
            *["--new-session", "--die-with-parent"],
            *["--ro-bind", "/", "/", "--dev", "/dev", *KERNEL],
            *["--bind", "/w", "/w", "--ro-bind", "/w/.git", "/w/.git"],
            *["--perms", "555", "--tmpfs", "/w/.codex", "--remount-ro", "/w/.codex"],
            *["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-net"],
            *["--chdir", "/w/a b", "--cap-drop", "ALL"],
        ]


def test_other_steps() -> None:
    plan = view(
        Tmpfs(b"/"), PrivateDevices(), Directory(b"/d"), Link(b"/bin", b"usr/bin"), network="open", cwd=b"/"
    )
    with arguments(plan) as words:
        assert words[2:] == [
            *["--tmpfs", "/", "--dev", "/dev", *KERNEL, "--dir", "/d", "--symlink", "usr/bin", "/bin"],
            *["--unshare-user", "--unshare-pid", "--unshare-ipc", "--chdir", "/", "--cap-drop", "ALL"],
        ]


def test_each_covered_file_has_a_descriptor_of_its_own() -> None:
    with arguments(view(Bind(b"/", b"/"), PrivateDevices(), EmptyFile(b"/a"), EmptyFile(b"/b", 0))) as words:
        at = words.index("--ro-bind-data")
        first, second = words[at + 1], words[at + 6]
        assert words[at : at + 8] == [
            *["--ro-bind-data", first, "/a", "--perms", "000", "--ro-bind-data", second, "/b"],
        ]
        assert first != second
        assert os.read(int(first), 1) == b""


def test_without_a_fresh_proc() -> None:
    backend = Backend(name="bubblewrap", program="/usr/bin/bwrap", proc=False)
    with arguments(view(Bind(b"/", b"/"), PrivateDevices(), ReadOnly(b"/proc")), backend) as words:
        assert "--proc" not in words
        assert "/proc" not in words


def test_the_host_s_proc_can_only_be_read() -> None:
    """Or the memory of the first process could be written."""
    backend = Backend(name="bubblewrap", program="/usr/bin/bwrap", proc=False)
    plan = view(Bind(b"/", b"/", writable=True), PrivateDevices(), writable=(b"/",))
    with arguments(plan, backend) as words:
        assert "--ro-bind /proc /proc" in " ".join(words)


def test_a_badge_lies_over_the_first_process() -> None:
    plan = view(Bind(b"/", b"/"), PrivateDevices(), Tmpfs(b"/proc"))
    words = bubblewrap.arguments(plan, BACKEND, [], b"/badge")
    at = words.index(b"--proc")
    assert words[at : at + 5] == [b"--proc", b"/proc", b"--ro-bind", b"/badge", b"/proc/1"]
    assert words.index(b"/proc/1") < words.index(b"--tmpfs")


def test_root_cannot_steer_the_kernel_where_everything_can_be_written() -> None:
    if os.geteuid() == 0:
        with arguments(view(Bind(b"/", b"/", writable=True), PrivateDevices(), writable=(b"/",))) as words:
            joined = " ".join(words)
        assert "--ro-bind-try /proc/sys /proc/sys --ro-bind-try /sys /sys" in joined


def build(plan: Plan, argv: list[bytes], env: dict[bytes, bytes], **more: Any) -> tuple[int | None, bytes]:
    command = bubblewrap.build(plan, BACKEND, argv, env, **more)
    try:
        done = subprocess.run(
            command.argv, pass_fds=command.inherited, capture_output=True, timeout=30, env={}, check=False
        )
        return done.returncode, done.stdout + done.stderr
    finally:
        for fd in command.inherited:
            os.close(fd)


@pytest.mark.usefixtures("needs_bubblewrap")
def test_bubblewrap_takes_it() -> None:
    plan = view(Bind(b"/", b"/"), PrivateDevices(), Tmpfs(b"/mnt", 0), ReadOnly(b"/mnt"), cwd=b"/usr")
    env = {b"A": b"1", b"B=C": b"2", b"": b"nobody can ask for it"}
    code, output = build(plan, [b"/bin/sh", b"-c", b"pwd; echo $A $B; ls /mnt; exit 4"], env)
    assert code == 4
    assert output.startswith(b"/usr\n1 C=2\n")
    assert b"Permission denied" in output


@pytest.mark.usefixtures("needs_bubblewrap")
def test_another_name() -> None:
    plan = view(Bind(b"/", b"/"), PrivateDevices())
    argv = [b"/bin/cat", b"/proc/self/cmdline"]
    assert build(plan, argv, {}, arg0=b"my name") == (0, b"my name\0/proc/self/cmdline\0")
    newer = Backend(name="bubblewrap", program="/usr/bin/bwrap", argv0=True)
    command = bubblewrap.build(plan, newer, argv, {}, arg0=b"my name")
    words = os.read(command.inherited[-1], 10_000).split(b"\0")
    assert words[words.index(b"--argv0") + 1] == b"my name"
    assert command.argv[-2:] == argv
    for fd in command.inherited:
        os.close(fd)


def test_no_shell_no_other_name() -> None:
    plan = Plan(kind="view", network="closed", steps=(Tmpfs(b"/"), PrivateDevices()))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(bubblewrap.Unbuildable, match="arg0"):
        bubblewrap.build(plan, BACKEND, [b"/x"], {}, arg0=b"y", program=b"12345678")
    assert len(os.listdir("/proc/self/fd")) == before, "nothing stays open"


def test_too_much() -> None:
    plan = view(Bind(b"/", b"/"), *(Tmpfs(b"/%d" % number, 0) for number in range(3000)))
    with pytest.raises(bubblewrap.Unbuildable, match="takes 9000"):
        bubblewrap.build(plan, BACKEND, [b"/x"], {})


def test_shared_mounts_are_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the plan is refused, and the words say how to get it."""
    monkeypatch.setattr(probe, "_partition", probe.Partition(("/usr/bin/unshare", "--mount")))
    for spread in (False, True):
        command = bubblewrap.build(view(Bind(b"/", b"/"), spread=spread), BACKEND, [b"true"], {})
        for fd in command.inherited:
            os.close(fd)
        first = [b"/usr/bin/unshare", b"--mount"] if spread else []
        assert command.argv[: len(first) + 2] == [*first, b"/usr/bin/bwrap", b"--args"]
    monkeypatch.setattr(probe, "_partition", probe.Partition(problem="unshare: no"))
    with pytest.raises(bubblewrap.Unbuildable, match=r"mounts of this machine are shared.*unshare: no"):
        bubblewrap.build(view(Bind(b"/", b"/"), spread=True), BACKEND, [b"true"], {})
