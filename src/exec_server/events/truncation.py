"""How much of a command's output an event carries, and how it says that there was more."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

__all__ = ["HEAD_TAIL_BYTES", "PREFIX_BYTES", "Truncation"]

PREFIX_BYTES: Final = 64 * 1024
"""The documented limit of an item's output, its marker included."""

HEAD_TAIL_BYTES: Final = 1024 * 1024
"""What the reference keeps today."""

_CUT_MARKER: Final = "\n...(truncated)"


class Truncation(Struct, frozen=True):
    """`prefix` keeps the beginning, within the limit; `head-tail` half the limit from either end.

    `limit` is in bytes of UTF-8, by default that of the mode. No character is cut in two.
    """

    mode: Literal["prefix", "head-tail"] = "prefix"
    limit: int | None = None

    def cut(self, text: str) -> str:
        """The text, or what fits of it with a marker."""
        prefix = self.mode == "prefix"
        limit = self.limit if self.limit is not None else PREFIX_BYTES if prefix else HEAD_TAIL_BYTES
        if len(text) * 4 <= limit:
            return text
        data = _bytes(text)
        if len(data) <= limit:
            return text
        if prefix:
            return _head(data, max(limit - len(_CUT_MARKER), 0)) + _CUT_MARKER[-limit:] * (limit > 0)
        head, tail = _head(data, limit // 2), _tail(data, limit - limit // 2)
        omitted = len(data) - len(_bytes(head)) - len(_bytes(tail))
        return f"{head}\n... {omitted} bytes omitted ...\n{tail}"


def _head(data: bytes, size: int) -> str:
    while 0 < size < len(data) and data[size] & 0xC0 == 0x80:
        size -= 1
    return data[:size].decode("utf-8", "surrogatepass")


def _tail(data: bytes, size: int) -> str:
    start = len(data) - size
    while start < len(data) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:].decode("utf-8", "surrogatepass")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
