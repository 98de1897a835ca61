"""What time it is: for tickets, which must not become good again, and among nodes, which may disagree."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["PeerClocks", "SteadyClock"]

TOLERATED_SECONDS: Final = 5.0
"""By which the clocks of nodes may differ without anybody being told; tickets put up with as much."""

STAMPS: Final = 10
"""Of a node that are looked at: those that were on their way for long say nothing about its clock."""


class SteadyClock:
    """The time of day, but it never goes back. Where that is set back, this goes on from the latest that it
    has said, at the usual speed."""

    def __init__(
        self,
        at_least: float = 0.0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._since = monotonic()
        self._latest = max(wall(), at_least)

    def __call__(self) -> float:
        now = self._monotonic()
        self._latest = max(self._wall(), self._latest + now - self._since)
        self._since = now
        return self._latest


class PeerClocks:
    """By how much the clocks of other nodes differ from ours, as far as they tell."""

    def __init__(self) -> None:
        self._ahead: dict[bytes, deque[float]] = {}

    def heard(self, node: bytes, stamp: float, now: float) -> None:
        """A node has said what time it is there."""
        self._ahead.setdefault(node, deque(maxlen=STAMPS)).append(stamp - now)

    def forget(self, node: bytes) -> None:
        self._ahead.pop(node, None)

    def off(self) -> dict[bytes, float]:
        """Nodes whose clocks differ by more than is tolerated, and by how much they are ahead of ours."""
        # A stamp can only be late, so the latest time that a node has told is the nearest to what it has.
        ahead = {node: max(stamps) for node, stamps in self._ahead.items()}
        return {node: seconds for node, seconds in ahead.items() if abs(seconds) > TOLERATED_SECONDS}
