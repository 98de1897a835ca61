"""Events in any order, any number of times, come out once and in order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.client import sequencer as module
from exec_server.client.sequencer import ReorderOverflow, Sequencer, Unrecoverable
from exec_server.services import Closed, Event, Exited, Output, ReadOutput


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


# Recovery ----------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Everything that ever happens to a process: its exit anywhere, its close last, or neither yet."""
    count = draw(st.integers(0, 25))
    ended = draw(st.sampled_from(("runs", "exited", "closed")))
    exit_at = None if ended == "runs" else draw(st.integers(1, count + 1))
    events: list[Event] = [
        Exited(seq, 3, None) if seq == exit_at else Output(seq, "stdout", b"%d" % seq)
        for seq in range(1, count + 1 + (exit_at is not None))
    ]
    if ended == "closed":
        events.append(Closed(len(events) + 1))
    return events


def retained(history: list[Event], after: int, until: int, evicted: frozenset[int]) -> ReadOutput:
    """What a server answers to `process/read` at that time."""
    known = history[:until]
    chunks = [event for event in known if isinstance(event, Output)]
    exits = [event.exit_code for event in known if isinstance(event, Exited)]
    return ReadOutput(
        [chunk for chunk in chunks if chunk.seq > after and chunk.seq not in evicted],
        until + 1,
        bool(exits),
        exits[0] if exits else None,
        any(isinstance(event, Closed) for event in known),
        None,
        True,
    )


@given(histories(), st.data())
def test_what_was_missed_is_filled_in_or_told(history: list[Event], data: st.DataObject) -> None:
    """Whatever was published, came early, and was evicted: all of it once and in order, or an error."""
    total = len(history)
    published_until = data.draw(st.integers(0, total))
    read_until = data.draw(st.integers(0, total))
    numbers_of = st.integers(1, max(total, 1))
    early = data.draw(st.frozensets(numbers_of.filter(lambda seq: seq > published_until + 1), max_size=12))
    evicted = data.draw(st.frozensets(numbers_of, max_size=3))

    sequencer = Sequencer()
    published: list[Event] = []
    for event in history[:published_until]:
        published += sequencer.push(event.seq, event)  # type: ignore[union-attr]
    sequencer.recovering = True
    for seq in early:
        if seq <= total:
            published += sequencer.push(seq, history[seq - 1])
    missing = [
        event.seq
        for event in history[published_until:read_until]
        if isinstance(event, Output) and event.seq in evicted and event.seq not in early
    ]
    found = retained(history, published_until, read_until, evicted)
    if missing:
        with pytest.raises(Unrecoverable, match="no longer retained while recovering through sequence"):
            sequencer.recover(found)
        return
    published += sequencer.recover(found)
    assert len(published) >= min(read_until, total)
    for event in history[read_until:]:
        published += sequencer.push(event.seq, event)  # type: ignore[union-attr]
    assert numbers(published) == list(range(1, total + 1))
    for event, original in zip(published, history, strict=True):
        if isinstance(event, Exited):
            assert isinstance(original, Exited)
            assert event.exit_code == original.exit_code
        else:
            assert event == original


def found(*chunks: int, next_seq: int, **fields: Any) -> ReadOutput:
    values = {"exited": False, "exit_code": None, "closed": False, "failure": None, "sandbox_denied": False}
    values |= fields
    outputs = [Output(seq, "stdout", b"%d" % seq) for seq in chunks]
    return ReadOutput(outputs, next_seq, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("early", "answer", "text"),
    [
        ([], found(next_seq=3, failure="gone"), "process failed while recovering: gone"),
        (
            [],
            found(1, 2, next_seq=3, closed=True),
            "process close sequence 2 conflicts with recovered output",
        ),
        ([2], found(1, next_seq=3, closed=True), "process close sequence 2 conflicts"),
        ([], found(1, 3, next_seq=3), "recovered process output sequence 3 exceeds target sequence 2"),
        (
            [],
            found(1, next_seq=3, exited=True),
            "recovering exited process did not include its exit code",
        ),
        ([], found(2, next_seq=3), "no longer retained while recovering through sequence 2"),
        ([], found(next_seq=4, exited=True, exit_code=0), "no longer retained while recovering through"),
    ],
)
def test_answers_that_cannot_be(early: list[int], answer: ReadOutput, text: str) -> None:
    sequencer = Sequencer()
    for seq in early:
        sequencer.push(seq, Output(seq, "stdout", b"x"))
    with pytest.raises(Unrecoverable, match=text):
        sequencer.recover(answer)


def test_nothing_new_is_nothing_to_do() -> None:
    sequencer = Sequencer()
    sequencer.push(1, Output(1, "stdout", b"x"))
    assert sequencer.recover(found(next_seq=2)) == []
    sequencer.push(2, Closed(2))
    assert sequencer.recover(found(next_seq=9)) == []


def test_the_exit_takes_the_hole_and_the_verdict() -> None:
    sequencer = Sequencer()
    ready = sequencer.recover(
        found(1, 3, next_seq=5, exited=True, exit_code=9, closed=True, sandbox_denied=True)
    )
    assert ready == [Output(1, "stdout", b"1"), Exited(2, 9, True), Output(3, "stdout", b"3"), Closed(4)]
    assert sequencer.ended


def test_what_comes_before_the_answer_may_be_much() -> None:
    """While the answer is on its way nothing fails for want of room, up to a bound that has a name."""
    sequencer = Sequencer()
    sequencer.recovering = True
    for seq in range(2, 1002):
        sequencer.push(seq, Output(seq, "stdout", bytes(10_000)))
    assert len(sequencer.recover(found(1, next_seq=2))) == 1001
    sequencer.recovering = True
    with pytest.raises(ReorderOverflow):
        sequencer.push(5000, Output(5000, "stdout", bytes(module.MAX_EARLY_BYTES_RECOVERING + 1)))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(0, 40), st.integers(0, 60))
def test_what_was_missed_comes_in_parts(sizes: list[int], live_from: int, exit_at: int) -> None:
    """The answers of a server that was given a budget, until they go over into what comes by itself."""
    total = sum(sizes)
    exit_seq = min(exit_at, total) + 1
    closed_seq = total + 2
    chunks = [Output(seq, "stdout", b"x") for seq in range(1, closed_seq) if seq != exit_seq]
    events: list[Event] = [*chunks, Exited(exit_seq, 0, False), Closed(closed_seq)]
    live = sorted((event for event in events if numbers([event])[0] > live_from), key=lambda e: numbers([e]))
    sequencer = Sequencer()
    sequencer.expect_recovery()
    published: list[Event] = []
    for event in live[: len(live) // 2]:
        published += sequencer.push(numbers([event])[0], event)
    for size in [*sizes, 1]:
        if sequencer.joined:
            break
        found = [chunk for chunk in chunks if chunk.seq > sequencer.last][:size]
        following = found[-1].seq + 1 if found else closed_seq + 1
        answer = ReadOutput(found, following, True, 0, True, None, False)
        published += sequencer.recover(answer, partial=bool(found))
    for event in live[len(live) // 2 :]:
        published += sequencer.push(numbers([event])[0], event)
    assert numbers(published) == list(range(1, closed_seq + 1))
    assert sequencer.ended
    assert sequencer.arrived == closed_seq
