"""Accepting when there is nothing left to accept with: one complaint, no spinning, and then on."""

from __future__ import annotations

import os
import resource
import socket
import subprocess

from support.rpc import WebSocketPeer
from support.server import COMMAND
from support.wait import eventually


def busy_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    return int(words[11]) + int(words[12])


def test_running_out_of_descriptors_while_accepting() -> None:
    server = subprocess.Popen(
        [COMMAND, "--listen", "ws://127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert server.stdout is not None
    assert server.stderr is not None
    url = server.stdout.readline().decode().strip()
    host, port = url.removeprefix("ws://").split(":")
    few = len(os.listdir(f"/proc/{server.pid}/fd")) + 5
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (few, few))
    try:
        crowd = [socket.create_connection((host, int(port)), timeout=10) for _ in range(20)]
        complaint = server.stderr.readline().decode()
        assert "cannot accept connections for now" in complaint
        before = busy_ticks(server.pid)
        eventually(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) >= few, "every descriptor in use")
        assert busy_ticks(server.pid) - before < 50, "it does not spin"
        for one in crowd:
            one.close()
        with WebSocketPeer(url) as peer:
            peer.initialize()
    finally:
        server.terminate()
        rest = server.communicate(timeout=20)[1]
    assert b"Traceback" not in rest, rest
    assert server.returncode == 0
