"""Many requests in one breath, to a server in this process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from exec_server.limits import Limits
from exec_server.server.server import Server
from exec_server.transport.memory import pair
from support.rpc import unb64
from support.wait import eventually_async

__all__ = ["InMemory", "pipelined", "process", "starting"]

MIB = 1024 * 1024


def process(process_id: str, **more: Any) -> dict[str, Any]:
    return {"processId": process_id, **more}


class InMemory:
    """A connection to a server in this process, on which everything is sent in one breath."""

    def __init__(self, server: Server) -> None:
        self.channel, theirs = pair(MIB)
        self.received: list[dict[str, Any]] = []
        theirs.attach(server.accept(theirs))
        self.channel.attach(self)

    def message_received(self, message: bytes) -> None:
        self.received.append(json.loads(message))

    binary_received = message_received

    def writing_paused(self) -> None: ...
    def writing_resumed(self) -> None: ...
    def channel_closed(self, reason: str) -> None: ...

    async def pipeline(self, requests: list[tuple[str, dict[str, Any]]]) -> list[str]:
        """What each request came to, in a form in which two runs can be compared."""
        self.channel.send(b'{"id":"i","method":"initialize","params":{"clientName":"x"}}')
        self.channel.send(b'{"method":"initialized"}')
        for number, (method, params) in enumerate(requests):
            self.channel.send(json.dumps({"id": number, "method": method, "params": params}).encode())
        answers: dict[int, dict[str, Any]] = {}

        def answered() -> bool:
            answers.update({message["id"]: message for message in self.received if "id" in message})
            return all(number in answers for number in range(len(requests)))

        await eventually_async(answered, "every answer")
        outcomes = []
        for number, (method, _) in enumerate(requests):
            answer = answers[number]
            outcome = answer["result"].get("status") if "result" in answer else answer["error"]["message"]
            outcomes.append(f"{method}: {outcome}")
        return outcomes

    async def output(self, process_id: str) -> bytes:
        """All that a process said, once it has closed."""

        def about(method: str) -> list[dict[str, Any]]:
            told = [message["params"] for message in self.received if message.get("method") == method]
            return [params for params in told if params["processId"] == process_id]

        await eventually_async(lambda: about("process/closed"), "the end of it")
        return b"".join(unb64(params["chunk"]) for params in about("process/output"))


def starting(process_id: str, program: str) -> tuple[str, dict[str, Any]]:
    more = {"argv": [program], "cwd": "file:///", "env": {"PATH": "/usr/bin:/bin"}, "tty": False}
    return "process/start", process(process_id, pipeStdin=True, **more)


async def pipelined(requests: list[tuple[str, dict[str, Any]]], waiting: int) -> list[Any]:
    server = Server(asyncio.get_running_loop(), Limits(waiting_requests=waiting))
    try:
        client = InMemory(server)
        outcomes: list[Any] = list(await client.pipeline(requests))
        for process_id in "pq":
            own = zip(requests, outcomes[: len(requests)], strict=True)
            if any(r[1]["processId"] == process_id and o == "process/start: None" for r, o in own):
                outcomes.append(await client.output(process_id))
        return outcomes
    finally:
        server.close()
