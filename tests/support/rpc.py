"""A plain JSON-RPC client for tests: no retries, no types, everything it received is kept.

Knows the protocol only as far as the specification's prose goes; shares no code with exec_server.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from types import TracebackType
from typing import Any, Self

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect, unix_connect

from .server import COMMAND, server_environment
from .wait import PATIENCE

__all__ = ["Peer", "Record", "RpcFailure", "StdioPeer", "WebSocketPeer", "b64", "unb64"]

PATH = "/usr/local/bin:/usr/bin:/bin"

STREAMS = {1: "stdout", 2: "stderr", 3: "pty"}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unb64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


class RpcFailure(Exception):
    """An error answer."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['message']} ({error['code']})")
        self.code: int = error["code"]
        self.message: str = error["message"]


class Record:
    """What was notified of one process."""

    def __init__(self, process_id: str) -> None:
        self.process_id = process_id
        self.chunks: dict[int, tuple[str, bytes]] = {}
        self.seqs: list[int] = []
        self.binary = 0
        self.exit_code: int | None = None
        self.exit_seq: int | None = None
        self.close_seq: int | None = None
        self.sandbox_denied: bool | None = None

    def take(self, method: str, params: dict[str, Any]) -> None:
        self.seqs.append(params["seq"])
        if method == "process/output":
            data = params["data"] if "data" in params else unb64(params["chunk"])
            self.binary += "data" in params
            assert data, "an empty chunk"
            self.chunks[params["seq"]] = (params["stream"], data)
        elif method == "process/exited":
            self.exit_seq, self.exit_code = params["seq"], params["exitCode"]
            self.sandbox_denied = params["sandboxDenied"]
        else:
            self.close_seq = params["seq"]

    @property
    def closed(self) -> bool:
        return self.close_seq is not None

    def stream(self, *names: str) -> bytes:
        return b"".join(data for _, (name, data) in sorted(self.chunks.items()) if name in names)

    @property
    def stdout(self) -> bytes:
        return self.stream("stdout")

    @property
    def stderr(self) -> bytes:
        return self.stream("stderr")

    @property
    def terminal(self) -> bytes:
        return self.stream("pty")

    @property
    def output(self) -> bytes:
        return self.stream("stdout", "stderr", "pty")

    def check(self) -> None:
        """Every number once, from 1 on; the close is the last, the exit came once."""
        assert sorted(self.seqs) == list(range(1, len(self.seqs) + 1)), self.seqs
        assert self.close_seq == len(self.seqs)
        assert self.exit_seq is not None


