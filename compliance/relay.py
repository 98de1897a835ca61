"""A rendezvous of ours and the ends of others: the programs of a relay, each started as a user starts it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compliance.harness import Codex
from compliance.programs import PATH, Program, wait_until
from compliance.server import command_under_test

__all__ = ["ENVIRONMENT", "RelayCodex", "Rendezvous", "our_environment", "reference_environment"]

ENVIRONMENT = "env-1"


class Rendezvous(Program):
    """Ours, with a key of its own; `url` is where it listens."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "rendezvous"
        command = [command_under_test()[0], "rendezvous"]
        self.key = subprocess.run(
            [*command, "key", "add", "compliance", "--data", str(self.data)],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout.strip()
        super().__init__(
            [*command, "--listen", "http://127.0.0.1:0", "--data", str(self.data), "--log-level", "info"],
            name="rendezvous",
            folder=folder,
            cwd=folder,
            environment={"HOME": str(folder)},
        )
        wait_until(lambda: "\n" in self.stdout or self.exit_code is not None, "the rendezvous's address")
        self.url = self.stdout.splitlines()[0]


class _Environment(Program):
    """An executor, once it can be reached."""

    def __init__(
        self, argv: Sequence[str], rendezvous: Rendezvous, url: str, folder: Path, sign: str, **more: str
    ) -> None:
        home = folder / "environment-home"
        home.mkdir()
        super().__init__(
            [*argv, "--remote", url, "--environment-id", ENVIRONMENT],
            name="environment",
            folder=folder,
            cwd=home,
            environment={
                "HOME": str(home),
                "CODEX_HOME": str(home),
                "CODEX_API_KEY": rendezvous.key,
                "PATH": PATH,
                **more,
            },
        )
        wait_until(
            lambda: sign in self.stderr or self.exit_code is not None, "the environment to be connected"
        )
        assert self.exit_code is None, self.report()


def reference_environment(
    binary: Path, rendezvous: Rendezvous, folder: Path, url: str | None = None
) -> Program:
    """`codex exec-server --remote`."""
    return _Environment(
        [str(binary), "exec-server"],
        rendezvous,
        url or rendezvous.url,
        folder,
        "executor connected to rendezvous",
        RUST_LOG="codex_exec_server=info",
    )


def our_environment(rendezvous: Rendezvous, folder: Path, url: str | None = None) -> Program:
    """`exec-server --remote`."""
    return _Environment(
        command_under_test()[:1], rendezvous, url or rendezvous.url, folder, "is connected; others reach it"
    )


class RelayCodex(Codex):
    """`codex exec` whose commands run in the environment behind a rendezvous."""

    def __init__(self, codex: Codex, url: str, key: str) -> None:
        self.__dict__.update(codex.__dict__)
        self._relay = {
            "CODEX_EXEC_SERVER_NOISE_REGISTRY_URL": url,
            "CODEX_EXEC_SERVER_NOISE_ENVIRONMENT_ID": ENVIRONMENT,
            "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN": key,
        }

    def _start(self, where: dict[str, Any], words: Sequence[str]) -> Program:
        return super()._start({**where, **self._relay}, words)
