"""After many processes all is as before: no zombie, no leaked descriptor, no memory that stays away."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from support.machine import children, descriptors, gone, resident_bytes, sleep_forever
from support.rpc import PATH, Peer, StdioPeer, WebSocketPeer
from support.server import RunningServer
from support.wait import eventually

MIB = 1024 * 1024

KINDS: list[dict[str, Any]] = [
    {"argv": ["/bin/true"]},
    {"argv": ["/bin/echo", "out"]},
    {"argv": ["/bin/echo", "terminal"], "tty": True},
    {"argv": ["/bin/cat"], "pipeStdin": True},
    {"argv": ["/bin/sh", "-c", "echo err >&2; exit 3"]},
    {"argv": ["/bin/no-such-program"]},
]


class Holdings(NamedTuple):
    """What a server has that it could lose."""

    descriptors: int
    children: int

    @classmethod
    def of(cls, pid: int) -> Holdings:
        return cls(len(descriptors(pid)), len(children(pid)))


@pytest.fixture
def alone(new_peer: Callable[..., Peer]) -> Peer:
    """A connection, over either transport, to a server that nobody else uses."""
    made = new_peer("--detach-ttl", "30")
    made.initialize()
    return made


class Many:
    """Runs processes of all kinds, so many at once, and forgets about them."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.started = 0

    def run(self, total: int, at_once: int) -> None:
        peer, ended, in_flight = self.peer, 0, 0
        last = self.started + total
        while ended < total:
            while in_flight < at_once and self.started < last:
                kind = KINDS[self.started % len(KINDS)]
                process_id = f"n{self.started}"
                settings = {"cwd": "file:///tmp", "env": {"PATH": PATH}, "tty": False, **kind}
                peer.request("process/start", {"processId": process_id, **settings}, request_id=process_id)
                if kind.get("pipeStdin"):
                    peer.request("process/write", {"processId": process_id, "chunk": "eA=="}, request_id="w")
                    peer.request("process/closeStdin", {"processId": process_id}, request_id="c")
                self.started += 1
                in_flight += 1
            message = peer.pump()
            assert message is not None
            if message.get("method") == "process/closed":
                process_id = message["params"]["processId"]
                record = peer.records.pop(process_id)
                record.check()
                expected = {1: b"out\n", 2: b"terminal\r\n", 3: b"x", 4: b"err\n"}
                assert record.output == expected.get(int(process_id[1:]) % len(KINDS), b"")
                ended, in_flight = ended + 1, in_flight - 1
            elif "error" in message and str(message["id"]).startswith("n"):
                assert message["error"]["code"] == -32603
                ended, in_flight = ended + 1, in_flight - 1
            if len(peer.received) > 1000:
                peer.received.clear()
                peer.notifications.clear()
                peer.answers.clear()

    def settle(self) -> None:
        """Until the server remembers none of them."""
        eventually(lambda: self.peer.call("process/list", {})["processes"] == [], "retention being over")


def come_back(pid: int, before: Holdings) -> None:
    eventually(lambda: Holdings.of(pid) == before, f"the server being as before ({before})")


def prove(peer: Peer, total: int, at_once: int, memory: int) -> None:
    """Warm up, measure, run, and measure again."""
    peer.initialize(extensions=True)
    many = Many(peer)
    many.run(300, at_once)
    many.settle()
    before, memory_before = Holdings.of(peer.server_pid), resident_bytes(peer.server_pid)
    many.run(total, at_once)
    many.settle()
    come_back(peer.server_pid, before)
    assert before.children == 1  # the guardian
    assert resident_bytes(peer.server_pid) - memory_before < memory


