"""A model on loopback: the Responses API as a real HTTP server that plays a script, well or badly.

What it can do wrong is what real endpoints and networks do: drop the connection, answer with a status,
say what is no event, stay silent, or never stop.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Literal, Self

__all__ = [
    "USAGE",
    "Cut",
    "Endless",
    "ModelServer",
    "Play",
    "Raw",
    "Say",
    "Silent",
    "Status",
    "call",
    "message",
    "reasoning",
]

Json = dict[str, Any]

USAGE: Json = {
    "input_tokens": 1200,
    "input_tokens_details": {"cached_tokens": 300},
    "output_tokens": 40,
    "output_tokens_details": {"reasoning_tokens": 8},
    "total_tokens": 1240,
}
"""What every answer costs, as in the recorded streams."""


def message(text: str) -> Json:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": content}


def call(name: str, arguments: Any, call_id: str = "call_1") -> Json:
    """A call; arguments that are a text are sent as they are, which need not be JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "call_id": call_id,
        "name": name,
        "arguments": text,
    }


def reasoning(*summary: str) -> Json:
    parts = [{"type": "summary_text", "text": text} for text in summary]
    return {"type": "reasoning", "id": "rs_1", "summary": parts, "encrypted_content": "secret"}


@dataclass(frozen=True)
class Say:
    """A whole answer."""

    items: Sequence[Json]
    usage: Json | None = field(default_factory=lambda: USAGE)


@dataclass(frozen=True)
class Cut:
    """The beginning of an answer, and then the connection is closed."""

    items: Sequence[Json] = ()


@dataclass(frozen=True)
class Status:
    """No answer but a status."""

    code: int
    body: str
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Raw:
    """These events, whatever they are."""

    events: Sequence[str]


@dataclass(frozen=True)
class Silent:
    """Accepted, and then nothing until the server ends."""


@dataclass(frozen=True)
class Endless:
    """Deltas for as long as somebody listens; or one line, or what means nothing."""

    what: Literal["deltas", "line", "comments"] = "deltas"


Play = Say | Cut | Status | Raw | Silent | Endless | str | Callable[["ModelServer"], "Play"]
"""A text is a message alone. A function is asked when its turn comes, after every call was answered."""


class ModelServer:
    """Plays a script, one line per request; the last line is repeated. Use it as a context."""

    def __init__(self, *script: Play) -> None:
        self._script = script
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.requests: list[Json] = []
        self._answering = threading.local()
        self.headers: list[dict[str, str]] = []
        """Of every request, with names in lower case."""
        handler = type("Handler", (_Handler,), {"model": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def outputs(self) -> dict[str, Any]:
        """What the model was told about its calls, by call id."""
        told: dict[str, Any] = {}
        for request in self.requests:
            for item in request["input"]:
                if str(item.get("type")).endswith("_output"):
                    told[item["call_id"]] = item["output"]
        return told

    def said_to(self, number: int = -1) -> str:
        """Every text of a request's input."""
        parts = [part for item in self.requests[number]["input"] for part in item.get("content", [])]
        return "\n".join(part.get("text", "") for part in parts)

    @property
    def request(self) -> Json:
        """The one that is being answered, for functions of a script; there may be several at a time."""
        request: Json = self._answering.request
        return request

    def next_play(self, request: Json) -> Play:
        self._answering.request = request
        with self._lock:
            play = self._script[min(len(self.requests), len(self._script) - 1)]
            self.requests.append(request)
        while callable(play):
            play = play(self)
        return play

    def wait_for_the_end(self, seconds: float = 60) -> bool:
        return self._over.wait(seconds)


def _events(play: Say | Cut) -> Iterator[Json]:
    yield {"type": "response.created", "response": {"id": "resp_1"}}
    for index, item in enumerate(play.items):
        if item.get("type") == "web_search_call" and "id" in item:
            added = {"type": "web_search_call", "id": item["id"], "status": "in_progress"}
            yield {"type": "response.output_item.added", "output_index": index, "item": added}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    if isinstance(play, Say):
        response = {"id": "resp_1", "output": [], **({"usage": play.usage} if play.usage else {})}
        yield {"type": "response.completed", "response": response}


class _Handler(BaseHTTPRequestHandler):
    model: ClassVar[ModelServer]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.model.headers.append({name.lower(): value for name, value in self.headers.items()})
        play = self.model.next_play(json.loads(body))
        with suppress(BrokenPipeError, ConnectionResetError):
            self._play(Say([message(play)]) if isinstance(play, str) else play)
        self.close_connection = True

    def _play(self, play: Any) -> None:
        if isinstance(play, Status):
            data = play.body.encode()
            self.send_response(play.code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            for header, content in play.headers:
                self.send_header(header, content)
            self.end_headers()
            self.wfile.write(data)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        if isinstance(play, Raw):
            for event in play.events:
                self.wfile.write(event.encode())
        elif isinstance(play, Silent):
            self.wfile.flush()
            self.model.wait_for_the_end()
        elif isinstance(play, Endless):
            delta = {
                "type": "response.output_text.delta",
                "item_id": "m",
                "output_index": 0,
                "content_index": 0,
            }
            line = f"data: {json.dumps({**delta, 'delta': 'x' * 200_000})}\n\n".encode()
            pieces = {"deltas": line, "line": b"x" * 1_000_000, "comments": b": alive\n\n"}
            if play.what == "line":
                self.wfile.write(b"data: ")
            while not (play.what == "comments" and self.model.wait_for_the_end(0.01)):
                self.wfile.write(pieces[play.what])
        else:
            for value in _events(play):
                self.wfile.write(f"event: {value['type']}\ndata: {json.dumps(value)}\n\n".encode())
                self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base class)
        """Silent."""
