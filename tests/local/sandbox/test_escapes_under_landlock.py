"""Ways out where there is no namespace: Landlock looks at files, and processes of the account have more in
common than those. Everything goes through a real server; what was to be changed is looked at from outside."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.rpc import WebSocketPeer
from support.sandbox import FORBIDDING, entry, profile, read_only, run_in
from support.server import COMMAND, RunningServer

GETFLAGS, SETFLAGS, NOATIME = 0x80086601, 0x40086602, 0x80
IPC_PRIVATE, IPC_RMID, IPC_CREAT = 0, 0, 0o1000

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p


@pytest.fixture(scope="module")
def peer() -> Iterator[WebSocketPeer]:
    """A connection to a server that may make no user namespaces."""
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(command=(*FORBIDDING, COMMAND)))
        one = stack.enter_context(WebSocketPeer(server.url, server.pid))
        one.initialize()
        yield one


@pytest.fixture
def victim() -> Iterator[int]:
    """A process outside."""
    with subprocess.Popen(["sleep", "1000"]) as one:
        yield one.pid
        one.kill()


ON_A_PROCESS = """
import ctypes, os, resource, sys
pid, user = int(sys.argv[1]), os.getuid()
libc = ctypes.CDLL(None)
ioprio_set, setattr = {"x86_64": (251, 314), "aarch64": (30, 274)}[os.uname().machine]

def attempt(call, *arguments):
    try:
        if call(*arguments) == -1:
            return
        print(arguments)
    except OSError:
        pass

idle = (ctypes.c_uint32 * 12)(48, 5)
attempt(resource.prlimit, pid, resource.RLIMIT_NOFILE, (1, 1))
attempt(resource.prlimit, pid, resource.RLIMIT_CPU, (1, 1))
attempt(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))
attempt(os.sched_setaffinity, pid, {0})
attempt(os.sched_setparam, pid, os.sched_param(0))
attempt(libc.syscall, setattr, pid, idle, 0)
attempt(libc.syscall, ioprio_set, 1, pid, 3 << 13)
attempt(libc.syscall, ioprio_set, 3, user, 0)
attempt(os.setpriority, os.PRIO_PROCESS, pid, 19)
attempt(os.setpriority, os.PRIO_PGRP, os.getpgid(pid), 19)
same = os.getpriority(os.PRIO_PROCESS, 0)  # every process of the account is meant
attempt(os.setpriority, os.PRIO_USER, user, same)
attempt(os.setpriority, os.PRIO_USER, 0, same)
"""


def state(pid: int) -> object:
    limits = [resource.prlimit(pid, which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)]
    priority = os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)
    return limits, priority, os.sched_getaffinity(pid)


def test_processes_outside(peer: WebSocketPeer, victim: int) -> None:
    before = state(victim), state(peer.server_pid)
    command = (sys.executable, "-I", "-S", "-c", ON_A_PROCESS, str(victim))
    for network in (False, True):
        assert run_in(peer, read_only(network=network), *command).output == b""
        assert (state(victim), state(peer.server_pid)) == before


SHARED = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
at = libc.shmat(int(sys.argv[1]), None, 0)
if at not in (None, ctypes.c_void_p(-1).value):
    ctypes.memmove(at, b"escaped", 8)
libc.shmctl(int(sys.argv[1]), 0, None)
if libc.semget(0, 1, 0o1600) != -1 or libc.msgget(0, 0o1600) != -1:
    print("escaped")
queue = b"/exec-server-escape-%s" % sys.argv[1].encode()
if libc.mq_open(queue, 0o102, 0o600, None) != -1:
    print("escaped")
    libc.mq_unlink(queue)
"""


def test_memory_that_others_share(peer: WebSocketPeer) -> None:
    number = libc.shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0o600)
    assert number >= 0
    at = libc.shmat(number, None, 0)
    try:
        ctypes.memmove(at, b"private", 8)
        record = run_in(peer, read_only(), sys.executable, "-I", "-S", "-c", SHARED, str(number))
        assert record.output == b""
        assert ctypes.string_at(at) == b"private"
    finally:
        libc.shmdt(ctypes.c_void_p(at))
        assert libc.shmctl(number, IPC_RMID, None) == 0


FLAGS = """
import fcntl, os, struct, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
for flags in (0x80, 0x40, 0x10):
    try:
        fcntl.ioctl(fd, 0x40086602, struct.pack("l", flags))
    except OSError:
        pass
"""


def test_flags_of_files_outside(peer: WebSocketPeer, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()

    def flags() -> int:
        with target.open("rb") as file:
            return int(struct.unpack("l", fcntl.ioctl(file, GETFLAGS, bytes(8)))[0])

    try:
        before = flags()
    except OSError:
        pytest.skip("files have no flags here")
    for sandbox in (read_only(), read_only(network=True)):
        run_in(peer, sandbox, sys.executable, "-I", "-S", "-c", FLAGS, str(target))
        assert flags() == before


def test_ordinary_programs_go_on(peer: WebSocketPeer, tmp_path: Path) -> None:
    names = (".git", ".agents", ".codex", ".aws")
    protected = [entry(tmp_path / name, "write") for name in names]
    sandbox = profile([entry(":root", "read"), entry(tmp_path, "write"), *protected])
    (tmp_path / "Makefile").write_text("all: one two\none two:\n\t@nice -n 1 echo $@\n")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(tmp_path / "repo")]
    subprocess.run(["git", "init", "-q", str(tmp_path / "repo")], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    script = """set -e
ulimit -n 100; ulimit -c 0; ulimit -n
nice -n 5 nice
make -s -j2 | sort
taskset -c 0 true
python3 - <<'X'
import os, subprocess, threading, multiprocessing.pool
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.setpriority(os.PRIO_PROCESS, 0, 10)
print(subprocess.run(["cat"], input=b"piped", capture_output=True).stdout.decode())
X
cp Makefile copy && cat copy > /dev/null && ls -l --color=always > /dev/null
git -C repo log --format=%s
"""
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    for needed in ("git", "make", "taskset"):
        assert shutil.which(needed), needed
    record = run_in(peer, sandbox, "/bin/bash", "-c", script, cwd=tmp_path.as_uri(), env=env)
    assert (record.exit_code, record.stdout.decode().split()) == (
        0,
        ["100", "5", "one", "two", "piped", "x"],
    ), record.output
