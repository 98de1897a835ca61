"""Calls that are sent again: in order for one process, and no process waits for another."""

from __future__ import annotations

import asyncio

from exec_server.client.client import State
from exec_server.environments.environment import Environment
from exec_server.testing.faults import Cut, Faults, Hold
from support.session import Drive, mentions, sent
from support.wait import eventually_async

MIB = 1024 * 1024


def test_who_does_not_read_keeps_nobody_else_waiting(drive: Drive) -> None:
    """More than a server keeps for a process that does not read is answered late, or never."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        idle = await machine.start(["sleep", "600"], stdin=True)
        other = await machine.start(["cat"], stdin=True)
        stuck = [asyncio.ensure_future(idle.write(bytes(4 * MIB))) for _ in range(6)]
        await eventually_async(lambda: sum(write.done() for write in stuck) >= 3, "what is kept for it")
        faults.cut()
        await eventually_async(lambda: machine.state is State.RECOVERING)
        writes = [asyncio.ensure_future(other.write(b"%d\n" % number)) for number in range(5)]
        await asyncio.gather(*writes)
        await other.write(b"last\n")
        done = await other.communicate()
        assert done.stdout.split() == [b"0", b"1", b"2", b"3", b"4", b"last"]
        assert not all(write.done() for write in stuck)
        for write in stuck:
            write.cancel()

    drive(scenario, Hold())


def test_what_is_made_meanwhile_comes_after_what_waits(drive: Drive) -> None:
    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["wc", "-c"], stdin=True)
        writes = [asyncio.ensure_future(process.write(bytes(200_000))) for _ in range(8)]
        await eventually_async(lambda: faults.cuts == 1)
        await eventually_async(lambda: machine.connected)
        # Some of them may still wait to be sent again; these must not overtake them.
        end = asyncio.ensure_future(process.close_stdin())
        await asyncio.gather(*writes, end)
        assert (await process.communicate()).stdout.split() == [b"1600000"]
        ids = [int(params["writeId"]) for params in sent(faults, "process/write")]
        assert ids[:8] == list(range(1, 9))
        assert ids[8:] == sorted(ids[8:])

    drive(scenario, Cut("received", 1, when=mentions(b'"accepted"')))


def test_a_caller_who_gives_up_is_not_waited_for(drive: Drive) -> None:
    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["wc", "-c"], stdin=True)
        faults.refuse()
        faults.cut()
        await eventually_async(lambda: machine.state is State.RECOVERING)
        writes = [asyncio.ensure_future(process.write(bytes(200_000))) for _ in range(4)]
        await asyncio.sleep(0)
        writes[1].cancel()
        faults.allow()
        await asyncio.gather(*writes, return_exceptions=True)
        await process.close_stdin()
        assert (await process.communicate()).stdout.split() == [b"600000"]

    drive(scenario)
