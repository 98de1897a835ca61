"""server/connection.py: clients that ask too much, and clients that do not read."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest

from exec_server.limits import Limits
from exec_server.server.server import Server
from support.machine import gone, resident_bytes, running, sleep_forever
from support.pipeline import InMemory, process, starting
from support.rpc import StdioPeer, WebSocketPeer, b64
from support.server import RunningServer
from support.wait import eventually

MIB = 1024 * 1024


# Clients that ask too much -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "bound"),
    [
        ("process/wait", Limits().long_polls),
        ("process/read", Limits().waiting_requests + Limits().queued_requests // 2),
    ],
)
def test_a_flood_of_waiting_requests_is_refused_beyond_a_bound(
    connect: Callable[..., WebSocketPeer], method: str, bound: int
) -> None:
    peer = connect()
    peer.initialize()
    quiet = peer.start("sleep", sleep_forever())
    asked = [peer.request(method, process(quiet, waitMs=60_000)) for _ in range(bound + 1000)]
    assert peer.call("environment/status")["status"] == "ready"
    # The first ones wait, the others are told that they may not, and the connection goes on.
    refused = [peer.answer(request)["error"] for request in asked[bound:]]
    assert {error["code"] for error in refused} == {-32600}
    assert refused[0]["message"].startswith("too many requests wait for processes (")
    assert not any(peer.answers[request] for request in asked[:bound])
    if method == "process/wait":
        assert peer.run("echo", "x").stdout == b"x\n"
        assert peer.call("process/read", process(quiet, waitMs=1))["exited"] is False
    assert peer.terminate(quiet)["running"]
    assert all(peer.result(request)["exited"] for request in asked[:bound])
    assert peer.call(method, process(quiet, waitMs=60_000))["exited"], "there is room again"


def test_waiting_requests_that_are_large_are_refused_beyond_a_bound() -> None:
    async def work() -> None:
        limits = Limits(waiting_bytes=100_000)
        server = Server(asyncio.get_running_loop(), limits)
        try:
            client = InMemory(server)
            requests = [starting("p", "cat")]
            requests += [("process/wait", process("p", comment="x" * 30_000, waitMs=1)) for _ in range(5)]
            outcomes = await client.pipeline(requests)
            assert outcomes[:4] == ["process/start: None", *["process/wait: None"] * 3]
            assert outcomes[4] == "process/wait: too many requests wait for processes (3)"
            client.received.clear()
            again = await client.pipeline([("process/wait", process("p", waitMs=1))])
            assert again == ["process/wait: None"], "there is room again"
        finally:
            server.close()

    asyncio.run(work())


def test_a_flood_of_work_is_not_read_without_end(connect: Callable[..., WebSocketPeer]) -> None:
    peer = connect()
    peer.initialize(extensions=True)
    reader = peer.start("cat", pipeStdin=True)
    [listed] = peer.call("process/list")["processes"]
    os.kill(listed["pid"], signal.SIGSTOP)
    count = 128 + 1024 + 1024 + 500
    write = process(reader, chunk=b64(bytes(2000)))
    writes = [peer.request("process/write", {**write, "writeId": str(number)}) for number in range(count)]
    other = connect()
    other.initialize()
    assert other.run("echo", "x").stdout == b"x\n"
    # Nothing of it is lost, not even what the server has not read yet.
    os.kill(listed["pid"], signal.SIGCONT)
    assert all(peer.result(request) == {"status": "accepted"} for request in writes)
    assert peer.call("process/closeStdin", process(reader)) == {"status": "accepted"}
    assert len(peer.finished(reader).stdout) == count * 2000


# Clients that do not read --------------------------------------------------------------------------


def test_a_client_that_stops_reading_blocks_only_itself_and_loses_nothing(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    server = start_server()
    deaf = connect(server, max_queue=1)
    deaf.initialize()
    deaf.run("true")
    before = resident_bytes(server.pid)
    size = 100_000_000
    process_id = deaf.start("/bin/sh", "-c", f"head -c {size} /dev/zero; echo done >&2")
    other = connect(server)
    other.initialize(extensions=True)
    # The other connection goes on, with output of its own.
    for _ in range(3):
        assert len(other.run("head", "-c", "2000000", "/dev/zero").stdout) == 2_000_000

    def held() -> bool:
        """The process waits for room, so it has stopped getting ahead."""
        listed = other.call("process/list", {"all": True})["processes"]
        first = next(entry for entry in listed if entry["processId"] == process_id)["outputBytes"]
        time.sleep(0.05)
        listed = other.call("process/list", {"all": True})["processes"]
        second = next(entry for entry in listed if entry["processId"] == process_id)["outputBytes"]
        return 0 < first == second < size

    eventually(held, "the process being held")
    assert resident_bytes(server.pid) - before < 64 * MIB
    record = deaf.finished(process_id)
    assert len(record.stdout) == size
    assert record.stderr == b"done\n"


def test_a_stdio_client_that_stops_reading_loses_nothing(start_stdio: Callable[..., StdioPeer]) -> None:
    peer = start_stdio()
    peer.initialize()
    size = 60_000_000
    process_id = peer.start("/bin/sh", "-c", f"head -c {size} /dev/zero; echo done >&2")
    last = -1

    def still() -> bool:
        nonlocal last
        now = resident_bytes(peer.server_pid)
        same, last = now == last, now
        time.sleep(0.05)
        return same

    eventually(still, "the server waiting")
    assert resident_bytes(peer.server_pid) < 100 * MIB
    record = peer.finished(process_id)
    assert (len(record.stdout), record.stderr) == (size, b"done\n")


def test_a_client_that_asks_and_does_not_read_is_not_asked_more(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    server = start_server()
    deaf = connect(server, max_queue=1)
    deaf.initialize()
    process_id = deaf.start("head", "-c", "1000000", "/dev/zero")
    deaf.finished(process_id)
    before = resident_bytes(server.pid)
    other = connect(server)
    other.initialize()
    asked = [deaf.request("process/read", process(process_id)) for _ in range(200)]
    highest = 0
    for _ in range(50):
        assert other.call("environment/status")["status"] == "ready"
        highest = max(highest, resident_bytes(server.pid) - before)
    # 200 answers are 270 MB; the server stops taking requests at a quarter of that.
    assert highest < 160 * MIB
    assert other.run("echo", "x").stdout == b"x\n"
    for request_id in asked:
        assert len(deaf.result(request_id)["chunks"]) > 0, "and nothing is lost"


def test_memory_comes_back_when_a_deaf_client_is_gone(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    server = start_server("--detach-ttl", "0.05")
    other = connect(server)
    other.initialize(extensions=True)
    for _ in range(3):
        deaf = connect(server, max_queue=1)
        deaf.initialize()
        marker = sleep_forever()
        deaf.shell(f"yes {marker}")
        eventually(lambda marker=marker: running(f"yes\0{marker}"), "output")  # type: ignore[misc]
        deaf.drop()
        gone(marker)
    assert other.run("echo", "x").stdout == b"x\n"
    left = [
        entry
        for entry in other.call("process/list", {"all": True})["processes"]
        if entry["state"] == "running"
    ]
    assert left == []
