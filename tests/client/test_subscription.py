"""Queues of events: bounded, and never silent about what they lose."""

from __future__ import annotations

import asyncio

from exec_server.client.subscription import Subscription
from exec_server.services import Closed, Output


def output(seq: int, size: int = 10) -> Output:
    return Output(seq, "stdout", bytes(size))


def test_pressure_is_told_once_and_taken_back() -> None:
    told: list[bool] = []
    queue = Subscription(100, 1000, told.append)
    for seq in range(1, 31):
        queue.put(output(seq))
    assert told == [True]
    taken = [queue.take() for _ in range(30)]
    assert told == [True, False]
    assert [event.seq for event in taken if event is not None] == list(range(1, 31))  # type: ignore[union-attr]
    assert queue.take() is None


def test_without_pressure_it_drops_and_says_so() -> None:
    queue = Subscription(100, 1000, None)
    for seq in range(1, 12):
        queue.put(output(seq))
    assert queue.lagged
    assert queue.take() is None


def test_too_many_small_events_drop_too() -> None:
    queue = Subscription(1000, 3, None)
    for seq in range(1, 5):
        queue.put(Closed(seq))
    assert queue.lagged


def test_becoming_lossy_lets_the_process_go_on() -> None:
    told: list[bool] = []
    queue = Subscription(100, 1000, told.append)
    for seq in range(1, 31):
        queue.put(output(seq))
    queue.make_lossy()
    assert told == [True, False]
    assert queue.lagged


def test_waiting_ends_with_the_next_event() -> None:
    async def main() -> None:
        queue = Subscription(100, 10, None)
        waiter = asyncio.ensure_future(queue.wait())
        await asyncio.sleep(0)
        assert not waiter.done()
        queue.put(output(1))
        await waiter

    asyncio.run(main())
