"""local/process/process.py: the life of one child, its output, its end."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.limits import Limits
from exec_server.local.process.killer import Killer
from exec_server.local.process.process import TRANSITIONS, ExitWatcher, ManagedProcess, State
from exec_server.local.worker import Worker
from support.local import Ear, machine, spec
from support.machine import children, descriptors, gone, running, sleep_forever, stat
from support.wait import eventually_async

REASON = "test"

LISTED = {
    ("starting", "running"),
    ("starting", "failed"),
    ("running", "exited"),
    ("exited", "closed"),
}


def test_the_table_is_the_one_of_the_specification() -> None:
    assert {(a.value, b.value) for a, following in TRANSITIONS.items() for b in following} == LISTED


@given(st.lists(st.sampled_from(State), max_size=12))
def test_only_what_is_listed_can_happen(walk: list[State]) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        process = ManagedProcess(
            loop,
            "p",
            spec("true"),
            Limits(),
            Ear(),
            Killer(loop),
            ExitWatcher(loop),
            Worker(loop, "sandboxer"),
        )
        for state in walk:
            before = process.state
            if (before.value, state.value) in LISTED:
                process._become(state)
                assert process.state is state
            else:
                with pytest.raises(RuntimeError):
                    process._become(state)
                assert process.state is before

    asyncio.run(run())


steps = st.sampled_from(["write", "close", "interrupt", "terminate", "gracefully", "hold", "release", "turn"])


@settings(max_examples=25)
@given(
    st.lists(steps, max_size=10),
    st.booleans(),
    st.sampled_from(["cat", "echo x; exit 3", "exec sleep 0.005"]),
)
def test_whatever_is_done_to_it_a_process_ends_in_order(walk: list[str], tty: bool, script: str) -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            process = table.start("p", spec("/bin/sh", "-c", script, tty=tty, pipe_stdin=True), ear)
            for step in walk:
                match step:
                    case "write" if process.state is not State.STARTING and not process.terminated:
                        process.write(b"words\n", None)
                    case "close":
                        process.close_stdin()
                    case "interrupt":
                        process.signal(signal.SIGINT)
                    case "terminate":
                        process.terminate()
                    case "gracefully":
                        process.terminate_gracefully(0.005)
                    case "hold":
                        process.hold_output(REASON)
                    case "release":
                        process.release_output(REASON)
                    case _:
                        await asyncio.sleep(0.002)
            await process.started
            process.release_output(REASON)
            process.terminate_gracefully(0.05)
            await process.wait(State.CLOSED)
            words = ear.words("p")
            assert words[0] == "started"
            assert words[-1] == "closed"
            assert words.count("exited") == 1
            seqs = [seq for _, word, seq in ear.heard if word != "started"]
            assert seqs == list(range(1, len(seqs) + 1))

    asyncio.run(run())


def test_a_process_leaves_nothing_behind() -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            await table.start("warm", spec("true"), ear).wait(State.CLOSED)
            before = descriptors(os.getpid())
            pids = set()
            for number, tty in enumerate([False, True] * 5):
                process = table.start(str(number), spec("echo", "x", tty=tty, pipe_stdin=True), ear)
                await process.wait(State.CLOSED)
                pids.add(process.pid)
            assert descriptors(os.getpid()).keys() == before.keys()
            assert len(pids - {None}) == 10
            assert not pids & set(children(os.getpid()))  # others of this worker's may be ending just now

    asyncio.run(run())


def test_waiting_ends_with_what_was_waited_for() -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            # The child exits and leaves somebody who holds its output open.
            process = table.start("p", spec("/bin/sh", "-c", "sleep 0.2 & echo x; exit 4"), ear)
            await process.wait(State.EXITED)
            assert process.state is State.EXITED
            assert process.log.exit_code == 4
            assert not process.log.closed
            await process.wait(State.CLOSED)
            assert process.state is State.CLOSED
            await process.wait(State.EXITED)  # at once

    asyncio.run(run())


def test_what_was_said_before_the_end_is_numbered_before_it() -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            for number in range(20):
                process = table.start(str(number), spec("/bin/sh", "-c", "echo a; echo b >&2"), ear)
                await process.wait(State.CLOSED)
                assert ear.words(str(number))[-2:] == ["exited", "closed"]

    asyncio.run(run())


def test_held_output_stays_where_it_is() -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            process = table.start("p", spec("/bin/sh", "-c", "head -c 3000000 /dev/zero; exit 5"), ear)
            process.hold_output("one")
            process.hold_output("two")
            await process.started
            await eventually_async(lambda: stat(process.pid or 0).state == "S", "the child waiting for room")
            process.release_output("one")
            await asyncio.sleep(0.01)
            assert process.log.total_bytes == 0
            process.release_output("two")
            await process.wait(State.CLOSED)
            assert process.log.total_bytes == 3_000_000
            assert process.log.exit_code == 5

    asyncio.run(run())


def test_output_that_is_held_when_the_child_exits_is_not_lost() -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            for tty in (False, True):
                process = table.start(f"p{tty}", spec("echo", "late", tty=tty), ear)
                process.hold_output(REASON)
                await process.wait(State.EXITED)
                assert process.log.total_bytes == 0
                process.release_output(REASON)
                await process.wait(State.CLOSED)
                assert ear.output[f"p{tty}"].strip() == b"late"

    asyncio.run(run())


def test_terminating_gives_the_number_of_processes() -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            marker = sleep_forever()
            script = f"setsid sleep {marker} & sleep {marker} & sleep {marker}"
            process = table.start("p", spec("/bin/bash", "-c", script), ear)
            await process.started
            await eventually_async(lambda: len(running(f"sleep\0{marker}")) == 3, "three sleepers")
            killed = process.terminate()
            assert process.terminate() is killed  # the same kill, not another
            assert await killed == 4
            await process.wait(State.CLOSED)
            assert process.log.exit_code == 137
            assert await process.terminate() == 0
            gone(marker)

    asyncio.run(run())


def test_asking_again_can_only_shorten_the_grace() -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            script = "trap '' TERM; echo ready; while :; do sleep 0.01; done"
            process = table.start("p", spec("/bin/bash", "-c", script), ear)
            await eventually_async(lambda: ear.output.get("p"), "the trap")
            began = asyncio.get_running_loop().time()
            process.terminate_gracefully(30)
            process.terminate_gracefully(0.05)
            process.terminate_gracefully(60)
            await process.wait(State.CLOSED)
            assert asyncio.get_running_loop().time() - began < 10
            assert process.log.exit_code == 137

    asyncio.run(run())


def test_an_exit_nobody_knows_is_said_to_be_unknown() -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            process = table.start("p", spec("cat", pipe_stdin=True), ear)
            await process.started
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)  # somebody else takes the status
            await process.wait(State.CLOSED)
            assert process.log.exit_code == -1
            assert process.failure is not None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 255", 255), ("kill -SEGV $$", 139), ("kill -TERM $$", 143)]
)
@pytest.mark.parametrize("tty", [False, True])
def test_exit_codes(script: str, code: int, tty: bool) -> None:
    async def run() -> None:
        async with machine() as (table, ear, _):
            process: Any = table.start("p", spec("/bin/sh", "-c", script, tty=tty), ear)
            await process.wait(State.CLOSED)
            assert process.log.exit_code == code

    asyncio.run(run())


def test_where_there_are_no_pidfds_a_thread_waits() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        watcher = ExitWatcher(loop)
        noticed: asyncio.Future[None] = loop.create_future()

        class Child:
            pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 9"], {})
            pidfd = None

            @staticmethod
            def exit_noticed() -> None:
                noticed.set_result(None)

        child: Any = Child()
        watcher.watch(child)
        await noticed
        assert watcher.reap(child) == 9

    asyncio.run(run())
