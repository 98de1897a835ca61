"""Whose handshakes fail: so that one who may come in cannot keep the door shut for everybody else.

An environment takes no handshake for ten seconds after eight that failed, whoever they were from. The router
knows who sends them, and stops passing on those of one who fails too often, for longer each time.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Blame", "Doorkeeper"]

FAILURES: Final = 4
"""Of one caller before its handshakes are no longer passed on; half of what an environment puts up with."""

FIRST_PAUSE: Final = 10.0
LAST_PAUSE: Final = 600.0
"""Seconds for which they are not, doubling: who never stops shuts the door some three times an hour."""

FORGIVEN_SECONDS: Final = 600.0
"""Without a failure or a pause, after which a caller is as good as new."""

DOOR_FAILURES: Final = 8
DOOR_SECONDS: Final = 10.0
"""What shuts an environment's door, and for how long: its own rule, followed here only to know why it
refuses."""


class Blame:
    """What is known of one caller at one environment."""

    __slots__ = ("_failures", "_last", "_pause", "_until")

    def __init__(self) -> None:
        self._failures = 0
        self._last = 0.0
        self._pause = FIRST_PAUSE
        self._until = 0.0

    def failed(self, now: float) -> None:
        if now - max(self._last, self._until) > FORGIVEN_SECONDS:
            self._failures, self._pause = 0, FIRST_PAUSE
        self._last = now
        self._failures += 1
        if self._failures >= FAILURES:
            self._failures = 0
            self._until = now + self._pause
            self._pause = min(2 * self._pause, LAST_PAUSE)

    def paused(self, now: float) -> bool:
        return now < self._until


class Doorkeeper:
    """Counts for one environment, as it does itself, and for each of its callers."""

    __slots__ = ("_callers", "_failures", "_shut_until")

    def __init__(self) -> None:
        self._callers: dict[str, Blame] = {}
        self._failures = 0
        self._shut_until = 0.0

    def opened(self) -> None:
        """The environment has a new connection, for which it counts anew."""
        self._failures, self._shut_until = 0, 0.0

    def failed(self, caller: str, now: float) -> bool:
        """A handshake of the caller was refused; False if the door was shut, and it is not to blame."""
        if now < self._shut_until:
            return False
        self._failures += 1
        if self._failures >= DOOR_FAILURES:
            self._failures, self._shut_until = 0, now + DOOR_SECONDS
        self._callers.setdefault(caller, Blame()).failed(now)
        return True

    def may_try(self, caller: str, now: float) -> bool:
        """Whether a handshake of the caller is passed on."""
        blame = self._callers.get(caller)
        return blame is None or not blame.paused(now)
