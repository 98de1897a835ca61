"""A thread that does one thing after another, for what may block and must not block the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..loop import Loop, Pending

if TYPE_CHECKING:
    from queue import SimpleQueue
    from threading import Thread

__all__ = ["Worker"]

T = TypeVar("T")


class Worker:
    """One thread, started with the first job. Jobs run in order; answers come back on the loop."""

    def __init__(self, loop: Loop, name: str) -> None:
        self._loop = loop
        self._name = name
        self._jobs: SimpleQueue[Any] | None = None
        self._thread: Thread | None = None

    def run(self, job: Callable[..., T], *args: Any) -> Pending[T]:
        """Do it in the thread."""
        if self._jobs is None:
            from queue import SimpleQueue
            from threading import Thread

            self._jobs = SimpleQueue()
            self._thread = Thread(target=_serve, args=(self._loop, self._jobs), name=self._name, daemon=True)
            self._thread.start()
        pending: Pending[T] = Pending()
        self._jobs.put((pending, job, args))
        return pending

    def close(self) -> None:
        """Let the thread end after what it was given."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def stop(self, timeout: float) -> None:
        """Forget what has not begun, and wait for what has."""
        if self._jobs is not None and self._thread is not None:
            from queue import Empty

            try:
                while True:
                    self._jobs.get_nowait()
            except Empty:
                self.close()
            self._thread.join(timeout)


def _serve(loop: Loop, jobs: SimpleQueue[Any]) -> None:
    while (entry := jobs.get()) is not None:
        pending, job, args = entry
        settle: Callable[..., object]
        outcome: object
        try:
            settle, outcome = pending.resolve, job(*args)
        except BaseException as error:
            settle, outcome = pending.fail, error
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:
            return  # the loop is closed; nobody is waiting
