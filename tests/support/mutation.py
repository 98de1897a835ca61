"""Bytes that were right, made wrong in the ways that break readers: the same ones for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

__all__ = ["mutations"]

LENGTHS = (b"\x00", b"\x7f", b"\xff", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\x80" * 12)
"""What lengths are put in the place of others: none, small, huge, of 64 bits, and without an end."""


def mutations(originals: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """So many broken copies, each made by one to three changes."""
    source = random.Random(seed)
    for number in range(count):
        message = bytearray(originals[number % len(originals)])
        for _ in range(source.randint(1, 3)):
            _change(message, source, originals)
        yield bytes(message)


def _change(message: bytearray, source: random.Random, originals: Sequence[bytes]) -> None:
    # The beginning is where the structure is; the rest is payload.
    at = source.randrange(min(len(message), source.choice((80, len(message) or 1))) or 1) if message else 0
    match source.randrange(7):
        case 0 if message:
            message[at] ^= 1 << source.randrange(8)
        case 1 if message:
            message[at] = source.randrange(256)
        case 2:
            del message[at:]
        case 3:
            del message[at : at + source.randint(1, 8)]
        case 4:
            message[at:at] = source.randbytes(source.randint(1, 8))
        case 5:
            message[at : at + 1] = source.choice(LENGTHS)
        case _:
            other = source.choice(originals)
            message[at:] = other[source.randrange(len(other) + 1) :]
