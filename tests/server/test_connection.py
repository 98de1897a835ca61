"""server/connection.py: the handshake, the envelope, and what ends a connection."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs
from websockets.exceptions import ConnectionClosed

from exec_server.server import dispatch
from support.pipeline import pipelined, process
from support.rpc import Peer, WebSocketPeer, b64, unb64

NewPeer = Callable[..., Peer]


# Handshake -----------------------------------------------------------------------------------------


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


# Envelope ------------------------------------------------------------------------------------------


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


def test_json_of_the_server_is_compact(connect: Callable[..., WebSocketPeer]) -> None:
    peer = connect()
    peer.send_raw('{"id":"x","method":"environment/status"}')
    raw = peer.receive_raw(10)
    assert isinstance(raw, str)
    assert raw == json.dumps(json.loads(raw), separators=(",", ":"))


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
