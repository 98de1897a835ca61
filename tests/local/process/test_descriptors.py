"""local/process/descriptors.py: what a child gets of the server's descriptors: nothing."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable

import pytest

from exec_server.local.process import descriptors
from support.rpc import Peer, StdioPeer, WebSocketPeer
from support.server import COMMAND, RunningServer


@pytest.mark.parametrize("tty", [False, True])
def test_a_child_has_three_descriptors(peer: Peer, tty: bool) -> None:
    record = peer.run_shell("ls /proc/self/fd", tty=tty)
    assert record.output.split() == [b"0", b"1", b"2", b"3"]  # 3 is the listing itself


def test_what_the_server_inherited_is_not_passed_on() -> None:
    read, write = os.pipe()
    process = subprocess.Popen(
        [COMMAND, "--listen", "ws://127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        pass_fds=[read],
    )
    try:
        assert process.stdout is not None
        with WebSocketPeer(process.stdout.readline().decode().strip()) as peer:
            peer.initialize()
            assert os.path.exists(f"/proc/{process.pid}/fd/{read}")
            assert peer.run_shell("ls /proc/self/fd").output.split() == [b"0", b"1", b"2", b"3"]
    finally:
        process.terminate()
        process.communicate(timeout=20)
        os.close(read)
        os.close(write)


def test_a_server_without_standard_descriptors_still_serves() -> None:
    # A daemon may have closed them; then new descriptors take their numbers.
    read, write = os.pipe()
    process = subprocess.Popen(
        ["/bin/bash", "-c", f'exec "$0" --listen ws://127.0.0.1:0 >&{write} <&- 2>&-', COMMAND],
        pass_fds=[write],
    )
    os.close(write)
    try:
        url = os.read(read, 1000).decode().strip()
        with WebSocketPeer(url) as peer:
            peer.initialize()
            for tty in (False, True):
                record = peer.run_shell("echo out; echo err >&2", tty=tty)
                assert record.exit_code == 0
                assert record.output.replace(b"\r", b"").count(b"\n") == 2
    finally:
        process.terminate()
        assert process.wait(20) == 0
        os.close(read)


def test_children_have_the_limit_the_server_was_started_with(
    connect: Callable[..., Peer], start_server: Callable[..., RunningServer]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(soft, 512)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        server = start_server()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    peer = connect(server)
    peer.initialize()
    assert peer.run_shell("ulimit -S -n").stdout.strip() == str(wanted).encode(), "nothing is raised yet"
    sleepers = [peer.shell("sleep 600") for _ in range(80)]
    assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    for sleeper in sleepers:
        peer.call("process/terminate", {"processId": sleeper})
    # The shell looks after it has been told who it is, so that the limit has been put back.
    process_id = peer.shell("read line; ulimit -S -n", pipeStdin=True)
    peer.write(process_id, b"go\n")
    assert peer.finished(process_id).stdout.strip() == str(wanted).encode()


def test_inherited_descriptors_are_hidden() -> None:
    code = (
        "import os\n"
        "from exec_server.local.process import descriptors\n"
        "read, write = os.pipe()\n"
        "os.set_inheritable(read, True)\n"
        "os.close(0)\n"
        "descriptors.hide_inherited()\n"
        "assert not os.get_inheritable(read)\n"
        "os.fstat(0), os.fstat(1), os.fstat(2)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_nothing_is_restored_where_nothing_was_raised() -> None:
    descriptors.restore_in_child(os.getpid())


def test_stdio_of_the_server_is_not_that_of_its_children(start_stdio: Callable[..., StdioPeer]) -> None:
    peer = start_stdio()
    peer.initialize()
    record = peer.run_shell("readlink /proc/$$/fd/0; exec cat")
    assert record.stdout == b"/dev/null\n"
