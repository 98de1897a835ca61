"""How far a handle is: everything that changes it, as a table. Pure.

                 start              succeed
    NOT_STARTED ───────→ STARTING ───────────→ READY ←──────────┐ succeed
         │                │     │                │ lose         │
         │                │     └─ fail for now ─┴→ UNREACHABLE ─┴ start → RETRYING
         │  fail for good │                            ↑                     │ fail, for now or for good
         └──────────────→ FAILED                       └─────────────────────┘
                              (and from everywhere: close → CLOSED)

READY is about being attached. A connection that drops afterwards is the client's to repair; only one that it
has given up is lost here. The first attempt decides whether a failure is for good; a retry that fails is
forgotten, so that a later caller can try again.
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["ATTEMPTING", "FINISHED", "TRANSITIONS", "Happening", "Readiness", "step"]


class Readiness(enum.Enum):
    """What a handle is good for."""

    NOT_STARTED = "not started"
    STARTING = "starting"
    READY = "ready"
    UNREACHABLE = "unreachable"
    """The last attempt failed; the next caller makes another."""
    RETRYING = "retrying"
    FAILED = "failed"
    """For good: later callers get the same error."""
    CLOSED = "closed"


class Happening(enum.Enum):
    """What changes it."""

    START = "started"
    SUCCEED = "attached"
    FAIL_FOR_NOW = "refused for now"
    FAIL_FOR_GOOD = "refused for good"
    LOSE = "lost"
    """The client has given its connection up."""
    CLOSE = "closed"


TRANSITIONS: Final[dict[Readiness, dict[Happening, Readiness]]] = {
    Readiness.NOT_STARTED: {
        Happening.START: Readiness.STARTING,
        Happening.FAIL_FOR_GOOD: Readiness.FAILED,
        Happening.CLOSE: Readiness.CLOSED,
    },
    Readiness.STARTING: {
        Happening.SUCCEED: Readiness.READY,
        Happening.FAIL_FOR_NOW: Readiness.UNREACHABLE,
        Happening.FAIL_FOR_GOOD: Readiness.FAILED,
        Happening.CLOSE: Readiness.CLOSED,
    },
    Readiness.READY: {
        Happening.LOSE: Readiness.UNREACHABLE,
        Happening.FAIL_FOR_GOOD: Readiness.FAILED,
        Happening.CLOSE: Readiness.CLOSED,
    },
    Readiness.UNREACHABLE: {
        Happening.START: Readiness.RETRYING,
        Happening.CLOSE: Readiness.CLOSED,
    },
    Readiness.RETRYING: {
        Happening.SUCCEED: Readiness.READY,
        Happening.FAIL_FOR_NOW: Readiness.UNREACHABLE,
        Happening.FAIL_FOR_GOOD: Readiness.UNREACHABLE,
        Happening.CLOSE: Readiness.CLOSED,
    },
    Readiness.FAILED: {Happening.CLOSE: Readiness.CLOSED},
    Readiness.CLOSED: {},
}
"""Every change there is."""

FINISHED: Final = frozenset(Readiness) - {Readiness.NOT_STARTED, Readiness.STARTING}
"""The first attempt has had its result."""

ATTEMPTING: Final = frozenset({Readiness.STARTING, Readiness.RETRYING})
"""Somebody is at it; whoever comes now waits for the same attempt."""


def step(readiness: Readiness, happening: Happening) -> Readiness:
    """What it is afterwards; what cannot happen is a mistake in the caller."""
    try:
        return TRANSITIONS[readiness][happening]
    except KeyError:
        raise RuntimeError(f"an environment that is {readiness.value} cannot be {happening.value}") from None
