"""local/process/guard.py: nothing outlives the server, however it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from support.machine import children, gone, running, sleep_forever, stat
from support.rpc import Peer, StdioPeer, WebSocketPeer
from support.server import COMMAND, RunningServer
from support.wait import eventually

TREE = (
    "setsid sleep {m} & (setsid bash -c 'sleep {m} & exit' &) ; trap '' TERM INT HUP; sleep {m} & sleep {m}"
)


def start_tree(peer: Peer, marker: str, **more: object) -> str:
    process_id = peer.shell(TREE.format(m=marker), **more)
    eventually(lambda: len(running(f"sleep\0{marker}")) == 4, "everybody to be there")
    return process_id


def guardians(server_pid: int) -> list[int]:
    """Of this server."""
    found = []
    for pid in children(server_pid):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"guardian.py" in file.read() and stat(pid).state not in "ZX":
                    found.append(pid)
        except FileNotFoundError:
            continue  # it has been reaped meanwhile
    return found


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1, signal.SIGSEGV]
)
@pytest.mark.parametrize("tty", [False, True], ids=["pipes", "terminal"])
def test_no_process_outlives_a_listening_server(
    start_server: Callable[..., RunningServer],
    connect: Callable[..., WebSocketPeer],
    number: int,
    tty: bool,
) -> None:
    server = start_server()
    peers = [connect(server), connect(server)]
    markers = []
    for peer in peers:
        peer.initialize()
        markers.append(sleep_forever())
        start_tree(peer, markers[-1], tty=tty)
    peers[0].drop()  # a detached session's processes go, too
    guarding = eventually(lambda: guardians(server.pid), "a guardian")
    code = server.end(number)
    assert code == (0 if number in (signal.SIGTERM, signal.SIGINT) else -number)
    for marker in markers:
        gone(marker)
    eventually(lambda: all(stat(pid).state in "ZX" for pid in guarding), "the end of the guardian")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_server_on_stdio(start_stdio: Callable[..., StdioPeer], number: int) -> None:
    peer = start_stdio()
    peer.initialize()
    marker = sleep_forever()
    start_tree(peer, marker)
    guarding = eventually(lambda: guardians(peer.server_pid), "a guardian")
    assert peer.end(number) == (-number if number == signal.SIGKILL else 0)
    gone(marker)
    eventually(lambda: all(stat(pid).state in "ZX" for pid in guarding), "the end of the guardian")


def test_starts_that_are_under_way_when_input_ends_come_to_nothing(
    start_stdio: Callable[..., StdioPeer],
) -> None:
    for _ in range(3):
        peer = start_stdio()
        peer.initialize()
        marker = sleep_forever()
        peer.send_many(
            [
                {"id": number, "method": "process/start", "params": peer.start_params(["sleep", marker])}
                for number in range(100, 400)
            ]
        )
        peer.end_of_input()
        assert peer.ended()
        assert peer.process.wait(20) == 0
        gone(marker)


def test_a_guardian_that_is_killed_is_replaced(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    server = start_server()
    peer = connect(server)
    peer.initialize()
    marker = sleep_forever()
    start_tree(peer, marker)
    [first] = eventually(lambda: guardians(server.pid), "a guardian")
    os.kill(first, signal.SIGKILL)
    [second] = eventually(lambda: [pid for pid in guardians(server.pid) if pid != first], "another guardian")
    assert stat(first).state == "X"  # and reaped
    # It is there, but not before its code runs does it guard.
    eventually(lambda: _ignores(second, signal.SIGTERM), "the second to be ready")
    assert len(running(f"sleep\0{marker}")) == 4
    server.end(signal.SIGKILL)
    gone(marker)


def _ignores(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        lines = dict(line.split(":", 1) for line in file.read().splitlines())
    return bool(int(lines["SigIgn"], 16) >> (number - 1) & 1)


def test_a_guardian_does_not_mind_signals_meant_for_others_and_holds_nothing(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    server = start_server()
    peer = connect(server)
    peer.initialize()
    peer.run("true")
    [guardian] = eventually(lambda: guardians(server.pid), "a guardian")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        eventually(lambda number=number: _ignores(guardian, number), "the guardian to be ready")  # type: ignore[misc]
        os.kill(guardian, number)
    assert stat(guardian).session == guardian
    eventually(lambda: os.readlink(f"/proc/{guardian}/cwd") == "/", "the guardian to leave our directory")
    links = [os.readlink(f"/proc/{guardian}/fd/{fd}") for fd in os.listdir(f"/proc/{guardian}/fd")]
    assert sorted(link.partition(":")[0] for link in links) == ["/dev/null"] * 3 + ["pipe"]
    with open(f"/proc/{guardian}/environ", "rb") as file:
        assert file.read() == b""
    assert guardians(server.pid) == [guardian]


def test_no_guardian_before_there_is_something_to_guard(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server()
    with WebSocketPeer(server.url) as peer:
        peer.initialize()
        peer.call("environment/status")
    assert children(server.pid) == []


@pytest.mark.parametrize("how", ["terminate", "kill the inner", "kill the outer", "end the outer"])
def test_a_server_inside_a_process_of_a_server_is_cleaned_up_after(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer], how: str
) -> None:
    server = start_server()
    outer = connect(server)
    outer.initialize()
    process_id = outer.start(COMMAND, "--listen", "ws://127.0.0.1:0")
    url = outer.saw(process_id, b"\n").stdout.decode().strip()
    marker = sleep_forever()
    with WebSocketPeer(url) as inner:
        inner.initialize()
        start_tree(inner, marker)
        inner_pid = int(inner.run_shell("echo $PPID").stdout)
        [guardian] = eventually(lambda: guardians(inner_pid), "the inner guardian")
        eventually(lambda: _ignores(guardian, signal.SIGTERM), "the inner guardian to be ready")
        match how:
            case "terminate":
                outer.terminate(process_id)
            case "kill the inner":
                os.kill(inner_pid, signal.SIGKILL)
            case "kill the outer":
                server.end(signal.SIGKILL)
            case "end the outer":
                server.end()
        gone(marker)
        eventually(lambda: stat(inner_pid).state in "ZX", "the end of the inner server")
        eventually(lambda: stat(guardian).state in "ZX", "the end of its guardian")
