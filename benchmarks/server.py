"""A server under measurement: how it is started, spoken to and stopped, and what it weighs."""

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from .client import WrongAnswer
from .client_stdio import StdioClient
from .client_websocket import WebSocketClient

__all__ = ["Command", "WebSocketServer", "kilobytes", "stop_process"]


class Command:
    """A command that serves, and where its complaints go."""

    def __init__(self, name: str, argv: Sequence[str], home: str) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the run
        # The reference reads its configuration here; nobody's own settings belong in a benchmark.
        self.environment = {**os.environ, "CODEX_HOME": home}

    def __str__(self) -> str:
        return shlex.join(self.argv)

    def version(self) -> str:
        """What it says of itself."""
        for asked in ([*self.argv, "--version"], [self.argv[0], "--version"]):
            done = subprocess.run(
                asked, capture_output=True, text=True, check=False, env=self.environment, timeout=30
            )
            if done.returncode == 0 and done.stdout:
                return done.stdout.strip()
        return "unknown"

    def complaints(self) -> str:
        """The end of what it wrote to stderr so far."""
        self.log.seek(0)
        return self.log.read()[-2000:].decode(errors="replace")

    @contextlib.contextmanager
    def over_stdio(self) -> Iterator[StdioClient]:
        """A server of its own behind a connection of its own, handshake done."""
        with StdioClient(self.argv, self.log, self.environment) as client:
            client.handshake()
            yield client


class WebSocketServer:
    """A listening server; stopped at the end of the `with` block."""

    def __init__(self, command: Command) -> None:
        self.process = subprocess.Popen(
            [*command.argv, "--listen", "ws://127.0.0.1:0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=command.log,
            env=command.environment,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        try:
            self.url = self.process.stdout.readline().decode().strip()
        except BaseException:  # a deadline, an interrupt: nobody else knows of this process yet
            self.stop()
            raise
        if not self.url.startswith("ws://"):
            self.stop()
            raise WrongAnswer(f"{command} printed {self.url!r} instead of its URL")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for one that does not listen."""
        stop_process(self.process)

    @contextlib.contextmanager
    def connect(self, **initialize: object) -> Iterator[WebSocketClient]:
        """A connection, handshake done; `initialize` are extra params for it."""
        with WebSocketClient(self.url) as client:
            client.handshake(**initialize)
            yield client

    def peak_memory(self) -> int:
        """The most bytes the server process has had resident so far."""
        return kilobytes(f"/proc/{self.process.pid}/status", "VmHWM:")

    def helpers_memory(self) -> int:
        """Bytes of the server's helper processes now, pages shared with others counted in part."""
        return sum(kilobytes(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in self.helpers())

    def helpers(self) -> list[int]:
        """Processes that belong to the server: its descendants, and whoever is in its session.

        Ask when none of the commands it was given is running: those are its descendants too.
        """
        parents: dict[int, int] = {}
        sessions: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
                parents[int(entry.name)], sessions[int(entry.name)] = int(fields[1]), int(fields[3])
        own = self.process.pid
        found = {pid for pid, session in sessions.items() if session == own} | {own}
        while grown := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= grown
        return sorted(found - {own})


def stop_process(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, and SIGKILL for one that does not listen."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def kilobytes(path: str, field: str) -> int:
    """A field of one of the kernel's files about a process, in bytes."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise WrongAnswer(f"no {field} in {path}")
