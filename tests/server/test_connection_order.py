"""server/connection.py: requests take effect in their order, and who waits delays nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from support.machine import gone, sleep_forever
from support.pipeline import pipelined, process, starting
from support.rpc import Peer, b64

NewPeer = Callable[..., Peer]


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
