"""What the machine and the client can do without any server, and how close our binary frames come."""

import base64
import contextlib
import fcntl
import importlib.util
import os
import socket
import statistics
import struct
import subprocess
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass

from .client import WrongAnswer
from .client_websocket import WebSocketClient
from .deadline import SECONDS_PER_ROUND, deadline
from .output import ProcessCount
from .rounds import blame
from .server import Command, WebSocketServer
from .workloads import Effort, output_of_pipe, zeros

__all__ = ["BINARY_TARGET", "Yardsticks", "measure_yardsticks"]

BINARY_TARGET = 0.5
"""The part of a bare read loop's speed that output in binary frames is asked to reach."""

READ_SIZE = 64 << 10
PIPE_SIZE = 1 << 20
REFERENCE_CHUNK = 8192
"""The largest chunk of the reference: the smaller the chunks, the more work for a client."""


@dataclass(frozen=True)
class Yardsticks:
    """Bytes per second, one number for each round."""

    bare_read: tuple[float, ...]
    """`os.read` in a loop on the pipe of the same program, nothing done with the bytes."""
    bare_terminal: tuple[float, ...]
    """The same on a terminal in raw mode: what the kernel's terminal layer lets through."""
    client: tuple[float, ...]
    """The load client fed with ready-made frames in the reference's chunk size."""
    binary: tuple[float, ...] | None
    """Ours in binary frames; None if skipped."""
    skipped: str | None
    """Why."""

    @property
    def binary_fraction(self) -> float | None:
        """Ours in binary frames against the bare read loop."""
        if self.binary is None:
            return None
        return statistics.median(self.binary) / statistics.median(self.bare_read)


def measure_yardsticks(ours: Command, effort: Effort, rounds: int) -> Yardsticks:
    """All of them, taking turns like the servers."""
    bare: list[float] = []
    terminal: list[float] = []
    client: list[float] = []
    binary: list[float] = []
    skipped = why_no_binary(ours)
    for _ in range(rounds):
        with deadline(SECONDS_PER_ROUND):
            bare.append(bare_read_loop(effort.pipe_bytes))
            terminal.append(bare_terminal_loop(effort.terminal_bytes))
            client.append(client_alone(effort.pipe_bytes))
        if skipped is None:
            with deadline(SECONDS_PER_ROUND), blame(ours):
                binary.append(binary_output(ours, effort))
    return Yardsticks(tuple(bare), tuple(terminal), tuple(client), tuple(binary) or None, skipped)


def why_no_binary(ours: Command) -> str | None:
    """None when our server agrees to send output as binary frames, else the reason."""
    try:
        if importlib.util.find_spec("exec_server.wire.binary") is None:
            return "exec_server.wire.binary does not exist"
    except ModuleNotFoundError:
        return "exec_server.wire is not installed"
    with (
        deadline(SECONDS_PER_ROUND),
        blame(ours),
        WebSocketServer(ours) as server,
        WebSocketClient(server.url) as client,
    ):
        agreed = client.handshake(binaryOutput=True).get("binaryOutput") is True
    return None if agreed else "the server did not agree to binaryOutput"


def binary_output(ours: Command, effort: Effort) -> float:
    """Bytes per second of output through a pipe, sent as binary frames without base64."""
    with WebSocketServer(ours) as server, server.connect(binaryOutput=True) as client:
        return output_of_pipe(client, effort, binary=True)


def bare_read_loop(size: int) -> float:
    """Bytes per second through a pipe when nobody is in between."""
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    return _read_all(reader, writer, size)


def bare_terminal_loop(size: int) -> float:
    """Bytes per second through a terminal in raw mode when nobody is in between."""
    reader, writer = os.openpty()
    tty.setraw(writer)
    return _read_all(reader, writer, size)


def _read_all(reader: int, writer: int, size: int) -> float:
    total = 0
    started = time.perf_counter()
    try:
        with subprocess.Popen(zeros(size), stdout=writer):
            os.close(writer)
            with contextlib.suppress(OSError):  # how a terminal ends
                while chunk := os.read(reader, READ_SIZE):
                    total += len(chunk)
    finally:
        os.close(reader)
    if total != size:
        raise WrongAnswer(f"read {total} bytes instead of {size}")
    return size / (time.perf_counter() - started)


def client_alone(size: int) -> float:
    """Bytes per second of output that the load client can take over loopback."""
    with canned_server(size) as url, WebSocketClient(url) as client:
        count = ProcessCount(["p"], [])
        started = time.perf_counter()
        while count.open:
            count.take(client)
        took = time.perf_counter() - started
        count.check(size)
    return size / took


@contextlib.contextmanager
def canned_server(size: int) -> Iterator[str]:
    """A child that answers an upgrade with the output of a process that nobody runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = os.fork()
        if child == 0:
            try:
                _serve_canned(listener, size)
            finally:
                os._exit(0)
        try:
            yield f"ws://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            os.waitpid(child, 0)


def _serve_canned(listener: socket.socket, size: int) -> None:
    chunk = base64.b64encode(bytes(REFERENCE_CHUNK)).decode()
    chunks = size // REFERENCE_CHUNK
    block = b"".join(
        _text_frame(
            f'{{"method":"process/output","params":{{"processId":"p","seq":{chunks},"stream":"stdout",'
            f'"chunk":"{chunk}"}}}}'
        )
        for _ in range(64)
    )
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        for _ in range(chunks // 64):
            connection.sendall(block)
        exited = f'{{"method":"process/exited","params":{{"processId":"p","seq":{chunks + 1},"exitCode":0}}}}'
        closed = f'{{"method":"process/closed","params":{{"processId":"p","seq":{chunks + 2}}}}}'
        connection.sendall(_text_frame(exited) + _text_frame(closed))


def _text_frame(text: str) -> bytes:
    size = len(text)
    head = struct.pack("!BB", 0x81, size) if size < 126 else struct.pack("!BBH", 0x81, 126, size)
    return head + text.encode()
