"""Recorded frames and handshakes, broken in thousands of ways: refused, and never anything else."""

from __future__ import annotations

import contextlib
import tracemalloc

from exec_server.relay.frame import (
    BadFrame,
    Frame,
    Handshake,
    Reset,
    _decode_any,
    _decode_record,
    decode,
    encode,
)
from exec_server.relay.noise import HandshakeFailed, Initiator, Responder, prologue
from relay.support import EXECUTOR, HARNESS, HandHarness, Site
from relay.vectors import FRAMES, VECTORS
from support.mutation import mutations

HONEST, HOSTILE = "6b8f6f0a-7f3e-4a53-9d53-5d8f1f9b2c11", "6b8f6f0a-7f3e-4a53-9d53-5d8f1f9b2c12"


def conversation(stream_id: str) -> tuple[list[bytes], list[bytes]]:
    """Everything that a harness and an environment say to each other in a short while."""
    site = Site()
    harness = HandHarness(site, stream_id)
    there, back = [encode(harness.claim), encode(harness.hello)], []
    for message in there:
        site.streams.frame_arrived(message)
    site.loop.settle()
    back += site.link.sent
    channel = harness.answered(site.link.frames()[0])
    for message in (b"{}", b'{"a":"' + b"x" * 200_000 + b'"}'):
        channel.send(message)
        while True:
            site.loop.settle()
            said, answered = list(harness.link.sent), list(site.link.sent)
            harness.link.sent.clear()
            site.link.sent.clear()
            if not said and not answered:
                break
            there += said
            back += answered
            for frame in said:
                site.streams.frame_arrived(frame)
            for frame in answered:
                channel.frame_received(decode(frame))
    assert harness.receiver.messages == [b"{}", b'{"a":"' + b"x" * 200_000 + b'"}']
    there.append(encode(Frame(stream_id, Reset("closed"))))
    return there, back


def test_the_two_ways_to_read_a_frame_agree() -> None:
    """The fast one for records reads what the thorough one reads, or leaves it to that one."""
    there, back = conversation(HOSTILE)
    known = [bytes.fromhex(frame["hex"]) for frame in FRAMES]
    fast = 0
    for message in mutations([*there, *back, *known], 6000, seed=1):
        quick = _decode_record(message)
        try:
            thorough: Frame | None = _decode_any(message)
        except BadFrame:
            thorough = None
        if quick is not None:
            fast += 1
            assert quick == thorough
            assert decode(memoryview(message)) == thorough
    assert fast > 100
    assert all(_decode_record(message) is not None for message in there[2:-1] if len(message) > 1000)


def test_a_frame_takes_no_more_memory_than_it_has() -> None:
    there, back = conversation(HOSTILE)
    broken = list(mutations([*there, *back], 1500, seed=2))
    tracemalloc.start()
    try:
        for message in broken:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with contextlib.suppress(BadFrame):
                decode(message)
            assert tracemalloc.get_traced_memory()[1] - before < 16_384 + 2 * len(message)
    finally:
        tracemalloc.stop()


def test_broken_handshakes_fail_on_both_sides() -> None:
    where = prologue("env-1", "reg-1", HOSTILE)
    first = Initiator(HARNESS, EXECUTOR.public, where).write(b"let me in")
    for message in mutations([first], 300, seed=3):
        with contextlib.suppress(HandshakeFailed):
            Responder(EXECUTOR, where).read(message)
            assert message == first
    second = bytes.fromhex(VECTORS[0]["msg2"])
    initiator_sees(second, where)


def initiator_sees(recorded: bytes, where: bytes) -> None:
    """A harness is answered with what is not its answer: by others, and broken."""
    initiator = Initiator(HARNESS, EXECUTOR.public, where)
    responder = Responder(EXECUTOR, where)
    responder.read(initiator.write(b"let me in"))
    second, _, _ = responder.write()
    for message in mutations([second, recorded], 300, seed=4):
        fresh = Initiator(HARNESS, EXECUTOR.public, where)
        fresh.write(b"let me in")
        with contextlib.suppress(HandshakeFailed):
            fresh.read(message)
            raise AssertionError("somebody else's answer was taken")


def test_a_hostile_stream_costs_only_itself() -> None:
    """A whole conversation, replayed and broken, at an environment that has an honest peer as well."""
    site = Site()
    honest = HandHarness(site, HONEST)
    channel = honest.open()
    there, back = conversation(HOSTILE)
    for number, message in enumerate(mutations([*there, *back], 3000, seed=5)):
        site.streams.frame_arrived(message)
        site.loop.settle()
        site.link.sent.clear()
        if number % 500 == 0:
            channel.send(b'{"id":%d}' % number)
            honest.exchange()
            site.loop.advance(1.0)
    assert len(site.streams) <= 2
    assert honest.receiver.messages == [b'{"id":%d}' % number for number in range(0, 3000, 500)]
    assert honest.receiver.closed is None


def test_a_replayed_handshake_opens_nothing() -> None:
    """Not under another id, which it is bound to; under its own the registry is asked, which says no."""
    site = Site()
    there, _ = conversation(HOSTILE)
    site.answer = False
    hello = decode(there[1])
    assert isinstance(hello.body, Handshake)
    assert site.said(hello) == ["Reset"]
    assert site.said(Frame(HONEST, hello.body, hello.ack)) == ["Reset"]
    assert len(site.questions) == 1
    assert len(site.streams) == 0
