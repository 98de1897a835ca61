"""Who was here, from where, for how long and with how much: for the log, for lists, for metrics.

There is never in it what opens anything: names of keys and no keys, no URLs, nothing of what was said.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from typing import Any, Final

from .. import log
from ..relay.frame import BadFrame, Handshake, Reset, decode
from ..relay.reasons import is_known
from .throttle import Throttle
from .tickets import EnvironmentTicket, HarnessTicket

__all__ = ["Journal", "Visit"]

LINES_PER_SECOND: Final = 0.2
LINES_AT_ONCE: Final = 3.0
"""About refusals of one address: who knocks all the time does not hide the others."""

ALL_LINES_PER_SECOND: Final = 10.0
ALL_LINES_AT_ONCE: Final = 50.0
"""About refusals of everybody: who has many addresses does not fill the disk, either."""

MAX_STREAM: Final = 64
"""Characters of a stream's id in a line; ids are UUIDs, or whatever a harness likes."""

MAX_REASON: Final = 200
"""Characters of a reason in a line: it may be in words of a peer."""

BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds, as others have them: upper ends of what is counted together."""


class Journal:
    """What one node has seen."""

    def __init__(self) -> None:
        self.refusals: Counter[tuple[str, str]] = Counter()
        """By what was refused (a call, an upgrade, a stream) and the code of the reason."""
        self.streams = 0
        """That were opened."""
        self.store_errors = 0
        self.latency: list[int] = [0] * (len(BUCKETS) + 1)
        """How many calls took how long to authorise, by bucket, and those that took longer."""
        self.latency_sum = 0.0
        self._of_one = Throttle(LINES_PER_SECOND, LINES_AT_ONCE)
        self._of_all = Throttle(ALL_LINES_PER_SECOND, ALL_LINES_AT_ONCE)
        self._untold = 0

    def registered(self, environment: str, tenant: str, key: str, address: str, registration: str) -> None:
        log.info(
            "an environment registered",
            environment=environment,
            tenant=tenant,
            key=key,
            address=address,
            registration=registration,
        )

    def authorised(self, seconds: float) -> None:
        """A call was found to be allowed, or not, within so long."""
        self.latency[bisect_left(BUCKETS, seconds)] += 1
        self.latency_sum += seconds

    def refused(self, what: str, code: str, reason: str, address: str) -> None:
        """Somebody was not let in. Whoever knocks a thousand times fills no log."""
        self.refusals[what, code] += 1
        now = time.monotonic()
        if not self._of_one.allow(address, now) or not self._of_all.allow("", now):
            self._untold += 1
            return
        untold, self._untold = self._untold, 0
        more = {"untold_before": untold} if untold else {}
        log.info(f"refused: {what}", code=code, reason=reason[:MAX_REASON], address=address, **more)


class Visit:
    """A WebSocket, from its admission to its end."""

    __slots__ = ("_journal", "_over", "_settled", "_stream", "address", "received", "sent", "since", "ticket")

    def __init__(self, journal: Journal, ticket: EnvironmentTicket | HarnessTicket, address: str) -> None:
        self._journal = journal
        self.ticket = ticket
        self.address = address
        self.since = time.time()
        self.received = 0
        self.sent = 0
        """Bytes of frames, from the peer and to it."""
        self._settled = isinstance(ticket, EnvironmentTicket)
        """Whether there is nothing more to learn from frames."""
        self._over = False
        self._stream: dict[str, str] = {}
        if self._settled:
            log.info("an environment connected", **self._who())

    def sending(self, frame: bytes | memoryview) -> None:
        """Something is passed on to the peer; with the first it is clear what becomes of a stream."""
        self.sent += len(frame)
        if self._settled:
            return
        self._settled = True
        try:
            found = decode(frame)
        except BadFrame:
            return
        body = found.body
        self._stream = {"stream": found.stream_id[:MAX_STREAM]}
        if isinstance(body, Reset):
            self._journal.refusals["stream", body.reason if is_known(body.reason) else "other"] += 1
            log.info("a stream was refused", reason=body.reason[:MAX_REASON], **self._who())
            return
        self._journal.streams += isinstance(body, Handshake)
        event = "a stream was opened" if isinstance(body, Handshake) else "a stream goes on"
        log.info(event, **self._who())

    def ended(self, reason: str) -> None:
        """It is over, whoever says so first."""
        if self._over:
            return
        self._over = True
        served = isinstance(self.ticket, EnvironmentTicket)
        log.info(
            "an environment is gone" if served else "a harness is gone",
            **self._who(),
            seconds=round(time.time() - self.since, 3),
            received=self.received,
            sent=self.sent,
            reason=reason[:MAX_REASON],
        )

    def listed(self) -> dict[str, Any]:
        """For whoever looks at what there is."""
        return {
            "key": self.ticket.key_name,
            "address": self.address,
            "since": self.since,
            "bytes": self.received + self.sent,
        }

    def _who(self) -> dict[str, Any]:
        ticket = self.ticket
        return {
            "environment": ticket.environment,
            "tenant": ticket.tenant,
            "key": ticket.key_name,
            "address": self.address,
            **self._stream,
        }
