"""server/handlers/legacy.py: chapter 6 of the specification, the first dialect and both at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from support.machine import gone, running, sleep_forever
from support.rpc import PATH, Peer, b64, unb64
from support.server import RunningServer
from support.wait import PATIENCE, eventually

NewPeer = Callable[..., Peer]


def params(process_id: str, *argv: str, **more: Any) -> dict[str, Any]:
    return {
        "processId": process_id,
        "argv": list(argv),
        "cwd": "/tmp",
        "env": {"PATH": PATH},
        "tty": False,
        **more,
    }


def execute(peer: Peer, process_id: str, *argv: str, **more: Any) -> None:
    assert peer.call("command/exec", params(process_id, *argv, **more)) == {
        "processId": process_id,
        "running": True,
        "exitCode": None,
        "stdout": None,
        "stderr": None,
    }


def told(peer: Peer, process_id: str) -> list[dict[str, Any]]:
    return [message for message in peer.notifications if message["params"].get("processId") == process_id]


def exit_code(peer: Peer, process_id: str, timeout: float = PATIENCE) -> int:
    def exited() -> list[dict[str, Any]]:
        return [m for m in told(peer, process_id) if m["method"] == "command/exec/exited"]

    [message] = peer.until(exited, f"the exit of {process_id}", timeout)
    assert set(message["params"]) == {"processId", "exitCode"}
    code: int = message["params"]["exitCode"]
    return code


def output(peer: Peer, process_id: str, stream: str = "stdout") -> bytes:
    deltas = [m["params"] for m in told(peer, process_id) if m["method"] == "command/exec/outputDelta"]
    assert all(set(delta) == {"processId", "stream", "chunk"} for delta in deltas)
    return b"".join(unb64(delta["chunk"]) for delta in deltas if delta["stream"] == stream)


def saw(peer: Peer, process_id: str, text: bytes) -> None:
    peer.until(lambda: text in output(peer, process_id), f"{text!r} from {process_id}")


def test_the_handshake_has_what_first_clients_look_for(new_peer: NewPeer) -> None:
    peer = new_peer()
    answer = peer.initialize()
    assert answer["protocolVersion"] == "exec-server.v0"
    assert {"sessionId", "environmentInfo"} <= set(answer)


def test_output_and_exit(peer: Peer) -> None:
    execute(peer, "p", "/bin/sh", "-c", "echo out; echo err >&2; exit 3", outputBytesCap=4096, arg0=None)
    assert exit_code(peer, "p") == 3
    assert (output(peer, "p"), output(peer, "p", "stderr")) == (b"out\n", b"err\n")
    # Nothing of the other dialect, and the exit is the last word.
    assert {m["method"] for m in told(peer, "p")} == {"command/exec/outputDelta", "command/exec/exited"}
    assert told(peer, "p")[-1]["method"] == "command/exec/exited"


def test_the_example_of_the_specification(peer: Peer) -> None:
    execute(peer, "proc-1", "bash", "-c", "printf 'ready\\n'; cat", tty=True, outputBytesCap=4096, arg0=None)
    saw(peer, "proc-1", b"ready\r\n")
    assert peer.call("command/exec/terminate", {"processId": "proc-1"}) == {"running": True}
    assert exit_code(peer, "proc-1") == 137


def test_a_terminal_is_written_to_and_heard_as_stdout(peer: Peer) -> None:
    execute(peer, "p", "cat", tty=True)
    assert peer.call("command/exec/write", {"processId": "p", "chunk": b64(b"hello\n\x04")}) == {
        "accepted": True
    }
    assert exit_code(peer, "p") == 0
    assert output(peer, "p") == b"hello\r\nhello\r\n"
    execute(peer, "size", "stty", "size", tty=True)
    assert exit_code(peer, "size") == 0
    assert output(peer, "size") == b"24 80\r\n"


def test_much_output(peer: Peer) -> None:
    execute(peer, "p", "head", "-c", "3000000", "/dev/zero")
    assert exit_code(peer, "p") == 0
    assert len(output(peer, "p")) == 3_000_000


def test_the_id_is_free_after_the_exit(peer: Peer) -> None:
    for code in range(3):
        execute(peer, "same", "/bin/sh", "-c", f"exit {code}")
        assert exit_code(peer, "same") == code
        peer.notifications.clear()
    assert peer.call("command/exec/terminate", {"processId": "same"}) == {"running": False}


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"argv": []}, -32602, "argv must not be empty"),
        ({"cwd": "tmp"}, -32602, "cwd must be an absolute path"),
        ({"cwd": ""}, -32602, "cwd must be an absolute path"),
        ({"cwd": "file:///C:/x"}, -32602, "'file:///C:/x' is invalid on 'linux'"),
        ({"cwd": "/no/such"}, -32603, "No such file or directory (os error 2)"),
        ({"argv": ["/no/such"]}, -32603, "No such file or directory (os error 2)"),
        ({"argv": [""]}, -32603, "missing program for pipe spawn"),
        ({"argv": "true"}, -32602, None),
        ({"env": None}, -32602, None),
        ({"tty": None}, -32602, None),
        ({"outputBytesCap": -1}, -32602, None),
    ],
)
def test_refused(peer: Peer, change: dict[str, Any], code: int, text: str | None) -> None:
    got = peer.refused("command/exec", {**params("p", "true"), **change})
    assert got[0] == code
    assert text is None or got[1] == text
    execute(peer, "p", "true")  # the id is still free
    assert exit_code(peer, "p") == 0


def test_directories(peer: Peer) -> None:
    for process_id, cwd in (("native", "/usr"), ("uri", "file:///usr/../usr")):
        execute(peer, process_id, "pwd", cwd=cwd)
        assert exit_code(peer, process_id) == 0
        assert output(peer, process_id) == b"/usr\n"


def test_writing_where_nobody_reads(peer: Peer) -> None:
    write = "command/exec/write"
    assert peer.refused(write, {"processId": "x", "chunk": ""}) == (-32600, "unknown process id x")
    assert peer.refused(write, {"processId": "x", "chunk": "!"})[0] == -32602
    execute(peer, "pipes", "sleep", sleep_forever())
    assert peer.refused(write, {"processId": "pipes", "chunk": ""}) == (
        -32600,
        "stdin is closed for process pipes",
    )
    peer.call("command/exec/terminate", {"processId": "pipes"})
    # Killed, and not yet forgotten: the exit is still on its way.
    execute(peer, "terminal", "cat", tty=True)
    peer.send_many(
        [
            {"id": "t", "method": "command/exec/terminate", "params": {"processId": "terminal"}},
            {"id": "w", "method": write, "params": {"processId": "terminal", "chunk": b64(b"x")}},
        ]
    )
    refusal = peer.answer("w")["error"]
    assert (refusal["code"], refusal["message"]) in (
        (-32603, "failed to write to process stdin"),
        (-32600, "unknown process id terminal"),
    )
    assert peer.result("t") == {"running": True}


def test_before_the_handshake(new_peer: NewPeer) -> None:
    peer = new_peer()
    first = "client must call initialize before using exec methods"
    assert peer.refused("command/exec", params("p", "true")) == (-32600, first)
    peer.call("initialize", {"clientName": "x"})
    second = "client must send initialized before using exec methods"
    assert peer.refused("command/exec/terminate", {"processId": "p"}) == (-32600, second)


def test_a_connection_speaks_the_dialect_it_used_last(peer: Peer) -> None:
    current = (-32601, "exec-server stub does not implement `x/y` yet")
    legacy = (-32600, "unknown method: x/y")
    assert peer.refused("x/y") == current
    peer.call("command/exec/terminate", {"processId": "p"})
    assert peer.refused("x/y") == legacy
    peer.notify("surprise")
    error = peer.answer(-1)["error"]
    assert (error["code"], error["message"]) == (-32600, "unexpected notification method: surprise")
    peer.call("environment/status")
    assert peer.refused("x/y") == current
    # A method of a family that does not exist changes nothing.
    peer.refused("command/exec/unknown")
    assert peer.refused("x/y") == current


def test_a_process_speaks_the_dialect_that_started_it(peer: Peer) -> None:
    execute(peer, "old", "/bin/sh", "-c", "echo x")
    record = peer.run("echo", "y", processId="new")
    assert record.stdout == b"y\n"
    assert exit_code(peer, "old") == 0
    assert {m["method"].partition("/")[0] for m in told(peer, "old")} == {"command"}
    assert {m["method"].partition("/")[0] for m in told(peer, "new")} == {"process"}


def test_ids_are_shared(peer: Peer) -> None:
    taken = (-32600, "process one already exists")
    execute(peer, "one", "cat", tty=True)
    assert peer.refused("command/exec", params("one", "true")) == taken
    assert peer.refused("process/start", peer.start_params(["true"], processId="one")) == taken
    peer.call("process/terminate", {"processId": "one"})
    exit_code(peer, "one")
    peer.run("true", processId="one")
    assert peer.refused("command/exec", params("one", "true")) == taken  # it is retained


def test_cross_use(peer: Peer) -> None:
    execute(peer, "old", "cat", tty=True)
    assert peer.write("old", b"hello\n") == "accepted"
    saw(peer, "old", b"hello\r\nhello\r\n")
    read = peer.read("old")
    assert b"".join(unb64(chunk["chunk"]) for chunk in read["chunks"]) == b"hello\r\nhello\r\n"
    assert peer.call("process/signal", {"processId": "old", "signal": "interrupt"}) == {}
    assert exit_code(peer, "old") == 130
    new = peer.start("cat", pipeStdin=True)
    assert peer.call("command/exec/write", {"processId": new, "chunk": b64(b"x")}) == {"accepted": True}
    peer.saw(new, b"x")
    assert peer.call("command/exec/terminate", {"processId": new}) == {"running": True}
    assert peer.finished(new).exit_code == 137


def test_the_exit_waits_for_output_but_not_for_long(peer: Peer) -> None:
    marker = sleep_forever()
    path = f"/tmp/{marker}"
    script = f"(while [ ! -e {path} ]; do sleep 0.01; done; echo late) & echo early; exit 5"
    began = time.monotonic()
    execute(peer, "p", "/bin/bash", "-c", script)
    assert exit_code(peer, "p") == 5
    assert 0.4 < time.monotonic() - began < 10
    assert output(peer, "p") == b"early\n"
    execute(peer, "p", "true")  # the id is free
    assert output(peer, "p") == b"early\n"
    with open(path, "w"):
        pass
    try:
        saw(peer, "p", b"late\n")  # what comes later is still told
    finally:
        os.unlink(path)


def test_terminate_takes_the_tree(peer: Peer) -> None:
    marker = sleep_forever()
    execute(peer, "p", "/bin/bash", "-c", f"setsid sleep {marker} & sleep {marker}")
    eventually(lambda: len(running(f"sleep\0{marker}")) == 2, "both")
    assert peer.call("command/exec/terminate", {"processId": "p"}) == {"running": True}
    assert exit_code(peer, "p") == 137
    gone(marker)


def test_processes_end_with_their_connection(
    start_server: Callable[..., RunningServer], connect: Callable[..., Peer]
) -> None:
    server = start_server()  # sessions live long here
    peer = connect(server)
    peer.initialize()
    old, new = sleep_forever(), sleep_forever()
    execute(peer, "old", "/bin/bash", "-c", f"setsid sleep {old} & sleep {old}")
    peer.start("sleep", new)
    eventually(lambda: len(running(f"sleep\0{old}")) == 2, "both")
    peer.drop()
    gone(old)
    assert len(running(new)) == 1  # the other dialect's wait to be resumed


def test_processes_that_are_only_starting_end_with_their_connection(
    start_server: Callable[..., RunningServer], connect: Callable[..., Peer]
) -> None:
    server = start_server()
    marker = sleep_forever()
    for _ in range(5):
        peer = connect(server)
        peer.initialize()
        for number in range(30):
            peer.request("command/exec", params(str(number), "sleep", marker))
        peer.drop()
    with_status = connect(server)
    with_status.initialize()
    with_status.run("true")  # whatever was begun before is done now
    gone(marker)


def test_stdio_ends_all(start_stdio: NewPeer) -> None:
    peer = start_stdio()
    peer.initialize()
    marker = sleep_forever()
    execute(peer, "p", "/bin/bash", "-c", f"setsid sleep {marker} & sleep {marker}")
    eventually(lambda: len(running(f"sleep\0{marker}")) == 2, "both")
    peer.drop()
    assert peer.ended()
    gone(marker)
