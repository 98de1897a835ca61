"""rendezvous/claims.py: who may have a stream, and who is to blame when there is none."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.relay.frame import Ack, Data, Frame, Handshake, Heartbeat, Reset, Resume
from support.router import MARK, Play

# What a first frame may be -------------------------------------------------------------------------


def test_a_stream_begins_with_resume_or_handshake() -> None:
    play = Play()
    for first in (Data(0, b"x"), Heartbeat(), Ack()):
        harness, socket = play.harness()
        play.from_harness(harness, Frame("s", first))
        assert (socket.closed, play.environment.sent) == (1008, [])
    harness, socket = play.harness()
    play.from_harness(harness, Frame("s", Handshake(b"1")))
    assert (socket.closed, len(play.environment.sent)) == (None, 1)


@pytest.mark.parametrize("body", [Reset("closed"), Data(0, b"x"), Heartbeat()])
def test_what_begins_no_stream(body: Any) -> None:
    play = Play()
    harness, socket = play.harness()
    play.from_harness(harness, Frame("s", body))
    assert (socket.closed, play.environment.sent) == (1008, [])


@pytest.mark.parametrize("name", ["x" * 257, "\x1b[2J", "a\nb", "\u00e4" * 129])
def test_ids_nobody_wants_to_keep(name: str) -> None:
    play = Play()
    harness, socket = play.harness()
    play.from_harness(harness, Frame(name, Resume()))
    assert (socket.closed, play.environment.sent) == (1008, [])


def test_a_stream_of_another_harness_cannot_be_taken() -> None:
    play = Play()
    play.stream("s", acked=True)
    for key, claim in (
        ("other key", Frame("s", Resume(3), MARK)),
        ("key", Frame("s", Resume())),
        ("key", Frame("s", Handshake(b"1"), MARK)),
    ):
        thief, socket = play.harness(key)
        play.from_harness(thief, claim)
        assert socket.resets() == ["s"]
        assert play.environment.sent == []
    plain = Play()
    plain.stream("s")
    thief, socket = plain.harness()
    plain.from_harness(thief, Frame("s", Resume(1), MARK))
    assert socket.resets() == ["s"]


def test_one_socket_carries_one_stream_at_a_time() -> None:
    play = Play()
    harness, socket = play.stream("s")
    play.from_harness(harness, Frame("t", Resume()))
    assert socket.resets() == ["t"]
    play.from_harness(harness, Frame("s", Reset("closed")))
    assert play.environment.resets() == ["s"]
    play.from_harness(harness, Frame("t", Resume()))
    assert [frame.stream_id for frame in play.environment.frames()] == ["t"]


# How many ------------------------------------------------------------------------------------------


def test_how_many_streams() -> None:
    play = Play()
    for number in range(96):
        play.stream(f"s{number}", caller="greedy")
    for caller, begun in (("greedy", 96), ("other", 128)):
        for number in range(96, begun):
            play.stream(f"s{number}", caller=caller)
        harness, socket = play.harness(caller=caller)
        play.from_harness(harness, Frame("one too many", Resume()))
        assert [frame.body for frame in socket.frames()] == [Reset("too_many_streams")]
        assert play.environment.sent == []


def test_a_claim_without_a_handshake_takes_no_place_and_does_not_last() -> None:
    play = Play()
    idle = [play.harness(caller="idle") for _ in range(130)]
    for number, (harness, _) in enumerate(idle):
        play.from_harness(harness, Frame(f"i{number}", Resume()))
    # Of one caller only so many, and none of them keeps anybody out.
    assert sum(bool(socket.resets()) for _, socket in idle) == 130 - 64
    play.environment.frames()
    for number in range(96):
        play.stream(f"s{number}", caller="other")
    play.loop.advance(9.9)
    assert [socket.closed for _, socket in idle] == [None] * 130
    play.loop.advance(0.2)
    assert [socket.closed for _, socket in idle][:64] == [1008] * 64
    assert play.router.stream_count == 96


def test_a_handshake_that_is_never_answered_ends() -> None:
    play = Play()
    harness, socket = play.harness()
    play.from_harness(harness, Frame("s", Resume()), Frame("s", Handshake(b"1")))
    play.environment.frames()
    play.loop.advance(14.9)
    assert socket.closed is None
    play.loop.advance(0.2)
    assert (socket.resets(), socket.closed) == (["s"], 1008)
    assert play.environment.resets() == ["s"]


# Whose handshakes fail -----------------------------------------------------------------------------


def fail_handshake(play: Play, caller: str, reason: str = "noise_relay_protocol_error", ack: int = 0) -> str:
    """One that the environment refuses: what the harness is told, or "" if it never got that far."""
    harness, socket = play.harness(caller=caller)
    play.from_harness(harness, Frame("f", Resume(), ack), Frame("f", Handshake(b"rubbish"), ack))
    if len(play.environment.frames()) == 2:
        play.from_environment(Frame("f", Reset(reason)))
        told = socket.frames()[-1].body
        assert isinstance(told, Reset)
        play.router.harness_closed(harness)
        return told.reason
    assert [frame.body for frame in socket.frames()] == [Reset("handshakes_paused")]
    return ""


def test_whoever_fails_too_often_is_stopped_before_the_environment_shuts_its_door() -> None:
    play = Play()
    passed = 0
    for _ in range(12_000):  # forty minutes, every 0.2 s
        passed += fail_handshake(play, "bad") != ""
        play.loop.advance(0.2)
    assert passed <= 4 * 9  # pauses of 10, 20, 40, ... 600 s
    play.stream("good", caller="good")


def test_one_who_hangs_up_before_the_refusal_is_to_blame_as_well() -> None:
    play = Play()
    for number in range(4):
        harness, _ = play.harness(caller="bad")
        play.from_harness(harness, Frame(f"s{number}", Handshake(b"rubbish")))
        play.router.harness_closed(harness)
        assert len(play.environment.frames()) == 2  # and a reset
    assert fail_handshake(play, "bad") == ""


def test_nobody_is_to_blame_for_a_door_that_is_shut() -> None:
    play = Play()
    for caller in ("a", "b"):
        for _ in range(4):
            assert fail_handshake(play, caller) == "noise_relay_protocol_error"
    # Eight: the environment takes none for ten seconds. An end of ours is told why; others hear what it said.
    for _ in range(9):
        assert fail_handshake(play, "c", ack=MARK) == "handshakes_paused"
        assert fail_handshake(play, "c") == "noise_relay_protocol_error"
    play.loop.advance(10.1)
    play.stream("c", caller="c")
    # What the environment says for another reason than a bad handshake counts for nothing, either.
    for _ in range(9):
        assert fail_handshake(play, "d", reason="too_many_streams") == "too_many_streams"
