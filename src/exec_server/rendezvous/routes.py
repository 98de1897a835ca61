"""What a router knows of: environments, harnesses, and the streams between them."""

from __future__ import annotations

from typing import Protocol

from ..loop import Timer
from .blame import Doorkeeper

__all__ = ["Environment", "Harness", "Route", "Socket"]


class Socket(Protocol):
    """A connection to one end, wherever it is."""

    def send(self, frame: bytes | memoryview) -> bool:
        """False when too much is unsent already; the frame is dropped then. A view is not kept."""

    def is_full(self) -> bool:
        """Whether it should get no more for now; the router must be told when it has drained."""

    def pause(self) -> None:
        """Read nothing from it for now."""

    def resume(self) -> None: ...
    def close(self, code: int, reason: str) -> None: ...


class Route:
    """A stream: one harness, one environment."""

    __slots__ = (
        "acked",
        "answered",
        "caller",
        "expiry",
        "harness",
        "key_digest",
        "offered",
        "opening",
        "slow",
        "stream_id",
        "tried_at",
    )

    def __init__(self, stream_id: str, harness: Harness, *, acked: bool) -> None:
        self.stream_id = stream_id
        self.harness: Harness | None = harness
        self.key_digest = harness.key_digest
        self.caller = harness.caller
        self.answered = acked
        """The environment has answered the handshake: it is a stream."""
        self.tried_at: float | None = None
        """When the handshake was passed on."""
        self.opening: Timer | None = None
        """Runs until it is a stream."""
        self.offered = False
        """The harness offered to acknowledge."""
        self.acked = acked
        self.expiry: Timer | None = None
        self.slow: Timer | None = None
        """Runs while the environment is not read because this harness takes nothing."""

    def stop_expiry(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    def stop_opening(self) -> None:
        if self.opening is not None:
            self.opening.cancel()
            self.opening = None


class Harness:
    """A harness's socket and the stream on it."""

    __slots__ = ("begun", "caller", "closed", "key_digest", "paused", "registration_id", "route", "socket")

    def __init__(self, registration_id: str, key_digest: str, socket: Socket, caller: str = "") -> None:
        self.registration_id = registration_id
        self.key_digest = key_digest
        self.caller = caller
        """The id of the API key it came with."""
        self.socket = socket
        self.route: Route | None = None
        self.paused = False
        self.closed = False
        self.begun = False
        """There was a stream on it, or an attempt at one."""

    def listed(self) -> dict[str, object]:
        """Who it is, where its socket is on this node and knows."""
        visit = getattr(self.socket, "visit", None)
        return {} if visit is None else visit.listed()

    def read_again(self) -> None:
        if self.paused and not self.closed:
            self.paused = False
            self.socket.resume()


class Environment:
    """What is known of a registration while it has a socket, or streams that wait for one."""

    __slots__ = ("door", "learning_until", "routes", "slow", "socket", "waiting")

    def __init__(self) -> None:
        self.door = Doorkeeper()
        self.socket: Socket | None = None
        self.learning_until = 0.0
        self.routes: dict[str, Route] = {}
        self.waiting: set[Harness] = set()
        """Harnesses that are not read because the environment is full."""
        self.slow: set[Route] = set()
        """Routes the environment is not read for."""

    def add(self, stream_id: str, harness: Harness, *, acked: bool) -> Route:
        """A stream, or the claim of one; one that acknowledges already goes on from before our time."""
        route = self.routes[stream_id] = Route(stream_id, harness, acked=acked)
        return route

    def drop(self, route: Route, *, keep_harness: bool = False) -> None:
        """Nothing is known of the stream any more."""
        route.stop_expiry()
        route.stop_opening()
        self.end_slow(route)
        if self.routes.get(route.stream_id) is route:
            del self.routes[route.stream_id]
        if route.harness is not None and not keep_harness:
            route.harness.route = None

    def end_slow(self, route: Route) -> None:
        """The environment need not wait for this one any more."""
        if route.slow is not None:
            route.slow.cancel()
            route.slow = None
            self.slow.discard(route)
            if not self.slow and self.socket is not None:
                self.socket.resume()

    def read_waiting(self) -> None:
        """There is room, or nobody to have room: harnesses are read again."""
        waiting, self.waiting = self.waiting, set()
        for harness in waiting:
            harness.read_again()
