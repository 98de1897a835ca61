"""From the claim of a stream id to the answer to its handshake: who may have a stream, and who is to blame.

Decides; what follows from it, to sockets and timers, is the router's.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ..relay.frame import NOTHING_RECEIVED, Frame, Handshake, Resume
from ..relay.reasons import HANDSHAKES_PAUSED, NOT_TRUSTED, TOO_MANY_STREAMS
from ..relay.stream import PROTOCOL_ERROR
from .routes import Environment, Harness, Route

__all__ = [
    "ANSWER_SECONDS",
    "CLAIM_SECONDS",
    "Refusal",
    "abandoned",
    "claim",
    "is_full",
    "is_shut",
    "why_not_to_try",
]

MAX_STREAMS: Final = 128
"""Of one environment; its own limit, and so not worth exceeding."""

CALLER_STREAMS: Final = 96
"""Of one environment and one API key: the rest is for others, whatever this one does."""

CALLER_CLAIMS: Final = 64
"""Streams of one environment and one API key that have claimed an id and not sent their handshake yet."""

CLAIM_SECONDS: Final = 10.0
"""From the claim of an id to the handshake. A claim alone is worth nothing, and counts for nothing."""

ANSWER_SECONDS: Final = 15.0
"""From a handshake to the environment's answer: it has 10 s to ask the registry, and a way to go."""

ABANDONED_SECONDS: Final = 2.0
"""Who goes away so soon after a handshake may have known that it would fail."""

MAX_STREAM_ID_BYTES: Final = 256
"""Ids are UUIDs; whatever else somebody chooses is kept in tables and lists, and should be short."""


class Refusal(NamedTuple):
    """There is no stream for this frame: it is reset, or the whole socket closed, or nothing is said."""

    reset: str | None = None
    close: str | None = None


def claim(environment: Environment, harness: Harness, frame: Frame) -> Route | Refusal:
    """The first frame of a stream on a socket: a new stream, or one that comes back (from another socket)."""
    body = frame.body
    if type(body) is not Resume and type(body) is not Handshake:
        if harness.route is None and not harness.begun:
            return Refusal(close="a stream begins with `resume` or `handshake`")
        return Refusal()
    harness.begun = True
    if not _is_sane(frame.stream_id):
        return Refusal(close="a stream's id is at most 256 bytes, none of them control characters")
    known = environment.routes.get(frame.stream_id)
    if known is not None and not (
        known.acked and type(body) is Resume and frame.acknowledges and known.key_digest == harness.key_digest
    ):
        return Refusal("stream_replaced")
    if harness.route is not None:
        return Refusal("closed")
    if known is not None:
        return known
    # It goes on with a stream from before our time: only ends that acknowledge do.
    acked = type(body) is Resume and (body.next_seq > 0 or frame.ack not in (0, NOTHING_RECEIVED))
    if is_full(environment, harness.caller) or (not acked and _claims_enough(environment, harness.caller)):
        return Refusal(TOO_MANY_STREAMS)
    return environment.add(frame.stream_id, harness, acked=acked)


def why_not_to_try(environment: Environment, route: Route, harness: Harness, now: float) -> str | None:
    """Why a handshake is not passed on, if it is not."""
    if not environment.door.may_try(harness.caller, now):
        return HANDSHAKES_PAUSED
    if route.tried_at is None and is_full(environment, harness.caller):
        return TOO_MANY_STREAMS
    return None


def is_full(environment: Environment, caller: str) -> bool:
    """Whether the environment has as many streams as it may have, or as many of this caller."""
    taken = [
        route.caller for route in environment.routes.values() if route.answered or route.tried_at is not None
    ]
    return len(taken) >= MAX_STREAMS or taken.count(caller) >= CALLER_STREAMS


def _claims_enough(environment: Environment, caller: str) -> bool:
    claims = 0
    for route in environment.routes.values():
        claims += not route.answered and route.tried_at is None and route.caller == caller
    return claims >= CALLER_CLAIMS


def is_shut(environment: Environment, route: Route, reason: str, now: float) -> bool:
    """A stream was reset. If that was the answer to a handshake, somebody is to blame for it; or nobody,
    because the environment takes none for now, which a harness of ours is told."""
    if route.answered or route.tried_at is None or reason not in (PROTOCOL_ERROR, NOT_TRUSTED):
        return False
    return not environment.door.failed(route.caller, now) and route.offered


def abandoned(environment: Environment, route: Route, now: float) -> None:
    """A harness does not wait for the answer."""
    if not route.answered and route.tried_at is not None and now - route.tried_at < ABANDONED_SECONDS:
        environment.door.failed(route.caller, now)


def _is_sane(stream_id: str) -> bool:
    """Whether an id can be kept and shown: short, and without control characters."""
    return len(stream_id.encode()) <= MAX_STREAM_ID_BYTES and stream_id.isprintable()
