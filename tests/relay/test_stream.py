"""The stream: whatever the network does, every message once and in order, or an end that both see."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.relay.frame import (
    NOTHING_RECEIVED,
    Ack,
    Data,
    Frame,
    Heartbeat,
    Resume,
    decode,
)
from exec_server.relay.noise import Opener, Sealer
from exec_server.relay.stream import (
    PROTOCOL_ERROR,
    REORDER_BYTES,
    UNTAKEN_MESSAGES,
    Stream,
    StreamFailed,
)

from .simulation import Conditions, Simulation, random_conditions, verdict

ROOM = 1 << 30
KEYS = bytes(range(32)), bytes(range(32, 64))


def pair(acked: bool = True, wide: bool = False) -> tuple[Stream, Stream]:
    """Two ends with keys, at time 0."""
    return (
        Stream("s", Sealer(KEYS[0]), Opener(KEYS[1]), acked=acked, now=0.0, wide=wide),
        Stream("s", Sealer(KEYS[1]), Opener(KEYS[0]), acked=acked, now=0.0, wide=wide),
    )


def said(stream: Stream, now: float = 0.0, room: int = ROOM) -> list[Frame]:
    return [decode(message) for message in stream.frames(now, room)]


def taken(stream: Stream) -> list[bytes]:
    messages = []
    while (message := stream.take()) is not None:
        messages.append(message)
    return messages


def give(stream: Stream, frames: list[Frame], now: float = 0.0) -> None:
    for frame in frames:
        stream.receive(frame, now)


def seqs(frames: list[Frame]) -> list[int]:
    return [frame.body.seq for frame in frames if isinstance(frame.body, Data)]


def record(sealer: Sealer, plaintext: bytes, **fields: Any) -> Frame:
    """The next record of a peer that we play ourselves."""
    seq = sealer.counter
    return Frame("s", Data(seq, sealer.seal(plaintext), **fields))


def one_end(acked: bool) -> tuple[Stream, Sealer]:
    return pair(acked)[1], Sealer(KEYS[0])


MESSAGES = st.lists(st.binary(min_size=1, max_size=200) | st.integers(61430, 130_000).map(bytes), max_size=12)


# Messages and records ----------------------------------------------------------------------------


@given(MESSAGES, st.booleans())
@settings(max_examples=50)
def test_what_is_sent_is_taken(messages: list[bytes], acked: bool) -> None:
    sender, receiver = pair(acked)
    for message in messages:
        sender.send(message)
    received: list[bytes] = []
    while (frames := said(sender)) and seqs(frames):
        give(receiver, frames)
        received += taken(receiver)
        give(sender, said(receiver, 0.1))
    assert received == messages
    assert sender.unsent == 0
    assert sender.drained


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8), st.data())
@settings(max_examples=60)
def test_records_may_be_cut_anywhere(messages: list[bytes], data: st.DataObject) -> None:
    stream, sealer = one_end(acked=False)
    run = b"".join(len(message).to_bytes(4, "big") + message for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(run)), max_size=20)))
    for start, end in zip([0, *cuts], [*cuts, len(run)], strict=True):
        stream.receive(record(sealer, run[start:end]), 0.0)  # also empty ones, which have no effect
    assert taken(stream) == messages


def test_a_large_message_is_cut_as_the_reference_does() -> None:
    stream, _ = pair(acked=False)
    stream.send(bytes(70_002))
    frames = said(stream)
    assert [len(frame.body.payload) for frame in frames if isinstance(frame.body, Data)] == [61456, 8582]
    assert seqs(frames) == [0, 1]


def test_small_messages_share_a_record() -> None:
    sender, receiver = pair()
    for number in range(100):
        sender.send(b"%d" % number)
    frames = said(sender)
    assert len(frames) == 1
    give(receiver, frames)
    assert taken(receiver) == [b"%d" % number for number in range(100)]


def test_lengths_of_messages() -> None:
    stream, _ = pair()
    for wrong in (b"", bytes(64 * 1024 * 1024 + 1)):
        with pytest.raises(ValueError):
            stream.send(wrong)
    for length in (0, 64 * 1024 * 1024 + 1, 2**32 - 1):
        receiver, sealer = one_end(acked=False)
        with pytest.raises(StreamFailed) as caught:
            receiver.receive(record(sealer, length.to_bytes(4, "big")), 0.0)
        assert caught.value.reason == PROTOCOL_ERROR
    receiver, sealer = one_end(acked=False)
    receiver.receive(record(sealer, (64 * 1024 * 1024).to_bytes(4, "big")), 0.0)


@pytest.mark.parametrize("size", [1, 15, 61457, 65535])
def test_lengths_of_records(size: int) -> None:
    stream, _ = one_end(acked=False)
    with pytest.raises(StreamFailed):
        stream.receive(Frame("s", Data(0, bytes(size))), 0.0)


def test_a_record_that_does_not_open_ends_the_stream_at_its_turn() -> None:
    stream, sealer = one_end(acked=False)
    first = record(sealer, b"\0\0\0\1a")
    stream.receive(Frame("s", Data(1, bytes(50))), 0.0)
    with pytest.raises(StreamFailed):
        stream.receive(first, 0.0)


# Order -------------------------------------------------------------------------------------------


@given(st.permutations(range(12)), st.booleans())
@settings(max_examples=40)
def test_records_in_any_order_and_twice(order: list[int], acked: bool) -> None:
    stream, sealer = one_end(acked)
    frames = [record(sealer, b"\0\0\0\1%c" % (65 + number)) for number in range(12)]
    for number in order:
        stream.receive(frames[number], 0.0)
        stream.receive(frames[number], 0.0)
    assert b"".join(taken(stream)) == b"ABCDEFGHIJKL"


def test_how_far_ahead_a_record_may_be() -> None:
    stream, sealer = one_end(acked=False)
    frames = [record(sealer, b"\0\0\0\1x") for _ in range(66)]
    stream.receive(frames[64], 0.0)
    with pytest.raises(StreamFailed):
        stream.receive(frames[65], 0.0)


def test_how_much_may_wait_for_a_missing_record() -> None:
    stream, sealer = one_end(acked=False)
    frames = [record(sealer, bytes(60_000)) for _ in range(20)]
    fits = REORDER_BYTES // 60_016
    give(stream, frames[1 : 1 + fits])
    with pytest.raises(StreamFailed):
        stream.receive(frames[1 + fits], 0.0)


def test_odd_segments_are_dropped_from_a_plain_peer_and_taken_from_ours() -> None:
    for acked in (False, True):
        stream, sealer = one_end(acked)
        give(stream, [record(sealer, b"\0\0\0\1a")])
        give(stream, [record(sealer, b"\0\0\0\1b", segment_index=1, segment_count=2)])
        assert taken(stream) == ([b"a", b"b"] if acked else [b"a"])


# A taker that is behind --------------------------------------------------------------------------


def test_a_plain_peer_that_is_not_taken_from_is_reset() -> None:
    stream, sealer = one_end(acked=False)
    stream.receive(record(sealer, b"\0\0\0\1x" * (UNTAKEN_MESSAGES + 1)), 0.0)
    assert stream.behind
    with pytest.raises(StreamFailed):
        stream.receive(record(sealer, b"\0\0\0\1x"), 0.0)


def test_an_acked_peer_that_is_not_taken_from_waits() -> None:
    """However long the taker sleeps, nothing is lost, little is sent and little is kept."""
    big = [bytes([number]) * 600_000 for number in range(200)]  # 120 MB: more than may wait
    conditions = Conditions(messages=(big, []), spacing=0.0, stalls=[(0.0, 900.0, "b")], loss=0.02)
    simulation = Simulation(conditions)
    outcome = simulation.run()
    assert verdict(conditions, outcome) is None
    assert outcome.failed == {}
    assert outcome.seconds > 900
    records = sum(map(len, big)) / 61440
    assert outcome.frames < 3 * records


# Acknowledging -----------------------------------------------------------------------------------


def test_a_plain_stream_says_nothing_of_its_own() -> None:
    stream, other = pair(acked=False)
    other.send(b"x")
    give(stream, said(other))
    assert stream.wake_at() is None
    assert said(stream, 1000.0) == []
    assert not stream.silent(1000.0)
    give(stream, [Frame("s", Resume(5), 3, 1), Frame("s", Ack(), 9), Frame("s", Heartbeat())])
    assert said(stream, 1000.0) == []
    other.send(b"y")
    (frame,) = said(other)
    assert not frame.acknowledges
    with pytest.raises(RuntimeError):
        stream.resume(0.0)


def test_the_first_frames_say_that_nothing_has_arrived() -> None:
    stream, _ = pair()
    stream.send(b"x")
    (frame,) = said(stream)
    assert (frame.ack, frame.ack_bits) == (NOTHING_RECEIVED, 0)


def test_an_ack_waits_a_moment_for_company() -> None:
    stream, sealer = one_end(acked=True)
    stream.receive(record(sealer, b"\0\0\0\1x"), 5.0)
    assert said(stream, 5.0) == []
    assert stream.wake_at() == pytest.approx(5.1)
    assert said(stream, 5.1) == [Frame("s", Ack(), 0)]
    assert said(stream, 5.2) == []
    stream.receive(record(sealer, b"\0\0\0\1y"), 6.0)
    stream.send(b"answer")
    (frame,) = said(stream, 6.0)
    assert (type(frame.body), frame.ack) == (Data, 1)
    assert stream.wake_at() == pytest.approx(7.0)  # its own record's time; the ack has travelled


def test_many_records_are_acknowledged_at_once() -> None:
    stream, sealer = one_end(acked=True)
    give(stream, [record(sealer, b"") for _ in range(15)])
    assert said(stream) == []
    give(stream, [record(sealer, b"")])
    assert said(stream) == [Frame("s", Ack(), 15)]
    stream, sealer = one_end(acked=True)
    give(stream, [record(sealer, (61430).to_bytes(4, "big") + bytes(61430)) for _ in range(5)])
    assert said(stream) == [Frame("s", Ack(), 4)]


def test_gaps_and_copies_are_told_at_once() -> None:
    stream, sealer = one_end(acked=True)
    frames = [record(sealer, b"\0\0\0\1x") for _ in range(40)]
    give(stream, [frames[2]])
    assert said(stream) == [Frame("s", Ack(), NOTHING_RECEIVED, 0b100)]
    give(stream, [frames[0]])
    assert said(stream) == [Frame("s", Ack(), 0, 0b10)]
    give(stream, [frames[0]])
    assert said(stream) == [Frame("s", Ack(), 0, 0b10)]
    give(stream, [frames[39]])
    assert said(stream) == [Frame("s", Ack(), 0, 0b10)]  # beyond the 32 bits
    give(stream, [frames[1]])
    assert said(stream) == [Frame("s", Ack(), 2, 0)]


def test_the_window_is_what_a_reference_receiver_buffers() -> None:
    stream, _ = pair()
    for _ in range(70):
        stream.send(bytes(61436))
    frames = said(stream)
    ahead = sum(len(frame.body.payload) for frame in frames[1:] if isinstance(frame.body, Data))
    assert ahead <= REORDER_BYTES < ahead + 61456
    stream, _ = pair()
    for _ in range(70):
        stream.send(b"x")
        stream.frames(0.0, ROOM)
    assert stream.unsent > 0
    give(stream, [Frame("s", Ack(), 64)])
    assert stream.drained is False
    assert seqs(said(stream)) == [65]


def test_acks_of_what_was_never_sent_are_ignored() -> None:
    stream, _ = pair()
    stream.send(b"x")
    said(stream)
    give(stream, [Frame("s", Ack(), 1), Frame("s", Ack(), 77, 0xFFFFFFFF), Frame("s", Ack(), 0xFFFFFFFE)])
    assert not stream.drained
    give(stream, [Frame("s", Ack(), 0, 0xFFFFFFFF)])
    assert stream.drained


def test_room_on_the_connection_is_respected() -> None:
    stream, _ = pair(acked=False)
    for _ in range(5):
        stream.send(bytes(61436))
    assert said(stream, room=0) == []
    assert len(said(stream, room=1)) == 1
    assert len(said(stream, room=70_000)) == 2
    assert len(said(stream)) == 2


# Repeating ---------------------------------------------------------------------------------------


def test_times_of_repetition() -> None:
    """1, 2, 4, 8, 8, … seconds, the same bytes every time, and twenty times at most."""
    stream, _ = pair()
    stream.send(b"x")
    (first,) = said(stream)
    now, gaps = 0.0, []
    for _ in range(20):
        while True:
            wake = stream.wake_at()
            assert wake is not None
            if stream.silent(wake):
                stream._heard = wake  # heard from, by frames that acknowledge nothing
            frames = said(stream, wake)
            if seqs(frames):
                break
        assert frames[0].body == first.body
        gaps.append(round(wake - now, 6))
        now = wake
    assert gaps == [1, 2, 4] + [8] * 17
    with pytest.raises(StreamFailed) as caught:
        stream.frames(now + 8, ROOM)
    assert caught.value.reason == "closed"


def test_a_measured_round_trip_shortens_the_first_wait() -> None:
    stream, _ = pair()
    stream.send(b"x")
    said(stream)
    give(stream, [Frame("s", Ack(), 0)], 0.15)
    stream.send(b"y")
    said(stream, 1.0)
    assert stream.wake_at() == pytest.approx(1.3)


def test_three_above_it_and_a_record_goes_again_once() -> None:
    stream, _ = pair()
    for _ in range(6):
        stream.send(b"x")
        said(stream)
    give(stream, [Frame("s", Ack(), 0, 0b110)], 0.01)
    assert seqs(said(stream, 0.01)) == []
    give(stream, [Frame("s", Ack(), 0, 0b1110)], 0.02)
    assert seqs(said(stream, 0.02)) == [1]
    give(stream, [Frame("s", Ack(), 0, 0b11110)], 0.03)
    assert seqs(said(stream, 0.03)) == []


# The path ----------------------------------------------------------------------------------------


def test_no_time_passes_while_the_path_is_gone() -> None:
    stream, _ = pair()
    stream.send(b"x")
    said(stream)
    stream.path_lost()
    assert stream.wake_at() is None
    stream.send(b"y")
    assert said(stream, 1000.0) == []
    assert not stream.silent(1000.0)


def test_resume_calls_until_it_is_heard_and_then_repeats_everything() -> None:
    stream, other = pair()
    stream.send(b"x")
    said(stream)
    stream.path_lost()
    stream.send(b"y")
    stream.resume(10.0)
    assert said(stream, 10.0) == [Frame("s", Resume(1), NOTHING_RECEIVED)]
    assert said(stream, 10.5) == []
    assert stream.wake_at() == 11.0
    (call,) = said(stream, 11.0)
    give(other, [call], 11.0)
    (answer,) = said(other, 11.0)
    assert answer.body == Ack()
    give(stream, [answer], 11.0)
    frames = said(stream, 11.0)
    assert seqs(frames) == [0, 1]
    give(other, frames, 11.0)
    assert taken(other) == [b"x", b"y"]


def test_resume_gives_up_after_five_seconds() -> None:
    stream, _ = pair()
    stream.resume(10.0)
    calls = 0
    while (wake := stream.wake_at()) is not None and wake < 15.0:
        calls += len(said(stream, wake))
    assert (calls, wake) == (5, 15.0)
    with pytest.raises(StreamFailed) as caught:
        stream.frames(15.0, ROOM)
    assert caught.value.reason == "closed"


def test_calls_do_not_make_more_of_themselves() -> None:
    """One small frame must not be answered with the whole window, again and again."""
    stream, _ = pair()
    for _ in range(10):
        stream.send(bytes(61000))
    assert len(said(stream)) == 10
    answers = []
    for step in range(100):
        give(stream, [Frame("s", Resume(0), NOTHING_RECEIVED)], step / 1000)
        answers += said(stream, step / 1000)
    assert seqs(answers) == []
    give(stream, [Frame("s", Resume(0), NOTHING_RECEIVED)], 0.25)
    assert seqs(said(stream, 0.25)) == list(range(10))


def test_heartbeats_and_silence() -> None:
    stream, other = pair()
    assert stream.wake_at() == 15.0
    assert said(stream, 14.9) == []
    (beat,) = said(stream, 15.0)
    assert beat == Frame("s", Heartbeat(), NOTHING_RECEIVED)
    give(other, [beat], 15.0)
    assert not other.silent(59.0)
    assert other.silent(60.0)
    assert stream.silent(45.0)


@given(st.integers(0, 2**64))
@settings(max_examples=120)
def test_any_schedule_delivers_once_and_in_order(seed: int) -> None:
    conditions = random_conditions(seed)
    assert verdict(conditions, Simulation(conditions).run()) is None


@given(
    st.floats(0, 0.4),
    st.floats(0, 0.3),
    st.floats(0, 0.5),
    st.lists(st.integers(1, 3000).map(bytes), max_size=40),
    st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_loss_and_disorder_alone_never_end_a_stream(
    loss: float, doubling: float, delay: float, messages: list[bytes], seed: int
) -> None:
    conditions = Conditions(
        seed=seed,
        loss=loss,
        doubling=doubling,
        delay=(0.0, delay),
        messages=(messages, messages[::-1]),
        spacing=0.005,
    )
    outcome = Simulation(conditions).run()
    assert verdict(conditions, outcome) is None
    assert outcome.failed == {}


def test_an_outage_of_eleven_seconds_is_survived() -> None:
    messages = [bytes(1000)] * 300
    cuts = [(1.0, 11.0, "a"), (14.0, 0.5, "b"), (16.0, 2.0, "router")]
    conditions = Conditions(messages=(messages, messages), spacing=0.05, cuts=cuts, loss=0.1)
    outcome = Simulation(conditions).run()
    assert verdict(conditions, outcome) is None
    assert outcome.failed == {}


def test_a_wide_window_has_sixty_four_records_and_the_peer_holds_all_of_them() -> None:
    stream, peer = pair(wide=True)
    for _ in range(70):
        stream.send(bytes(61436))
    frames = said(stream)
    assert seqs(frames) == list(range(65))
    give(peer, frames[1:])
    assert taken(peer) == []
    give(peer, frames[:1])
    assert len(taken(peer)) == 65
    give(stream, said(peer))
    assert seqs(said(stream)) == list(range(65, 70))


def test_a_wide_window_is_for_those_that_acknowledge() -> None:
    stream, sealer = pair(acked=False, wide=True)[1], Sealer(KEYS[0])
    frames = [record(sealer, bytes(60_000)) for _ in range(20)]
    with pytest.raises(StreamFailed, match="too much came"):
        give(stream, frames[1:])


def test_a_message_may_come_in_the_smallest_pieces() -> None:
    """Each would cost many times its size, were it kept as it is."""
    stream, sealer = one_end(acked=False)
    size = 20_000
    give(stream, [record(sealer, (size + 100_000).to_bytes(4, "big"))])
    for index in range(size):
        give(stream, [record(sealer, bytes((index % 256,)))])
        assert len(stream._pieces) <= 9
    for _ in range(2):
        give(stream, [record(sealer, bytes(50_000))])
    (message,) = taken(stream)
    assert message == bytes(index % 256 for index in range(size)) + bytes(100_000)


@given(st.lists(st.integers(0, 200), max_size=30), st.booleans())
@settings(max_examples=50)
def test_memory_is_bounded_whatever_a_peer_sends(numbers: list[int], acked: bool) -> None:
    stream, sealer = one_end(acked)
    for number in numbers:
        sealer.counter = number
        frame = record(sealer, (61000).to_bytes(4, "big") + bytes(61000))
        try:
            stream.receive(frame, 0.0)
        except StreamFailed:
            break
        assert stream._held_bytes <= REORDER_BYTES
        assert len(stream._held) <= 65


def test_record_numbers_end() -> None:
    stream, _ = pair()
    stream._sealer.counter = 0xFFFF_FFFE
    stream.send(b"last")
    assert seqs(said(stream)) == [0xFFFF_FFFE]
    give(stream, [Frame("s", Ack(), 0xFFFF_FFFE)])
    stream.send(b"one too many")
    with pytest.raises(StreamFailed):
        stream.frames(0.0, ROOM)
