"""A machine whose processes do what a script says, at the times it says: for tests of waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from exec_server.services import Closed, EnvironmentFacts, Event, Exited, Failed, Output, ReadOutput, Shell

__all__ = ["ScriptedMachine", "ScriptedProcess", "exits", "prints"]

Step = tuple[float, Event | bytes | int]
"""Seconds after the start, and what happens then: output, an exit code, or any event."""


def prints(at: float, text: str) -> Step:
    return at, text.encode()


def exits(at: float, code: int = 0, closed: bool = True) -> list[Step]:
    """The exit and, unless something holds the output open, its end."""
    return [(at, code), (at, Closed(0))] if closed else [(at, code)]


class ScriptedProcess:
    """`services.Process`, as far as unified exec uses it."""

    def __init__(self, process_id: str, steps: Sequence[Step]) -> None:
        self.id = process_id
        self.written: list[bytes] = []
        self.signals: list[str] = []
        self.terminated = 0
        self.write_error: Exception | None = None
        self.signal_error: Exception | None = None
        self.denied_on_read = False
        self.dies_after: float | None = 0.0
        """Seconds it takes to go when it is killed; None for one that never does."""
        self._seq = 0
        self._queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for index, (at, what) in enumerate(steps):
            loop.call_later(at + index * 1e-9, self.happen, what)  # timers of one moment have no order

    def happen(self, what: Event | bytes | int | Exception) -> None:
        self._seq += 1
        if isinstance(what, bytes):
            what = Output(self._seq, "stdout", what)
        elif isinstance(what, int):
            what = Exited(self._seq, what, False)
        self._queue.put_nowait(what)

    async def events(self) -> AsyncIterator[Event]:
        while True:
            event = await self._queue.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, Closed | Failed):
                return

    async def read(self, after_seq: int | None = None, **options: Any) -> ReadOutput:
        return ReadOutput([], 1, True, 1, True, None, self.denied_on_read)

    async def write(self, data: bytes) -> None:
        if self.write_error is not None:
            raise self.write_error
        self.written.append(data)

    async def signal(self, name: str) -> None:
        if self.signal_error is not None:
            raise self.signal_error
        self.signals.append(name)

    async def terminate(self, grace: float | None = None) -> int | None:
        self.terminated += 1
        if self.dies_after is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(self.dies_after, self.happen, 137)
            loop.call_later(self.dies_after + 1e-9, self.happen, Closed(0))
        return 1


class ScriptedMachine:
    """`services.Environment`, as far as unified exec uses it. The next start plays the next script."""

    def __init__(self, *scripts: Sequence[Step], remote: bool = False, shell: Shell | None = None) -> None:
        self.is_remote = remote
        self.info = EnvironmentFacts(shell=shell or Shell("bash", "/bin/bash"), cwd="file:///project")
        self.scripts = list(scripts)
        self.started: list[ScriptedProcess] = []
        self.options: list[dict[str, Any]] = []
        self.start_error: Exception | None = None

    @property
    def processes(self) -> ScriptedMachine:
        return self

    async def start(self, argv: Sequence[str], *, process_id: str, **options: Any) -> ScriptedProcess:
        if self.start_error is not None:
            raise self.start_error
        self.options.append({"argv": list(argv), "process_id": process_id, **options})
        process = ScriptedProcess(process_id, self.scripts.pop(0) if self.scripts else [])
        self.started.append(process)
        return process
