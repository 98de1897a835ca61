"""A client that takes nothing for granted: raw messages, kept in the order they came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from ..client.launch import ExecServerLaunchCommand, Launched, launch
from ..limits import Limits
from ..transport.channel import Channel
from ..wire import base64

__all__ = ["Ended", "Peer", "ServerUnderTest"]

ANSWER_SECONDS = 10.0
"""How long a server may take for anything a check asks."""


class Ended(AssertionError):
    """The server ended the connection."""


class Peer:
    """One connection to the server under test."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._answers: dict[Any, dict[str, Any]] = {}
        self._notifications: list[dict[str, Any]] = []
        self._closed = False
        self._changed = asyncio.Event()
        self._next_id = 1000
        self.order: list[Any] = []
        """Ids of answers, in order of arrival."""

    def use(self, channel: Channel) -> None:
        self._channel = channel

    # From the channel
    def message_received(self, message: bytes) -> None:
        parsed = json.loads(message)
        if "method" in parsed:
            self._notifications.append(parsed)
        else:
            self._answers[parsed.get("id")] = parsed
            self.order.append(parsed.get("id"))
        self._changed.set()

    binary_received = message_received

    def writing_paused(self) -> None:
        """Checks send little."""

    def writing_resumed(self) -> None:
        """See above."""

    def channel_closed(self, reason: str) -> None:
        del reason
        self._closed = True
        self._changed.set()

    # For the checks
    def send_text(self, text: str) -> None:
        """Anything at all."""
        assert self._channel is not None
        self._channel.send(text.encode())

    def send(self, message: dict[str, Any]) -> None:
        self.send_text(json.dumps(message, separators=(",", ":")))

    def ask(self, method: str, params: Any = None) -> int:
        """Send a request without waiting; its id."""
        self._next_id += 1
        self.send({"id": self._next_id, "method": method, "params": params})
        return self._next_id

    async def answer(self, request_id: Any) -> dict[str, Any]:
        """The whole answer to a request."""
        await self._until(lambda: request_id in self._answers)
        return self._answers.pop(request_id)

    async def call(self, method: str, params: Any = None) -> Any:
        """The result of a request; an error fails the check."""
        answer = await self.answer(self.ask(method, params))
        assert "result" in answer, f"`{method}` was answered with {answer}"
        return answer["result"]

    async def error(self, method: str, params: Any = None) -> dict[str, Any]:
        """The error of a request; a result fails the check."""
        answer = await self.answer(self.ask(method, params))
        assert "error" in answer, f"`{method}` should have failed, but was answered with {answer}"
        error: dict[str, Any] = answer["error"]
        return error

    async def initialize(self, **params: Any) -> dict[str, Any]:
        """The whole handshake."""
        result: dict[str, Any] = await self.call("initialize", {"clientName": "conformance", **params})
        self.send({"method": "initialized", "params": {}})
        return result

    async def start(self, process_id: str, *argv: str, **fields: Any) -> Any:
        """Start a process with what every start needs."""
        return await self.call("process/start", start_params(process_id, *argv, **fields))

    async def events(self, process_id: str) -> list[dict[str, Any]]:
        """All notifications of a process up to its close, in order of their numbers."""

        def of_process() -> list[dict[str, Any]]:
            return [
                message for message in self._notifications if message["params"].get("processId") == process_id
            ]

        await self._until(lambda: any(message["method"] == "process/closed" for message in of_process()))
        numbered = [message for message in of_process() if "seq" in message["params"]]
        return sorted(numbered, key=lambda message: int(message["params"]["seq"]))

    async def finish(self, process_id: str) -> tuple[dict[str, bytes], int]:
        """Output per stream and exit code of a process, its numbers checked on the way."""
        events = await self.events(process_id)
        numbers = [event["params"]["seq"] for event in events]
        assert numbers == list(range(1, len(numbers) + 1)), f"numbers with gaps or repeats: {numbers}"
        assert events[-1]["method"] == "process/closed", "the close must have the last number"
        exits = [event["params"] for event in events if event["method"] == "process/exited"]
        assert len(exits) == 1, f"one exit expected, got {exits}"
        output: dict[str, bytes] = {}
        for event in events:
            if event["method"] == "process/output":
                params = event["params"]
                data = base64.decode(params["chunk"])
                assert data, "a chunk is never empty"
                output[params["stream"]] = output.get(params["stream"], b"") + data
        return output, exits[0]["exitCode"]

    async def output_until(self, process_id: str, needle: bytes) -> bytes:
        """Wait until a process has written something."""

        def written() -> bytes:
            chunks = [
                message["params"]
                for message in self._notifications
                if message["method"] == "process/output" and message["params"]["processId"] == process_id
            ]
            return b"".join(
                base64.decode(chunk["chunk"]) for chunk in sorted(chunks, key=lambda chunk: int(chunk["seq"]))
            )

        await self._until(lambda: needle in written())
        return written()

    def notifications(self, method: str) -> list[dict[str, Any]]:
        """Everything that came under that name."""
        return [message for message in self._notifications if message["method"] == method]

    async def closed(self) -> None:
        """Wait until the server has ended the connection."""
        async with asyncio.timeout(ANSWER_SECONDS):
            while not self._closed:
                self._changed.clear()
                await self._changed.wait()

    def hang_up(self) -> None:
        if self._channel is not None:
            self._channel.abort()

    async def _until(self, condition: Any) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while not condition():
                    if self._closed:
                        raise Ended("the server ended the connection")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"no answer within {ANSWER_SECONDS:g}s") from None


class ServerUnderTest:
    """Where the server is, and how to get connections to it."""

    def __init__(self, target: str | Sequence[str], token: str | None, options: Sequence[str] = ()) -> None:
        self._url = target if isinstance(target, str) else None
        self._command = None if isinstance(target, str) else [*target, *options]
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._open: list[tuple[Peer, Launched | None]] = []

    @property
    def resumable(self) -> bool:
        """Whether a second connection reaches the same server."""
        return self._url is not None

    async def connect(self) -> Peer:
        peer = Peer()
        launched: Launched | None = None
        channel: Channel
        if self._command is not None:
            program, *args = self._command
            launched = launch(ExecServerLaunchCommand(program=program, args=args))
            channel = await launched.dial(peer)
        else:
            channel = await self._dial(peer)
        peer.use(channel)
        self._open.append((peer, launched))
        return peer

    async def close(self) -> None:
        """End every connection, and every server started for one."""
        opened, self._open = self._open, []
        for peer, launched in opened:
            peer.hang_up()
            if launched is not None:
                await launched.stop()

    async def _dial(self, peer: Peer) -> Channel:
        assert self._url is not None
        limits = Limits()
        if self._url.startswith("unix://"):
            from ..transport import unix

            path = self._url.removeprefix("unix://")
            return await unix.connect(path, peer, limits, headers=self._headers, timeout=ANSWER_SECONDS)
        if self._url.startswith("relay+"):
            from ..relay.harness import dialer

            token = self._headers.get("Authorization", "").removeprefix("Bearer ")
            return await dialer(self._url, token=token)(peer)
        from ..transport import websocket

        return await websocket.connect(self._url, peer, limits, headers=self._headers, timeout=ANSWER_SECONDS)


def start_params(process_id: str, *argv: str, **fields: Any) -> dict[str, Any]:
    """Params of `process/start` with what every start needs."""
    return {
        "processId": process_id,
        "argv": list(argv),
        "cwd": "file:///",
        "env": {"PATH": "/usr/local/bin:/usr/bin:/bin"},
        "tty": False,
        **fields,
    }
