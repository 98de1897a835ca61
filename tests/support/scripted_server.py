"""A server that says what no real one can be made to say, in the order a test wants."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from exec_server.transport.channel import Channel, Receiver
from exec_server.transport.memory import MemoryChannel, pair

__all__ = ["ScriptedServer"]

Answer = Callable[["ScriptedServer", dict[str, Any]], Any]
"""What a method is answered with, from its params. An exception is answered as an error, None not at all."""


class ScriptedServer:
    """Answers by a table; everything it was sent is kept."""

    def __init__(self, answers: dict[str, Answer], *, resumable: bool = True) -> None:
        self._answers = answers
        self._resumable = resumable
        self._channel: MemoryChannel | None = None
        self.received: list[dict[str, Any]] = []

    async def dial(self, receiver: Receiver) -> Channel:
        ours, theirs = pair(1 << 20)
        ours.resumable = self._resumable  # type: ignore[misc]
        self._channel = theirs
        theirs.attach(self)
        ours.attach(receiver)
        return ours

    def send(self, message: dict[str, Any]) -> None:
        assert self._channel is not None
        self._channel.send(json.dumps(message).encode())

    def notify(self, method: str, **params: Any) -> None:
        self.send({"method": method, "params": params})

    def hang_up(self) -> None:
        assert self._channel is not None
        self._channel.close()

    def sent(self, method: str) -> list[dict[str, Any]]:
        """The params of every request of that method."""
        return [message["params"] for message in self.received if message.get("method") == method]

    # From the channel
    def message_received(self, message: bytes) -> None:
        parsed = json.loads(message)
        self.received.append(parsed)
        answer = self._answers.get(parsed.get("method", ""))
        if "id" not in parsed or answer is None:
            return
        result = answer(self, parsed.get("params") or {})
        if result is not None:
            self.send({"id": parsed["id"], "result": result})

    binary_received = message_received

    def writing_paused(self) -> None:
        """Little is said here."""

    def writing_resumed(self) -> None:
        """See above."""

    def channel_closed(self, reason: str) -> None:
        del reason
