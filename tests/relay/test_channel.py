"""A stream as a channel: what its receiver is told, and when."""

from __future__ import annotations

import pytest

from exec_server.relay.channel import QUEUE_BYTES
from exec_server.relay.frame import Data, Frame, Heartbeat, Reset, Resume

from .support import HandHarness, MemoryLink, Site


def opened(*, acks: bool = True, echo: bool = False) -> tuple[Site, HandHarness]:
    site = Site(echo=echo)
    harness = HandHarness(site, acks=acks)
    harness.open()
    return site, harness


def test_messages_of_one_turn_share_a_frame() -> None:
    site, harness = opened()
    assert harness.channel is not None
    for number in range(50):
        harness.channel.send(b"[%d]" % number)
    site.loop.settle()
    assert len(harness.link.sent) == 1
    harness.exchange()
    assert site.receivers[0].messages == [b"[%d]" % number for number in range(50)]


def test_binary_messages_arrive_as_such_between_our_ends() -> None:
    site, harness = opened()
    assert harness.channel is not None
    assert harness.channel.carries_binary
    harness.channel.send_parts(b"\x01\x01", b"data", b"", binary=True)
    harness.channel.send_parts(b'{"a":', memoryview(b"1"), b"}", binary=False)
    harness.exchange()
    assert site.receivers[0].binary == [b"\x01\x01data"]
    assert site.receivers[0].messages == [b'{"a":1}']
    _, plain = opened(acks=False)
    assert plain.channel is not None
    assert not plain.channel.carries_binary


@pytest.mark.parametrize("acks", [True, False])
def test_a_receiver_that_pauses_gets_everything_later(acks: bool) -> None:
    site, harness = opened(acks=acks)
    assert harness.channel is not None
    theirs = site.receivers[0].channel
    assert theirs is not None
    theirs.pause_reading()
    harness.channel.send(b"[1]")
    harness.channel.send(b"[2]")
    harness.exchange()
    assert site.receivers[0].messages == []
    theirs.resume_reading()
    site.loop.settle()
    assert site.receivers[0].messages == [b"[1]", b"[2]"]


def test_who_fills_the_queue_is_told_to_pause_and_to_go_on() -> None:
    site, harness = opened()
    assert harness.channel is not None
    harness.link.backlog = 10 * 1024 * 1024  # the connection is full
    harness.channel.send(b" " * (QUEUE_BYTES // 2))
    assert not harness.receiver.paused
    harness.channel.send(b" " * QUEUE_BYTES)
    assert harness.receiver.paused
    assert harness.channel.unsent() > QUEUE_BYTES
    harness.link.backlog = 0
    harness.channel.link_drained()
    harness.exchange()
    assert not harness.receiver.paused
    assert harness.receiver.pauses == 1
    assert sum(map(len, site.receivers[0].messages)) == QUEUE_BYTES * 3 // 2


@pytest.mark.parametrize("acks", [True, False])
def test_closing_sends_what_is_unsent_first(acks: bool) -> None:
    site, harness = opened(acks=acks)
    assert harness.channel is not None
    harness.channel.send(b" " * 3_000_000)
    harness.channel.close()
    harness.channel.send(b"[never]")
    harness.exchange()
    site.loop.advance(1)
    harness.exchange()
    (receiver,) = site.receivers
    assert [len(message) for message in receiver.messages] == [3_000_000]
    assert receiver.closed is not None
    assert harness.receiver.closed == "closed"
    assert harness.ended == 1


def test_closing_does_not_wait_forever() -> None:
    site, harness = opened()
    assert harness.channel is not None
    harness.channel.send(b"[1]")
    harness.channel.close()
    site.loop.advance(4.9)
    assert harness.receiver.closed is None
    site.loop.advance(0.2)
    assert harness.receiver.closed == "closed"
    assert isinstance(harness.link.frames()[-1].body, Reset)


def test_abort_ends_at_once() -> None:
    _, harness = opened()
    assert harness.channel is not None
    harness.channel.send(b"[1]")
    harness.channel.abort()
    assert harness.receiver.closed == "closed"
    assert [type(frame.body) for frame in harness.link.frames()] == [Reset]
    harness.channel.abort()
    harness.channel.close()
    assert harness.ended == 1


def test_lost_frames_are_sent_again_by_the_clock() -> None:
    site, harness = opened()
    assert harness.channel is not None
    harness.channel.send(b"[1]")
    site.loop.settle()
    (lost,) = harness.link.frames()
    site.loop.advance(0.9)
    assert harness.link.frames() == []
    site.loop.advance(0.2)
    (again,) = harness.link.frames()
    assert isinstance(again.body, Data)
    assert again.body == lost.body


def test_an_idle_stream_beats_and_a_silent_one_is_called_for() -> None:
    site, harness = opened()
    site.loop.advance(15)
    assert [type(frame.body) for frame in harness.link.frames()] == [Heartbeat]
    site.loop.advance(30)
    kinds = [type(frame.body) for frame in harness.link.frames()]
    assert kinds == [Heartbeat, Resume]
    site.loop.advance(5.5)
    assert isinstance(harness.link.frames()[-1].body, Reset)
    assert harness.receiver.closed is not None


def test_two_idle_ends_keep_each_other_alive() -> None:
    site, harness = opened()
    for _ in range(600):
        site.loop.advance(1.0)
        harness.exchange()
    assert harness.receiver.closed is None
    assert site.receivers[0].closed is None


def test_a_message_that_cannot_be_sent_ends_the_channel(fresh_log: None) -> None:
    _, harness = opened()
    assert harness.channel is not None
    harness.channel.send(b"")
    assert harness.receiver.closed == "closed"


def test_a_closed_channel_tells_a_late_receiver() -> None:
    site = Site()
    harness = HandHarness(site)
    channel = harness.open()
    channel.abort()
    from .support import Remembering

    late = Remembering()
    channel.attach(late)
    assert late.closed == "closed"


def test_resuming_on_another_connection() -> None:
    site, harness = opened(echo=True)
    assert harness.channel is not None
    harness.channel.send(b"[1]")
    site.loop.settle()
    harness.link.frames()
    harness.channel.link_lost("cut")
    harness.channel.send(b"[2]")
    site.loop.advance(10)
    assert harness.link.frames() == []
    harness.link = MemoryLink()
    harness.channel.link_found(harness.link)
    harness.exchange()
    site.loop.advance(1)
    harness.exchange()
    assert harness.receiver.messages == [b"[1]", b"[2]"]


@pytest.mark.parametrize("acks", [True, False])
def test_what_arrived_before_the_end_is_delivered_before_it(acks: bool) -> None:
    site, harness = opened(acks=acks)
    assert harness.channel is not None
    (receiver,) = site.receivers
    assert receiver.channel is not None
    receiver.channel.pause_reading()
    harness.channel.send(b"[1]")
    site.loop.settle()
    harness.exchange()
    assert receiver.messages == []
    site.give(Frame("stream-1", Reset("closed")))
    assert receiver.messages == [b"[1]"]
    assert receiver.closed is not None
