"""How often somebody may ask: token buckets, one for each somebody, and a bound on their number."""

from __future__ import annotations

from typing import Final

__all__ = ["Throttle"]

MAX_BUCKETS: Final = 20_000
"""Somebodies remembered at once. Full buckets are forgotten first; they say nothing."""


class Throttle:
    """At most `burst` at once and `rate` per second, for each name."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = max(1.0, burst)  # of less than one nobody ever has one
        self._buckets: dict[str, tuple[float, float]] = {}

    def allow(self, name: str, now: float) -> bool:
        """Take one, if there is one."""
        left = self._left(name, now)
        if left < 1.0:
            self._buckets[name] = (left, now)
            return False
        if name not in self._buckets and len(self._buckets) >= MAX_BUCKETS:
            self._sweep(now)
        self._buckets[name] = (left - 1.0, now)
        return True

    def empty(self, name: str, now: float) -> bool:
        """Whether nothing is left, without taking any."""
        return self._left(name, now) < 1.0

    def __len__(self) -> int:
        return len(self._buckets)

    def _left(self, name: str, now: float) -> float:
        left, since = self._buckets.get(name, (self._burst, now))
        return min(self._burst, left + (now - since) * self._rate)

    def _sweep(self, now: float) -> None:
        self._buckets = {
            name: bucket for name, bucket in self._buckets.items() if self._left(name, now) < self._burst
        }
        while len(self._buckets) >= MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
