"""What is left of a tree: after a graceful end, after an exit, after the session, in both dialects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from support.machine import gone, running, sleep_forever
from support.rpc import Peer, WebSocketPeer
from support.server import COMMAND, RunningServer
from support.wait import eventually


def test_a_graceful_end_takes_what_was_left_behind(ws: WebSocketPeer) -> None:
    marker = sleep_forever()
    process_id = ws.shell(f"setsid sleep {marker} > /dev/null 2>&1 & echo ready; sleep 600")
    ws.saw(process_id, b"ready")
    eventually(lambda: running(f"sleep\0{marker}"), "the one that moved away")
    mode = {"type": "graceful", "timeoutMs": 10_000}
    assert ws.call("process/terminate", {"processId": process_id, "mode": mode}) == {"running": True}
    assert ws.finished(process_id).exit_code == 143
    gone(marker)


@pytest.mark.parametrize("tty", [False, True])
def test_a_graceful_end_reaches_who_is_stopped(ws: WebSocketPeer, tty: bool) -> None:
    script = "trap 'echo obeyed; exit 7' TERM; echo pid $$ ready; while :; do sleep 0.05; done"
    process_id = ws.shell(script, tty=tty)
    ws.saw(process_id, b"ready")
    pid = int(ws.records[process_id].output.split()[1])
    os.kill(pid, signal.SIGSTOP)
    mode = {"type": "graceful", "timeoutMs": 20_000}
    assert ws.call("process/terminate", {"processId": process_id, "mode": mode}) == {"running": True}
    record = ws.finished(process_id)
    assert record.exit_code == 7
    assert b"obeyed" in record.output


def test_force_on_a_process_that_has_exited_kills_its_background_children(ws: WebSocketPeer) -> None:
    marker = sleep_forever()
    process_id = ws.shell(f"setsid sleep {marker} > /dev/null 2>&1 & exit 0")
    ws.finished(process_id)
    eventually(lambda: running(f"sleep\0{marker}"), "the background child")
    assert ws.call("process/terminate", {"processId": process_id}) == {"running": False}
    assert running(f"sleep\0{marker}"), "a plain terminate leaves them alone, as the reference does"
    force = {"processId": process_id, "mode": {"type": "force"}}
    assert ws.call("process/terminate", force) == {"running": False, "killed": 1}
    gone(marker)


def test_terminate_all_takes_everything_the_session_ever_started(peer: Peer) -> None:
    marker = sleep_forever()
    left = peer.shell(f"setsid sleep {marker} > /dev/null 2>&1 & exit 0")
    peer.finished(left)
    running_one = peer.shell(f"echo ready; exec sleep {marker}")
    peer.saw(running_one, b"ready")
    eventually(lambda: len(running(f"sleep\0{marker}")) == 2, "both")
    assert peer.call("process/terminateAll")["killed"] >= 1
    gone(marker)
    assert peer.finished(running_one).exit_code == 137
    assert peer.run("echo", "on").stdout == b"on\n"


def test_a_start_behind_one_that_fails_gets_the_id(peer: Peer) -> None:
    params = {"processId": "p", "cwd": "file:///", "env": {"PATH": "/usr/bin:/bin"}, "tty": False}
    first = peer.request("process/start", {**params, "argv": ["/no/such/program"]})
    second = peer.request("process/start", {**params, "argv": ["true"]})
    assert peer.answer(first)["error"]["code"] == -32603
    assert peer.result(second)["processId"] == "p"


def test_no_direct_is_for_the_first_dialect_too(start_stdio: Callable[..., Peer]) -> None:
    peer = start_stdio("--no-direct")
    peer.initialize()
    params = {"processId": "v", "argv": ["true"], "cwd": "/", "env": {}, "tty": False}
    assert peer.refused("command/exec", params) == (-32600, "direct exec is disabled on this server")


def test_background_children_of_the_first_dialect_end_with_the_connection(
    connect: Callable[..., WebSocketPeer],
) -> None:
    marker = sleep_forever()
    old = connect()
    old.initialize()
    script = f"setsid sleep {marker} > /dev/null 2>&1 & exit 0"
    env = {"PATH": "/usr/bin:/bin"}
    params = {"processId": "v", "argv": ["/bin/sh", "-c", script], "cwd": "/", "env": env, "tty": False}
    old.call("command/exec", params)
    eventually(lambda: running(f"sleep\0{marker}"), "the background child")
    old.drop()
    gone(marker)


def test_a_low_hard_limit_only_costs_the_tag() -> None:
    command = ["prlimit", "--rttime=200000:200000", COMMAND, "run", "--", "echo", "hi"]
    done = subprocess.run(command, capture_output=True, timeout=30)
    assert (done.stdout, done.returncode) == (b"hi\n", 0), done.stderr


TRACER = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
if libc.ptrace(0x4206, int(sys.argv[1]), 0, 0):
    sys.exit(f"cannot trace: {os.strerror(ctypes.get_errno())}")
print("tracing", flush=True)
sys.stdin.read()
"""


def test_the_exit_of_a_traced_child_is_told_when_its_tracer_lets_go(ws: WebSocketPeer) -> None:
    process_id = ws.shell("echo $$; read line; exit 3", pipeStdin=True)
    ws.saw(process_id, b"\n")
    pid = ws.records[process_id].stdout.decode().strip()
    with subprocess.Popen(
        [sys.executable, "-c", TRACER, pid],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdin is not None
        assert tracer.stderr is not None
        if tracer.stdout.readline() != b"tracing\n":
            pytest.skip(f"this machine allows no tracing: {tracer.stderr.read().decode().strip()}")
        ws.write(process_id, b"\n")
        assert ws.call("environment/status") == {"status": "ready"}
        tracer.stdin.close()
        assert ws.finished(process_id).exit_code == 3


def test_every_origin_is_looked_at(start_server: Callable[..., RunningServer]) -> None:
    import http.client

    server = start_server("--allow-origin", "https://good.example")
    host = server.url.removeprefix("ws://")
    for origins, status in ((["https://good.example"], 200), (["https://good.example", "https://evil"], 403)):
        connection = http.client.HTTPConnection(host, timeout=10)
        connection.putrequest("GET", "/readyz")
        for origin in origins:
            connection.putheader("Origin", origin)
        connection.endheaders()
        assert connection.getresponse().status == status
        connection.close()
