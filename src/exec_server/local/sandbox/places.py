"""Who gets which helper: a bounded number of places, and callers who wait for one in the order they came.

A helper serves one plan. When there are more plans in use than places, some helper has to end for another
to start, and starting takes a hundred times as long as a call. So a helper that has become free goes to
whoever has waited longest of those it fits; it ends for the sake of another plan only when it was not
needed for a while, or when somebody without any helper has waited for long enough, it has been there for
about as long as it took to start, and all those have been served who waited when it came. Nobody waits for
ever, and nobody starts a helper for every single call.

Nothing here touches a process: whoever was granted a place starts, uses and ends what belongs there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Event, Lock
from time import monotonic
from typing import Final

from .helper_process import HelperProcess, Key

__all__ = ["GRACE_SECONDS", "OWN_SECONDS", "Places", "Waiter"]

STALE_SECONDS: Final = 0.5
"""A helper that was idle for so long is given up at once when another plan needs its place."""

GRACE_SECONDS: Final = 0.1
"""How long a caller waits before a helper ends for it that has just been used, and how long one that has
come may stay: about as long as a start takes."""

OWN_SECONDS: Final = 0.01
"""How long a caller waits for a helper of its own plan that is at work before another is started: ten times
what a small call takes, and a tenth of a start."""

BUSY_SECONDS: Final = 1.0
"""How long a caller waits for a helper of its own plan that is at work, while others are ended for those
who have none: some calls take long."""


class Waiter:
    """A caller in line, until it was granted something."""

    def __init__(self, key: Key, number: int, since: float, *, reusing: bool) -> None:
        self.key = key
        self.number = number
        self.since = since
        self.reusing = reusing
        """Whether a helper that has served before will do."""
        self.granted = Event()
        self.helper: HelperProcess | None = None
        """If it fits, to be used; else to be ended, so that another can be started in its place."""
        self.refused = False
        """Granted nothing: there are no places any more."""

    @property
    def fits(self) -> bool:
        """Whether it was granted a helper that can be used as it is."""
        return self.helper is not None and self.reusing and self.helper.key == self.key


class Places:
    """The places of one server. May be used from any thread."""

    def __init__(self, most: int, clock: Callable[[], float] = monotonic) -> None:
        self._most = most
        self._clock = clock
        self._lock = Lock()
        self._line: list[Waiter] = []
        self._idle: dict[Key, list[HelperProcess]] = {}
        self._at_work: Counter[Key] = Counter()
        """Helpers that are at work, or being started, and will serve again."""
        self._numbers = 0
        self.count = 0
        """Places that are taken."""
        self.closed = False

    def take(self, key: Key) -> HelperProcess | None:
        """An idle helper of a plan, if there is one and nobody waits: what most calls find."""
        with self._lock:
            helpers = self._idle.get(key)
            if not helpers or self._line:
                return None
            helper = helpers.pop()
            if not helpers:
                del self._idle[key]
            self._at_work[key] += 1
            return helper

    def ask(self, key: Key, *, reusing: bool) -> Waiter:
        """Get in line; who finds what it needs is granted it at once."""
        with self._lock:
            self._numbers += 1
            waiter = Waiter(key, self._numbers, self._clock(), reusing=reusing)
            if self.closed:
                _refuse(waiter)
            else:
                self._line.append(waiter)
                self._hand_out()
            return waiter

    def look_again(self) -> None:
        """Time has passed: somebody may have waited for long enough."""
        with self._lock:
            self._hand_out()

    def leave(self, waiter: Waiter) -> bool:
        """Get out of line; False if something was granted already and has to be given back."""
        with self._lock:
            if waiter.granted.is_set():
                return False
            self._line.remove(waiter)
            self._hand_out()
            return True

    def give_back(self, helper: HelperProcess) -> bool:
        """It is free for others; False if there will be none: then it has to be ended."""
        with self._lock:
            if self.closed or not helper.reusable:
                return False
            self._at_work[helper.key] -= 1
            helper.idle_since = self._clock()
            if helper.promised is None:
                helper.promised = self._numbers
                helper.ready_since = helper.idle_since
            self._idle.setdefault(helper.key, []).append(helper)
            if self._line:
                self._hand_out()
            return True

    def free(self, key: Key, *, reusable: bool) -> None:
        """Who was at work for a plan has ended, or could not be started: its place can be taken."""
        with self._lock:
            if reusable:
                self._at_work[key] -= 1
            self.count -= 1
            self._hand_out()

    def forget(self) -> None:
        """One that was withdrawn has ended."""
        with self._lock:
            self.count -= 1
            self._hand_out()

    def withdraw(self, wanted: Callable[[HelperProcess], bool]) -> list[HelperProcess]:
        """Those idle ones that are wanted. They keep their places until `forget`."""
        with self._lock:
            found = [helper for helpers in self._idle.values() for helper in helpers if wanted(helper)]
            for helper in found:
                self._remove(helper)
            return found

    def idle(self) -> list[HelperProcess]:
        """All that are idle now; each may be at work a moment later."""
        with self._lock:
            return [helper for helpers in self._idle.values() for helper in helpers]

    def close(self) -> list[HelperProcess]:
        """Nobody is granted anything any more. Those that were idle, to be ended."""
        with self._lock:
            self.closed = True
            for waiter in self._line:
                _refuse(waiter)
            self._line.clear()
        return self.withdraw(lambda _: True)

    # With the lock held

    def _hand_out(self) -> None:
        if not self.closed:
            now = self._clock()
            while self._line and self._hand_on(now) and self._idle:
                pass  # what was kept back for one that has found another may fit the next

    def _hand_on(self, now: float) -> bool:
        """Grant what can be granted; whether a place has changed hands by that."""
        changed = False
        urgent = next((waiter for waiter in self._line if self._is_urgent(waiter, now)), None)
        for waiter in tuple(self._line):
            helpers = self._idle.get(waiter.key) if waiter.reusing else None
            if helpers and not (_has_stayed(helpers[-1], now) and _comes_first(urgent, waiter, helpers[-1])):
                self._line.remove(waiter)
                self._grant(waiter, self._remove(helpers[-1]))
        for waiter in tuple(self._line):
            if self.count < self._most and self._may_start(waiter, now):
                self.count += 1
                changed = True
                self._line.remove(waiter)
                self._grant(waiter, None)
            elif (victim := self._dispensable(waiter, now)) is not None:
                changed = True
                self._line.remove(waiter)
                self._grant(waiter, self._remove(victim))
        return changed

    def _grant(self, waiter: Waiter, helper: HelperProcess | None) -> None:
        if waiter.reusing:
            self._at_work[waiter.key] += 1
        waiter.helper = helper
        waiter.granted.set()

    def _remove(self, helper: HelperProcess) -> HelperProcess:
        helpers = self._idle[helper.key]
        helpers.remove(helper)
        if not helpers:
            del self._idle[helper.key]
        return helper

    def _may_start(self, waiter: Waiter, now: float) -> bool:
        own = waiter.reusing and self._at_work[waiter.key] > 0
        return not own or now - waiter.since >= OWN_SECONDS

    def _is_urgent(self, waiter: Waiter, now: float) -> bool:
        """Whether somebody has waited for too long to let younger ones pass."""
        own = waiter.reusing and (self._at_work[waiter.key] > 0 or waiter.key in self._idle)
        return now - waiter.since >= (BUSY_SECONDS if own else GRACE_SECONDS)

    def _dispensable(self, waiter: Waiter, now: float) -> HelperProcess | None:
        """Which idle one ends for a waiter, if any does: the one that was used least recently."""
        idle = [helper for helpers in self._idle.values() for helper in helpers if _has_stayed(helper, now)]
        if not idle:
            return None
        oldest = min(idle, key=lambda helper: helper.idle_since)
        own = waiter.reusing and self._at_work[waiter.key] > 0
        stale = now - oldest.idle_since >= STALE_SECONDS and not own
        return oldest if stale or now - waiter.since >= GRACE_SECONDS else None


def _refuse(waiter: Waiter) -> None:
    waiter.refused = True
    waiter.granted.set()


def _has_stayed(helper: HelperProcess, now: float) -> bool:
    return now - helper.ready_since >= GRACE_SECONDS


def _comes_first(urgent: Waiter | None, waiter: Waiter, helper: HelperProcess) -> bool:
    """Whether a helper should rather end than go on with a waiter, for somebody who has waited longer."""
    if urgent is None or urgent.number >= waiter.number or urgent.key == helper.key:
        return False
    return helper.promised is not None and waiter.number > helper.promised
