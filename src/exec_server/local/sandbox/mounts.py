"""What is mounted on this machine, as one value that is cheap to ask for again and again.

Views are put together from what is mounted when they are made, and must not change by themselves: a warm
helper is only right for the mounts it was started with. The kernel says through a descriptor when something
was mounted, unmounted or remounted, but not when the way in which mounts spread was changed; so the table
is read when it says so, and once in a while.
"""

from __future__ import annotations

import os
from _thread import allocate_lock
from hashlib import blake2b
from time import monotonic
from typing import Final, NamedTuple

__all__ = ["Mounts", "mounts", "summary"]

UNTOLD_SECONDS: Final = 1.0
"""How long a change that nobody is told of may go unnoticed. Reading the table takes 30 µs, asking 1."""

_READ_BYTES: Final = 1 << 20
_DIGEST_BYTES: Final = 16


class Mounts(NamedTuple):
    """All that plans have to know about a table of mounts."""

    digest: bytes
    """Which mounts these are."""
    spread: bool
    """Whether what is mounted later appears in copies of some of them, as views are."""


class _Watch:
    """The table as the kernel shows it, and its word on whether it was changed since it was last asked."""

    def __init__(self) -> None:
        from select import POLLPRI, poll

        self.process = os.getpid()
        self._descriptor = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._poll = poll()
        self._poll.register(self._descriptor, POLLPRI)

    def has_changed(self) -> bool:
        return bool(self._poll.poll(0))

    def table(self) -> bytes:
        parts = []
        offset = 0
        while part := os.pread(self._descriptor, _READ_BYTES, offset):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)


_UNKNOWN: Final = Mounts(b"", True)
_NEVER: Final = float("-inf")

_lock = allocate_lock()
_watch: _Watch | None = None
_known = _UNKNOWN
_read_at = _NEVER


def mounts() -> Mounts:
    """The mounts of this process, as they are now."""
    global _watch, _known, _read_at
    with _lock:
        now = monotonic()
        try:
            if _watch is None or _watch.process != os.getpid():
                _watch, _read_at = _Watch(), _NEVER
            if _watch.has_changed() or now - _read_at > UNTOLD_SECONDS:
                _known = summary(_watch.table())
                _read_at = now
        except OSError:
            _read_at = _NEVER
            return _UNKNOWN  # without /proc nobody can say what is mounted
        return _known


def summary(table: bytes) -> Mounts:
    """Of the text of a table. Numbers of mounts say nothing: the same ones may be numbered anew."""
    lines = [line.split(b" ", 2)[-1] for line in table.splitlines()]
    # Device, root, place and options, then optional fields (shared:1, master:2, ...) up to a dash.
    marks = [field for line in lines for field in line.partition(b" - ")[0].split(b" ")[4:]]
    spread = any(mark.startswith((b"shared:", b"master:")) for mark in marks)
    return Mounts(blake2b(b"\n".join(lines), digest_size=_DIGEST_BYTES).digest(), spread)
