"""One thread for what may have to wait, so that the loop, with everybody's frames on it, never does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, TypeVar

__all__ = ["Overloaded", "Worker"]

T = TypeVar("T")

MOST_WAITING: Final = 1000
"""Things to do; beyond, they are refused."""


class Overloaded(Exception):
    """Too much waits already, or this has waited for too long."""


class Worker:
    """Does what it is given in that order, one after the other."""

    def __init__(self, name: str) -> None:
        self._line: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._room = threading.BoundedSemaphore(MOST_WAITING)
        self._closed = False
        self._last: Callable[[], object] = lambda: None
        # A disk that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def do(self, work: Callable[[], T], seconds: float) -> T:
        """The result. What has not begun after so many seconds is not done any more; what has, is, but nobody
        waits for it."""
        if self._closed:
            raise Overloaded("it is closed")
        if not self._room.acquire(blocking=False):
            raise Overloaded(f"{MOST_WAITING} others wait")
        doing: Future[T] = Future()
        self._line.put((doing, work))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(doing)
        except TimeoutError:
            raise Overloaded(f"nothing came back for {seconds:g} s") from None

    def close(self, work: Callable[[], object]) -> None:
        """Do this last, and wait for it."""
        self._closed, self._last = True, work
        self._line.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        while (item := self._line.get()) is not None:
            doing, work = item
            self._room.release()
            if not doing.set_running_or_notify_cancel():
                continue
            try:
                doing.set_result(work())
            except BaseException as error:
                doing.set_exception(error)
        self._last()
