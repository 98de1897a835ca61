"""Waiting: what the core asks of an event loop, a small loop of its own, and answers that come later.

The core (processes, sessions, connections) is written against the nine calls of `Loop`, which asyncio's
and uvloop's loops have. On stdio it runs on `PollLoop` instead: importing asyncio costs four times
what starting Python does, and a server started per task is waited for every time.
"""

from __future__ import annotations

import heapq
import os
import select
import signal
from collections import deque
from collections.abc import Callable, Generator
from itertools import count
from time import monotonic
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from . import log

__all__ = ["Loop", "Pending", "PollLoop", "Timer", "after", "resolved"]

T = TypeVar("T")
Callback = Callable[..., object]

_UNSETTLED: Final = object()

MAX_POLL_SECONDS: Final = 3600.0
"""The longest single wait; the system call overflows at some weeks."""


class Timer(Protocol):
    """A call that has been planned and can be called off."""

    def cancel(self) -> None: ...


class Loop(Protocol):
    """All that the core needs of an event loop."""

    def time(self) -> float: ...
    def call_soon(self, callback: Callback, *args: Any) -> object: ...
    def call_soon_threadsafe(self, callback: Callback, *args: Any) -> object: ...
    def call_later(self, delay: float, callback: Callback, *args: Any) -> Timer: ...
    def add_reader(self, fd: int, callback: Callback, *args: Any) -> object: ...
    def remove_reader(self, fd: int) -> object: ...
    def add_writer(self, fd: int, callback: Callback, *args: Any) -> object: ...
    def remove_writer(self, fd: int) -> object: ...
    def add_signal_handler(self, sig: int, callback: Callback, *args: Any) -> object: ...


class Pending(Generic[T]):
    """An answer that is not there yet: settled once, with a value or an error."""

    __slots__ = ("_callbacks", "_error", "_value", "on_cancel")

    def __init__(self, on_cancel: Callable[[], object] | None = None) -> None:
        self._value: object = _UNSETTLED
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Pending[T]], object]] = []
        self.on_cancel = on_cancel

    @property
    def settled(self) -> bool:
        return self._value is not _UNSETTLED or self._error is not None

    def resolve(self, value: T) -> None:
        """Settle with a value; ignored when already settled."""
        if not self.settled:
            self._value = value
            self._run_callbacks()

    def fail(self, error: BaseException) -> None:
        """Settle with an error; ignored when already settled."""
        if not self.settled:
            self._error = error
            self._run_callbacks()

    def cancel(self) -> None:
        """Nobody wants the answer any more: forget who asked, and let the work know."""
        if not self.settled:
            self._callbacks.clear()
            if self.on_cancel is not None:
                self.on_cancel()

    def result(self) -> T:
        """The value, or the error raised."""
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def then(self, callback: Callable[[Pending[T]], object]) -> None:
        """Call back when settled; at once if it already is."""
        if self.settled:
            callback(self)
        else:
            self._callbacks.append(callback)

    def _run_callbacks(self) -> None:
        # Whoever works for this usually knows it, too: the two, and a large answer, would wait for the
        # garbage collector to find them.
        self.on_cancel = None
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def __await__(self) -> Generator[Any, None, T]:
        if not self.settled:
            from asyncio import get_running_loop

            future = get_running_loop().create_future()
            self.then(lambda _: None if future.done() else future.set_result(None))
            try:
                yield from future
            except BaseException:
                self.cancel()
                raise
        return self.result()


def resolved(value: T) -> Pending[T]:
    """An answer that is already there."""
    pending: Pending[T] = Pending()
    pending.resolve(value)
    return pending


def after(first: Pending[Any], work: Callable[[], T | Pending[T]]) -> Pending[T]:
    """Do something once `first` has settled, either way; what it gives is the answer."""
    pending: Pending[T] = Pending()

    def run(_: Pending[Any]) -> None:
        try:
            result = work()
        except BaseException as error:
            pending.fail(error)
            return
        if isinstance(result, Pending):
            pending.on_cancel = result.cancel
            result.then(lambda done: _copy(done, pending))
        else:
            pending.resolve(result)

    first.then(run)
    return pending


def _copy(source: Pending[T], target: Pending[T]) -> None:
    try:
        target.resolve(source.result())
    except BaseException as error:
        target.fail(error)


class _Planned:
    """A timer of PollLoop."""

    __slots__ = ("_args", "_callback", "_loop", "in_heap")

    def __init__(self, loop: PollLoop, callback: Callback, args: tuple[Any, ...]) -> None:
        self._loop = loop
        self._callback: Callback | None = callback
        self._args = args
        self.in_heap = True

    @property
    def cancelled(self) -> bool:
        return self._callback is None

    def cancel(self) -> None:
        if self._callback is not None:
            self._callback, self._args = None, ()
            if self.in_heap:
                self._loop.timer_cancelled()

    def run(self) -> None:
        callback, args = self._callback, self._args
        if callback is not None:
            self._callback, self._args = None, ()
            callback(*args)


