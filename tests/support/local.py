"""Processes of this machine without a server around them, for the tests of local/process/."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from exec_server.limits import Limits
from exec_server.local.process.machine import ProcessMachine
from exec_server.local.process.process import ManagedProcess
from exec_server.local.process.spawn import SpawnSpec
from exec_server.local.process.table import ProcessTable
from support.wait import eventually_async

__all__ = ["Ear", "machine", "spec"]

PATH = "/usr/local/bin:/usr/bin:/bin"


def spec(*argv: str, **more: Any) -> SpawnSpec:
    settings = {"cwd": "/tmp", "env": {"PATH": PATH}, "tty": False, "pipe_stdin": False, **more}
    return SpawnSpec(argv=list(argv), **settings)


class Ear:
    """Listens to processes and remembers what they said."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, Any]] = []
        self.output: dict[str, bytes] = {}

    def process_started(self, process: ManagedProcess) -> None:
        self.heard.append((process.id, "started", process.pid))

    def process_output(self, process: ManagedProcess, seq: int, stream: str, data: bytes) -> None:
        self.heard.append((process.id, "output", seq))
        self.output[process.id] = self.output.get(process.id, b"") + data

    def process_exited(self, process: ManagedProcess, seq: int) -> None:
        self.heard.append((process.id, "exited", seq))

    def process_closed(self, process: ManagedProcess, seq: int) -> None:
        self.heard.append((process.id, "closed", seq))

    def words(self, process_id: str) -> list[str]:
        return [word for name, word, _ in self.heard if name == process_id]


@asynccontextmanager
async def machine(**limits: Any) -> AsyncIterator[tuple[ProcessTable, Ear, ProcessMachine]]:
    """A table of processes; everything is killed in the end."""
    made = ProcessMachine(asyncio.get_running_loop(), Limits(**limits))
    table = ProcessTable(made)
    try:
        yield table, Ear(), made
    finally:
        everybody = list(table)
        table.kill_all()
        await eventually_async(lambda: not any(process.live for process in everybody), "the end of all")
        made.close()
