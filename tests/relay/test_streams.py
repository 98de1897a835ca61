"""Every row of the table of what an environment does with a frame."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.relay.channel import LINK_BYTES
from exec_server.relay.frame import (
    NOTHING_RECEIVED,
    WIDE,
    Ack,
    Data,
    Frame,
    Handshake,
    Heartbeat,
    Reset,
    Resume,
    encode,
)
from exec_server.relay.keys import Identity
from exec_server.relay.noise import Initiator, prologue
from exec_server.relay.stream import PROTOCOL_ERROR

from .support import EXECUTOR, HARNESS, HandHarness, MemoryLink, Site


def hello(stream_id: str, authorization: bytes = b"x", key: Identity = EXECUTOR) -> Frame:
    message = Initiator(HARNESS, key.public, prologue("env-1", "reg-1", stream_id)).write(authorization)
    return Frame(stream_id, Handshake(message))


def reset(stream_id: str) -> Frame:
    return Frame(stream_id, Reset(PROTOCOL_ERROR))


@pytest.mark.parametrize(
    ("acks", "offered", "answered"),
    [
        (True, (NOTHING_RECEIVED, WIDE), (NOTHING_RECEIVED, WIDE)),
        (True, (NOTHING_RECEIVED, 0), (NOTHING_RECEIVED, 0)),
        (True, (NOTHING_RECEIVED, 2), (NOTHING_RECEIVED, 0)),
        (True, (0, 0), (0, 0)),
        (False, (NOTHING_RECEIVED, WIDE), (0, 0)),
    ],
)
def test_what_a_harness_offers_is_answered_in_kind(
    acks: bool, offered: tuple[int, int], answered: tuple[int, int]
) -> None:
    site = Site(acks=acks)
    (answer,) = site.give(Frame("s", hello("s").body, *offered))
    assert isinstance(answer.body, Handshake)
    assert (answer.ack, answer.ack_bits) == answered


@pytest.mark.parametrize("acks", [True, False])
def test_a_stream_is_validated_opened_and_served(acks: bool) -> None:
    site = Site()
    harness = HandHarness(site, acks=acks)
    channel = harness.open()
    (question,) = site.questions
    assert question[:3] == ("stream-1", HARNESS.public, "let me in")
    assert channel.stream.acked is acks
    channel.send(b'{"id":1}')
    channel.send(bytes(100_000).replace(b"\0", b" "))
    harness.exchange()
    assert harness.receiver.messages == [b'{"id":1}', b" " * 100_000]


def test_an_environment_without_acks_answers_as_the_reference_does() -> None:
    site = Site(acks=False)
    harness = HandHarness(site, acks=True)
    assert not harness.open().stream.acked
    assert harness.channel is not None
    harness.channel.send(b"{}")
    harness.site.loop.settle()
    (frame,) = site.give(*harness.link.frames())
    assert not frame.acknowledges


def test_what_is_unknown() -> None:
    site = Site()
    assert site.give(Frame("s", Data(0, b"x"))) == [reset("s")]
    assert site.give(Frame("s", Heartbeat())) == [reset("s")]
    assert site.give(Frame("s", Resume(1))) == [reset("s")]
    assert site.give(Frame("s", Resume(0), 5)) == [reset("s")]
    for claim in (Resume(), Ack(), Reset("x")):
        assert site.give(Frame("s", claim)) == []
    assert site.give(Frame("s", Resume(), 0xFFFFFFFF)) == []
    site.streams.frame_arrived(b"\xff\xff garbage")
    site.streams.frame_arrived(encode(Frame("s", Reset(""))))
    assert site.link.frames() == []


@pytest.mark.parametrize(
    "bad",
    [
        hello("s", key=Identity.generate()),
        Frame("s", hello("other").body),
        Frame("s", Handshake(b"garbage")),
        Frame("s", Handshake(bytes(3568))),
        hello("s", b"a" * 4097),
        hello("s", b"\xff\xfe"),
    ],
    ids=["key", "prologue", "garbage", "zeros", "too long", "not UTF-8"],
)
def test_handshakes_that_fail_are_not_asked_about(bad: Frame) -> None:
    site = Site()
    assert site.give(bad) == [reset("s")]
    assert site.questions == []


def test_an_authorization_may_be_long_or_empty() -> None:
    site = Site()
    assert site.said(hello("a", b"a" * 4096), hello("b", b"")) == ["Handshake", "Handshake"]
    assert [question[2] for question in site.questions] == ["a" * 4096, ""]


def test_who_the_registry_does_not_know_is_refused() -> None:
    site = Site()
    site.answer = False
    assert site.give(hello("s")) == [reset("s")]
    site.answer = None
    assert site.give(hello("t")) == []
    site.questions[-1][3].fail(OSError("the registry is gone"))
    assert site.link.frames() == [reset("t")]
    assert site.receivers == []


def test_validation_blocks_nobody() -> None:
    site = Site()
    harness = HandHarness(site)
    channel = harness.open()
    site.answer = None
    site.give(hello("slow"))
    channel.send(b"{}")
    harness.exchange()
    assert harness.receiver.messages == [b"{}"]
    site.questions[-1][3].resolve(True)
    assert [type(frame.body) for frame in site.link.frames()] == [Handshake]


def test_during_validation() -> None:
    site = Site()
    site.answer = None
    first = hello("s")
    assert site.give(first) == []
    assert site.give(first, Frame("s", Ack()), Frame("s", Heartbeat()), Frame("s", Resume(5))) == []
    assert site.give(hello("s")) == [reset("s")]
    assert site.cancelled == 1
    assert site.give(first) == []
    assert site.give(Frame("s", Data(0, b"x"))) == [reset("s")]
    assert site.cancelled == 2
    assert site.give(first) == []
    assert site.give(Frame("s", Reset("never mind"))) == []
    assert site.cancelled == 3
    for question in site.questions:
        question[3].resolve(True)  # too late, and for streams that are gone
    assert site.link.frames() == []
    assert len(site.streams) == 0


def test_a_handshake_on_an_open_stream() -> None:
    site = Site()
    harness = HandHarness(site)
    (answer,) = site.give(harness.claim, harness.hello)
    assert site.give(harness.hello) == [answer]  # doubled on the way
    site.link.backlog = 4 * LINK_BYTES
    assert site.give(harness.hello) == []  # nobody reads the answers, so they would pile up
    site.link.backlog = 0
    assert site.give(hello("stream-1")) == [reset("stream-1")]
    channel = harness.answered(answer)
    channel.send(b"[1]")
    harness.exchange()
    assert harness.receiver.messages == [b"[1]"]
    assert site.give(harness.hello) == [reset("stream-1")]
    channel.send(b"[2]")
    harness.exchange()
    assert harness.receiver.messages == [b"[1]", b"[2]"]
    assert len(site.questions) == 1


def test_a_broken_record_ends_only_its_stream() -> None:
    site = Site()
    one, other = HandHarness(site, "one"), HandHarness(site, "other")
    one.open()
    other.open()
    (said,) = site.give(Frame("one", Data(0, bytes(40))))
    assert (said.stream_id, said.body) == ("one", Reset(PROTOCOL_ERROR))
    assert site.receivers[0].closed is not None
    assert len(site.streams) == 1
    assert other.channel is not None
    other.channel.send(b"{}")
    other.exchange()
    assert other.receiver.messages == [b"{}"]


def test_a_reset_ends_a_stream_without_a_word() -> None:
    site = Site()
    HandHarness(site).open()
    assert site.give(Frame("stream-1", Reset("closed"))) == []
    assert site.receivers[0].closed is not None
    assert len(site.streams) == 0
    assert site.give(Frame("stream-1", Data(0, b"x"))) == [reset("stream-1")]


def test_an_id_may_be_used_again() -> None:
    site = Site()
    HandHarness(site).open()
    site.give(Frame("stream-1", Reset("closed")))
    again = HandHarness(site)
    again.open().send(b"{}")
    again.exchange()
    assert again.receiver.messages == [b"{}"]


def test_how_many_streams_and_validations() -> None:
    site = Site()
    for number in range(128):
        assert site.said(hello(f"s{number}")) == ["Handshake"]
    assert site.give(hello("one too many")) == [reset("one too many")]
    site.give(Frame("s0", Reset("closed")))
    assert site.said(hello("now")) == ["Handshake"]

    site = Site()
    site.answer = None
    for number in range(32):
        assert site.give(hello(f"s{number}")) == []
    assert site.give(hello("one too many")) == [reset("one too many")]
    assert len(site.questions) == 32


def test_the_pause_after_eight_failures_and_its_end() -> None:
    site = Site()
    HandHarness(site, "open").open()
    for number in range(8):
        assert site.give(Frame(f"s{number}", Handshake(b"x"))) == [reset(f"s{number}")]
    asked = len(site.questions)
    assert site.give(hello("good")) == [reset("good")]
    assert len(site.questions) == asked
    assert len(site.streams) == 1
    site.loop.advance(9.9)
    site.link.frames()
    assert site.give(hello("good")) == [reset("good")]
    site.loop.advance(0.1)
    site.link.frames()
    assert site.said(hello("good")) == ["Handshake"]
    for number in range(7):
        site.give(Frame(f"t{number}", Handshake(b"x")))
    assert site.said(hello("still good")) == ["Handshake"]


def test_a_new_connection_has_no_failures() -> None:
    site = Site()
    for number in range(8):
        site.give(Frame(f"s{number}", Handshake(b"x")))
    site.streams.link_lost("cut")
    site.streams.link_found(site.link)
    assert site.said(hello("good")) == ["Handshake"]


def test_a_lost_connection_ends_plain_streams_and_validations_and_keeps_acked_ones() -> None:
    site = Site()
    plain, acked = HandHarness(site, "plain", acks=False), HandHarness(site, "acked")
    plain.open()
    acked_channel = acked.open()
    site.answer = None
    site.give(hello("pending"))
    site.streams.link_lost("cut")
    assert site.cancelled == 1
    assert [receiver.closed for receiver in site.receivers] == ["cut", None]

    acked_channel.send(b'"meanwhile"')
    site.loop.settle()
    acked.link.frames()  # on the way when the connection broke, and gone
    site.receivers[1].channel.send(b'"late"')  # type: ignore[union-attr]  # set by the site
    site.loop.advance(20)
    acked.link.frames()
    assert site.link.frames() == []

    site.link = MemoryLink()
    site.streams.link_found(site.link)
    call = site.link.frames()
    assert [type(frame.body) for frame in call] == [Resume]
    for frame in call:
        acked_channel.frame_received(frame)
    acked.exchange()
    site.loop.advance(10)
    acked.exchange()
    assert acked.receiver.messages == [b'"late"', b'"meanwhile"']


def test_acked_streams_wait_thirty_seconds() -> None:
    site = Site()
    HandHarness(site).open()
    site.streams.link_lost("cut")
    site.loop.advance(29.9)
    assert site.receivers[0].closed is None
    site.loop.advance(0.2)
    assert site.receivers[0].closed == "cut"
    assert len(site.streams) == 0


def test_closing_tells_every_peer() -> None:
    site = Site()
    HandHarness(site, "one").open()
    HandHarness(site, "two", acks=False).open()
    site.streams.close()
    assert [(frame.stream_id, frame.body) for frame in site.link.frames()] == [
        ("one", Reset("closed")),
        ("two", Reset("closed")),
    ]
    assert all(receiver.closed for receiver in site.receivers)


def test_a_flood_of_unknown_streams_does_not_fill_memory() -> None:
    site = Site()
    site.link.backlog = 100 * 1024 * 1024
    assert site.give(*(Frame(f"s{number}", Data(0, b"x")) for number in range(100))) == []


def test_streams_share_a_full_connection() -> None:
    """One that has much to say does not keep the others from saying little."""
    site = Site(echo=False)
    loud, quiet = HandHarness(site, "loud", acks=False), HandHarness(site, "quiet", acks=False)
    loud.open()
    quiet.open()
    site.link.backlog = 2 * 1024 * 1024
    channels = [receiver.channel for receiver in site.receivers]
    assert channels[0] is not None
    assert channels[1] is not None
    channels[0].send(b" " * 8_000_000)
    channels[1].send(b"{}")
    site.loop.settle()
    assert site.link.frames() == []
    site.link.backlog = 0
    site.streams.link_drained()
    assert [frame.stream_id for frame in site.link.frames()][-1] == "quiet"


HELLO_A = hello("a").body.payload  # type: ignore[union-attr]  # a handshake
IDS = st.sampled_from(["a", "b", "c", "stream-1"])
BODIES = st.one_of(
    st.builds(Data, st.integers(0, 200), st.binary(min_size=1, max_size=40)),
    st.just(Ack()),
    st.just(Heartbeat()),
    st.builds(Resume, st.integers(0, 5)),
    st.just(Reset("x")),
    st.builds(Handshake, st.sampled_from([b"garbage", bytes(3568), HELLO_A])),
)
FRAMES = st.builds(Frame, IDS, BODIES, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))


@given(st.lists(FRAMES | st.sampled_from(["lost", "found", "later", "yes", "no"]), max_size=40))
@settings(max_examples=150)
def test_whatever_comes_costs_only_itself(happenings: list[Frame | str]) -> None:
    """No frame, in any order and at any time, breaks an environment or makes it keep more than it should."""
    site = Site()
    for happening in happenings:
        if happening == "lost":
            site.streams.link_lost("cut")
        elif happening == "found":
            site.streams.link_found(site.link)
        elif happening == "later":
            site.loop.advance(3.0)
        elif happening in ("yes", "no"):
            site.answer = happening == "yes"
        else:
            site.streams.frame_arrived(encode(happening))  # type: ignore[arg-type]  # a frame
        site.loop.settle()
    assert len(site.streams) <= len({"a", "b", "c", "stream-1"})
    site.streams.link_found(site.link)
    site.loop.advance(20.0)
    site.answer = True
    site.link.frames()
    assert site.said(hello("fresh")) == ["Handshake"]
