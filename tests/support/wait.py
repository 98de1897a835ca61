"""Waiting for something to become true, for as long as it takes and no longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["PATIENCE", "eventually", "eventually_async"]

PATIENCE = 20.0
"""Seconds before a test gives up. Long, because the machine may be busy; nothing waits for it in vain."""

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "the condition", timeout: float = PATIENCE) -> T:
    """The first true value of the condition; AssertionError when the time is over."""
    deadline = time.monotonic() + timeout
    pause = 0.001
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true in {timeout:g} s; last seen: {value!r}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


async def eventually_async(
    condition: Callable[[], T], what: str = "the condition", timeout: float = PATIENCE
) -> T:
    """The same, while the event loop goes on."""
    deadline = time.monotonic() + timeout
    pause = 0.0
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true in {timeout:g} s; last seen: {value!r}")
        await asyncio.sleep(pause)
        pause = min(pause + 0.001, 0.05)
