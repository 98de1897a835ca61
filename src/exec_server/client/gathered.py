"""A large content in one piece: parts go to their places as they come, and nothing is there twice.

Most of what it costs to have 64 MB in memory is the kernel handing out 16,384 pages one by one: 35 ms,
against 7 for copying the bytes. Where it can, a content of known size is therefore a `bytes` object that
the kernel is asked to back with large pages, filled before anybody sees it, which is what CPython's
interface for making such objects (PyBytes_FromStringAndSize without a source) is for.
"""

from __future__ import annotations

import io
import sys
from typing import Any, Final

__all__ = ["LARGE_BYTES", "Gathered"]

LARGE_BYTES: Final = 4 * 1024 * 1024
"""From this size on, large pages are worth asking for."""

_LARGE_PAGE_BYTES: Final = 2 * 1024 * 1024
_MADV_HUGEPAGE: Final = 14


class Gathered:
    """Parts of one content; `expected` is its size as far as anybody knows."""

    def __init__(self, expected: int) -> None:
        self._size = 0
        self._whole: bytes | None = None
        self._room: memoryview = memoryview(b"")
        self._stream: io.BytesIO | None = None
        made = _unfilled(expected) if expected >= LARGE_BYTES else None
        if made is None:
            self._stream = io.BytesIO()
        else:
            self._whole, self._room = made

    def put(self, offset: int, data: bytes | memoryview) -> None:
        """Copy a part to its place. In the end there must be no gaps."""
        if not data:
            return  # asked for ahead, beyond the end
        end = offset + len(data)
        self._size = max(self._size, end)
        if self._stream is None:
            if end <= len(self._room):
                self._room[offset:end] = data
                return
            # More than anybody knew of.
            self._stream = io.BytesIO()
            self._stream.write(self._room[:offset])
            self._forget()
        self._stream.seek(offset)
        self._stream.write(data)

    def finish(self) -> bytes:
        """The content. Nothing may be put afterwards."""
        if self._stream is not None:
            return self._stream.getvalue()
        whole, size = self._whole or b"", self._size
        self._forget()
        return whole if size == len(whole) else whole[:size]

    def _forget(self) -> None:
        self._room.release()
        self._room = memoryview(b"")
        self._whole = None


def _unfilled(size: int) -> tuple[bytes, memoryview] | None:
    """A bytes object without content yet, and where to put it; None where that cannot be had."""
    if sys.platform != "linux" or sys.implementation.name != "cpython":
        return None
    try:
        import ctypes

        make: Any = ctypes.pythonapi.PyBytes_FromStringAndSize
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
        locate: Any = ctypes.pythonapi.PyBytes_AsString
        locate.restype, locate.argtypes = ctypes.c_void_p, (ctypes.py_object,)
        advise: Any = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    except (ImportError, OSError, AttributeError):
        return None
    whole = make(None, size)
    start = locate(whole)
    first = -(-start // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
    last = (start + size) // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
    if first < last:
        advise(first, last - first, _MADV_HUGEPAGE)  # a wish: without it, it is only slower
    return whole, memoryview((ctypes.c_char * size).from_address(start)).cast("B")
