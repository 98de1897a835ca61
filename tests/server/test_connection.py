"""server/connection.py: the handshake, the order of requests, and who waits for whom."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_websocket

from exec_server.limits import Limits
from exec_server.server import dispatch
from exec_server.server.server import Server
from exec_server.transport.memory import pair
from support.machine import gone, resident_bytes, running, sleep_forever
from support.rpc import Peer, StdioPeer, WebSocketPeer, b64, unb64
from support.server import RunningServer
from support.wait import PATIENCE, eventually, eventually_async

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


def test_only_so_many_writes_may_wait(new_peer: NewPeer) -> None:
    peer = new_peer("--concurrent-requests", "2")
    peer.initialize()
    full, other = peer.start("sleep", sleep_forever(), pipeStdin=True), peer.start("cat", pipeStdin=True)
    for number in range(128):  # as many as its stdin has room for
        peer.request("process/write", process(full, chunk=b64(bytes(70_000)), writeId=f"{number}"))
    writes = [
        peer.request("process/write", process(full, chunk=b64(bytes(70_000)), writeId=f"w{number}"))
        for number in range(4)
    ]
    queued = [peer.request("process/read", process(other)) for _ in range(3)]
    # The few of the control lane pass: they are what ends the waiting.
    assert peer.call("environment/status")["status"] == "ready"
    assert peer.call("process/signal", process("unknown", signal="interrupt")) == {}
    assert not any(peer.answers[request] for request in [writes[-1], *queued])
    assert peer.terminate(full)["running"]
    assert "error" in peer.answer(writes[-1])
    assert [peer.result(request)["exited"] for request in queued] == [False] * 3
    order = [message["id"] for message in peer.received if message.get("id") in queued]
    assert order == queued


def test_who_waits_for_a_process_delays_nobody_however_few_may_wait(
    new_peer: NewPeer, tmp_path: Path
) -> None:
    peer = new_peer("--concurrent-requests", "1")
    peer.initialize()
    params = peer.start_params(["cat"], pipeStdin=True)
    process_id = params["processId"]
    peer.send_many(
        [
            {"id": "start", "method": "process/start", "params": params},
            {"id": "wait", "method": "process/wait", "params": process(process_id)},
            {"id": "read", "method": "process/read", "params": process(process_id, waitMs=60_000)},
            {"id": "again", "method": "process/wait", "params": process(process_id, until="exited")},
        ]
    )
    assert peer.call("fs/getMetadata", {"path": tmp_path.as_uri()})["isDirectory"]
    assert peer.run("echo", "x").stdout == b"x\n"
    assert not any(peer.answers[request] for request in ("wait", "read", "again"))
    assert peer.call("process/closeStdin", process(process_id)) == {"status": "accepted"}
    for request in ("wait", "read", "again"):
        assert peer.result(request)["exited"]


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


class InMemory:
    """A connection to a server in this process, on which everything is sent in one breath."""

    def __init__(self, server: Server) -> None:
        self.channel, theirs = pair(MIB)
        self.received: list[dict[str, Any]] = []
        theirs.attach(server.accept(theirs))
        self.channel.attach(self)

    def message_received(self, message: bytes) -> None:
        self.received.append(json.loads(message))

    binary_received = message_received

    def writing_paused(self) -> None: ...
    def writing_resumed(self) -> None: ...
    def channel_closed(self, reason: str) -> None: ...

    async def pipeline(self, requests: list[tuple[str, dict[str, Any]]]) -> list[str]:
        """What each request came to, in a form in which two runs can be compared."""
        self.channel.send(b'{"id":"i","method":"initialize","params":{"clientName":"x"}}')
        self.channel.send(b'{"method":"initialized"}')
        for number, (method, params) in enumerate(requests):
            self.channel.send(json.dumps({"id": number, "method": method, "params": params}).encode())
        answers: dict[int, dict[str, Any]] = {}

        def answered() -> bool:
            answers.update({message["id"]: message for message in self.received if "id" in message})
            return all(number in answers for number in range(len(requests)))

        await eventually_async(answered, "every answer")
        outcomes = []
        for number, (method, _) in enumerate(requests):
            answer = answers[number]
            outcome = answer["result"].get("status") if "result" in answer else answer["error"]["message"]
            outcomes.append(f"{method}: {outcome}")
        return outcomes

    async def output(self, process_id: str) -> bytes:
        """All that a process said, once it has closed."""

        def about(method: str) -> list[dict[str, Any]]:
            told = [message["params"] for message in self.received if message.get("method") == method]
            return [params for params in told if params["processId"] == process_id]

        await eventually_async(lambda: about("process/closed"), "the end of it")
        return b"".join(unb64(params["chunk"]) for params in about("process/output"))


def starting(process_id: str, program: str) -> tuple[str, dict[str, Any]]:
    more = {"argv": [program], "cwd": "file:///", "env": {"PATH": "/usr/bin:/bin"}, "tty": False}
    return "process/start", process(process_id, pipeStdin=True, **more)


async def pipelined(requests: list[tuple[str, dict[str, Any]]], waiting: int) -> list[Any]:
    server = Server(asyncio.get_running_loop(), Limits(waiting_requests=waiting))
    try:
        client = InMemory(server)
        outcomes: list[Any] = list(await client.pipeline(requests))
        for process_id in "pq":
            own = zip(requests, outcomes[: len(requests)], strict=True)
            if any(r[1]["processId"] == process_id and o == "process/start: None" for r, o in own):
                outcomes.append(await client.output(process_id))
        return outcomes
    finally:
        server.close()


ids = st.sampled_from("pq")
pipelines = st.lists(
    st.builds(starting, ids, st.sampled_from(["cat", "cat", "/no/such/program"]))
    | st.builds(
        lambda p, n: ("process/write", process(p, chunk=b64(b"%d " % n), writeId=str(n))),
        ids,
        st.integers(0, 99),
    )
    | st.builds(lambda p: ("process/closeStdin", process(p)), ids)
    | st.builds(lambda p: ("process/read", process(p)), ids),
    min_size=2,
    max_size=12,
)


@settings(max_examples=30)
@given(pipelines, st.integers(1, 3))
def test_what_had_to_queue_has_the_effect_it_would_have_had_at_once(
    requests: list[tuple[str, dict[str, Any]]], waiting: int
) -> None:
    requests = [*requests, *(("process/closeStdin", process(process_id)) for process_id in "pq")]
    assert asyncio.run(pipelined(requests, waiting)) == asyncio.run(pipelined(requests, 1024))


def test_a_write_that_had_to_queue_does_not_pass_one_that_waits_for_the_start() -> None:
    writes = [("process/write", process("p", chunk=b64(b"%d" % n), writeId=str(n))) for n in (1, 2, 3)]
    requests = [starting("p", "cat"), *writes, ("process/closeStdin", process("p"))]
    for waiting in (1, 2, 3, 4):
        assert asyncio.run(pipelined(requests, waiting))[-1] == b"123"


def test_a_start_that_had_to_queue_does_not_pass_who_waits_for_the_one_before() -> None:
    requests = [starting("p", "/no/such/program"), ("process/read", process("p")), starting("p", "true")]
    for waiting in (1, 2, 3):
        assert asyncio.run(pipelined(requests, waiting))[1] == "process/read: unknown process id p"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(errno.EMFILE, "Too many open files", "/secret/place"),
            "No file descriptors available (os error 24)",
        ),
        (
            OSError(errno.EIO, "Input/output error", "/secret/place"),
            "internal error: OSError: Input/output error",
        ),
        (RuntimeError("oh"), "internal error: RuntimeError: oh"),
    ],
)
def test_what_nobody_foresaw_is_answered_without_the_names_of_files(
    monkeypatch: pytest.MonkeyPatch, fresh_log: None, error: Exception, text: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    method = dispatch.find("process/read")
    assert method is not None
    monkeypatch.setitem(dispatch._methods, "process/read", structs.replace(method, run=fail))
    assert asyncio.run(pipelined([("process/read", process("p"))], 1))[0] == f"process/read: {text}"


def test_writes_that_wait_for_room_when_the_process_is_terminated_are_refused(peer: Peer) -> None:
    process_id = peer.start("sleep", sleep_forever(), pipeStdin=True)
    chunk = b64(bytes(70_000))
    writes = [
        peer.request("process/write", process(process_id, chunk=chunk, writeId=str(n))) for n in range(200)
    ]
    again = peer.request("process/write", process(process_id, chunk=chunk, writeId="199"))
    assert peer.terminate(process_id)["running"]
    answers = [peer.answer(request) for request in [*writes, again]]
    accepted = [answer["result"] for answer in answers if "result" in answer]
    refused = [
        (answer["error"]["code"], answer["error"]["message"]) for answer in answers if "error" in answer
    ]
    # What the queue and the pipe take: 128 chunks and a little.
    assert accepted == [{"status": "accepted"}] * len(accepted)
    assert 128 <= len(accepted) <= 150
    assert refused == [(-32603, "failed to write to process stdin")] * (201 - len(accepted))
    late = peer.answer(peer.request("process/write", process(process_id, chunk="", writeId="0")))
    assert late["result"] == {"status": "accepted"}, "that one was"


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


# File contents as they are -------------------------------------------------------------------------


class FilesPeer:
    """A connection that has agreed on `binaryFiles`, and builds its frames by the description of them."""

    def __init__(self, websocket: ClientConnection, **agreed: Any) -> None:
        self.websocket = websocket
        self.reply = self.call("initialize", {"clientName": "t", **agreed})["result"]
        websocket.send('{"method":"initialized"}')

    def ask(self, method: str, params: Any, request_id: Any = 7) -> str | bytes:
        self.websocket.send(json.dumps({"id": request_id, "method": method, "params": params}))
        return self.websocket.recv(timeout=PATIENCE)

    def call(self, method: str, params: Any, request_id: Any = 7) -> Any:
        answer = self.ask(method, params, request_id)
        assert isinstance(answer, str)
        return json.loads(answer)

    def block(self, request_id: bytes, handle: bytes, offset: int, data: bytes) -> Any:
        sizes = bytes([3, len(handle)]) + len(request_id).to_bytes(4, "big") + offset.to_bytes(8, "big")
        self.websocket.send(sizes + request_id + handle + data)
        answer = self.websocket.recv(timeout=PATIENCE)
        assert isinstance(answer, str)
        return json.loads(answer)


@pytest.fixture
def websocket(server: RunningServer) -> Iterator[ClientConnection]:
    with open_websocket(server.url, compression=None, max_size=None) as connection:
        yield connection


def part(frame: str | bytes) -> tuple[bytes, int, int, bytes]:
    """The id, whether it is the end, the size of the file, and the bytes."""
    assert isinstance(frame, bytes)
    assert frame[0] == 2
    end = 14 + int.from_bytes(frame[2:6], "big")
    return frame[14:end], frame[1], int.from_bytes(frame[6:14], "big"), frame[end:]


def test_file_contents_come_as_they_are(websocket: ClientConnection, tmp_path: Path) -> None:
    content = bytes(range(256)) * 8192
    (tmp_path / "f").write_bytes(content)
    uri = (tmp_path / "f").as_uri()
    peer = FilesPeer(websocket, binaryFiles=True, extensions=True)
    assert peer.reply["binaryFiles"] is True
    assert "binaryOutput" not in peer.reply
    assert peer.call("fs/open", {"handleId": "h", "path": uri})["result"] == {"handleId": "h"}

    def block(offset: int, length: int, request_id: Any = 7) -> Any:
        params = {"handleId": "h", "offset": offset, "len": length}
        return part(peer.ask("fs/readBlock", params, request_id))

    assert block(0, MIB) == (b"7", 0, 2 * MIB, content[:MIB])
    assert block(2 * MIB - 3, 10, "é") == (b'"\xc3\xa9"', 1, 2 * MIB, content[-3:])
    assert block(2 * MIB, 10, "x" * 70_000) == (b'"' + b"x" * 70_000 + b'"', 1, 2 * MIB, b"")
    assert peer.call("fs/readBlock", {"handleId": "no", "offset": 0, "len": 1})["error"]["code"] == -32004

    def ranged(**more: int) -> str | bytes:
        return peer.ask("fs/readFile", {"path": uri, **more})

    assert part(ranged(offset=5, length=3)) == (b"7", 0, 2 * MIB, content[5:8])
    assert part(ranged(length=MIB)) == (b"7", 0, 2 * MIB, content[:MIB])
    assert part(ranged(offset=MIB, length=MIB)) == (b"7", 1, 2 * MIB, content[MIB:])
    assert part(ranged(offset=2**63, length=1)) == (b"7", 1, 2 * MIB, b"")
    assert part(ranged(offset=2**63 - 1, length=MIB)) == (b"7", 1, 2 * MIB, b"")
    assert part(ranged(offset=2**63 - 5, length=4)) == (b"7", 1, 2 * MIB, b"")
    # More than a block, or all of it, is JSON to everybody.
    for more in ({}, {"length": MIB + 1}, {"offset": 1}):
        answer = ranged(**more)
        assert isinstance(answer, str)
        assert (
            unb64(json.loads(answer)["result"]["dataBase64"])
            == content[more.get("offset", 0) :][: more.get("length", 2 * MIB)]
        )
    # A file that does not say how large it is.
    found = part(peer.ask("fs/readFile", {"path": "file:///proc/self/status", "offset": 0, "length": MIB}))
    assert found[:3] == (b"7", 1, 0)
    assert found[3].startswith(b"Name:")


def test_blocks_are_written_as_they_are(websocket: ClientConnection, tmp_path: Path) -> None:
    peer = FilesPeer(websocket, binaryFiles=True)
    uri = (tmp_path / "f").as_uri()
    peer.call("fs/open", {"handleId": "hé", "path": uri, "mode": "replace"})
    handle = "hé".encode()
    assert peer.block(b"8", handle, 3, b"d\0\xff") == {"id": 8, "result": {}}
    assert peer.block(b'"\\u0061"', handle, 0, b"abc") == {"id": "a", "result": {}}
    assert peer.block(b"9", handle, 0, b"")["error"] == {
        "code": -32600,
        "message": "file write block length must be between 1 and 1048576",
    }
    assert peer.block(b"9", handle, 0, bytes(MIB + 1))["error"]["code"] == -32600
    assert peer.block(b"9", handle, 2**64 - 1, b"x")["error"]["message"] == (
        "file write range exceeds the signed 64-bit file offset limit"
    )
    assert peer.block(b"9", b"no", 0, b"x")["error"]["code"] == -32004
    assert peer.call("fs/close", {"handleId": "hé"})["result"] == {}
    assert (tmp_path / "f").read_bytes() == b"abcd\0\xff"
    # What is not a block is an error to nobody in particular, and JSON may be binary as ever.
    for bad in (b"\3", b"\3\1" + bytes(12), b"\2" + bytes(20), b"\0", b""):
        websocket.send(bad)
        assert json.loads(websocket.recv(timeout=PATIENCE))["id"] == -1
    websocket.send(b'{"id":1,"method":"environment/status"}')
    assert json.loads(websocket.recv(timeout=PATIENCE))["result"]["status"] == "ready"


def test_blocks_keep_their_place_among_other_calls(websocket: ClientConnection, tmp_path: Path) -> None:
    peer = FilesPeer(websocket, binaryFiles=True)
    uri, size = (tmp_path / "f").as_uri(), 600_000
    requests: list[str | bytes] = [
        json.dumps(
            {"id": 1, "method": "fs/open", "params": {"handleId": "h", "path": uri, "mode": "replace"}}
        )
    ]
    for number in range(20):
        head = bytes([3, 1]) + (2).to_bytes(4, "big") + bytes(8) + str(number + 10).encode() + b"h"
        requests.append(head + bytes([number]) * size)
        params = {"handleId": "h", "offset": 0, "chunk": b64(bytes([100 + number]) * size)}
        requests.append(json.dumps({"id": number + 50, "method": "fs/writeBlock", "params": params}))
    requests.append(json.dumps({"id": 2, "method": "fs/close", "params": {"handleId": "h"}}))
    for request in requests:
        peer.websocket.send(request)
    answers = [json.loads(peer.websocket.recv(timeout=PATIENCE)) for _ in requests]
    assert all(answer.get("result") is not None for answer in answers)
    assert (tmp_path / "f").read_bytes() == bytes([119]) * size


def test_without_an_agreement_contents_are_json(websocket: ClientConnection, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    peer = FilesPeer(websocket, binaryOutput=True, extensions=True)
    assert "binaryFiles" not in peer.reply
    assert peer.reply["environmentInfo"]["capabilities"]["binaryFiles"] is True
    peer.call("fs/open", {"handleId": "h", "path": (tmp_path / "f").as_uri()})
    answer = peer.call("fs/readBlock", {"handleId": "h", "offset": 0, "len": 9})
    assert answer["result"] == {"chunk": "YWJj", "eof": True}
    assert peer.block(b"9", b"h", 0, b"x")["id"] == -1


def test_lines_carry_no_binary_contents(start_stdio: Callable[..., StdioPeer]) -> None:
    assert "binaryFiles" not in start_stdio().initialize(binaryFiles=True)


def test_large_contents_in_json(new_peer: NewPeer, tmp_path: Path) -> None:
    peer = new_peer()
    peer.initialize()
    content = bytes(range(256)) * 4000
    uri = (tmp_path / "f").as_uri()
    assert peer.call("fs/writeFile", {"path": uri, "dataBase64": b64(content)}) == {}
    assert (tmp_path / "f").read_bytes() == content
    peer.call("fs/open", {"handleId": "h", "path": uri, "mode": "replace"})
    assert peer.call("fs/writeBlock", {"handleId": "h", "offset": 0, "chunk": b64(content)}) == {}
    bad = b64(content)[:1000] + "!" + b64(content)[1001:]
    assert peer.refused("fs/writeBlock", {"handleId": "h", "offset": 0, "chunk": bad}) == (
        -32602,
        "Invalid symbol 33, offset 1000.",
    )
    peer.call("fs/close", {"handleId": "h"})
    assert (tmp_path / "f").read_bytes() == content
    code, text = peer.refused("fs/writeFile", {"path": uri, "dataBase64": bad})
    assert (code, text) == (
        -32600,
        "fs/writeFile requires valid base64 dataBase64: Invalid symbol 33, offset 1000.",
    )
