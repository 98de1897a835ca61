"""A scripted model: the Responses API on loopback, answering from a list of turns.

`codex exec` asks a model what to do next and sends back what each tool call returned. A test writes the
model's side as a script, so a run is decided by the test alone, and reads afterwards what the model saw,
which is the only thing a user of the harness cares about.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar

__all__ = [
    "Call",
    "Model",
    "ToolResult",
    "Turn",
    "apply_patch",
    "exec_command",
    "view_image",
    "write_stdin",
]

Json = dict[str, Any]
"""A JSON object."""


@dataclass(frozen=True)
class Call:
    """One tool call the model makes."""

    name: str
    arguments: Json

    def item(self, call_id: str) -> Json:
        """The call as an output item of a response."""
        identity = {"id": f"item_{call_id}", "call_id": call_id, "name": self.name}
        return {"type": "function_call", **identity, "arguments": json.dumps(self.arguments)}


def exec_command(cmd: str, **options: Any) -> Call:
    """Run `cmd`; `tty`, `yield_time_ms`, `workdir` and the like are `options`."""
    return Call("exec_command", {"cmd": cmd, **options})


def write_stdin(session_id: int, chars: str = "", **options: Any) -> Call:
    """Type `chars` into a running command; without any, wait for more of its output."""
    return Call("write_stdin", {"session_id": session_id, "chars": chars, **options})


def apply_patch(patch: str) -> Call:
    """Edit files. The harness offers an unknown model no tool for it, but takes this command line for one
    and edits through `fs/*`, without starting a process."""
    return exec_command(f"apply_patch <<'END_OF_PATCH'\n{patch}\nEND_OF_PATCH")


def view_image(path: str) -> Call:
    """Look at an image file; the harness reads it through `fs/*` and shows it to the model."""
    return Call("view_image", {"path": path})


@dataclass(frozen=True)
class ToolResult:
    """What the model was told about one of its calls: the text, and the facts the harness puts in it."""

    text: str
    images: tuple[str, ...] = ()
    """The images in it, as `data:` URLs."""

    @property
    def output(self) -> str:
        """What the command printed, without the harness's header."""
        return self.text.partition("Output:\n")[2]

    @property
    def exit_code(self) -> int | None:
        """The exit code; None for a command that still runs."""
        found = re.search(r"^Process exited with code (-?\d+)$", self.text, re.MULTILINE)
        return int(found[1]) if found else None

    @property
    def session_id(self) -> int | None:
        """The number to pass to write_stdin; None for a command that has finished."""
        found = re.search(r"^Process running with session ID (\d+)$", self.text, re.MULTILINE)
        return int(found[1]) if found else None


Turn = str | Call | Sequence[Call] | Callable[["Model"], "Turn"]
"""A final message, one call, several parallel calls, or a function that looks at the model and says which.

A function runs when the harness asks for that turn, which is after every call before it was answered: the
place to wait for a condition, or to use a session id that only exists by then."""


@dataclass
class Model:
    """The model of one run. Use as a context manager; `base_url` is what the harness gets configured with."""

    turns: Sequence[Turn]
    requests: list[Json] = field(default_factory=list)
    """Bodies of all requests, in order."""
    failures: list[BaseException] = field(default_factory=list)
    """What went wrong inside the script, for the test to raise: an HTTP thread has nobody to tell."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"model": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="model")

    def __enter__(self) -> Model:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    @property
    def results(self) -> list[ToolResult]:
        """What the model was told about its calls, in the order it made them."""
        told: dict[str, ToolResult] = {}
        for request in self.requests:
            for item in request.get("input", []):
                if item.get("type") == "function_call_output":
                    told[item["call_id"]] = ToolResult(_text(item["output"]), _images(item["output"]))
        return [told[call_id] for call_id in sorted(told, key=_call_order)]

    def respond(self, request: Json) -> list[Json]:
        """The events that answer one request, by the script."""
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            try:
                items = self._items(number)
            except BaseException as error:
                self.failures.append(error)
                raise
        response_id = f"resp_{number}"
        usage = {
            "input_tokens": 1,
            "input_tokens_details": None,
            "output_tokens": 1,
            "output_tokens_details": None,
            "total_tokens": 2,
        }
        return [
            {"type": "response.created", "response": {"id": response_id}},
            *({"type": "response.output_item.done", "item": item} for item in items),
            {"type": "response.completed", "response": {"id": response_id, "usage": usage}},
        ]

    def _items(self, number: int) -> list[Json]:
        if number >= len(self.turns):
            raise AssertionError(f"the harness asked for turn {number} of a script of {len(self.turns)}")
        turn = self.turns[number]
        while callable(turn):
            turn = turn(self)
        if isinstance(turn, str):
            content = [{"type": "output_text", "text": turn}]
            return [{"type": "message", "role": "assistant", "id": f"msg_{number}", "content": content}]
        calls = [turn] if isinstance(turn, Call) else turn
        return [call.item(f"call_{number}_{index}") for index, call in enumerate(calls)]


def _text(output: Any) -> str:
    """A tool output is a text, or a list of content items of which we keep the texts."""
    if isinstance(output, str):
        return output
    return "".join(part.get("text", "") for part in output)


def _images(output: Any) -> tuple[str, ...]:
    if isinstance(output, str):
        return ()
    return tuple(part["image_url"] for part in output if part.get("type") == "input_image")


def _call_order(call_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in call_id.split("_")[1:])


class _Handler(BaseHTTPRequestHandler):
    """One request of the harness."""

    model: ClassVar[Model]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = self.rfile.read(length)
        if not self.path.endswith("/responses"):
            self._answer(404, "application/json", b"{}")
            return
        try:
            events = self.model.respond(json.loads(body))
        except BaseException as error:
            self._answer(500, "text/plain", repr(error).encode())
            return
        stream = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        self._answer(200, "text/event-stream", stream.encode())

    def do_GET(self) -> None:
        """The harness may ask for a list of models; it does without."""
        self._answer(404, "application/json", b"{}")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base class)
        """Silent: what was asked is in `Model.requests`."""
