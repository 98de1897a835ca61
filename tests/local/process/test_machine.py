"""local/process/machine.py: what all processes share, and its end."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from exec_server.limits import Limits
from exec_server.local.process import tree
from exec_server.local.process.machine import ProcessMachine
from exec_server.local.process.table import ProcessTable
from support.local import Ear, spec
from support.machine import children, gone, sleep_forever
from support.wait import eventually_async


def test_closing_kills_what_was_started_and_what_is_about_to_be() -> None:
    # Starts that wait for the spawning thread when the end comes must not come to life after it.
    marker = sleep_forever()

    async def run() -> None:
        machine = ProcessMachine(asyncio.get_running_loop(), Limits())
        table = ProcessTable(machine)
        first = table.start("first", spec("sleep", marker), Ear())
        await first.started
        for number in range(100):
            table.start(str(number), spec("sleep", marker), Ear())
        machine.close()

    asyncio.run(run())
    gone(marker)
    for child in children(os.getpid()):
        try:
            os.waitpid(child, os.WNOHANG)
        except ChildProcessError:
            continue


def test_what_could_not_be_killed_at_the_end_is_left_to_the_guardian(
    monkeypatch: pytest.MonkeyPatch, fresh_log: None, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = sleep_forever()
    guardians: list[int] = []

    def cannot(_: object) -> int:
        raise OSError(errno.EMFILE, "not every process could be looked at")

    async def run() -> None:
        machine = ProcessMachine(asyncio.get_running_loop(), Limits())
        process = ProcessTable(machine).start("p", spec("setsid", "sleep", marker), Ear())
        await process.started
        await eventually_async(lambda: machine.guard._pidfd is not None, "a guardian")
        with open(f"/proc/self/fdinfo/{machine.guard._pidfd}") as info:
            guardians.extend(int(line.split()[1]) for line in info if line.startswith("Pid:"))
        monkeypatch.setattr(tree, "kill_tagged", cannot)
        machine.close()

    asyncio.run(run())
    gone(marker)
    [guardian] = guardians
    assert os.waitpid(guardian, 0)[1] == 0
    assert "the guardian is left to kill them" in capfd.readouterr().err
