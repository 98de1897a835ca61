"""local/process/stdin.py: writes arrive in order, each id once, and nobody is blocked but the writer."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.limits import Limits
from exec_server.local.process.stdin import Stdin
from exec_server.loop import Pending
from support.wait import eventually_async

F_SETPIPE_SZ = 1031


class Child:
    """The other end."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.received = b""
        self.ended = False

    def take(self, most: int = 1 << 20) -> int:
        try:
            data = os.read(self.fd, most)
        except BlockingIOError:
            return 0
        self.ended = not data
        self.received += data
        return len(data)


@asynccontextmanager
async def stdin(**limits: Any) -> AsyncIterator[tuple[Stdin, Child]]:
    read, write = os.pipe()
    for fd in (read, write):
        os.set_blocking(fd, False)
    fcntl.fcntl(write, F_SETPIPE_SZ, 4096)
    made = Stdin(asyncio.get_running_loop(), write, terminal=False, limits=Limits(**limits))
    yield made, Child(read)
    made.discard()
    os.close(read)


writes = st.tuples(st.just("write"), st.integers(0, 6000), st.none() | st.sampled_from("abcdefgh"))
takes = st.tuples(st.just("take"), st.integers(1, 8000))


@given(
    st.lists(writes | takes, max_size=30),
    st.integers(1, 4),
    st.sampled_from([1, 5000, 1 << 20]),
    st.booleans(),
)
def test_order_is_kept_and_each_id_counts_once(
    steps: list[Any], chunks: int, size: int, finish: bool
) -> None:
    async def run() -> None:
        async with stdin(stdin_queue_chunks=chunks, stdin_queue_bytes=size) as (writer, child):
            expected = b""
            seen: set[str] = set()
            answers: list[Pending[Any]] = []
            for number, step in enumerate(steps):
                if step[0] == "take":
                    child.take(step[1])
                    await asyncio.sleep(0)
                    continue
                data = bytes([number]) * step[1]
                if step[2] is not None and writer.earlier(step[2]) is not None:
                    assert step[2] in seen
                    continue
                assert step[2] not in seen or step[2] is None
                if step[2] is not None:
                    seen.add(step[2])
                answers.append(writer.write(data, step[2]))
                expected += data
                # Answers come in order, and no more wait in the queue than may.
                settled = [answer.settled for answer in answers]
                assert settled == sorted(settled, reverse=True)
                assert len(writer._queue) <= chunks
            if finish:
                writer.request_close()
                assert writer.close_requested

            def drained() -> bool:
                child.take()
                return child.ended if finish else child.received == expected

            await eventually_async(drained, "everything arriving")
            assert child.received == expected
            await eventually_async(lambda: all(answer.settled for answer in answers), "every answer")
            assert {answer.result() for answer in answers} <= {"accepted"}

    asyncio.run(run())


def test_a_full_queue_delays_only_the_answer() -> None:
    async def run() -> None:
        async with stdin(stdin_queue_chunks=2) as (writer, child):
            answers = [writer.write(bytes([number]) * 4096, None) for number in range(6)]
            # One is in the pipe, two in the queue.
            assert [answer.settled for answer in answers] == [True] * 3 + [False] * 3
            await eventually_async(lambda: child.take(4096) and answers[3].settled, "room")
            assert not answers[5].settled

            def all_answered() -> bool:
                child.take(4096)
                return all(answer.settled for answer in answers)

            await eventually_async(all_answered, "room for the rest")

    asyncio.run(run())


def test_a_queue_is_full_by_bytes_too() -> None:
    async def run() -> None:
        async with stdin(stdin_queue_bytes=10_000) as (writer, _):
            assert writer.write(bytes(20_000), None).settled  # a single large one is taken
            assert not writer.write(b"x", None).settled

    asyncio.run(run())


def test_a_child_that_reads_no_more_blocks_nobody() -> None:
    async def run() -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        writer = Stdin(asyncio.get_running_loop(), write, terminal=False, limits=Limits(stdin_queue_chunks=2))
        answers = [writer.write(bytes(1 << 20), None) for _ in range(5)]
        assert not answers[-1].settled
        os.close(read)
        await eventually_async(lambda: all(answer.settled for answer in answers), "everybody going on")
        assert writer.write(b"more", "id").result() == "accepted"
        assert writer.earlier("id") is not None
        with pytest.raises(OSError):
            os.fstat(write)

    asyncio.run(run())


def test_only_so_many_ids_are_remembered() -> None:
    async def run() -> None:
        async with stdin() as (writer, _):
            for number in range(4097):
                writer.write(b"", str(number))
            assert writer.earlier("0") is None
            assert writer.earlier("1") is not None
            assert writer.earlier("4096") is not None

    asyncio.run(run())


def test_the_end_comes_after_what_waits() -> None:
    async def run() -> None:
        async with stdin(stdin_queue_chunks=1) as (writer, child):
            for number in range(4):
                writer.write(bytes([number]) * 5000, None)
            writer.request_close()
            writer.request_close()

            def ended() -> bool:
                child.take(3000)
                return child.ended

            await eventually_async(ended, "the end of file")
            assert child.received == b"".join(bytes([number]) * 5000 for number in range(4))

    asyncio.run(run())


def test_a_terminal_is_not_closed() -> None:
    async def run() -> None:
        master, slave = os.openpty()
        writer = Stdin(asyncio.get_running_loop(), master, terminal=True, limits=Limits())
        writer.write(b"x", None)
        writer.discard()
        os.fstat(master)
        os.close(master)
        os.close(slave)

    asyncio.run(run())


def test_what_waits_for_room_when_the_child_is_killed_was_not_accepted() -> None:
    async def run() -> None:
        async with stdin(stdin_queue_chunks=1) as (writer, child):
            accepted = [writer.write(bytes(5000), str(number)) for number in range(2)]
            waiting = writer.write(b"late", "late")
            assert writer.earlier("late") is waiting, "the same write again is answered with the first"
            assert not waiting.settled
            writer.break_off()
            assert accepted[0].result() == "accepted"
            with pytest.raises(BrokenPipeError, match="failed to write to process stdin"):
                waiting.result()
            assert writer.earlier("late") is None
            assert writer.earlier("0") is not None
            assert child.take(5000)

    asyncio.run(run())
