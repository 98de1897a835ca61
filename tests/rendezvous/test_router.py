"""The router: whose frames go where, and who is told what when somebody goes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.relay.frame import Ack, Data, Frame, Handshake, Heartbeat, Reset, Resume, encode
from exec_server.rendezvous.router import SLOW_SECONDS
from support.router import MARK, FakeSocket, Play


def test_frames_pass_unchanged_and_in_order() -> None:
    play = Play()
    one, one_socket = play.stream("one")
    other, other_socket = play.stream("other")
    odd = b"\x08\x01\x12\x03one\xd2\x01\x01x\x2a\x05\x18\x01\x22\x01a"  # an unknown field in the middle
    play.router.harness_frame(one, odd)
    assert play.environment.sent == [odd]
    play.environment.sent.clear()
    numbers = [Frame("one", Data(seq, b"x")) for seq in range(5)]
    play.from_harness(one, *numbers)
    assert play.environment.frames() == numbers
    play.from_environment(Frame("other", Data(0, b"y")), Frame("one", Heartbeat()))
    assert other_socket.frames() == [Frame("other", Data(0, b"y"))]
    assert one_socket.frames() == [Frame("one", Heartbeat())]
    assert play.router.stream_count == 2
    assert other.route is not None


def test_what_is_no_frame_goes_nowhere() -> None:
    play = Play()
    harness, socket = play.stream()
    play.router.harness_frame(harness, b"\xff")
    play.router.harness_frame(harness, encode(Frame("s", Reset(""))))
    play.router.environment_frame("reg", play.environment, b"\xff")
    assert (play.environment.sent, socket.sent, socket.closed) == ([], [], None)


def test_unknown_streams_of_an_environment() -> None:
    play = Play()
    play.from_environment(Frame("s", Data(0, b"x")))
    assert play.environment.resets() == ["s"]
    play.from_environment(Frame("s", Reset("x")))
    assert play.environment.sent == []
    play.from_environment(Frame("s", Resume(4), 3))  # its harness may be on its way back
    assert play.environment.sent == []
    play.loop.advance(5.0)
    play.from_environment(Frame("s", Resume(4), 3))
    assert play.environment.resets() == ["s"]


def test_a_plain_stream_ends_with_its_harness() -> None:
    play = Play()
    harness, _ = play.stream()
    play.router.harness_closed(harness)
    assert play.environment.resets() == ["s"]
    assert play.router.stream_count == 0


def test_a_plain_stream_ends_with_its_environment() -> None:
    play = Play()
    _, socket = play.stream()
    play.router.environment_closed("reg", play.environment)
    assert (socket.resets(), socket.closed) == (["s"], 1001)
    assert not play.router.is_online("reg")
    assert play.router.streams() == {}


def test_an_acked_stream_waits_for_its_harness() -> None:
    play = Play()
    harness, _ = play.stream(acked=True)
    play.router.harness_closed(harness)
    play.from_environment(Frame("s", Data(0, b"lost"), 5))
    assert play.environment.sent == []
    play.loop.advance(29.0)
    again, socket = play.harness()
    call = Frame("s", Resume(7), 3)
    play.from_harness(again, call)
    assert play.environment.frames() == [call]
    play.from_environment(Frame("s", Ack(), 6))
    assert socket.frames() == [Frame("s", Ack(), 6)]
    play.loop.advance(100.0)
    assert play.environment.sent == []

    play.router.harness_closed(again)
    play.loop.advance(30.0)
    assert play.environment.resets() == ["s"]


def test_an_acked_stream_moves_to_a_newer_socket() -> None:
    play = Play()
    _, before = play.stream(acked=True)
    newer, socket = play.harness()
    play.from_harness(newer, Frame("s", Resume(7), 3))
    assert before.closed == 1000
    play.from_environment(Frame("s", Ack(), 6))
    assert len(socket.sent) == 1
    assert before.sent == []


def test_an_acked_stream_waits_for_its_environment() -> None:
    play = Play()
    harness, socket = play.stream(acked=True)
    play.router.environment_closed("reg", play.environment)
    play.from_harness(harness, Frame("s", Data(0, b"lost"), 5))
    assert (socket.sent, socket.closed) == ([], None)
    play.loop.advance(20.0)
    play.environment = FakeSocket()
    play.router.environment_opened("reg", play.environment)
    play.from_environment(Frame("s", Resume(2), 1))
    assert socket.frames() == [Frame("s", Resume(2), 1)]
    play.loop.advance(100.0)
    assert socket.closed is None
    play.router.environment_closed("reg", play.environment)
    play.loop.advance(30.0)
    assert (socket.resets(), socket.closed) == (["s"], 1001)
    assert play.router.streams() == {}


def test_both_ends_must_offer_acknowledgements() -> None:
    play = Play()
    harness, socket = play.harness()
    play.from_harness(harness, Frame("s", Resume(), MARK), Frame("s", Handshake(b"1"), MARK))
    play.from_environment(Frame("s", Handshake(b"2")))
    play.environment.frames()
    play.router.harness_closed(harness)
    assert play.environment.resets() == ["s"]
    assert len(socket.sent) == 1


def test_a_newer_socket_of_an_environment_replaces_the_older() -> None:
    play = Play()
    _, plain = play.stream("plain")
    _, acked = play.stream("acked", acked=True)
    before, play.environment = play.environment, FakeSocket()
    play.router.environment_opened("reg", play.environment)
    assert before.closed == 1000
    assert plain.resets() == ["plain"]
    assert acked.sent == []
    play.router.environment_closed("reg", before)  # the old one's end means nothing any more
    assert play.router.is_online("reg")
    play.router.environment_frame("reg", before, encode(Frame("acked", Ack(), 1)))
    assert acked.sent == []


def test_superseding_ends_everything() -> None:
    play = Play()
    _, plain = play.stream("plain")
    _, acked = play.stream("acked", acked=True)
    play.router.supersede("reg")
    assert (plain.resets(), acked.resets()) == (["plain"], ["acked"])
    assert play.environment.closed == 1000
    assert not play.router.is_online("reg")
    play.router.supersede("never heard of")


def test_a_registration_that_its_own_environment_has_replaced() -> None:
    """Its streams go on, and it ends with the last of them, or with its successor."""
    play = Play()
    harness, _ = play.stream()
    play.router.retire("reg", "next")
    play.router.retire("unheard-of", "next")
    play.router.end_retired()
    play.from_harness(harness, Frame("s", Data(0, b"x")))
    assert play.environment.frames() == [Frame("s", Data(0, b"x"))]
    play.router.harness_closed(harness)
    play.router.end_retired()
    assert (play.environment.closed, play.router.registrations(), play.router.retired) == (1000, set(), {})

    play = Play()
    _, socket = play.stream()
    play.router.retire("reg", "next")
    play.router.revoke("next")
    assert (socket.resets(), play.environment.closed, play.router.retired) == (["s"], 1008, {})


def test_a_stream_from_before_a_restart_goes_on() -> None:
    play = Play()
    harness, socket = play.harness()
    call = Frame("s", Resume(7), 3)
    play.from_harness(harness, call)
    assert play.environment.frames() == [call]
    play.router.harness_closed(harness)
    assert play.environment.sent == []  # it counts as acked, so it waits
    assert socket.closed is None


def test_a_harness_without_its_environment() -> None:
    play = Play()
    harness, socket = play.harness()
    play.router.environment_closed("reg", play.environment)
    play.from_harness(harness, Frame("s", Resume()))
    assert (socket.resets(), socket.closed) == (["s"], 1001)


# What ends because a key is revoked ----------------------------------------------------------------


@pytest.mark.parametrize("acked", [True, False])
def test_a_harness_that_is_revoked_ends_at_both_ends(acked: bool) -> None:
    play = Play()
    harness, socket = play.stream(acked=acked)
    play.router.harness_revoked(harness)
    assert [frame.body for frame in socket.frames()] == [Reset("key_revoked")]
    assert socket.closed == 1008
    assert play.environment.resets() == ["s"]
    assert play.router.stream_count == 0


# Who is slow ---------------------------------------------------------------------------------------


def test_a_harness_that_fills_its_environment_is_not_read() -> None:
    play = Play()
    greedy, greedy_socket = play.stream("greedy")
    _, other_socket = play.stream("other")
    play.environment.full = True
    play.from_harness(greedy, Frame("greedy", Data(0, b"x")))
    assert (greedy_socket.reading, other_socket.reading) == (False, True)
    play.environment.full = False
    play.router.environment_drained("reg")
    assert greedy_socket.reading


def test_a_slow_harness_of_a_plain_stream_is_waited_for_but_not_for_long() -> None:
    play = Play()
    slow, slow_socket = play.stream("slow")
    _, quick_socket = play.stream("quick")
    slow_socket.full = True
    play.from_environment(Frame("slow", Data(0, b"x")))
    assert not play.environment.reading
    slow_socket.full = False
    play.router.harness_drained(slow)
    assert play.environment.reading

    slow_socket.full = True
    play.from_environment(Frame("slow", Data(1, b"x")))
    assert not play.environment.reading
    slow_socket.frames()
    play.loop.advance(SLOW_SECONDS)
    assert play.environment.reading
    assert slow_socket.resets() == ["slow"]
    assert play.environment.resets() == ["slow"]
    play.from_environment(Frame("quick", Data(0, b"y")))
    assert len(quick_socket.frames()) == 1


def test_a_slow_harness_that_goes_away_frees_its_environment() -> None:
    play = Play()
    slow, slow_socket = play.stream("slow")
    slow_socket.full = True
    play.from_environment(Frame("slow", Data(0, b"x")))
    play.router.harness_closed(slow)
    assert play.environment.reading


def test_a_slow_harness_of_an_acked_stream_costs_only_itself() -> None:
    play = Play()
    _, socket = play.stream(acked=True)
    socket.full = socket.overflowing = True
    play.from_environment(Frame("s", Data(0, b"x"), 1))
    assert play.environment.reading
    assert play.router.dropped == 1
    assert play.router.stream_count == 1


def test_overflow_resets_a_plain_stream() -> None:
    play = Play()
    _, socket = play.stream()
    socket.overflowing = True
    play.from_environment(Frame("s", Data(0, b"x")))
    assert play.environment.resets() == ["s"]
    assert play.router.stream_count == 0
    play = Play()
    harness, socket = play.stream()
    play.environment.overflowing = True
    play.from_harness(harness, Frame("s", Data(0, b"x")))
    assert socket.resets() == ["s"]
    acked = Play()
    harness, socket = acked.stream(acked=True)
    acked.environment.overflowing = True
    acked.from_harness(harness, Frame("s", Data(0, b"x"), 1))
    assert socket.sent == []


# Whatever happens ----------------------------------------------------------------------------------


IDS = st.sampled_from(["a", "b", "c"])

BODIES = st.one_of(
    st.builds(Data, st.integers(0, 9), st.just(b"x")),
    st.sampled_from([Ack(), Heartbeat(), Resume(), Resume(3), Reset("x"), Handshake(b"h")]),
)

FRAMES = st.builds(Frame, IDS, BODIES, st.sampled_from([0, 5, MARK]))

STEPS = st.one_of(
    st.tuples(st.just("harness"), st.integers(0, 2), FRAMES),
    st.tuples(st.just("environment"), FRAMES),
    st.tuples(st.sampled_from(["close", "full", "drain", "open"]), st.integers(0, 2)),
    st.tuples(st.sampled_from(["lose", "return", "supersede", "wait"])),
)


@given(st.lists(STEPS, max_size=60))
@settings(max_examples=200)
def test_whatever_happens_frames_reach_only_their_own(steps: list[tuple[Any, ...]]) -> None:
    """No order of events breaks the router, and no harness ever hears of a stream that is not its own."""
    play = Play()
    harnesses = [play.harness(f"key {number % 2}") for number in range(3)]
    claimed: dict[int, set[str]] = {id(socket): set() for _, socket in harnesses}
    for name, *arguments in steps:
        if name == "harness":
            harness, socket = harnesses[arguments[0]]
            claimed[id(socket)].add(arguments[1].stream_id)
            play.from_harness(harness, arguments[1])
        elif name == "environment":
            play.from_environment(arguments[0])
        elif name == "close":
            play.router.harness_closed(harnesses[arguments[0]][0])
        elif name == "open":
            harnesses[arguments[0]] = play.harness(f"key {arguments[0] % 2}")
            claimed[id(harnesses[arguments[0]][1])] = set()
        elif name == "full":
            harnesses[arguments[0]][1].full = True
        elif name == "drain":
            harnesses[arguments[0]][1].full = False
            play.router.harness_drained(harnesses[arguments[0]][0])
        elif name == "lose":
            play.router.environment_closed("reg", play.environment)
        elif name == "return":
            play.environment = FakeSocket()
            play.router.environment_opened("reg", play.environment)
        elif name == "supersede":
            play.router.supersede("reg")
        else:
            play.loop.advance(7.0)
        for _, socket in harnesses:
            assert {frame.stream_id for frame in socket.frames()} <= claimed[id(socket)]
    for harness, _ in harnesses:
        play.router.harness_closed(harness)
    play.router.environment_closed("reg", play.environment)
    play.loop.advance(60.0)
    assert play.router.streams() == {}
