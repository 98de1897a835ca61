"""Ways out by the first process inside, with which everybody in a sandbox is to end.

It is bubblewrap's, and has the rights of the command. Whoever can write its memory can have it do
anything: outlive its keeper, or tell that the command has ended. So nobody inside may reach it; and if
somebody has it all the same (here: this test, from outside), it still ends when the sandbox does.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exec_server.local.sandbox import mountpoints
from support.rpc import WebSocketPeer
from support.sandbox import read_only, run_in, start_in, workspace_write
from support.server import COMMAND, RunningServer
from support.wait import eventually

pytestmark = pytest.mark.usefixtures("needs_bubblewrap")

REACH = """
import ctypes, os, resource, sys
libc = ctypes.CDLL(None, use_errno=True)
vm_write = {"x86_64": 311, "aarch64": 271}[os.uname().machine]

def ptrace(pid):
    if libc.ptrace(0x4206, ctypes.c_long(pid), None, None) < 0:
        raise OSError

def memory(pid):
    os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))

def memory_of_its_thread(pid):
    os.close(os.open(f"/proc/{pid}/task/{pid}/mem", os.O_RDWR))

def descriptors(pid):
    os.listdir(f"/proc/{pid}/fd")

def write(pid):
    if libc.syscall(vm_write, *map(ctypes.c_long, (pid, 0, 0, 0, 0, 0))) < 0:
        raise OSError

def hold(pid):
    os.close(os.pidfd_open(pid))

def limit(pid):
    resource.prlimit(pid, resource.RLIMIT_RTTIME, (1000, resource.RLIM_INFINITY))

for pid in (1, os.getpid()):
    if pid != 1:
        print("itself:", end=" ")
    for way in (memory, memory_of_its_thread, descriptors, ptrace, write, hold, limit):
        try:
            way(pid)
            print(way.__name__, end=" ")
        except OSError:
            pass
"""


@pytest.mark.parametrize("network", [False, True])
def test_nobody_inside_reaches_it(ws: WebSocketPeer, tmp_path: Path, network: bool) -> None:
    for sandbox in (read_only(network=network), workspace_write(tmp_path, network=network)):
        said = run_in(ws, sandbox, sys.executable, "-I", "-S", "-c", REACH).stdout.decode()
        more = "write " if network else ""
        assert said == f"itself: memory memory_of_its_thread descriptors {more}hold limit "


def test_a_network_leaves_debuggers_alone(ws: WebSocketPeer) -> None:
    script = """
import ctypes, os, time
child = os.fork() or time.sleep(1000)
print(ctypes.CDLL(None).ptrace(0x4206, ctypes.c_long(child), None, None), flush=True)
os.kill(child, 9)
"""
    sandbox = read_only(network=True)
    assert run_in(ws, sandbox, sys.executable, "-I", "-S", "-c", script).stdout == b"0\n"


INIT = 'mount -t tmpfs tmpfs /run && mkfifo /run/initctl && exec "$0" "$@"'
"""In a mount namespace of its own: this machine's stays as it is."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount, and only root is listened to")
def test_nor_the_first_process_of_the_machine(tmp_path: Path) -> None:
    """Through its named pipe, into which one can write in a view that can only be read."""
    command = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", INIT, COMMAND]
    attempt = "import os; os.open('/run/initctl', os.O_WRONLY | os.O_NONBLOCK)"
    with RunningServer(command=command) as server, WebSocketPeer(server.url, server.pid) as peer:
        peer.initialize()
        for sandbox, word in ((read_only(), b"PermissionError"), (None, b"No such device or address")):
            record = run_in(peer, sandbox, sys.executable, "-I", "-S", "-c", attempt)
            assert word in record.stderr, "without a sandbox, only a reader is missing"


# Somebody has it ---------------------------------------------------------------------------------

CODE = bytes.fromhex("9090" + "b89d000000bf0100000031f60f05" + "b8220000000f05ebf7")
"""Nothing in place of the call it waits in; prctl(PR_SET_PDEATHSIG, 0); pause, for ever."""


captured_ones: list[int] = []


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    """Whatever the outcome."""
    yield
    while captured_ones:
        pid = captured_ones.pop()
        if mountpoints.is_running(pid):
            os.kill(pid, signal.SIGKILL)


class Captured:
    """A sandbox whose first process does not end with its keeper, and in which nobody is marked."""

    def __init__(self, peer: WebSocketPeer) -> None:
        if os.uname().machine != "x86_64":
            pytest.skip("the code is for x86-64")
        self.process = start_in(peer, read_only(), "sh", "-c", "echo up; exec sleep 1000")
        peer.saw(self.process, b"up")
        (keeper,) = children(peer.server_pid, "bwrap")
        (self.first,) = children(keeper, "bwrap")
        self.inside = [self.first, *children(self.first)]
        captured_ones.append(self.first)
        eventually(lambda: self.call() != "running", "the first process waits")
        at = int(self.call().split()[-1], 16) - 2
        with open(f"/proc/{self.first}/mem", "r+b", buffering=0) as memory:
            memory.seek(at)
            memory.write(CODE)
        for sig in (signal.SIGSTOP, signal.SIGCONT):  # which makes it begin its call anew
            os.kill(self.first, sig)
        eventually(lambda: self.call().startswith("34 "), "the first process does what it was told")
        for pid in self.inside:
            hard = resource.prlimit(pid, resource.RLIMIT_RTTIME)[1]
            resource.prlimit(pid, resource.RLIMIT_RTTIME, (1000, hard))

    def call(self) -> str:
        """What the first process waits in, by number."""
        return Path(f"/proc/{self.first}/syscall").read_text().strip()

    def expect_the_end(self) -> None:
        """Now, but for the first process: taking its view apart takes a moment."""
        assert set(self.left) <= {self.first}
        eventually(lambda: not self.left, "the end of the first process")

    @property
    def left(self) -> list[int]:
        return [pid for pid in self.inside if mountpoints.is_running(pid)]


def children(pid: int, name: str = "") -> list[int]:
    words = [
        word for each in Path(f"/proc/{pid}/task").glob("*/children") for word in each.read_text().split()
    ]
    return [int(word) for word in words if name in Path(f"/proc/{word}/comm").read_text()]


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with RunningServer() as one:
        yield one


def test_it_ends_when_the_command_is_terminated(server: RunningServer) -> None:
    with WebSocketPeer(server.url, server.pid) as peer:
        peer.initialize()
        captured = Captured(peer)
        peer.terminate(captured.process)
        peer.finished(captured.process)
        captured.expect_the_end()


def test_it_ends_when_the_server_does(server: RunningServer) -> None:
    with WebSocketPeer(server.url, server.pid) as peer:
        peer.initialize()
        captured = Captured(peer)
        os.kill(server.pid, signal.SIGTERM)
        eventually(lambda: not mountpoints.is_running(server.pid), "the end of the server")
        captured.expect_the_end()


def test_it_ends_when_the_server_is_killed(server: RunningServer) -> None:
    with WebSocketPeer(server.url, server.pid) as peer:
        peer.initialize()
        captured = Captured(peer)
        os.kill(server.pid, signal.SIGKILL)
        eventually(lambda: captured.left == [], "the guardian has ended it")
