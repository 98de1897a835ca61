"""Framing: LF ends a line, nothing else does, and the size of the pieces does not matter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.events.lines import Line, LineSplitter, split_lines, split_lines_async


def lines(*blocks: bytes, most: int = 1000) -> list[tuple[int, bytes, bool]]:
    return [(line.number, line.data, line.terminated) for line in split_lines(blocks, most)]


def test_lines_and_their_numbers() -> None:
    assert lines(b"a\n\nb\r\n \t\nc") == [(1, b"a", True), (3, b"b", True), (5, b"c", False)]
    assert lines(b"") == lines() == lines(b"\n\r\n\n") == []


def test_only_lf_ends_a_line() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\rg"
    assert lines(text.encode() + b"\n") == [(1, text.encode(), True)]


def test_one_cr_and_one_bom_are_taken_off() -> None:
    assert lines(b"\xef\xbb\xbfa\r\r\n\xef\xbb\xbfb\n") == [(1, b"a\r", True), (2, b"\xef\xbb\xbfb", True)]
    assert lines(b"\xef", b"\xbb", b"\xbfa") == [(1, b"a", False)], "also when it comes in pieces"


def test_a_line_that_is_too_long_is_told_and_the_next_is_read() -> None:
    found = list(split_lines([b"x" * 900 + b"\n" + b"y" * 1001 + b"\nz\n"], 1000))
    assert [(line.size, line.overlong) for line in found] == [(900, False), (1001, True), (1, False)]
    assert found[1].data == b"y" * 256
    assert not next(split_lines([b"y" * 1000 + b"\n"], 1000)).overlong


def test_a_line_that_never_ends_takes_no_memory() -> None:
    splitter = LineSplitter(1000)
    for _ in range(1000):
        assert list(splitter.feed(b"x" * 1000)) == []
    assert sum(map(len, splitter._parts)) <= 1000
    assert [line.size for line in splitter.end()] == [1_000_000]


@given(st.lists(st.binary(max_size=40)), st.integers(1, 50))
def test_the_size_of_the_pieces_does_not_matter(blocks: list[bytes], most: int) -> None:
    whole = list(split_lines([b"".join(blocks)], most))
    assert list(split_lines(blocks, most)) == whole
    assert list(split_lines([bytes([byte]) for byte in b"".join(blocks)], most)) == whole

    async def trickle() -> AsyncIterator[bytes]:
        for block in blocks:
            yield block

    async def gather() -> list[Line]:
        return [line async for line in split_lines_async(trickle(), most)]

    assert asyncio.run(gather()) == whole


@pytest.mark.parametrize("size", [1, 2, 3, 65_536])
def test_every_byte_is_in_a_line(size: int) -> None:
    data = b"".join(b"%d" % number + b"x" * (number % 97) + b"\n" for number in range(2000))
    blocks = [data[start : start + size] for start in range(0, len(data), size)]
    assert b"".join(line.data + b"\n" for line in split_lines(blocks)) == data
