"""How long a call waits for a command: a window of time, which the end of the command cuts short and pauses
lengthen; and what the command says meanwhile."""

from __future__ import annotations

import asyncio
from typing import Final

from .buffer import HeadTailBuffer
from .exec import ExecCommand, WriteStdin
from .unified_process import UnifiedProcess

__all__ = ["MAX_POLL_MS", "Pauses", "collect", "first_window", "write_window"]

DEFAULT_YIELD_MS: Final = 10_000
DEFAULT_WRITE_YIELD_MS: Final = 250
MIN_YIELD_MS: Final = 250
MIN_YIELD_WINDOWS_MS: Final = 10_000
MAX_YIELD_MS: Final = 30_000
MIN_POLL_MS: Final = 5_000
MAX_POLL_MS: Final = 300_000
"""The reference's windows. A poll waits longer than it asks for: it has nothing else to do."""

CLOSE_GRACE_SECONDS: Final = 0.05
"""How long output may go on after the exit before a call returns without it."""


def first_window(call: ExecCommand, platform_os: str | None) -> float:
    """Seconds that a call which starts a command waits for it."""
    least = MIN_YIELD_WINDOWS_MS if platform_os == "windows" else MIN_YIELD_MS
    return _clamped(call.yield_time_ms, DEFAULT_YIELD_MS, least, MAX_YIELD_MS)


def write_window(call: WriteStdin, max_poll_ms: int) -> float:
    """Seconds that a call which types into a command, or looks at it, waits for it."""
    least, most = (MIN_YIELD_MS, MAX_YIELD_MS) if call.chars else (MIN_POLL_MS, max(max_poll_ms, MIN_POLL_MS))
    return _clamped(call.yield_time_ms, DEFAULT_WRITE_YIELD_MS, least, most)


def _clamped(asked_ms: int | None, default: int, least: int, most: int) -> float:
    return min(max(default if asked_ms is None else asked_ms, least), most) / 1000


class Pauses:
    """Times in which no window runs out. They may overlap."""

    def __init__(self) -> None:
        self._open = 0
        self._since = 0.0
        self._over = 0.0

    def __bool__(self) -> bool:
        return self._open > 0

    def begin(self, now: float) -> None:
        if not self._open:
            self._since = now
        self._open += 1

    def end(self, now: float) -> None:
        self._open -= 1
        if not self._open:
            self._over += now - self._since

    def total(self, now: float) -> float:
        """Seconds spent in pauses so far."""
        return self._over + (now - self._since if self._open else 0.0)


async def collect(running: UnifiedProcess, window: float, pauses: Pauses, capacity: int) -> HeadTailBuffer:
    """What it prints until the window is over, or it is."""
    buffer = HeadTailBuffer(capacity)
    try:
        await _gather(running, window, pauses, buffer)
    except BaseException:
        # The call is interrupted. What it has seen nobody was told yet: the next one is.
        buffer.merge(running.pending.drain())
        running.pending = buffer
        raise
    return buffer


async def _gather(running: UnifiedProcess, window: float, pauses: Pauses, buffer: HeadTailBuffer) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + window
    paused_before = pauses.total(loop.time())
    grace: float | None = None
    while True:
        now = loop.time()
        left = deadline + pauses.total(now) - paused_before - now
        if running.pending:
            buffer.merge(running.pending.drain())
            if left <= 0:
                return
            continue
        over = running.exit_seen or running.given_up
        if (over and running.output_over) or left <= 0:
            return
        if over:
            # Something else holds its output open, or the news is about to come.
            grace = now + min(CLOSE_GRACE_SECONDS, left) if grace is None else grace
            if now >= grace:
                return
            await running.changed(grace - now)
        else:
            await running.changed(None if pauses else left)
