"""Head and tail, to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.agent.buffer import HeadTailBuffer


def filled(capacity: int, *pushes: bytes) -> HeadTailBuffer:
    buffer = HeadTailBuffer(capacity)
    for data in pushes:
        buffer.push(data)
    return buffer


@pytest.mark.parametrize(
    ("capacity", "pushes", "head", "tail", "omitted"),
    [
        (10, (b"0123456789", b"ab"), b"01234", b"789ab", 2),
        (10, (b"0123456789", b"ABCDEFGHIJK"), b"01234", b"GHIJK", 11),
        (10, (b"01", b"234", b"567", b"89", b"a"), b"01234", b"6789a", 1),
        (7, (b"abcdefgh", b"ij"), b"abc", b"ghij", 3),
        (1, (b"abc",), b"", b"c", 2),
        (0, (b"abc",), b"", b"", 3),
        (10, (b"", b"abc", b""), b"abc", b"", 0),
    ],
)
def test_what_is_kept(
    capacity: int, pushes: tuple[bytes, ...], head: bytes, tail: bytes, omitted: int
) -> None:
    buffer = filled(capacity, *pushes)
    assert (buffer.head, buffer.tail, buffer.omitted) == (head, tail, omitted)
    assert buffer.total == sum(map(len, pushes))


def test_the_marker() -> None:
    assert filled(10, b"0123456789", b"ab").joined() == b"01234\n... 2 bytes omitted ...\n789ab"
    assert filled(10, b"0123456789", b"ab").joined(marker=False) == b"01234789ab"
    assert filled(10, b"0123456789").joined() == b"0123456789"


def test_the_live_check_of_the_specification() -> None:
    """400000 lines of eight bytes, as a command of the reference printed them."""
    buffer = HeadTailBuffer()
    text = b"".join(b"%07d\n" % number for number in range(400_000))
    for start in range(0, len(text), 65_536):
        buffer.push(text[start : start + 65_536])
    joined = buffer.joined()
    assert len(joined) == 1_048_607
    assert b"0065535\n\n... 2151424 bytes omitted ...\n" in joined
    assert joined.endswith(b"0399999\n")


PIECES = st.lists(st.binary(max_size=30))
CAPACITY = st.integers(0, 40)


@given(CAPACITY, PIECES)
def test_the_size_of_the_pieces_does_not_matter(capacity: int, pieces: list[bytes]) -> None:
    one, many = filled(capacity, b"".join(pieces)), filled(capacity, *pieces)
    assert (one.head, one.tail, one.omitted) == (many.head, many.tail, many.omitted)
    assert many.retained <= capacity
    whole = b"".join(pieces)
    assert whole.startswith(many.head)
    assert whole.endswith(many.tail)
    assert many.total == len(whole)


@given(CAPACITY, st.lists(PIECES, max_size=4))
def test_merging_is_pushing(capacity: int, streams: list[list[bytes]]) -> None:
    merged, pushed, drained = HeadTailBuffer(capacity), HeadTailBuffer(capacity), HeadTailBuffer(capacity)
    source = HeadTailBuffer(capacity)
    for pieces in streams:
        merged.merge(filled(capacity, *pieces))
        for piece in pieces:
            pushed.push(piece)
            source.push(piece)
        drained.merge(source.drain())
        assert not source
    for other in (merged, drained):
        assert (other.head, other.tail, other.omitted) == (pushed.head, pushed.tail, pushed.omitted)