class Peer:
    """One connection. `received` is every message in the order it came."""

    carries_binary = False

    def __init__(self) -> None:
        self._ids = count(1)
        self._names = count(1)
        self.received: list[dict[str, Any]] = []
        self.answers: dict[Any, deque[dict[str, Any]]] = defaultdict(deque)
        self.notifications: list[dict[str, Any]] = []
        self.records: dict[str, Record] = {}
        self.session_id = ""
        self.info: dict[str, Any] = {}
        self.server_pid = 0

    # The two ends of the transport ---------------------------------------------------------------

    def send_raw(self, data: str | bytes) -> None:
        raise NotImplementedError

    def receive_raw(self, timeout: float) -> str | bytes | None:
        """A message; None when the connection has ended; TimeoutError when nothing came."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        """End without a word."""
        raise NotImplementedError

    # Messages ------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        self.send_raw(json.dumps(message))

    def send_many(self, messages: Sequence[Any]) -> None:
        for message in messages:
            self.send(message)

    def pump(self, timeout: float = PATIENCE) -> dict[str, Any] | None:
        """Take in one message; None when the connection has ended."""
        raw = self.receive_raw(timeout)
        if raw is None:
            return None
        message = _binary_output(raw) if isinstance(raw, bytes) else json.loads(raw)
        assert "jsonrpc" not in message
        self.received.append(message)
        if "method" in message:
            self.notifications.append(message)
            method, params = message["method"], message.get("params")
            if method in ("process/output", "process/exited", "process/closed"):
                process_id = params["processId"]
                self.records.setdefault(process_id, Record(process_id)).take(method, params)
        else:
            assert set(message) in ({"id", "result"}, {"id", "error"}), message
            self.answers[message["id"]].append(message)
        return message

    def until(self, condition: Callable[[], Any], what: str, timeout: float = PATIENCE) -> Any:
        """Take in messages until the condition holds."""
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            try:
                ended = self.pump(max(deadline - time.monotonic(), 0)) is None
            except TimeoutError:
                raise AssertionError(f"no {what} in {timeout:g} s") from None
            if ended:
                raise AssertionError(f"the connection ended before {what}")
        return value

    def ended(self, timeout: float = PATIENCE) -> bool:
        """Take in messages until the connection ends."""
        deadline = time.monotonic() + timeout
        try:
            while self.pump(max(deadline - time.monotonic(), 0)) is not None:
                pass
        except TimeoutError:
            return False
        return True

    # Requests ------------------------------------------------------------------------------------

    def request(self, method: str, params: Any = None, request_id: Any = None) -> Any:
        """Send a request and give its id."""
        request_id = next(self._ids) if request_id is None else request_id
        self.send({"id": request_id, "method": method, "params": params})
        return request_id

    def answer(self, request_id: Any, timeout: float = PATIENCE) -> dict[str, Any]:
        """The next answer with that id."""
        waiting = self.answers[request_id]
        self.until(lambda: waiting, f"answer to {request_id!r}", timeout)
        return waiting.popleft()

    def result(self, request_id: Any, timeout: float = PATIENCE) -> Any:
        message = self.answer(request_id, timeout)
        if "error" in message:
            raise RpcFailure(message["error"])
        return message["result"]

    def call(self, method: str, params: Any = None, timeout: float = PATIENCE) -> Any:
        return self.result(self.request(method, params), timeout)

    def refused(self, method: str, params: Any = None) -> tuple[int, str]:
        """Code and message of the error that answers."""
        message = self.answer(self.request(method, params))
        assert "error" in message, message
        return message["error"]["code"], message["error"]["message"]

    def notify(self, method: str, params: Any = None) -> None:
        self.send({"method": method, "params": params})

    def alive(self) -> None:
        """The connection answers, in its current state."""
        assert self.refused("no/such/method")[0] in (-32600, -32601)

    # The protocol --------------------------------------------------------------------------------

    def initialize(self, **more: Any) -> dict[str, Any]:
        result: dict[str, Any] = self.call("initialize", {"clientName": "test", **more})
        self.session_id = result["sessionId"]
        self.info = result["environmentInfo"]
        self.notify("initialized", {})
        return result

    def start_params(self, argv: Sequence[str], **more: Any) -> dict[str, Any]:
        return {
            "processId": f"p{next(self._names)}",
            "argv": list(argv),
            "cwd": "file:///tmp",
            "env": {"PATH": PATH},
            "tty": False,
            **more,
        }

    def start(self, *argv: str, **more: Any) -> str:
        """Start a process; its id."""
        params = self.start_params(argv, **more)
        assert self.call("process/start", params) == {"processId": params["processId"], "sandboxType": "none"}
        process_id: str = params["processId"]
        return process_id

    def shell(self, script: str, **more: Any) -> str:
        return self.start("/bin/bash", "-c", script, **more)

    def write(self, process_id: str, data: bytes, **more: Any) -> str:
        params = {"processId": process_id, "chunk": b64(data), **more}
        status: str = self.call("process/write", params)["status"]
        return status

    def close_stdin(self, process_id: str) -> str:
        status: str = self.call("process/closeStdin", {"processId": process_id})["status"]
        return status

    def read(self, process_id: str, **more: Any) -> dict[str, Any]:
        result: dict[str, Any] = self.call("process/read", {"processId": process_id, **more})
        return result

    def terminate(self, process_id: str, **more: Any) -> dict[str, Any]:
        result: dict[str, Any] = self.call("process/terminate", {"processId": process_id, **more})
        return result

    def record(self, process_id: str) -> Record:
        return self.records.setdefault(process_id, Record(process_id))

    def finished(self, process_id: str, timeout: float = PATIENCE) -> Record:
        """Everything that was notified of a process, once it has closed."""
        record = self.record(process_id)
        self.until(lambda: record.closed, f"close of {process_id!r}", timeout)
        record.check()
        return record

    def saw(self, process_id: str, text: bytes, timeout: float = PATIENCE) -> Record:
        """Take in messages until the process has written this."""
        record = self.record(process_id)
        self.until(lambda: text in record.output, f"{text!r} from {process_id!r}", timeout)
        return record

    def run(self, *argv: str, **more: Any) -> Record:
        """Start, and wait for the end."""
        return self.finished(self.start(*argv, **more))

    def run_shell(self, script: str, **more: Any) -> Record:
        return self.finished(self.shell(script, **more))

    def state(self, process_id: str) -> dict[str, Any]:
        """How `process/list` describes a process; needs the extensions."""
        listed = self.call("process/list", {})["processes"]
        found: dict[str, Any] = next(entry for entry in listed if entry["processId"] == process_id)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _binary_output(frame: bytes) -> dict[str, Any]:
    kind, stream, length, seq = struct.unpack_from("!BBHQ", frame)
    assert kind == 1
    process_id, data = frame[12 : 12 + length].decode(), frame[12 + length :]
    params = {"processId": process_id, "seq": seq, "stream": STREAMS[stream], "data": data}
    return {"method": "process/output", "params": params}


class WebSocketPeer(Peer):
    """Over a WebSocket, by the `websockets` library. `url` may be ws://, wss:// or unix://."""

    carries_binary = True

    def __init__(self, url: str, server_pid: int = 0, **options: Any) -> None:
        super().__init__()
        options = {
            "compression": None,
            "max_size": None,
            "ping_interval": None,
            "open_timeout": PATIENCE,
            "close_timeout": 1,
            **options,
        }
        self._stack = ExitStack()
        self._connection: ClientConnection = self._stack.enter_context(
            unix_connect(url.removeprefix("unix://"), "ws://localhost/", **options)
            if url.startswith("unix://")
            else connect(url, proxy=None, **options)
        )
        self.server_pid = server_pid

    def send_raw(self, data: str | bytes) -> None:
        self._connection.send(data)

    def receive_raw(self, timeout: float) -> str | bytes | None:
        try:
            return self._connection.recv(timeout)
        except ConnectionClosed:
            return None

    def close(self) -> None:
        self._stack.close()

    def drop(self) -> None:
        self._connection.socket.shutdown(socket.SHUT_RDWR)
        self._stack.close()

    @property
    def raw(self) -> ClientConnection:
        return self._connection


