"""A connection that is lost: which state the session is in, when to try again, when to give up. Pure.

Everything that decides is here; client.py does what it says. Time is passed in, twice: `now` is a clock
that stands still while this machine sleeps, `asleep` is how long it has slept in all.

                 opened                lost
    CONNECTING ────────→ CONNECTED ←─────────→ RECOVERING
         │                   │       resumed       │
         └───────────────────┴── gave up ──────────┴──→ FAILED      (and from everywhere: closed → CLOSED)
"""

from __future__ import annotations

import enum
from typing import Final
from zlib import crc32

from msgspec import Struct

from ..wire.errors import ALREADY_ATTACHED
from .errors import ConnectionLost, ServerRejected

__all__ = [
    "RECOVERY_SECONDS",
    "RENDEZVOUS",
    "TRANSITIONS",
    "WEBSOCKET",
    "Attempts",
    "Backoff",
    "Happening",
    "State",
    "budget",
    "disconnect_text",
    "failure_text",
    "is_worth_another_try",
    "noticed_sleep",
    "sleep_text",
    "step",
]

RECOVERY_SECONDS: Final = 25.0
"""How long to try, counted without sleep: less than the 30 s the reference keeps a session."""

SILENCE_SECONDS: Final = 25.0
"""How long a connection that has the session again may bring nothing of what was missed."""

SPARE_SECONDS: Final = 5.0
"""By how much trying ends before a server forgets the session: it noticed the loss at another time."""

DETACH_SECONDS: Final = 30.0
"""How long a server keeps a session without a connection, where it does not say."""

NOTICED_SLEEP_SECONDS: Final = 2.0
"""Clocks may be set by fractions of a second; a sleep is longer."""

FLAPPING_SECONDS: Final = 1.0
"""A connection that did not last this long was not worth much: the next one is not made at once."""


