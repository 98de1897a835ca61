"""An agent in this process, on a real machine, with a model that plays a script."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from exec_server.agent.mcp_client import McpServer, McpServers
from exec_server.agent.model import ModelSettings
from exec_server.agent.runner import Outcome, Runner, RunnerSettings
from exec_server.agent.thread import Thread, Threads
from exec_server.environments.config import LOCAL_ID, Configuration
from exec_server.environments.connect import IN_PROCESS, connect
from exec_server.environments.environment import Environment
from exec_server.environments.manager import EnvironmentManager
from exec_server.events.check import check
from exec_server.events.lines import split_lines
from exec_server.events.reader import parse_line
from exec_server.events.writer import EventWriter
from support.model_server import ModelServer, Play

__all__ = ["Played", "play", "played"]

During = Callable[[Runner, EnvironmentManager], Awaitable[None]]


class Played:
    """What came of it."""

    def __init__(self, stream: bytes, model: ModelServer, outcome: Outcome, home: Path) -> None:
        self.stream = stream
        self.model = model
        self.outcome = outcome
        self.home = home
        self.events: list[dict[str, Any]] = [json.loads(line) for line in stream.split(b"\n") if line]

    @property
    def kinds(self) -> list[str]:
        """The events in short: `turn.started`, `command_execution started`, `error`."""
        return [
            f"{event['item']['type']} {event['type'].removeprefix('item.')}"
            if "item" in event
            else event["type"]
            for event in self.events
        ]

    def items(self, kind: str) -> list[dict[str, Any]]:
        """The completed items of that kind."""
        items = [event["item"] for event in self.events if event["type"] == "item.completed"]
        return [item for item in items if item["type"] == kind]

    def output(self, call_id: str = "call_1") -> Any:
        """What the model was told about a call."""
        return self.model.outputs()[call_id]

    @property
    def thread_id(self) -> str:
        return str(self.events[0]["thread_id"])


class _Counting(io.BytesIO):
    """A stream that says how many lines it has, whenever it gets another."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = 0
        self.notify: Callable[[int], None] = lambda _: None

    def write(self, line: Any) -> int:
        written = super().write(line)
        self.lines += 1
        self.notify(self.lines)
        return written


async def played(
    model: ModelServer,
    folder: Path,
    *,
    prompt: str = "go",
    thread: Callable[[Threads], Thread] | None = None,
    configuration: Configuration | None = None,
    servers: Sequence[McpServer] = (),
    manage: Callable[[EnvironmentManager], None] | None = None,
    during: During | None = None,
    on_event: Callable[[Runner, int], None] | None = None,
    ask: Any = None,
    model_settings: dict[str, Any] | None = None,
    ext: bool = False,
    agents: bool = False,
    live_output: bool = False,
    **settings: Any,
) -> Played:
    """One turn, with everything that belongs to it, checked against what the stream promises."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    cwd = folder / "work"
    cwd.mkdir(exist_ok=True)

    async def here() -> Environment:
        return await connect(IN_PROCESS)

    chosen: dict[str, Any] = {
        "environment_ids": (LOCAL_ID,),
        "cwd": str(cwd),
        "mode": "danger-full-access",
        **settings,
    }
    patience = {
        "retry_seconds": 0.001,
        "network_wait_seconds": 0.001,
        "api_key": "k",
        **(model_settings or {}),
    }
    file = _Counting()
    threads = Threads(str(home))
    async with (
        EnvironmentManager(configuration, local=lambda: here) as manager,
        McpServers(list(servers)) as started,
    ):
        if manage is not None:
            manage(manager)
        with thread(threads) if thread is not None else threads.start(str(cwd)) as opened:
            runner = Runner(
                manager,
                opened,
                EventWriter(file, ext=ext, live_output=live_output),
                RunnerSettings(
                    model=ModelSettings(**{"model": "scripted", "base_url": model.url, **patience}), **chosen
                ),
                servers=started,
                ask=ask,
                threads=threads if agents else None,
            )
            if on_event is not None:
                file.notify = partial(on_event, runner)
            try:
                runner.start()
                meanwhile = asyncio.ensure_future(during(runner, manager)) if during is not None else None
                outcome = await runner.run(prompt)
                if meanwhile is not None:
                    await meanwhile
            finally:
                await runner.close()
    stream = file.getvalue()
    violations = [str(one) for one in check(map(parse_line, split_lines([stream])), ours=True)]
    assert violations == [], stream.decode()
    return Played(stream, model, outcome, home)


def play(folder: Path, *script: Play, **options: Any) -> Played:
    """The same for a script."""
    with ModelServer(*script) as model:
        return asyncio.run(played(model, folder, **options))
