"""The server under test, as a user starts it: a command that prints its address."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from compliance.programs import Program, wait_until

__all__ = ["Server", "command_under_test"]

UNDER_TEST = "EXEC_SERVER_UNDER_TEST"
"""Environment variable: the command to test instead of ours, without `--listen`. With
`<codex> exec-server` in it the reference is tested against itself, which is how these tests are tested."""

START_DEADLINE = 15.0
"""Seconds until the server must have printed its address."""


def command_under_test() -> list[str]:
    """The command that starts the server, without `--listen`."""
    chosen = os.environ.get(UNDER_TEST)
    return shlex.split(chosen) if chosen else [str(Path(sys.executable).parent / "exec-server")]


class Server(Program):
    """A running server that listens on a free loopback port; `url` is what it said it is."""

    def __init__(self, command: list[str], folder: Path) -> None:
        home = folder / "server-home"
        home.mkdir()
        super().__init__(
            [*command, "--listen", "ws://127.0.0.1:0"],
            name="server",
            folder=folder,
            cwd=home,
            environment={"HOME": str(home), "CODEX_HOME": str(home)},
        )
        try:
            wait_until(self._has_spoken, "the server's address", START_DEADLINE)
            self.url = self.stdout.splitlines()[0].strip() if "\n" in self.stdout else ""
            if not self.url.startswith("ws://127.0.0.1:"):
                raise AssertionError(f"no address in the server's first line\n{self.report()}")
        except BaseException:
            self.stop()
            raise

    def _has_spoken(self) -> bool:
        return "\n" in self.stdout or self.exit_code is not None
