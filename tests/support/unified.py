"""Unified exec on a machine that follows a script, on a clock of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from exec_server.agent.unified import Settings, UnifiedExec
from exec_server.agent.unified_events import (
    ExecCommandEnd,
    ExecEvent,
)
from support.scripted import ScriptedMachine
from support.virtual_time import run_virtual

__all__ = ["end_of", "names", "scripted"]

Body = Callable[[UnifiedExec, list[ExecEvent]], Awaitable[None]]


def names(events: Sequence[ExecEvent]) -> list[str]:
    return [type(event).__name__.removeprefix("ExecCommand") for event in events]


def end_of(events: Sequence[ExecEvent]) -> ExecCommandEnd:
    (end,) = [event for event in events if isinstance(event, ExecCommandEnd)]
    return end


def scripted(machine: ScriptedMachine, body: Body, **options: Any) -> None:
    """Run a test on a machine that follows a script, in no time."""

    async def main() -> None:
        events: list[ExecEvent] = []
        settings = options.pop("settings", Settings(sequential_ids=True))
        machines: Any = {"m": machine}
        unified = UnifiedExec(machines, "m", emit=events.append, settings=settings, **options)
        await body(unified, events)
        await unified.close()

    run_virtual(main())
