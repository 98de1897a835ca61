"""A tool server over HTTP, written by hand: what it answers to calls is a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self

__all__ = ["HttpTools", "Refuse"]


@dataclass(frozen=True)
class Refuse:
    """No answer but a status."""

    status: int
    body: str = ""


class HttpTools:
    """Plays a script, one entry per call: a text is the result, None is no answer. The last is repeated.

    With `door`, nobody gets further than that. Use it as a context.
    """

    def __init__(self, *script: str | Refuse | None, door: Refuse | None = None) -> None:
        self.script: Sequence[str | Refuse | None] = script
        self.door = door
        self.asked: list[tuple[str, dict[str, str]]] = []
        """The methods of every request, with its headers in lower case."""
        self.over = threading.Event()
        self._calls = 0
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"tools": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/mcp"

    def next_call(self) -> str | Refuse | None:
        with self._lock:
            self._calls += 1
            return self.script[min(self._calls, len(self.script)) - 1]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    tools: ClassVar[HttpTools]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(Refuse(405))

    def do_DELETE(self) -> None:
        self._send(Refuse(200))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.tools.asked.append((asked["method"], {k.lower(): v for k, v in self.headers.items()}))
        with suppress(BrokenPipeError, ConnectionResetError):
            self._send(self.tools.door or self._answer(asked["method"], asked.get("id")))

    def _answer(self, method: str, number: Any) -> Refuse:
        if number is None:
            return Refuse(202)
        result: dict[str, Any]
        if method == "initialize":
            about = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            result = {**about, "serverInfo": {"name": "http", "version": "1"}}
        elif method == "tools/list":
            result = {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}
        elif method == "tools/call":
            play = self.tools.next_call()
            if play is None:
                self.tools.over.wait(60)
            if not isinstance(play, str):
                return play or Refuse(204)
            result = {"content": [{"type": "text", "text": play}]}
        else:
            error = {"code": -32601, "message": "no"}
            return Refuse(200, json.dumps({"jsonrpc": "2.0", "id": number, "error": error}))
        return Refuse(200, json.dumps({"jsonrpc": "2.0", "id": number, "result": result}))

    def _send(self, answer: Refuse) -> None:
        data = answer.body.encode()
        self.send_response(answer.status)
        self.send_header("content-type", "application/json")
        self.send_header("mcp-session-id", "s")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base class)
        """Silent."""
