"""Programs under observation: started apart from us, bounded in time, and gone afterwards to the last child.

A program that starts others may let them slip out of its process group, and whether it does is part of
what is tested here. So everything started carries a mark in its environment, which children inherit, and
the mark finds them wherever they went.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["Program", "is_running", "wait_until"]

MARK = "EXEC_SERVER_COMPLIANCE_MARK"
"""The environment variable whose value tells one program's offspring from all other processes."""

CONDITION_DEADLINE = 20.0
"""Seconds `wait_until` gives a condition. Less than a whole run may take, so that of the two errors a
failing test shows the clearer one."""

STOP_DEADLINE = 5.0
"""Seconds a program has to end after SIGTERM, and its offspring after SIGKILL."""

POLL_INTERVAL = 0.01
"""Seconds between two looks at a condition that has no event of its own, such as a file appearing."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs find commands: the same for everybody who runs these tests."""


def wait_until(condition: Callable[[], bool], what: str, deadline: float = CONDITION_DEADLINE) -> None:
    """Return once `condition()` holds; raise TimeoutError naming `what` if it does not in time."""
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"after {deadline:g} s still waiting for: {what}")
        time.sleep(POLL_INTERVAL)


def is_running(pid: int) -> bool:
    """Whether the process runs; a dead one that nobody has reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Program:
    """A started program. Its output goes to files in `folder`: no pipe can fill up or be held open."""

    def __init__(
        self, argv: Sequence[str], *, name: str, folder: Path, cwd: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._mark = uuid.uuid4().hex
        self._stdout = folder / f"{name}.stdout"
        self._stderr = folder / f"{name}.stderr"
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                argv,
                cwd=cwd,
                env={"PATH": PATH, "LANG": "C.UTF-8", **environment, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        """What it printed so far."""
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it complained about so far."""
        return self._stderr.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self, deadline: float) -> int:
        """Its exit code; TimeoutError with what it said when it does not end in time."""
        try:
            return self._process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} still ran after {deadline:g} s\n{self.report()}") from None

    def report(self) -> str:
        """The end of everything it said, to show in a failure."""
        return f"{self.name} stdout: {self.stdout[-4000:]}\n{self.name} stderr: {self.stderr[-4000:]}"

    def offspring(self) -> list[int]:
        """The running processes it started, directly or not, wherever they moved to."""
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self._process.pid:
                continue
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0") and is_running(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def outlived_by(self) -> list[int]:
        """Of an ended program: the offspring that does not follow it within the time it takes to notice."""
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self.offspring(), f"the offspring of {self.name} to go", STOP_DEADLINE)
        return self.offspring()

    def stop(self) -> None:
        """End it and all it started: politely first, then not."""
        if self.exit_code is None:
            self._signal_group(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_DEADLINE)
        self._signal_group(signal.SIGKILL)
        self._process.wait(STOP_DEADLINE)
        wait_until(self._no_offspring_left, f"the offspring of {self.name} to be gone", STOP_DEADLINE)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _no_offspring_left(self) -> bool:
        # A process may fork between our look and our kill, hence looking again until none is left.
        for pid in (left := self.offspring()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left
