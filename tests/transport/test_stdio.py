"""transport/stdio.py: one message per line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.machine import gone, running, sleep_forever
from support.rpc import StdioPeer
from support.server import COMMAND
from support.wait import eventually

StartStdio = Callable[..., StdioPeer]
MIB = 1024 * 1024
ASK = b'{"id":1,"method":"no/such"}'


@pytest.fixture
def peer(start_stdio: StartStdio) -> StdioPeer:
    return start_stdio()


def is_answered(peer: StdioPeer) -> bool:
    return bool(peer.answer(1)["error"]["code"] == -32601)


def test_line_ends(peer: StdioPeer) -> None:
    peer.send_bytes(ASK + b"\n")
    assert is_answered(peer)
    peer.send_bytes(ASK + b"\r\n")
    assert is_answered(peer)
    peer.send_bytes(b"\n\r\n   \n\t \r\n" + ASK + b"\n")  # blank lines are nothing
    assert is_answered(peer)
    peer.send_bytes(ASK + b"\r\r\n")  # only one is removed, and the other is a blank
    assert is_answered(peer)
    assert len(peer.received) == 4


def test_lines_in_pieces_and_in_heaps(peer: StdioPeer) -> None:
    for byte in ASK + b"\n":
        peer.send_bytes(bytes([byte]))
    assert is_answered(peer)
    peer.send_bytes(b"".join(b'{"id":%d,"method":"no/such"}\n' % number for number in range(5000)))
    for number in range(5000):
        assert peer.answer(number)["error"]["code"] == -32601


def test_a_last_line_without_an_end_counts(peer: StdioPeer) -> None:
    peer.send_bytes(b'{"id":7,"method":"initialize","params":{"clientName":"x"}}')
    peer.end_of_input()
    assert "sessionId" in peer.result(7)
    assert peer.ended()
    assert peer.process.wait(20) == 0


def test_malformed_lines(peer: StdioPeer) -> None:
    peer.send_bytes(b"nonsense\n")
    message = peer.answer(-1)["error"]
    assert message["code"] == -32600
    assert message["message"].startswith("failed to parse JSON-RPC message from exec-server stdio: ")
    peer.alive()


def with_children(peer: StdioPeer) -> str:
    peer.initialize()
    marker = sleep_forever()
    peer.shell(f"setsid sleep {marker} & sleep {marker}")
    eventually(lambda: len(running(f"sleep\0{marker}")) == 2, "both")
    return marker


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(b'{"method":"\xff"}\n', id="no UTF-8"),
        pytest.param(b'{"id":1,"result":{}}\n', id="an answer nobody asked for"),
        pytest.param(b"", id="nothing"),
        pytest.param(b'{"half a line', id="half a line"),
    ],
)
def test_everything_ends_with_the_connection(peer: StdioPeer, last: bytes) -> None:
    marker = with_children(peer)
    peer.send_bytes(last)
    if not last.endswith(b"\n"):
        peer.end_of_input()
    assert peer.ended()
    assert peer.process.wait(20) == 0
    gone(marker)


def test_the_longest_line_and_one_more_byte(peer: StdioPeer) -> None:
    head, tail = b'{"id":1,"method":"no/such","params":"', b'"}'
    filler = b"x" * (64 * MIB - len(head) - len(tail))
    peer.send_bytes(head + filler + tail + b"\r\n")
    assert is_answered(peer)
    try:
        peer.send_bytes(head + filler + b"x" + tail + b"\n")
    except BrokenPipeError:
        pass  # it did not wait for the end
    assert peer.ended()
    assert peer.process.wait(20) == 0


def test_a_line_without_end_is_not_kept(peer: StdioPeer) -> None:
    sent = 0
    try:
        while sent < 200 * MIB:
            peer.send_bytes(bytes(MIB).replace(b"\0", b"x"))
            sent += MIB
    except BrokenPipeError:
        pass
    assert sent < 100 * MIB
    assert peer.ended()


def test_a_client_that_is_gone_ends_the_server() -> None:
    # Its input stays open; the server notices when it has something to say.
    process = subprocess.Popen(
        [COMMAND, "--listen", "stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write(ASK + b"\n")
    process.stdin.flush()
    assert process.wait(20) == 0
    assert process.stderr.read() == b""
    process.stdin.close()
    process.stderr.close()


def test_input_from_a_file(tmp_path: Path) -> None:
    requests = [
        {"id": 1, "method": "initialize", "params": {"clientName": "x"}},
        {"method": "initialized"},
        {"id": 2, "method": "environment/status"},
    ]
    file = tmp_path / "input"
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    for output in (subprocess.PIPE, (tmp_path / "output").open("w+b")):
        with file.open("rb") as source:
            done = subprocess.run(
                [COMMAND, "--listen", "stdio"],
                stdin=source,
                stdout=output,
                stderr=subprocess.PIPE,
                timeout=20,
            )
        text = done.stdout
        if output is not subprocess.PIPE:
            assert not isinstance(output, int)
            output.seek(0)
            text = output.read()
            output.close()
        answers = [json.loads(line) for line in text.splitlines()]
        assert [answer["id"] for answer in answers] == [1, 2]
        assert (done.returncode, done.stderr) == (0, b"")


def test_no_input_at_all() -> None:
    done = subprocess.run(
        [COMMAND, "--listen", "stdio"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_one_socket_for_both_ways() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        process = subprocess.Popen([COMMAND, "--listen", "stdio"], stdin=theirs, stdout=theirs)
        theirs.close()
        ours.settimeout(20)
        ours.sendall(ASK + b"\n")
        received = b""
        while not received.endswith(b"\n"):
            received += ours.recv(65536)
        assert json.loads(received)["id"] == 1
        ours.shutdown(socket.SHUT_WR)
        assert process.wait(20) == 0


def test_blocking_mode_of_what_was_lent_is_given_back() -> None:
    read, write = os.pipe()
    out_read, out_write = os.pipe()
    assert os.get_blocking(read)
    process = subprocess.Popen([COMMAND, "--listen", "stdio"], stdin=read, stdout=out_write)
    os.write(write, ASK + b"\n")
    assert b"-32601" in os.read(out_read, 65536)
    assert not os.get_blocking(read)  # shared with the server
    os.close(write)
    assert process.wait(20) == 0
    assert os.get_blocking(read)
    assert os.get_blocking(out_write)
    for fd in (read, out_read, out_write):
        os.close(fd)


def test_stray_prints_are_not_messages(start_stdio: StartStdio) -> None:
    peer = start_stdio()
    peer.initialize()
    links: dict[str, Any] = {fd: os.readlink(f"/proc/{peer.server_pid}/fd/{fd}") for fd in ("0", "1", "2")}
    assert links["0"] == "/dev/null"
    assert links["1"] == links["2"]
