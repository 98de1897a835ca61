"""local/process/machine.py: what all processes share, and its end."""

from __future__ import annotations

import asyncio
import os

from exec_server.limits import Limits
from exec_server.local.process.machine import ProcessMachine
from exec_server.local.process.table import ProcessTable
from support.local import Ear, spec
from support.machine import children, gone, sleep_forever


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
