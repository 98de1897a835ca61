"""local/process/table.py: ids, limits, and the end of an owner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from exec_server.local.process.process import State
from exec_server.local.process.table import ProcessTable
from exec_server.testing import StillLoop
from exec_server.wire.errors import RpcError
from support.local import Ear, machine, spec
from support.machine import gone, running, sleep_forever
from support.wait import eventually_async


def test_an_id_is_taken_from_the_start_until_the_retention_is_over() -> None:
    async def run() -> None:
        async with machine(retention=0.05) as (table, ear, _):
            process = table.start("p", spec("true"), ear)
            for state in (State.STARTING, State.CLOSED):
                if state is State.CLOSED:
                    await process.wait(State.CLOSED)
                assert process.state is state
                with pytest.raises(RpcError, match="process p already exists"):
                    table.start("p", spec("true"), ear)
            table.forget_later(process)
            await eventually_async(lambda: table.get("p") is None, "the id becoming free")
            again = table.start("p", spec("true"), ear)
            table.forget(process)  # the old one is not the new one
            assert table.get("p") is again
            await again.wait(State.CLOSED)

    asyncio.run(run())


def on_a_still_clock(work: Callable[[StillLoop], Awaitable[None]]) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        await work(loop)

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(run())


async def closed(table: ProcessTable, ear: Ear, process_id: str) -> None:
    process = table.start(process_id, spec("echo", "x"), ear)
    await process.wait(State.CLOSED)
    table.forget_later(process)


async def later(loop: StillLoop, seconds: float) -> None:
    """Let time pass in steps, as it does."""
    for _ in range(20):
        loop.advance(seconds / 20)
        for _ in range(3):
            await asyncio.sleep(0)


def test_the_retention_does_not_run_while_the_owner_is_away() -> None:
    async def run(loop: StillLoop) -> None:
        async with machine(retention=30, detach_ttl=3600) as (table, ear, _):
            await closed(table, ear, "before")
            await later(loop, 20)
            table.owner_left()
            await closed(table, ear, "away")
            await later(loop, 3000)
            assert [process.id for process in table] == ["before", "away"]
            table.owner_is_back()
            await later(loop, 29)
            assert [process.id for process in table] == ["before", "away"]
            await later(loop, 2)
            assert list(table) == []

    on_a_still_clock(run)


def test_what_an_owner_may_not_know_is_kept_until_it_is_heard_or_missed() -> None:
    async def run(loop: StillLoop) -> None:
        heard = loop.time()
        async with machine(retention=30, detach_ttl=300) as (_, ear, made):
            table = ProcessTable(made, lambda: heard)
            table.expect_acknowledgements(True)
            await closed(table, ear, "p")
            heard = loop.time() + 0.1  # on its way when it was told
            await later(loop, 31)
            assert table.get("p") is not None
            heard = loop.time()
            await later(loop, 31)
            assert table.get("p") is None

            await closed(table, ear, "q")
            await later(loop, 31)
            assert table.get("q") is not None
            await closed(table, ear, "q")  # who wants the id again is there, and its time is over
            with pytest.raises(RpcError, match="process q already exists"):
                table.start("q", spec("true"), ear)
            await later(loop, 320)
            assert table.get("q") is not None
            await later(loop, 60)
            assert table.get("q") is None  # it is there and has nothing to say
            table.kill_all()

    on_a_still_clock(run)


def test_retention_has_a_bound() -> None:
    async def run() -> None:
        async with machine(retained_processes=3, retained_closed_output=1000) as (table, ear, _):

            async def finished(process_id: str, *argv: str) -> None:
                process = table.start(process_id, spec(*argv), ear)
                await process.wait(State.CLOSED)
                table.forget_later(process)

            for number in range(6):
                await finished(f"small {number}", "true")
            assert [process.id for process in table] == ["small 3", "small 4", "small 5"]
            for number in range(3):
                await finished(f"large {number}", "head", "-c", "400", "/dev/zero")
            # Three of these are too much, though three may be kept; the oldest goes.
            assert [process.id for process in table] == ["large 1", "large 2"]

    asyncio.run(run())


def test_nothing_is_remembered_for_an_owner_who_is_gone() -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            done = table.start("done", spec("echo", "x"), ear)
            await done.wait(State.CLOSED)
            table.forget_later(done)
            late = table.start("late", spec("cat", pipe_stdin=True), ear)
            await late.started
            killed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            table.kill_all(killed.set_result)
            await killed
            assert list(table) == []
            await late.wait(State.CLOSED)
            table.forget_later(late)
            assert list(table) == []

    asyncio.run(run())


def test_a_start_that_fails_frees_its_id_at_once() -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            process = table.start("p", spec("/no/such/program"), ear)
            with pytest.raises(RpcError, match="No such file or directory"):
                await process.started
            assert process.state is State.FAILED
            assert table.get("p") is None
            assert ear.heard == []
            await table.start("p", spec("true"), ear).wait(State.CLOSED)

    asyncio.run(run())


def test_the_limit_counts_what_starts_and_runs() -> None:
    async def run() -> None:
        async with machine(max_processes=2) as (table, ear, _):
            one = table.start("1", spec("cat", pipe_stdin=True), ear)
            two = table.start("2", spec("cat", pipe_stdin=True), ear)
            with pytest.raises(RpcError, match=r"process limit reached \(2\)"):
                table.start("3", spec("true"), ear)
            await one.started
            await two.started
            one.close_stdin()
            await one.wait(State.EXITED)
            await table.start("3", spec("true"), ear).wait(State.CLOSED)

    asyncio.run(run())


def test_new_processes_of_a_held_table_are_held() -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            old = table.start("old", spec("echo", "x"), ear)
            table.hold_output()
            new = table.start("new", spec("echo", "x"), ear)
            await old.wait(State.EXITED)
            await new.wait(State.EXITED)
            assert ear.output == {}
            new.hold_output("another reason")
            table.release_output()
            await old.wait(State.CLOSED)
            assert not new.log.closed
            new.release_output("another reason")
            await new.wait(State.CLOSED)
            assert ear.output == {"old": b"x\n", "new": b"x\n"}

    asyncio.run(run())


def test_killing_all_takes_what_runs_and_what_is_only_starting() -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            marker = sleep_forever()
            running_ones = [table.start(f"r{n}", spec("sleep", marker), ear) for n in range(3)]
            for process in running_ones:
                await process.started
            starting = [table.start(f"s{n}", spec("sleep", marker), ear) for n in range(20)]
            killed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            table.kill_all(killed.set_result)
            table.kill_all(lambda _: pytest.fail("only the first call counts"))
            assert await killed >= 3
            for process in starting:
                await process.started
            everybody = [*running_ones, *starting]
            await eventually_async(lambda: not any(process.live for process in everybody), "the end of all")
            gone(marker)

    asyncio.run(run())


def test_grace_is_given_to_whoever_uses_it_and_no_longer_than_needed() -> None:
    async def run() -> None:
        async with machine(shutdown_grace=30) as (table, ear, _):
            script = "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.01; done"
            process = table.start("p", spec("/bin/bash", "-c", script), ear)
            await eventually_async(lambda: ear.output.get("p"), "the trap")
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            table.kill_all(done.set_result)
            async with asyncio.timeout(10):
                await done
            assert process.log.exit_code == 3
            assert ear.output["p"].endswith(b"bye\n")

    asyncio.run(run())


def test_grace_has_an_end() -> None:
    async def run() -> None:
        async with machine(shutdown_grace=0.1) as (table, ear, _):
            marker = sleep_forever()
            script = f"trap '' TERM; echo ready; sleep {marker}"
            process = table.start("p", spec("/bin/bash", "-c", script), ear)
            await eventually_async(lambda: ear.output.get("p"), "the trap")
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            table.kill_all(done.set_result)
            assert await done >= 1
            await process.wait(State.EXITED)
            assert process.log.exit_code == 137
            assert running(marker) == []

    asyncio.run(run())
