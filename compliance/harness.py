"""`codex exec`, the reference's own client, run once with a scripted model and a server of our choice.

It is kept to itself: a private home, no configuration of the person who runs the tests, and no way out of
this machine (what it would fetch at start-up is switched off, and its web proxy is a closed port).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compliance.model import Model, ToolResult, Turn
from compliance.programs import Program

__all__ = ["Codex", "Run"]

Json = dict[str, Any]
"""A JSON object."""

RUN_DEADLINE = 45.0
"""Seconds one run may take. The longest script here needs about ten; below pytest's own limit of 60, which
would kill the test without a report."""

CLOSED_PORT = "http://127.0.0.1:9"
"""A proxy that answers nobody: a request that would leave the machine fails at once."""

CONFIG = """\
model = "scripted"
model_provider = "scripted"
approval_policy = "never"
check_for_update_on_startup = false

[model_providers.scripted]
name = "scripted"
base_url = "{base_url}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
supports_websockets = false

[analytics]
enabled = false

[features]
plugins = false
apps = false
"""
"""config.toml of the private home. Without the last two tables it contacts three hosts at start-up."""


@dataclass(frozen=True)
class Run:
    """What one run of `codex exec` left behind."""

    exit_code: int
    events: list[Json]
    """The `--json` stream, one object per line."""
    results: list[ToolResult]
    """What the model was told about each of its calls, in the order of the script."""
    left_running: list[int]
    """Processes of its own that did not go after it exited, for example a stdio server or its commands."""
    stderr: str
    requests: list[Json]
    """Bodies of all that was asked of the model: instructions, and what the harness found out by itself."""

    @property
    def thread_id(self) -> str:
        """The id of the conversation."""
        return str(next(event["thread_id"] for event in self.events if event["type"] == "thread.started"))

    @property
    def output(self) -> str:
        """What the model saw of all commands together; of one command, however many calls it took."""
        return "".join(result.output for result in self.results)

    def items(self, kind: str) -> list[Json]:
        """The completed items of that kind, for example `command_execution`."""
        items = [event["item"] for event in self.events if event["type"] == "item.completed"]
        return [item for item in items if item["type"] == kind]


class Codex:
    """The reference client with its private home; `run` it with a script."""

    def __init__(self, binary: Path, folder: Path, workspace: Path) -> None:
        self.binary = binary
        self.home = folder / "codex-home"
        self.home.mkdir()
        self.sandbox = "danger-full-access"
        """The policy of its commands: this one, `read-only` or `workspace-write`."""
        self._folder = folder
        self._workspace = workspace

    def run(
        self,
        turns: Sequence[Turn],
        *,
        url: str | None = None,
        environments: str | None = None,
        prompt: str = "play the script",
        subcommand: Sequence[str] = (),
    ) -> Run:
        """Let the model play `turns` against the server at `url`, or those in an environments.toml.

        With `subcommand` (`resume ID`, `fork ID`) it is a turn of a thread that there is already.
        Fails unless the whole script was played, the run ended in time and the turn was completed.
        """
        where = {"CODEX_EXEC_SERVER_URL": url} if url else {}
        if environments is not None:
            (self.home / "environments.toml").write_text(environments)
        with Model(turns) as model:
            (self.home / "config.toml").write_text(CONFIG.format(base_url=model.base_url))
            program = self._start(where, [*subcommand, prompt])
            try:
                exit_code = program.wait(RUN_DEADLINE)
                left_running = program.outlived_by()
            finally:
                program.stop()
                if model.failures:
                    raise model.failures[0]
        events = [json.loads(line) for line in program.stdout.splitlines()]
        if exit_code != 0 or len(model.requests) != len(turns) or events[-1]["type"] != "turn.completed":
            played = f"{len(model.requests)} of {len(turns)} turns, exit code {exit_code}"
            raise AssertionError(
                f"codex exec did not play the script to its end: {played}\n{program.report()}"
            )
        return Run(exit_code, events, model.results, left_running, program.stderr, model.requests)

    def _start(self, where: Json, words: Sequence[str]) -> Program:
        options = ["--json", "--skip-git-repo-check", "-s", self.sandbox, "-C", str(self._workspace)]
        return Program(
            [str(self.binary), "exec", *options, *words],
            name="codex",
            folder=self._folder,
            cwd=self._workspace,
            environment={
                "HOME": str(self.home),
                "CODEX_HOME": str(self.home),
                "HTTP_PROXY": CLOSED_PORT,
                "HTTPS_PROXY": CLOSED_PORT,
                "ALL_PROXY": CLOSED_PORT,
                "NO_PROXY": "127.0.0.1",
                **where,
            },
        )
