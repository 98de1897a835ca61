"""Ways out of a sandbox in the moment in which it ends: what covered a name must outlive everybody inside.

A name that must not be made is covered by a mount, and the mount is gone as soon as what it was mounted
on is removed. Whoever is still inside then could make the name for real.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from exec_server.limits import Limits
from exec_server.local.files.lane import Abandoned, Turn
from exec_server.local.process.machine import ProcessMachine
from exec_server.local.sandbox.files import SandboxedFiles
from exec_server.testing import ManualLoop
from exec_server.wire.files import GlobParams
from support.profiles import context, path, special
from support.rpc import WebSocketPeer
from support.sandbox import start_in, workspace_write

pytestmark = pytest.mark.usefixtures("needs_bubblewrap")

ROUNDS = 5
"""Every round is a chance for one of the runners; before this was closed, most rounds were lost."""

RUNNERS = """
import os, sys, time
for _ in range(12):
    if os.fork() == 0:
        os.setsid()
        while True:
            for name in (".git", ".codex", ".agents"):
                try:
                    os.mkdir(name)
                    os.mkdir(name + "/hooks")
                except OSError:
                    pass
print("up", flush=True)
if sys.argv[1] == "leave":
    os._exit(0)
time.sleep(1000)
"""
"""They run on while the command itself ends, or is killed."""


@pytest.mark.parametrize("end", ["leave", "terminate", "keeper"])
def test_runners_in_the_background_make_nothing(ws: WebSocketPeer, tmp_path: Path, end: str) -> None:
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        others = keepers(ws.server_pid)
        command = (sys.executable, "-I", "-S", "-c", RUNNERS, end)
        running = start_in(ws, workspace_write(folder), *command, cwd=folder.as_uri())
        if end != "leave":
            ws.saw(running, b"up")
        if end == "terminate":
            ws.terminate(running)
        elif end == "keeper":
            (keeper,) = keepers(ws.server_pid) - others
            os.kill(keeper, signal.SIGKILL)
        assert ws.finished(running).exit_code is not None
        assert os.listdir(folder) == []


def who_sees(covered: Path) -> list[int]:
    """Processes in whose view something is mounted there."""
    found: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b" %b " % os.fsencode(covered) in Path(f"/proc/{name}/mountinfo").read_bytes():
                found.append(int(name))
        except OSError:
            pass  # it has ended
    return found


def test_a_sandbox_whose_keeper_is_killed_while_it_is_made_never_begins(
    ws: WebSocketPeer, tmp_path: Path
) -> None:
    """bubblewrap itself would go on without its keeper."""
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        others = keepers(ws.server_pid)
        running = start_in(
            ws, workspace_write(folder), "sh", "-c", "sleep 60; mkdir .git", cwd=folder.as_uri()
        )
        (keeper,) = keepers(ws.server_pid) - others
        os.kill(keeper, signal.SIGKILL)
        ws.finished(running)
        assert who_sees(folder / ".git") == []
        assert os.listdir(folder) == []


def keepers(server: int) -> set[int]:
    """Processes outside of the sandboxes that a server has started."""
    found: set[int] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = Path(f"/proc/{name}/stat").read_text()
        except OSError:
            continue  # it has ended
        if "(bwrap)" in status and int(status.rpartition(")")[2].split()[1]) == server:
            found.add(int(name))
    return found


class Stopping(Turn):
    """Stops whoever does a call, as soon as it has its covers; from then on nobody waits any more."""

    def __init__(self, covered: Path) -> None:
        self._covered = covered
        self._done = threading.Event()
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.is_set():
            for pid in who_sees(self._covered):
                os.kill(pid, signal.SIGSTOP)
                self.stopped.set()
                return

    def check(self) -> None:
        if self.stopped.is_set():
            raise Abandoned

    def end(self) -> None:
        self._done.set()
        self._thread.join()


def test_a_call_that_was_given_up_is_gone_before_its_covers(tmp_path: Path) -> None:
    """Who kills a helper in the middle of a call sees to it that nobody is left of it."""
    machine = ProcessMachine(ManualLoop(), Limits())
    files = SandboxedFiles(machine, Limits())
    root = Path(os.path.realpath(tmp_path))
    box = context(
        special("minimal", "read"), path("/usr", "read"), path(root, "write"), path(root / ".git", "deny")
    )
    try:
        for _ in range(20):
            turn = Stopping(root / ".git")
            try:
                files.perform(box, "fs/glob", GlobParams(path="file:///usr", pattern="**/nothing"), turn)
            except Abandoned:
                assert who_sees(root / ".git") == []
                assert os.listdir(root) == []
                return
            finally:
                turn.end()
        raise AssertionError("nobody was ever seen at work")
    finally:
        files.close()
        machine.close()