class StdioPeer(Peer):
    """Over the pipes of a server of its own."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        super().__init__()
        self.process = subprocess.Popen(
            [COMMAND, "--listen", "stdio", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=server_environment(**(env or {})),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._write_fd = self.process.stdin.fileno()
        self._read_fd = self.process.stdout.fileno()
        self._received = bytearray()
        self.server_pid = self.process.pid

    def send_raw(self, data: str | bytes) -> None:
        self.send_bytes((data.encode() if isinstance(data, str) else data) + b"\n")

    def send_bytes(self, data: bytes) -> None:
        """Exactly these bytes."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._write_fd, view) :]

    def send_many(self, messages: Sequence[Any]) -> None:
        self.send_bytes(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def receive_raw(self, timeout: float) -> str | bytes | None:
        deadline = time.monotonic() + timeout
        while (end := self._received.find(b"\n")) < 0:
            readable, _, _ = select.select([self._read_fd], [], [], max(deadline - time.monotonic(), 0))
            if not readable:
                raise TimeoutError
            data = os.read(self._read_fd, 1 << 20)
            if not data:
                assert not self._received, "the last line had no end"
                return None
            self._received += data
        line = self._received[:end].decode()
        del self._received[: end + 1]
        return line

    def end_of_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal the server and give its exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """End of input; a server that was not ended otherwise exits with 0 and has said nothing."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        ended_before = self.process.poll() is not None
        self.end_of_input()
        while os.read(self._read_fd, 1 << 20):
            pass
        code = self.process.wait(PATIENCE)
        errors = self.process.stderr.read().decode()
        self.process.stdout.close()
        self.process.stderr.close()
        assert errors == "", errors
        assert ended_before or code == 0

    def drop(self) -> None:
        self.end_of_input()
