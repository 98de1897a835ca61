"""loop.py: the small loop of stdio, and answers that come later."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest

from exec_server.loop import Pending, PollLoop, after, resolved


@pytest.fixture
def loop() -> Iterator[PollLoop]:
    made = PollLoop()
    watchdog = made.call_later(20, made.stop)
    yield made
    watchdog.cancel()
    made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    yield ends
    for end in ends:
        os.close(end)


def fill(write: int) -> None:
    """Until no more fits."""
    try:
        while True:
            os.write(write, bytes(65536))
    except BlockingIOError:
        return


# Calls and timers --------------------------------------------------------------------------------


def test_calls_come_in_order(loop: PollLoop) -> None:
    seen: list[Any] = []
    loop.call_soon(seen.append, 1)
    loop.call_soon(lambda: (seen.append(2), loop.call_soon(seen.append, 4), loop.call_soon(loop.stop)))
    loop.call_soon(seen.append, 3)
    loop.run()
    assert seen == [1, 2, 3, 4]


def test_timers_come_in_the_order_of_their_time(loop: PollLoop) -> None:
    seen: list[Any] = []
    began = monotonic()
    loop.call_later(0.03, lambda: (seen.append("last"), loop.stop()))
    loop.call_later(0.01, seen.append, "first")
    loop.call_later(0.02, seen.append, "second")
    loop.call_later(0, seen.append, "now")
    loop.call_later(-5, seen.append, "before now")
    loop.run()
    assert sorted(seen[:2]) == ["before now", "now"]
    assert seen[2:] == ["first", "second", "last"]
    assert monotonic() - began >= 0.03


def test_timers_of_one_moment_come_in_the_order_they_were_made(loop: PollLoop) -> None:
    seen: list[int] = []
    for number in range(10):
        loop.call_later(0, seen.append, number)
    loop.call_later(0.01, loop.stop)
    loop.run()
    assert seen == list(range(10))


def test_a_cancelled_timer_does_not_come(loop: PollLoop) -> None:
    seen: list[str] = []
    loop.call_later(0.005, seen.append, "cancelled").cancel()
    loop.call_later(0.01, loop.stop)
    loop.run()
    assert seen == []


def test_a_timer_can_be_cancelled_in_the_round_in_which_it_is_due(loop: PollLoop) -> None:
    seen: list[str] = []
    first = loop.call_later(0, lambda: second.cancel())
    second = loop.call_later(0, seen.append, "cancelled")
    loop.call_later(0.01, loop.stop)
    loop.run()
    first.cancel()  # too late, and harmless
    first.cancel()
    assert seen == []


def test_cancelled_timers_are_not_kept_until_they_would_be_due(loop: PollLoop) -> None:
    kept = [loop.call_later(1_000_000, loop.stop) for _ in range(10)]
    for _ in range(10_000):
        loop.call_later(1_000_000, loop.stop).cancel()
    assert len(loop._timers) < 500
    seen: list[str] = []
    loop.call_later(0.01, seen.append, "due")
    loop.call_later(0.02, loop.stop)
    loop.run()
    assert seen == ["due"]
    for timer in kept:
        timer.cancel()


@pytest.mark.usefixtures("fresh_log")
def test_a_fault_in_one_call_does_not_end_the_others(
    loop: PollLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    loop.call_soon(lambda: 1 // 0)
    loop.call_soon(seen.append, "after")
    loop.call_soon(loop.stop)
    loop.run()
    assert seen == ["after"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_stop_can_come_from_another_thread(loop: PollLoop) -> None:
    thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(loop.stop))
    loop.call_later(0.01, thread.start)
    loop.run()
    thread.join()


def test_calls_from_threads_all_arrive(loop: PollLoop) -> None:
    seen: list[int] = []

    def take(number: int) -> None:
        seen.append(number)
        if len(seen) == 4000:
            loop.stop()

    def send(first: int) -> None:
        for number in range(first, first + 1000):
            loop.call_soon_threadsafe(take, number)

    threads = [threading.Thread(target=send, args=(first,)) for first in range(0, 4000, 1000)]
    for thread in threads:
        thread.start()
    loop.run()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(4000))
    for first in range(0, 4000, 1000):
        of_one = [number for number in seen if first <= number < first + 1000]
        assert of_one == sorted(of_one)


# Descriptors -------------------------------------------------------------------------------------


def test_a_reader_is_called_while_there_is_something_to_read(loop: PollLoop, pipe: tuple[int, int]) -> None:
    read, write = pipe
    seen: list[bytes] = []

    def readable(word: str) -> None:
        assert word == "argument"
        seen.append(os.read(read, 1))
        if seen[-1] == b"c":
            loop.stop()

    loop.add_reader(read, readable, "argument")
    os.write(write, b"abc")
    loop.run()
    assert seen == [b"a", b"b", b"c"]
    assert loop.remove_reader(read)
    assert not loop.remove_reader(read)


def test_end_of_file_is_readable(loop: PollLoop) -> None:
    read, write = os.pipe()
    seen: list[bytes] = []
    loop.add_reader(read, lambda: (seen.append(os.read(read, 1)), loop.stop()))
    os.close(write)
    loop.run()
    loop.remove_reader(read)
    os.close(read)
    assert seen == [b""]


def test_a_writer_is_called_when_there_is_room(loop: PollLoop, pipe: tuple[int, int]) -> None:
    read, write = pipe
    fill(write)
    seen: list[int] = []
    loop.add_writer(write, lambda: (seen.append(os.write(write, b"x")), loop.stop()))
    loop.call_later(0.01, lambda: seen.append(0) or os.read(read, 1 << 20))
    loop.run()
    assert seen == [0, 1]
    assert loop.remove_writer(write)
    assert not loop.remove_writer(write)


def test_a_writer_hears_that_nobody_reads_any_more(loop: PollLoop) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    fill(write)
    loop.add_writer(write, loop.stop)
    os.close(read)
    loop.run()
    loop.remove_writer(write)
    os.close(write)


def test_one_descriptor_can_be_read_and_written(loop: PollLoop) -> None:
    left, right = os.openpty()
    seen: list[str] = []

    def done(what: str, remove: Callable[[int], object]) -> None:
        remove(left)
        seen.append(what)
        if len(seen) == 2:
            loop.stop()

    loop.add_reader(left, done, "read", loop.remove_reader)
    loop.add_writer(left, done, "written", loop.remove_writer)
    os.write(right, b"x")
    loop.run()
    assert sorted(seen) == ["read", "written"]
    os.close(left)
    os.close(right)


def test_the_last_reader_given_counts(loop: PollLoop, pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.write(write, b"x")
    loop.add_reader(read, pytest.fail, "this one was replaced")
    loop.add_reader(read, loop.stop)
    loop.run()
    loop.remove_reader(read)


@pytest.mark.parametrize("first", [0, 1])
def test_a_reader_removed_in_the_same_round_is_not_called(loop: PollLoop, first: int) -> None:
    # Whoever is called first closes the other's descriptor, as the exit of a process does.
    pipes = [os.pipe(), os.pipe()]
    seen: list[int] = []

    def readable(mine: int) -> None:
        other = pipes[1 - mine]
        seen.append(mine)
        loop.remove_reader(other[0])
        os.close(other[0])
        loop.remove_reader(pipes[mine][0])
        loop.call_soon(loop.stop)

    for number in (first, 1 - first):
        loop.add_reader(pipes[number][0], readable, number)
    for _, write in pipes:
        os.write(write, b"x")
    loop.run()
    assert len(seen) == 1
    os.close(pipes[seen[0]][0])
    for _, write in pipes:
        os.close(write)


def test_what_cannot_be_watched_is_refused_and_forgotten(loop: PollLoop, tmp_path: Any) -> None:
    with open(tmp_path / "file", "wb") as file:
        with pytest.raises(PermissionError):
            loop.add_reader(file.fileno(), loop.stop)
        with pytest.raises(PermissionError):
            loop.add_writer(file.fileno(), loop.stop)
        assert not loop.remove_reader(file.fileno())
        assert not loop.remove_writer(file.fileno())


def test_signals_are_calls(loop: PollLoop) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    seen: list[str] = []
    try:
        loop.add_signal_handler(signal.SIGUSR1, lambda word: (seen.append(word), loop.stop()), "heard")
        loop.call_later(0.01, os.kill, os.getpid(), signal.SIGUSR1)
        loop.run()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == ["heard"]


# Answers that come later -------------------------------------------------------------------------


def test_an_answer_is_given_once() -> None:
    pending: Pending[int] = Pending()
    seen: list[int] = []
    pending.then(lambda done: seen.append(done.result()))
    assert not pending.settled
    pending.resolve(1)
    pending.resolve(2)
    pending.fail(ValueError())
    pending.then(lambda done: seen.append(done.result() + 10))
    assert pending.settled
    assert seen == [1, 11]


def test_none_is_an_answer() -> None:
    pending: Pending[None] = Pending()
    pending.resolve(None)
    assert pending.settled
    assert pending.result() is None


def test_an_error_is_an_answer() -> None:
    pending: Pending[int] = Pending()
    pending.fail(KeyError("x"))
    pending.resolve(1)
    with pytest.raises(KeyError):
        pending.result()


def test_cancelling_forgets_who_asked_and_tells_the_work() -> None:
    seen: list[str] = []
    pending: Pending[int] = Pending(lambda: seen.append("told"))
    pending.then(lambda _: seen.append("asked"))
    pending.cancel()
    pending.resolve(1)
    pending.cancel()
    assert seen == ["told"]


def test_what_is_settled_does_not_wait_for_the_garbage_collector() -> None:
    class Work:
        def __init__(self) -> None:
            self.answer: Pending[bytearray] = Pending(self.abandon)

        def abandon(self) -> None:
            """Nobody does."""

    class Large(bytearray):
        """Something that can be watched."""

    gc.disable()
    try:
        work, large = Work(), Large()
        seen = weakref.ref(large)
        work.answer.resolve(large)
        del work, large
        assert seen() is None
    finally:
        gc.enable()


def test_waiting_in_asyncio() -> None:
    async def run() -> None:
        assert await resolved(5) == 5
        pending: Pending[int] = Pending()
        asyncio.get_running_loop().call_soon(pending.resolve, 6)
        assert await pending == 6
        failing: Pending[int] = Pending()
        asyncio.get_running_loop().call_soon(failing.fail, KeyError())
        with pytest.raises(KeyError):
            await failing

    asyncio.run(run())


def test_cancelling_in_asyncio_reaches_the_work() -> None:
    seen: list[str] = []

    async def run() -> None:
        pending: Pending[int] = Pending(lambda: seen.append("told"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await pending
        pending.resolve(1)

    asyncio.run(run())
    assert seen == ["told"]


def test_after_does_the_work_when_the_first_has_settled_either_way() -> None:
    for settle in (lambda first: first.resolve(None), lambda first: first.fail(KeyError())):
        first: Pending[None] = Pending()
        second = after(first, lambda: 7)
        assert not second.settled
        settle(first)
        assert second.result() == 7


def test_after_passes_errors_on() -> None:
    def work() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        after(resolved(None), work).result()


def test_after_waits_for_work_that_waits() -> None:
    inner: Pending[int] = Pending()
    outer = after(resolved(None), lambda: inner)
    assert not outer.settled
    inner.resolve(3)
    assert outer.result() == 3
    failing: Pending[int] = Pending()
    outer = after(resolved(None), lambda: failing)
    failing.fail(KeyError())
    with pytest.raises(KeyError):
        outer.result()


def test_cancelling_after_cancels_the_work() -> None:
    seen: list[str] = []
    inner: Pending[int] = Pending(lambda: seen.append("told"))
    after(resolved(None), lambda: inner).cancel()
    assert seen == ["told"]
