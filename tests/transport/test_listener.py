"""Accepting when there is nothing left to accept with: one complaint, no spinning, and then on."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import subprocess
from pathlib import Path

from exec_server.transport.listener import Listener
from support.rpc import WebSocketPeer
from support.server import COMMAND, RunningServer
from support.tls import certificate
from support.wait import eventually, eventually_async


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


def test_a_tls_handshake_has_its_time(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)

    async def run() -> None:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        listener = Listener(sock, asyncio.Protocol, context, handshake_timeout=0.2)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        try:
            async with asyncio.timeout(20):
                assert await reader.read() == b"", "it is let go"
        finally:
            writer.close()
            listener.close()
        await eventually_async(lambda: not listener._opening, "nothing being left of it")

    asyncio.run(run())


def test_stopping_in_the_middle_of_handshakes_is_nothing_to_complain_about(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with RunningServer("--tls-cert", str(cert), "--tls-key", str(key), listen="wss://127.0.0.1:0") as server:
        host, port = server.url.removeprefix("wss://").split(":")
        before = len(os.listdir(f"/proc/{server.pid}/fd"))
        crowd = [socket.create_connection((host, int(port)), timeout=10) for _ in range(10)]
        eventually(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) >= before + 10, "all being accepted")
        assert server.end() == 0
        assert server.errors() == ""
        for one in crowd:
            one.close()
