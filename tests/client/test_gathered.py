"""client/gathered.py: parts that become one content."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.client import gathered
from exec_server.client.gathered import LARGE_BYTES, Gathered

BLOCK = 1024 * 1024


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@pytest.mark.parametrize("size", [0, 1, BLOCK, LARGE_BYTES - 1, LARGE_BYTES, 5 * BLOCK + 17])
@pytest.mark.parametrize("wrong_by", [0, -3, 3, -BLOCK, BLOCK, -(10**9), 10 * BLOCK])
def test_whatever_was_expected(size: int, wrong_by: int) -> None:
    content = pattern(size)
    target = Gathered(size + wrong_by)
    for at in range(0, size, BLOCK):
        target.put(at, memoryview(content)[at : at + BLOCK])
    target.put(size + BLOCK, b"")  # asked for ahead, and nothing was there
    found = target.finish()
    assert type(found) is bytes
    assert found == content


@given(st.permutations(range(6)), st.integers(0, 8 * BLOCK))
def test_in_any_order(order: list[int], expected: int) -> None:
    content = pattern(5 * BLOCK + 1000)
    target = Gathered(expected)
    for number in order:
        target.put(number * BLOCK, content[number * BLOCK : (number + 1) * BLOCK])
    assert target.finish() == content


def test_results_are_ordinary() -> None:
    """Bytes like any: hashable, equal to their like, and nobody else's memory."""
    target, other = Gathered(LARGE_BYTES), Gathered(LARGE_BYTES)
    for each, byte in ((target, b"a"), (other, b"b")):
        each.put(0, byte * LARGE_BYTES)
    first, second = target.finish(), other.finish()
    assert first == b"a" * LARGE_BYTES
    assert second == b"b" * LARGE_BYTES
    assert hash(first) == hash(b"a" * LARGE_BYTES)
    assert sys.getsizeof(first) == sys.getsizeof(bytes(LARGE_BYTES))


def test_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered.sys, "platform", "darwin")
    content = pattern(LARGE_BYTES + 1)
    target = Gathered(len(content))
    target.put(BLOCK, content[BLOCK:])
    target.put(0, content[:BLOCK])
    assert target.finish() == content