class PollLoop:
    """One thread, one poll: enough of a loop for a server on stdio."""

    def __init__(self) -> None:
        self._poll = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._epoll = hasattr(select, "epoll")
        self._readers: dict[int, tuple[Callback, tuple[Any, ...]]] = {}
        self._writers: dict[int, tuple[Callback, tuple[Any, ...]]] = {}
        self._ready: deque[tuple[Callback, tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, _Planned]] = []
        self._cancelled_timers = 0
        self._order = count()
        self._signals: dict[int, tuple[Callback, tuple[Any, ...]]] = {}
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.add_reader(self._wake_read, self._woken)

    time = staticmethod(monotonic)

    def call_soon(self, callback: Callback, *args: Any) -> None:
        self._ready.append((callback, args))

    def call_soon_threadsafe(self, callback: Callback, *args: Any) -> None:
        self._ready.append((callback, args))
        self._wake()

    def call_later(self, delay: float, callback: Callback, *args: Any) -> Timer:
        planned = _Planned(self, callback, args)
        heapq.heappush(self._timers, (monotonic() + max(delay, 0.0), next(self._order), planned))
        return planned

    def add_reader(self, fd: int, callback: Callback, *args: Any) -> None:
        known = fd in self._readers
        self._readers[fd] = (callback, args)
        if not known:
            try:
                self._watch(fd, first=fd not in self._writers)
            except OSError:
                del self._readers[fd]
                raise

    def remove_reader(self, fd: int) -> bool:
        if self._readers.pop(fd, None) is None:
            return False
        self._unwatch(fd)
        return True

    def add_writer(self, fd: int, callback: Callback, *args: Any) -> None:
        known = fd in self._writers
        self._writers[fd] = (callback, args)
        if not known:
            try:
                self._watch(fd, first=fd not in self._readers)
            except OSError:
                del self._writers[fd]
                raise

    def remove_writer(self, fd: int) -> bool:
        if self._writers.pop(fd, None) is None:
            return False
        self._unwatch(fd)
        return True

    def add_signal_handler(self, sig: int, callback: Callback, *args: Any) -> None:
        self._signals[sig] = (callback, args)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(sig, lambda signum, _frame: self._ready.append(self._signals[signum]))

    def stop(self) -> None:
        """Make `run` return after what is being done now."""
        self._stopping = True
        self._wake()

    def run(self) -> None:
        """Serve until stopped."""
        while not self._stopping:
            self._run_once()

    def close(self) -> None:
        """Give the loop's own descriptors back."""
        if self._signals:
            signal.set_wakeup_fd(-1)
        os.close(self._wake_read)
        os.close(self._wake_write)
        if isinstance(self._poll, select.epoll):
            self._poll.close()

    def _run_once(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled:
            heapq.heappop(timers)
            self._cancelled_timers -= 1
        if self._ready or self._stopping:
            timeout = 0.0
        elif timers:
            timeout = min(max(timers[0][0] - monotonic(), 0.0), MAX_POLL_SECONDS)
        else:
            timeout = -1.0
        for fd, events in self._wait(timeout):
            if events & ~_WRITABLE and (reader := self._readers.get(fd)) is not None:
                self._ready.append((_run_if_watched, (self._readers, fd, reader)))
            if events & ~_READABLE and (writer := self._writers.get(fd)) is not None:
                self._ready.append((_run_if_watched, (self._writers, fd, writer)))
        if timers:
            now = monotonic()
            while timers and timers[0][0] <= now:
                planned = heapq.heappop(timers)[2]
                planned.in_heap = False
                if planned.cancelled:
                    self._cancelled_timers -= 1
                else:
                    self._ready.append((planned.run, ()))
        for _ in range(len(self._ready)):
            callback, args = self._ready.popleft()
            try:
                callback(*args)
            except Exception as error:
                # One broken callback must not end everybody else's work.
                log.error("a callback failed in an unforeseen way", exc_info=error)

    def timer_cancelled(self) -> None:
        """Throw cancelled timers out when they are most of what is planned: some are months away."""
        self._cancelled_timers += 1
        if self._cancelled_timers > _MIN_CANCELLED and self._cancelled_timers * 2 > len(self._timers):
            self._timers[:] = [entry for entry in self._timers if not entry[2].cancelled]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def _wait(self, timeout: float) -> list[tuple[int, int]]:
        if self._epoll:
            return self._poll.poll(timeout)
        return self._poll.poll(timeout * 1000 if timeout >= 0 else None)

    def _mask(self, fd: int) -> int:
        return (select.POLLIN if fd in self._readers else 0) | (select.POLLOUT if fd in self._writers else 0)

    def _watch(self, fd: int, first: bool) -> None:
        if first:
            self._poll.register(fd, self._mask(fd))
        else:
            self._poll.modify(fd, self._mask(fd))

    def _unwatch(self, fd: int) -> None:
        mask = self._mask(fd)
        if mask:
            self._poll.modify(fd, mask)
        else:
            self._poll.unregister(fd)

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # it is full, so the loop wakes anyway

    def _woken(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass


def _run_if_watched(
    watched: dict[int, tuple[Callback, tuple[Any, ...]]], fd: int, entry: tuple[Callback, tuple[Any, ...]]
) -> None:
    """Readiness is told once per poll; by now somebody may have stopped watching, or closed it."""
    if watched.get(fd) is entry:
        callback, args = entry
        callback(*args)


_READABLE: Final = select.POLLIN
_WRITABLE: Final = select.POLLOUT
_MIN_CANCELLED: Final = 64
"""Cancelled timers that are not worth the trouble of looking for them."""
