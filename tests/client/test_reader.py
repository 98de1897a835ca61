"""Reading on where the last loop stopped, and what is kept of what is gathered."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import exec_server
from exec_server import Environment, Output
from exec_server.client.process import _Gathered
from exec_server.environments.connect import IN_PROCESS

Scenario = Callable[[Environment], Awaitable[None]]
ECHO = ["sh", "-c", 'while read x; do echo "got $x"; done']
PATIENCE = 50


@pytest.fixture(params=[True, False], ids=["in-process", "stdio"])
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    def go(scenario: Scenario) -> None:
        async def main() -> None:
            async with asyncio.timeout(PATIENCE):
                async with exec_server.connect(IN_PROCESS if request.param else None) as machine:
                    await scenario(machine)

        asyncio.run(main())

    return go


def test_a_loop_goes_on_where_the_last_one_stopped(run: Callable[[Scenario], None]) -> None:
    async def scenario(machine: Environment) -> None:
        seen = []
        async with await machine.start(ECHO, stdin=True) as process:
            for number in range(5):
                await process.write(b"%d\n" % number)
                async for chunk in process.output():
                    seen.append(chunk.data)
                    if b"got %d\n" % number in chunk.data:
                        break
            await process.close_stdin()
            assert [chunk async for chunk in process.output()] == []
            assert b"".join(seen) == b"".join(b"got %d\n" % number for number in range(5))
            again = [chunk.data async for chunk in process.output(from_start=True)]
            assert again == seen

    run(scenario)


def test_output_communicate_and_collect_share_a_place(run: Callable[[Scenario], None]) -> None:
    async def scenario(machine: Environment) -> None:
        async with await machine.start(ECHO, stdin=True) as process:
            await process.write(b"one\n")
            assert (await anext(process.output())).data == b"got one\n"
            await process.write(b"two\n")
            text = b""
            while not text.endswith(b"\n"):
                text += (await process.collect(0.05)).data
            assert text == b"got two\n"
            done = await process.communicate(b"three\n")
            assert (done.stdout, done.exit_code) == (b"got three\n", 0)

    run(scenario)


def test_a_wait_for_output_that_is_cancelled_loses_none(run: Callable[[Scenario], None]) -> None:
    async def scenario(machine: Environment) -> None:
        async with await machine.start(ECHO, stdin=True) as process:
            text = b""
            for number in range(20):
                try:
                    async with asyncio.timeout(0):
                        text += (await anext(process.output())).data
                except TimeoutError:
                    pass
                await process.write(b"%d\n" % number)
            await process.close_stdin()
            async for chunk in process.output():
                text += chunk.data
            assert text == b"".join(b"got %d\n" % number for number in range(20))

    run(scenario)


def test_two_readers_at_once_share_the_output(run: Callable[[Scenario], None]) -> None:
    async def scenario(machine: Environment) -> None:
        count = "i=0; while [ $i -lt 500 ]; do echo $i; i=$((i+1)); done"
        async with await machine.start(["sh", "-c", f"read x; {count}"], stdin=True) as process:

            async def read() -> list[Output]:
                return [chunk async for chunk in process.output()]

            readers = [asyncio.ensure_future(read()) for _ in range(3)]
            await asyncio.sleep(0)
            await process.write(b"\n")
            found = [chunk for chunks in await asyncio.gather(*readers) for chunk in chunks]
            chunks = sorted(found, key=lambda chunk: chunk.seq)
            assert b"".join(chunk.data for chunk in chunks).split() == [b"%d" % n for n in range(500)]

    run(scenario)


def test_who_left_a_loop_and_waits_does_not_make_the_process_wait(run: Callable[[Scenario], None]) -> None:
    async def scenario(machine: Environment) -> None:
        process = await machine.start(["head", "-c", "30000000", "/dev/zero"])
        async for _ in process.output():
            break
        assert (await process.wait()).exit_code == 0

    run(scenario)


def test_the_exit_is_there_before_children_have_let_go_of_the_pipe(run: Callable[[Scenario], None]) -> None:
    async def scenario(machine: Environment) -> None:
        async with await machine.start(["sh", "-c", "sleep 600 & echo $!; exit 3"]) as process:
            child = int((await anext(process.output())).data)
            assert (await process.wait_exit()).exit_code == 3
            assert not process.ended
            with pytest.raises(TimeoutError, match=rf"process '{process.id}' did not end within 0.05s"):
                await process.wait(0.05)
            os.kill(child, signal.SIGKILL)  # in-process nobody else would, and everybody waits for it
            assert (await process.wait()).exit_code == 3
        async with await machine.start(["sleep", "600"]) as process:
            with pytest.raises(TimeoutError, match="did not exit within 0s"):
                await process.wait_exit(0)

    run(scenario)


def test_a_second_conversation_is_refused(run: Callable[[Scenario], None]) -> None:
    async def scenario(machine: Environment) -> None:
        async with await machine.start(["echo", "one"]) as process:
            assert (await process.communicate()).stdout == b"one\n"
            with pytest.raises(RuntimeError, match="has been gathered by `communicate` already"):
                await process.communicate()
        async with await machine.start(["sleep", "600"]) as process:
            with pytest.raises(exec_server.CommunicateTimeout):
                await process.communicate(timeout=0.05)
            with pytest.raises(RuntimeError, match="has been gathered"):
                await process.communicate()

    run(scenario)


def test_exactly_the_newest_bytes_are_kept(run: Callable[[Scenario], None]) -> None:
    async def scenario(machine: Environment) -> None:
        async with await machine.start(["seq", "100000"]) as process:
            done = await process.communicate(limit=1000)
            whole = b"".join(b"%d\n" % number for number in range(1, 100001))
            assert done.stdout == whole[-1000:]
            assert done.dropped_bytes == len(whole) - 1000
            assert done.truncated
        async with await machine.start(["true"]) as process:
            with pytest.raises(ValueError, match="a limit is a number of bytes, not -1"):
                await process.communicate(limit=-1)

    run(scenario)


@given(
    st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=20))),
    st.none() | st.integers(0, 100),
)
def test_what_is_kept_within_a_limit(written: list[tuple[str, bytes]], limit: int | None) -> None:
    gathered = _Gathered(limit)
    for seq, (stream, data) in enumerate(written, 1):
        gathered.add(Output(seq, stream, data))  # type: ignore[arg-type]  # one of the two
    done = gathered.completed(0)
    labelled = [(stream, byte) for stream, data in written for byte in data]
    kept = labelled if limit is None else labelled[len(labelled) - min(limit, len(labelled)) :]
    assert done.stdout == bytes(byte for stream, byte in kept if stream == "stdout")
    assert done.stderr == bytes(byte for stream, byte in kept if stream == "stderr")
    assert done.dropped_bytes == len(labelled) - len(kept)
