"""server/connection.py: the handshake, the order of requests, and who waits for whom."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from support.machine import gone, resident_bytes, running, sleep_forever
from support.rpc import Peer, StdioPeer, WebSocketPeer, b64, unb64
from support.server import RunningServer
from support.wait import eventually

NewPeer = Callable[..., Peer]
MIB = 1024 * 1024


def process(process_id: str, **more: Any) -> dict[str, Any]:
    return {"processId": process_id, **more}


# Handshake ---------------------------------------------------------------------------------------

FAMILIES = {
    "process/start": (
        "exec",
        {"processId": "p", "argv": ["true"], "cwd": "file:///", "env": {}, "tty": False},
    ),
    "process/read": ("exec", process("p")),
    "process/write": ("exec", process("p", chunk="", writeId="w")),
    "process/signal": ("exec", process("p", signal="interrupt")),
    "process/terminate": ("exec", process("p")),
    "process/closeStdin": ("exec", process("p")),
    "process/resize": ("exec", process("p", rows=1, cols=1)),
    "process/wait": ("exec", process("p")),
    "process/snapshot": ("exec", process("p")),
    "command/exec": ("exec", {"processId": "p", "argv": ["true"], "cwd": "/", "env": {}, "tty": False}),
    "environment/info": ("environment info", None),
    "environment/status": ("environment status", None),
}


def test_nothing_before_the_handshake(new_peer: NewPeer) -> None:
    peer = new_peer()
    for method, (family, params) in FAMILIES.items():
        text = f"client must call initialize before using {family} methods"
        assert peer.refused(method, params) == (-32600, text)
    assert peer.refused("process/read", {"processId": 1})[0] == -32602  # params come first
    assert peer.refused("no/such") == (-32601, "exec-server stub does not implement `no/such` yet")
    peer.call("initialize", {"clientName": ""})
    for method, (family, params) in FAMILIES.items():
        text = f"client must send initialized before using {family} methods"
        assert peer.refused(method, params) == (-32600, text)
    peer.notify("initialized")
    assert peer.call("environment/status")["status"] == "ready"
    peer.send({"method": "initialized", "params": [1, {"any": "thing"}]})  # may be repeated
    assert peer.call("environment/status", {})["status"] == "ready"


def test_initialize_once(new_peer: NewPeer) -> None:
    peer = new_peer()
    for bad in (None, {}, {"clientName": 1}, {"clientName": "x", "resumeSessionId": 1}):
        assert peer.refused("initialize", bad)[0] == -32602
    unknown = (-32600, "unknown session id nobody")
    assert peer.refused("initialize", {"clientName": "x", "resumeSessionId": "nobody"}) == unknown
    assert peer.refused("initialize", {"clientName": "x", "resumeSessionId": ""}) == (
        -32600,
        "unknown session id ",
    )
    first = peer.initialize()
    assert set(first) == {"sessionId", "environmentInfo", "protocolVersion"}
    assert first["sessionId"] == first["sessionId"].lower()
    assert [len(part) for part in first["sessionId"].split("-")] == [8, 4, 4, 4, 12]
    assert first["sessionId"][14] == "4"
    again = (-32600, "initialize may only be sent once per connection")
    assert peer.refused("initialize", {"clientName": "x"}) == again


def test_the_handshake_can_be_pipelined(new_peer: NewPeer) -> None:
    peer = new_peer()
    params = peer.start_params(["cat"], pipeStdin=True)
    process_id = params["processId"]
    peer.send_many(
        [
            {"id": 1, "method": "initialize", "params": {"clientName": "x"}},
            {"method": "initialized"},
            {"id": 2, "method": "process/start", "params": params},
            {"id": 3, "method": "process/write", "params": process(process_id, chunk=b64(b"hello"))},
            {"id": 4, "method": "process/closeStdin", "params": process(process_id)},
            {"id": 5, "method": "process/wait", "params": process(process_id)},
            {"id": 6, "method": "process/read", "params": process(process_id, waitMs=10_000)},
        ]
    )
    assert "sessionId" in peer.result(1)
    assert peer.result(2)["processId"] == process_id
    assert peer.result(3) == {"status": "accepted"}
    assert peer.result(4) == {"status": "accepted"}
    assert peer.result(5)["exitCode"] == 0
    assert [unb64(chunk["chunk"]) for chunk in peer.result(6)["chunks"]] == [b"hello"]


# Envelope ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", [0, -1, -5, 2**63 - 1, -(2**63), "", "text", 'ü\n"', "1"])
def test_ids_come_back_as_they_were(peer: Peer, request_id: Any) -> None:
    peer.send({"id": request_id, "method": "environment/status", "jsonrpc": "1.0", "more": None})
    assert peer.answer(request_id)["result"]["status"] == "ready"


def test_an_id_in_use_is_no_hindrance(peer: Peer) -> None:
    process_id = peer.start("cat", pipeStdin=True)
    peer.request("process/wait", process(process_id), request_id="same")
    peer.request("environment/status", None, request_id="same")
    assert peer.result("same")["status"] == "ready"
    peer.close_stdin(process_id)
    assert peer.result("same")["exited"] is True


def test_methods_without_params(peer: Peer) -> None:
    peer.send({"id": "absent", "method": "environment/status"})
    assert peer.result("absent")["status"] == "ready"
    for params in ({"x": 1}, [], [1], "x", 1, False):
        assert peer.refused("environment/status", params)[0] == -32602


def test_an_unknown_notification_is_answered_and_the_connection_goes_on(peer: Peer) -> None:
    peer.notify("no/such/notification", {"x": 1})
    error = peer.answer(-1)["error"]
    text = "unexpected notification method: no/such/notification"
    assert error == {"code": -32600, "message": text}
    peer.alive()


def test_answers_to_malformed_messages_come_in_their_turn(peer: Peer) -> None:
    peer.send_raw('{"id":"a","method":"environment/status"}')
    peer.send_raw("nonsense")
    peer.send_raw('{"id":"b","method":"environment/status"}')
    assert peer.result("b")["status"] == "ready"
    assert [message["id"] for message in peer.received[-3:]] == ["a", -1, "b"]


@pytest.mark.parametrize(
    "message",
    [
        {"method": "initialized"},
        {"id": 1, "result": {}},
        {"id": 1, "error": {"code": 1, "message": "x"}},
        {"id": "never asked", "result": None},
    ],
)
def test_what_ends_a_connection(new_peer: NewPeer, message: Any, tmp_path: Any) -> None:
    peer = new_peer()
    if message.get("method") != "initialized":
        peer.initialize()
    # What comes behind it, in the same breath, has no effect.
    params = peer.start_params(["touch", str(tmp_path / "file")])
    follows = {"id": 7, "method": "process/start", "params": params}
    try:
        peer.send_many([message, follows])
    except (ConnectionClosed, BrokenPipeError):
        pass  # it is over already
    assert peer.ended()
    assert 7 not in peer.answers
    assert not (tmp_path / "file").exists()


# Order and fairness ------------------------------------------------------------------------------


def test_a_long_poll_delays_nobody(peer: Peer) -> None:
    quiet = peer.start("cat", pipeStdin=True)
    polls = [peer.request("process/read", process(quiet, waitMs=60_000)) for _ in range(50)]
    waits = [peer.request("process/wait", process(quiet)) for _ in range(50)]
    began = time.monotonic()
    assert peer.call("environment/status")["status"] == "ready"
    assert peer.run("echo", "x").stdout == b"x\n"
    assert time.monotonic() - began < 10
    assert not any(peer.answers[one] for one in [*polls, *waits])
    peer.close_stdin(quiet)
    assert all(peer.result(one)["exited"] for one in [*polls, *waits])


def test_effects_come_in_the_order_of_the_requests(peer: Peer) -> None:
    messages: list[Any] = []
    for number in range(20):
        params = peer.start_params(["cat"], pipeStdin=True, processId=f"n{number}")
        messages += [
            {"id": f"s{number}", "method": "process/start", "params": params},
            *(
                {
                    "id": f"w{number}.{n}",
                    "method": "process/write",
                    "params": process(f"n{number}", chunk=b64(b"%d" % n)),
                }
                for n in range(5)
            ),
            {"id": f"c{number}", "method": "process/closeStdin", "params": process(f"n{number}")},
            {
                "id": f"x{number}",
                "method": "process/write",
                "params": process(f"n{number}", chunk=b64(b"late")),
            },
        ]
    peer.send_many(messages)
    for number in range(20):
        assert peer.finished(f"n{number}").stdout == b"01234"
        assert peer.result(f"c{number}") == {"status": "accepted"}
        assert peer.result(f"x{number}") == {"status": "stdinClosed"}


def test_signal_and_terminate_wait_for_the_start_they_belong_to(peer: Peer) -> None:
    marker = sleep_forever()
    for method, more, code in (
        ("process/terminate", {}, 137),
        ("process/signal", {"signal": "SIGTERM"}, 143),
        ("process/resize", {"rows": 5, "cols": 5}, None),
    ):
        params = peer.start_params(["sleep", marker], tty=True)
        peer.send_many(
            [
                {"id": "start", "method": "process/start", "params": params},
                {"id": "next", "method": method, "params": process(params["processId"], **more)},
            ]
        )
        assert peer.result("start")["processId"] == params["processId"]
        peer.result("next")
        if code is not None:
            assert peer.finished(params["processId"]).exit_code == code
        else:
            peer.terminate(params["processId"])
    gone(marker)


def test_only_so_many_may_wait(new_peer: NewPeer) -> None:
    peer = new_peer("--concurrent-requests", "2")
    peer.initialize()
    one, two = peer.start("cat", pipeStdin=True), peer.start("cat", pipeStdin=True)
    polls = [peer.request("process/read", process(one, waitMs=60_000)) for _ in range(2)]
    queued = [peer.request("process/read", process(two)) for _ in range(3)]
    # The few of the control lane pass: they are what ends the waiting.
    assert peer.call("environment/status")["status"] == "ready"
    assert peer.call("process/signal", process("unknown", signal="interrupt")) == {}
    assert not any(peer.answers[request] for request in [*polls, *queued])
    assert peer.terminate(one)["running"]
    assert all(peer.result(request)["exited"] for request in polls)
    assert [peer.result(request)["exited"] for request in queued] == [False] * 3
    order = [message["id"] for message in peer.received if message.get("id") in queued]
    assert order == queued


def test_one_at_a_time(new_peer: NewPeer) -> None:
    peer = new_peer("--concurrent-requests", "1")
    peer.initialize()
    messages = [
        {"id": f"s{n}", "method": "process/start", "params": peer.start_params(["echo", "x"])}
        for n in range(20)
    ]
    peer.send_many([*messages, {"id": "end", "method": "no/such"}])
    for number in range(20):
        peer.result(f"s{number}")
    order = [message["id"] for message in peer.received if str(message.get("id")).startswith("s")]
    assert order == [f"s{number}" for number in range(20)]


def test_a_flood_of_waiting_requests_is_not_read_without_end(
    connect: Callable[..., WebSocketPeer],
) -> None:
    peer = connect()
    peer.initialize()
    marker = sleep_forever()
    quiet = peer.start("sleep", marker)
    requests = [peer.request("process/read", process(quiet, waitMs=60_000)) for _ in range(1024 + 1024 + 500)]
    other = connect()
    other.initialize()
    assert other.run("echo", "x").stdout == b"x\n"
    # Nothing of it is lost, not even what the server has not read yet.
    [pid] = eventually(lambda: running(marker), "the sleeper being there")
    os.kill(pid, 9)
    assert all(peer.result(request)["exited"] for request in requests)
    peer.alive()


# Clients that do not read ------------------------------------------------------------------------


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


def test_json_of_the_server_is_compact(connect: Callable[..., WebSocketPeer]) -> None:
    peer = connect()
    peer.send_raw('{"id":"x","method":"environment/status"}')
    raw = peer.receive_raw(10)
    assert isinstance(raw, str)
    assert raw == json.dumps(json.loads(raw), separators=(",", ":"))