def test_five_hundred_processes_on_stdio(start_stdio: Callable[..., StdioPeer]) -> None:
    prove(start_stdio("--retention", "0"), 500, 16, 16 * MIB)


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_ten_thousand_processes(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    prove(connect(start_server("--retention", "0")), 10_000, 32, 16 * MIB)


def test_two_hundred_processes_at_once(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    server = start_server("--retention", "0")
    peer = connect(server)
    peer.initialize(extensions=True)
    peer.run("true")
    eventually(lambda: peer.call("process/list", {})["processes"] == [], "retention being over")
    before = Holdings.of(server.pid)
    ids = [peer.start("cat", pipeStdin=True, tty=number % 4 == 0) for number in range(200)]
    assert len(children(server.pid)) == 201
    # Everybody hears, everybody is heard.
    for number, process_id in enumerate(ids):
        peer.request("process/write", {"processId": process_id, "chunk": "aGVsbG8K"}, request_id=number)
    for process_id in ids:
        peer.saw(process_id, b"hello")
    for number, process_id in enumerate(ids):
        if number % 4 == 0:
            peer.write(process_id, b"\x04")
        elif number % 4 == 1:
            peer.terminate(process_id)
        else:
            peer.close_stdin(process_id)
    for number, process_id in enumerate(ids):
        assert peer.finished(process_id).exit_code == (137 if number % 4 == 1 else 0)
    eventually(lambda: peer.call("process/list", {})["processes"] == [], "retention being over")
    come_back(server.pid, before)


def test_two_hundred_trees_killed_at_once(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    server = start_server("--detach-ttl", "0")
    peer = connect(server)
    peer.initialize()
    peer.run("true")
    before = Holdings.of(server.pid)
    marker = sleep_forever()
    params = [peer.start_params(["/bin/sh", "-c", f"sleep {marker} & sleep {marker}"]) for _ in range(200)]
    ids = [peer.request("process/start", one) for one in params]
    for one in ids:
        peer.result(one)
    began = time.monotonic()
    peer.drop()
    gone(marker)
    assert time.monotonic() - began < 15
    eventually(
        lambda: Holdings.of(server.pid) == before._replace(descriptors=before.descriptors - 1),
        "the server being as before, without the connection",
    )


def test_starts_that_fail_leave_nothing(alone: Peer) -> None:
    alone.run("true")
    before = Holdings.of(alone.server_pid)
    bad = [
        {"argv": ["/no/such"]},
        {"argv": ["/no/such"], "tty": True},
        {"argv": ["/tmp"], "pipeStdin": True},
        {"cwd": "file:///no/such"},
        {"argv": ["true", "\0"]},
        {"argv": ["true", "x" * 131_072]},
    ]
    for number in range(300):
        params = {**alone.start_params(["true"]), **bad[number % len(bad)]}
        assert alone.refused("process/start", params)[0] == -32603
    come_back(alone.server_pid, before)


def test_the_first_dialect_leaves_nothing(alone: Peer) -> None:
    def run(total: int) -> None:
        for number in range(total):
            params = {"processId": "p", "argv": ["true"], "cwd": "/", "env": {}, "tty": number % 2 == 0}
            alone.call("command/exec", params)
            alone.until(
                lambda: any(m["method"] == "command/exec/exited" for m in alone.notifications), "the exit"
            )
            alone.notifications.clear()

    run(20)
    before = Holdings.of(alone.server_pid)
    run(200)
    come_back(alone.server_pid, before)


def test_waiting_leaves_nothing(alone: Peer) -> None:
    """Polls of months are taken back when they are answered, or when nobody waits any more."""
    process_id = alone.start("cat", pipeStdin=True)
    params = {"processId": process_id, "waitMs": 10**12}

    def poll(times: int) -> None:
        for _ in range(times):
            seq = alone.read(process_id)["nextSeq"] - 1
            request = alone.request("process/read", {**params, "afterSeq": seq})
            alone.write(process_id, b"x")
            assert alone.result(request)["chunks"]
        alone.received.clear()
        alone.notifications.clear()

    poll(500)
    memory = resident_bytes(alone.server_pid)
    poll(1000)
    assert resident_bytes(alone.server_pid) - memory < 4 * MIB


def test_clients_that_vanish_leave_nothing(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    server = start_server("--detach-ttl", "0")

    def visit(number: int) -> None:
        peer = WebSocketPeer(server.url)
        peer.initialize(binaryOutput=number % 2 == 0)
        peer.start("yes", tty=number % 3 == 0)
        peer.request("process/read", {"processId": "p1", "waitMs": 60_000})
        peer.request("process/wait", {"processId": "p1"})
        peer.start("cat", pipeStdin=True)
        peer.drop()

    for number in range(12):
        visit(number)
    eventually(lambda: len(children(server.pid)) == 1, "everybody being gone")
    before = Holdings.of(server.pid)
    memory = resident_bytes(server.pid)
    for number in range(40):
        visit(number)
    come_back(server.pid, before)
    # A client that vanishes may leave some MiB unsent; forty of them would be many times this.
    assert resident_bytes(server.pid) - memory < 24 * MIB


def test_running_out_of_descriptors_is_an_error_and_passes(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    server = start_server("--retention", "0")
    peer = connect(server)
    peer.initialize(extensions=True)
    peer.run("true")
    eventually(lambda: len(children(server.pid)) == 1, "only the guardian being there")
    before = Holdings.of(server.pid)
    few = before.descriptors + 20
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (few, few))
    running, refused = [], []
    for number in range(30):
        params = peer.start_params(["cat"], pipeStdin=True, tty=number % 3 == 0)
        answer = peer.answer(peer.request("process/start", params))
        if "error" in answer:
            assert answer["error"]["code"] == -32603
            assert answer["error"]["message"].endswith("(os error 24)")
            refused.append(params["processId"])
        else:
            running.append(params["processId"])
    assert len(running) > 2
    assert refused
    assert peer.refused("process/read", {"processId": refused[0]}) == (
        -32600,
        f"unknown process id {refused[0]}",
    )
    for process_id in running:
        peer.terminate(process_id)
        peer.finished(process_id)
    come_back(server.pid, before)
    assert peer.run("echo", "again").stdout == b"again\n"
