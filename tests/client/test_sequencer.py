"""Events in any order, any number of times, come out once and in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.client import sequencer as module
from exec_server.client.sequencer import ReorderOverflow, Sequencer
from exec_server.services import Closed, Event, Exited, Output


def events_of(count: int) -> list[Event]:
    outputs: list[Event] = [Output(seq, "stdout", b"%d" % seq) for seq in range(1, count + 1)]
    return [*outputs, Exited(count + 1, 0, False), Closed(count + 2)]


def numbers(events: list[Event]) -> list[int]:
    return [event.seq for event in events]  # type: ignore[union-attr]


@given(st.integers(0, 60), st.randoms(use_true_random=False), st.integers(0, 30))
def test_any_order_with_repeats_comes_out_once_and_in_order(count: int, random: object, repeats: int) -> None:
    events = events_of(count)
    arrivals = events + [random.choice(events) for _ in range(repeats)]  # type: ignore[attr-defined]
    random.shuffle(arrivals)  # type: ignore[attr-defined]
    sequencer = Sequencer()
    published: list[Event] = []
    for event in arrivals:
        published += sequencer.push(event.seq, event)  # type: ignore[union-attr]
    assert numbers(published) == list(range(1, count + 3))
    assert sequencer.ended


def test_nothing_follows_the_close() -> None:
    sequencer = Sequencer()
    assert numbers(sequencer.push(1, Closed(1))) == [1]
    assert sequencer.push(2, Output(2, "stdout", b"x")) == []


def test_an_early_close_does_not_lose_the_tail() -> None:
    sequencer = Sequencer()
    assert sequencer.push(4, Closed(4)) == []
    assert numbers(sequencer.push(1, Output(1, "stdout", b"a"))) == [1]
    assert sequencer.push(3, Exited(3, 0, False)) == []
    assert numbers(sequencer.push(2, Output(2, "stdout", b"b"))) == [2, 3, 4]


def test_too_many_early_events_fail() -> None:
    sequencer = Sequencer()
    for seq in range(2, module.MAX_EARLY_EVENTS + 2):
        sequencer.push(seq, Exited(seq, 0, None))
    with pytest.raises(ReorderOverflow, match="exceeds 256 entries"):
        sequencer.push(1000, Exited(1000, 0, None))


def test_too_many_early_bytes_fail() -> None:
    sequencer = Sequencer()
    half = bytes(module.MAX_EARLY_BYTES // 2 + 1)
    sequencer.push(2, Output(2, "stdout", half))
    with pytest.raises(ReorderOverflow, match="reorder buffer exceeds 1048576 bytes"):
        sequencer.push(3, Output(3, "stdout", half))
    with pytest.raises(ReorderOverflow, match="event exceeds 1048576 bytes"):
        sequencer.push(4, Output(4, "stdout", half * 2 + b"xx"))


def test_the_event_that_closes_the_gap_may_be_large() -> None:
    sequencer = Sequencer()
    sequencer.push(2, Output(2, "stdout", b"x"))
    assert numbers(sequencer.push(1, Output(1, "stdout", bytes(3_000_000)))) == [1, 2]