class State(enum.Enum):
    """What a session is to its client."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    RECOVERING = "recovering"
    FAILED = "failed"
    CLOSED = "closed"


class Happening(enum.Enum):
    """What changes it."""

    OPENED = "opened"
    """The first handshake is done."""
    LOST = "lost"
    """The connection ended, and there is a way back."""
    RESUMED = "resumed"
    """A new connection has the session, and every process is caught up."""
    GAVE_UP = "gave up"
    """There is no way back."""
    CLOSED = "closed"
    """The caller is through with it."""


TRANSITIONS: Final[dict[State, dict[Happening, State]]] = {
    State.CONNECTING: {
        Happening.OPENED: State.CONNECTED,
        Happening.GAVE_UP: State.FAILED,
        Happening.CLOSED: State.CLOSED,
    },
    State.CONNECTED: {
        Happening.LOST: State.RECOVERING,
        Happening.GAVE_UP: State.FAILED,
        Happening.CLOSED: State.CLOSED,
    },
    State.RECOVERING: {
        Happening.RESUMED: State.CONNECTED,
        Happening.GAVE_UP: State.FAILED,
        Happening.CLOSED: State.CLOSED,
    },
    State.FAILED: {Happening.CLOSED: State.CLOSED},
    State.CLOSED: {},
}
"""Every change of state there is."""


def step(state: State, happening: Happening) -> State:
    """The state after it; what cannot happen is a mistake in the caller."""
    try:
        return TRANSITIONS[state][happening]
    except KeyError:
        raise RuntimeError(f"a session that is {state.value} cannot be {happening.value}") from None


class Backoff(Struct, frozen=True):
    """How long to wait between attempts, in seconds: `first`, then `factor` times more, up to `most`."""

    first: float
    factor: float
    most: float
    jitter: float
    """Up to this part is added, by session and attempt: many clients must not come back as one."""

    def delay(self, attempt: int, session_id: str) -> float:
        """Before the attempt that follows number `attempt`, which is 1 for the first."""
        plain = min(self.first * self.factor ** min(attempt - 1, 64), self.most)
        spread = crc32(f"{session_id}:{attempt}".encode()) / 2**32
        return plain * (1 + self.jitter * spread)


WEBSOCKET: Final = Backoff(0.1, 1.0, 0.1, 0.0)
"""As the reference: a server that is there answers at once, one that is not costs nothing."""

RENDEZVOUS: Final = Backoff(0.5, 2.0, 5.0, 0.5)
"""As the reference: everybody behind one relay comes back at the same time."""


def budget(chosen: float | None, detach_seconds: float | None) -> float:
    """How long to try: as chosen, else as long as the server says that it keeps a session, or the usual."""
    if chosen is not None:
        return chosen
    return max(RECOVERY_SECONDS, (detach_seconds or 0.0) - SPARE_SECONDS)


class Attempts:
    """One recovery, from the loss to the end: says after each failed attempt how long to wait, or no."""

    def __init__(
        self, now: float, asleep: float, budget: float, backoff: Backoff = WEBSOCKET, session_id: str = ""
    ) -> None:
        self._budget = budget
        self._backoff = backoff
        self._session_id = session_id
        self._asleep = asleep
        self._deadline = now + budget
        self._last_error = ""
        self.made = 0
        """Attempts that failed."""

    def first_delay(self, now: float, connected_at: float) -> float:
        """The seconds to wait before the first attempt: none, unless connections break as they are made."""
        lasted = now - connected_at
        return self._backoff.delay(1, self._session_id) if lasted < FLAPPING_SECONDS else 0.0

    def left(self, now: float) -> float:
        """Seconds until it is over."""
        return max(self._deadline - now, 0.0)

    def renew(self, now: float) -> None:
        """The session was had again, and lost again: the server counts from here, and so do we."""
        self._deadline = now + self._budget

    def failed(self, now: float, asleep: float, error: BaseException) -> float | str:
        """The seconds to wait before the next attempt, or why there is none."""
        self.made += 1
        if not is_worth_another_try(error):
            return str(error)
        self._last_error = str(error) or self._last_error
        if asleep - self._asleep >= NOTICED_SLEEP_SECONDS:
            # The network of a machine that just woke up needs its time: count from here.
            self._deadline = now + self._budget
            self._asleep = asleep
        left = self.left(now)
        if left <= 0:
            last = f" (last attempt: {self._last_error})" if self._last_error else ""
            return f"recovery timed out after {self._budget:g}s{last}"
        return min(self._backoff.delay(self.made, self._session_id), left)


def is_worth_another_try(error: BaseException) -> bool:
    """Whether the next attempt may end otherwise. A channel of its own may say so (`retryable`)."""
    said = getattr(error, "retryable", None)
    if isinstance(said, bool):
        return said
    if isinstance(error, ServerRejected):
        return error.code == ALREADY_ATTACHED
    return isinstance(error, ConnectionLost | OSError)  # TimeoutError is an OSError


def disconnect_text(reason: str) -> str:
    """The words for a lost connection."""
    return "exec-server transport disconnected" + (f": {reason}" if reason else "")


def failure_text(
    reason: str,
    last_error: str,
    slept: float,
    detach_seconds: float | None,
    away: float = 0.0,
    silent: float = 0.0,
) -> str:
    """The words for a session that could not be resumed, and what may have been the cause.

    `away` is how long there was no connection that we knew of, sleep not counted; `silent` is how long
    nothing was heard, which is longer if this program stood still (SIGSTOP, a paused container).
    """
    text = f"{disconnect_text(reason)}; failed to resume exec-server session: {last_error}"
    note = (
        sleep_text(slept, detach_seconds)
        or away_text(away, detach_seconds)
        or silence_text(silent, detach_seconds)
    )
    return f"{text} ({note})" if note else text


def noticed_sleep(seconds: float) -> float:
    """How long this machine slept; 0.0 where clocks only differ."""
    return seconds if seconds >= NOTICED_SLEEP_SECONDS else 0.0


def sleep_text(slept: float, detach_seconds: float | None) -> str:
    """Whether this machine slept through it; empty if it did not sleep."""
    if slept < NOTICED_SLEEP_SECONDS:
        return ""
    keeps = DETACH_SECONDS if detach_seconds is None else detach_seconds
    compared = "longer than" if slept > keeps else "less than"
    return (
        f"this machine slept for {_span(slept)}, {compared} the {_span(keeps)}"
        " for which the server keeps a session without a connection"
    )


def away_text(away: float, detach_seconds: float | None) -> str:
    """Whether there was no connection for longer than a session is kept; empty if not."""
    keeps = DETACH_SECONDS if detach_seconds is None else detach_seconds
    if away <= keeps:
        return ""
    return f"away for {_span(away)}; the server keeps a session without a connection for {_span(keeps)}"


def silence_text(silent: float, detach_seconds: float | None) -> str:
    """Whether nothing was heard for longer than a session is kept; empty if not."""
    keeps = DETACH_SECONDS if detach_seconds is None else detach_seconds
    if silent <= keeps:
        return ""
    return (
        f"nothing was heard of the server for {_span(silent)}; it keeps a session without a connection for"
        f" {_span(keeps)}"
    )


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f}s" if seconds >= 1 else f"{seconds:g}s"
    minutes = round(seconds / 60)
    return f"{minutes}min" if minutes < 120 else f"{minutes // 60}h{minutes % 60:02}min"
