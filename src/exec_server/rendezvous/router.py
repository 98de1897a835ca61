"""The router: carries frames between harnesses and environments, and sees nothing but whose they are.

    harness socket --(claims a stream id)--> route <--(frames of that id)-- environment socket

Frames pass unchanged and in order. A plain stream ends when a socket of it does, and the other end is told; a
stream whose two ends acknowledge (both said so in their handshakes) waits 30 seconds for the socket to come
back. Knows nothing of sockets: they are given to it, here or on another node.
"""

from __future__ import annotations

from typing import Final, Protocol

from .. import log
from ..loop import Loop, Timer
from ..relay.frame import (
    NOTHING_RECEIVED,
    BadFrame,
    Frame,
    Handshake,
    Reset,
    Resume,
    decode,
    encode,
)
from ..relay.reasons import HANDSHAKES_PAUSED, KEY_REVOKED, NOT_TRUSTED, TOO_MANY_STREAMS
from ..relay.stream import PROTOCOL_ERROR
from .blame import Doorkeeper

__all__ = ["Harness", "Router", "Socket"]

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

GRACE_SECONDS: Final = 30.0
"""How long an acked stream waits for a socket to come back."""

LEARNING_SECONDS: Final = 5.0
"""After an environment has connected, how long acked streams nobody knows may be those of harnesses that are
still on their way back, e.g. after a restart. As long as an end calls for its peer."""

SLOW_SECONDS: Final = 1.0
"""How long a harness that takes nothing may keep its whole environment waiting; then its stream is reset."""

NORMAL, GOING_AWAY, POLICY = 1000, 1001, 1008


class Socket(Protocol):
    """A connection to one end, wherever it is."""

    def send(self, frame: bytes | memoryview) -> bool:
        """False when too much is unsent already; the frame is dropped then. A view is not kept."""

    def is_full(self) -> bool:
        """Whether it should get no more for now; `Router.drained` must follow."""

    def pause(self) -> None:
        """Read nothing from it for now."""

    def resume(self) -> None: ...
    def close(self, code: int, reason: str) -> None: ...


class _Route:
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

    def __init__(self, stream_id: str, harness: Harness) -> None:
        self.stream_id = stream_id
        self.harness: Harness | None = harness
        self.key_digest = harness.key_digest
        self.caller = harness.caller
        self.answered = False
        """The environment has answered the handshake: it is a stream."""
        self.tried_at: float | None = None
        """When the handshake was passed on."""
        self.opening: Timer | None = None
        """Runs until it is a stream."""
        self.offered = False
        """The harness offered to acknowledge."""
        self.acked = False
        self.expiry: Timer | None = None
        self.slow: Timer | None = None
        """Runs while the environment is not read because this harness takes nothing."""


class Harness:
    """A harness's socket and the stream on it."""

    __slots__ = ("begun", "caller", "closed", "key_digest", "paused", "registration_id", "route", "socket")

    def __init__(self, registration_id: str, key_digest: str, socket: Socket, caller: str = "") -> None:
        self.registration_id = registration_id
        self.key_digest = key_digest
        self.caller = caller
        """The id of the API key it came with."""
        self.socket = socket
        self.route: _Route | None = None
        self.paused = False
        self.closed = False
        self.begun = False
        """There was a stream on it, or an attempt at one."""


class _Environment:
    """What is known of a registration while it has a socket, or streams that wait for one."""

    __slots__ = ("door", "learning_until", "routes", "slow", "socket", "waiting")

    def __init__(self) -> None:
        self.door = Doorkeeper()
        self.socket: Socket | None = None
        self.learning_until = 0.0
        self.routes: dict[str, _Route] = {}
        self.waiting: set[Harness] = set()
        """Harnesses that are not read because the environment is full."""
        self.slow: set[_Route] = set()
        """Routes the environment is not read for."""


class Router:
    """All of one node."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._environments: dict[str, _Environment] = {}
        self.frames = 0
        self.bytes = 0
        self.dropped = 0
        self.resets = 0

    # Environments --------------------------------------------------------------------------------

    def environment_opened(self, registration_id: str, socket: Socket) -> None:
        """An environment has connected; a socket it had before is replaced."""
        environment = self._environments.setdefault(registration_id, _Environment())
        before, environment.socket = environment.socket, socket
        environment.learning_until = self._loop.time() + LEARNING_SECONDS
        environment.door.opened()
        environment.slow.clear()
        if before is not None:
            before.close(NORMAL, "replaced by a newer connection")
            for route in list(environment.routes.values()):
                if not route.acked:
                    self._end_at_harness(environment, route, "environment_disconnected", None)
        for route in environment.routes.values():
            if route.harness is not None:
                self._stop_expiry(route)

    def environment_closed(self, registration_id: str, socket: Socket) -> None:
        """Its socket is gone."""
        environment = self._environments.get(registration_id)
        if environment is None or environment.socket is not socket:
            return
        environment.socket = None
        for route in list(environment.routes.values()):
            self._end_slow(environment, route)
            if route.acked:
                self._expire_later(registration_id, environment, route)
            else:
                self._end_at_harness(environment, route, "environment_disconnected", GOING_AWAY)
        for harness in environment.waiting:
            self._read_again(harness)
        environment.waiting.clear()
        self._forget_if_idle(registration_id, environment)

    def supersede(self, registration_id: str) -> None:
        """The registration is no longer current: everything on it ends."""
        self._end_all(registration_id, "superseded", NORMAL, "superseded by a newer registration")

    def revoke(self, registration_id: str) -> None:
        """The key it was registered with is revoked: the same."""
        self._end_all(registration_id, KEY_REVOKED, POLICY, "the key of this environment was revoked")

    def _end_all(self, registration_id: str, reason: str, code: int, text: str) -> None:
        environment = self._environments.pop(registration_id, None)
        if environment is None:
            return
        for route in list(environment.routes.values()):
            self._end_at_harness(environment, route, reason, GOING_AWAY)
        if environment.socket is not None:
            environment.socket.close(code, text)

    def forget(self, registration_id: str) -> dict[Harness, str]:
        """The environment is on another node now. Gives the plain streams that end with that, by harness."""
        environment = self._environments.pop(registration_id, None)
        plain: dict[Harness, str] = {}
        if environment is not None:
            for route in list(environment.routes.values()):
                if route.harness is not None and not route.acked:
                    plain[route.harness] = route.stream_id
                self._drop(environment, route)
        return plain

    def is_online(self, registration_id: str) -> bool:
        environment = self._environments.get(registration_id)
        return environment is not None and environment.socket is not None

    def environment_frame(self, registration_id: str, socket: Socket, message: bytes | memoryview) -> None:
        """A message from an environment's socket."""
        environment = self._environments.get(registration_id)
        if environment is None or environment.socket is not socket:
            return
        try:
            frame = decode(message)
        except BadFrame as error:
            log.debug("a frame of an environment was dropped", reason=str(error))
            self.dropped += 1
            return
        route = environment.routes.get(frame.stream_id)
        body = frame.body
        if route is None:
            learning = frame.acknowledges and self._loop.time() < environment.learning_until
            if type(body) is not Reset and not learning:
                self._reset(socket, frame.stream_id, "harness_disconnected")
            return
        harness = route.harness
        if type(body) is Handshake:
            route.acked = route.acked or (route.offered and frame.acknowledges)
            route.answered = True
            self._stop_opening(route)
        elif type(body) is Reset and self._is_shut(environment, route, body.reason):
            if harness is not None:
                self._reset(harness.socket, frame.stream_id, HANDSHAKES_PAUSED)
            self._drop(environment, route)
            return
        if harness is not None:
            self._forward_to_harness(environment, route, harness, message)
        if type(body) is Reset:
            self._drop(environment, route)

    def _is_shut(self, environment: _Environment, route: _Route, reason: str) -> bool:
        """A stream was reset. If that was the answer to a handshake, somebody is to blame for it; or nobody,
        because the environment takes none for now, which a harness of ours is told."""
        if route.answered or route.tried_at is None or reason not in (PROTOCOL_ERROR, NOT_TRUSTED):
            return False
        return not environment.door.failed(route.caller, self._loop.time()) and route.offered

    def _abandoned(self, environment: _Environment, route: _Route) -> None:
        """A harness does not wait for the answer."""
        now = self._loop.time()
        if not route.answered and route.tried_at is not None and now - route.tried_at < ABANDONED_SECONDS:
            environment.door.failed(route.caller, now)

    def _forward_to_harness(
        self, environment: _Environment, route: _Route, harness: Harness, message: bytes | memoryview
    ) -> None:
        self._count(message)
        if not harness.socket.send(message):
            self.dropped += 1
            if not route.acked:
                self._end_both(environment, route, "too much is unsent to the harness")
        elif not route.acked and route.slow is None and harness.socket.is_full():
            # A plain stream cannot make its sender wait, so the whole environment waits, but not for long.
            route.slow = self._loop.call_later(SLOW_SECONDS, self._too_slow, environment, route)
            environment.slow.add(route)
            if environment.socket is not None:
                environment.socket.pause()

    def _too_slow(self, environment: _Environment, route: _Route) -> None:
        self._end_both(environment, route, f"the harness took nothing for {SLOW_SECONDS:g} s")

    def _end_slow(self, environment: _Environment, route: _Route) -> None:
        if route.slow is not None:
            route.slow.cancel()
            route.slow = None
            environment.slow.discard(route)
            if not environment.slow and environment.socket is not None:
                environment.socket.resume()

    # Harnesses -----------------------------------------------------------------------------------

    def harness_opened(
        self, registration_id: str, key_digest: str, socket: Socket, caller: str = ""
    ) -> Harness:
        """A harness has connected; its first frame says which stream it is."""
        return Harness(registration_id, key_digest, socket, caller)

    def harness_frame(self, harness: Harness, message: bytes | memoryview) -> None:
        """A message from a harness's socket."""
        environment = self._environments.get(harness.registration_id)
        try:
            frame = decode(message)
        except BadFrame as error:
            log.debug("a frame of a harness was dropped", reason=str(error))
            self.dropped += 1
            return
        if environment is None:
            self._reset(harness.socket, frame.stream_id, "environment_disconnected")
            harness.socket.close(GOING_AWAY, "the environment is not connected")
            return
        route = harness.route
        if route is None or route.stream_id != frame.stream_id:
            route = self._claim(environment, harness, frame)
            if route is None:
                return
        if type(frame.body) is Handshake and not self._let_try(environment, route, harness, frame):
            return
        self._forward_to_environment(environment, route, harness, message)
        if type(frame.body) is Reset:
            self._abandoned(environment, route)
            self._drop(environment, route)

    def _let_try(self, environment: _Environment, route: _Route, harness: Harness, frame: Frame) -> bool:
        """Whether a handshake is passed on."""
        if route.answered:
            return True
        now, refused = self._loop.time(), None
        if not environment.door.may_try(harness.caller, now):
            refused = HANDSHAKES_PAUSED
        elif route.tried_at is None and self._is_full(environment, harness.caller):
            refused = TOO_MANY_STREAMS
        if refused is not None:
            self._reset(harness.socket, route.stream_id, refused)
            self._drop(environment, route)
            return False
        route.offered = frame.acknowledges
        if route.tried_at is None:
            route.tried_at = now
            self._stop_opening(route)
            route.opening = self._loop.call_later(ANSWER_SECONDS, self._not_opened, environment, route)
        return True

    def _is_full(self, environment: _Environment, caller: str) -> bool:
        """Whether the environment has as many streams as it may have, or as many of this caller."""
        taken = [
            route.caller
            for route in environment.routes.values()
            if route.answered or route.tried_at is not None
        ]
        return len(taken) >= MAX_STREAMS or taken.count(caller) >= CALLER_STREAMS

    def _not_opened(self, environment: _Environment, route: _Route) -> None:
        """There was no handshake in time, or no answer to it."""
        route.opening = None
        if environment.routes.get(route.stream_id) is not route:
            return
        harness = route.harness
        self._end_both(environment, route, "there was no handshake in time")
        if harness is not None:
            harness.socket.close(POLICY, "there was no handshake in time")

    def _claim(self, environment: _Environment, harness: Harness, frame: Frame) -> _Route | None:
        """The first frame of a stream on a socket: a new stream, or one that comes back."""
        body = frame.body
        if type(body) is not Resume and type(body) is not Handshake:
            if harness.route is None and not harness.begun:
                harness.socket.close(POLICY, "a stream begins with `resume` or `handshake`")
            return None
        harness.begun = True
        if not _is_sane(frame.stream_id):
            harness.socket.close(
                POLICY, "a stream's id is at most 256 bytes, none of them control characters"
            )
            return None
        known = environment.routes.get(frame.stream_id)
        if known is not None and not (
            known.acked
            and type(body) is Resume
            and frame.acknowledges
            and known.key_digest == harness.key_digest
        ):
            self._reset(harness.socket, frame.stream_id, "stream_replaced")
            return None
        if harness.route is not None:
            self._reset(harness.socket, frame.stream_id, "closed")
            return None
        if known is None:
            # It goes on with a stream from before our time: only ends that acknowledge do.
            acked = type(body) is Resume and (body.next_seq > 0 or frame.ack not in (0, NOTHING_RECEIVED))
            if self._is_full(environment, harness.caller) or (
                not acked and self._claims_enough(environment, harness)
            ):
                self._reset(harness.socket, frame.stream_id, TOO_MANY_STREAMS)
                return None
            route = environment.routes[frame.stream_id] = _Route(frame.stream_id, harness)
            route.acked = route.answered = acked
            if not acked:
                route.opening = self._loop.call_later(CLAIM_SECONDS, self._not_opened, environment, route)
        else:
            route = known
            before, route.harness = route.harness, harness
            if before is not None:
                before.route = None
                before.socket.close(NORMAL, "the stream goes on elsewhere")
            if environment.socket is not None:
                self._stop_expiry(route)
        harness.route = route
        return route

    def _claims_enough(self, environment: _Environment, harness: Harness) -> bool:
        claims = 0
        for route in environment.routes.values():
            claims += not route.answered and route.tried_at is None and route.caller == harness.caller
        return claims >= CALLER_CLAIMS

    def _forward_to_environment(
        self, environment: _Environment, route: _Route, harness: Harness, message: bytes | memoryview
    ) -> None:
        socket = environment.socket
        if socket is None:
            return  # it will be back, and this will be sent again
        self._count(message)
        if not socket.send(message):
            self.dropped += 1
            if not route.acked:
                self._end_both(environment, route, "too much is unsent to the environment")
        elif socket.is_full() and not harness.paused:
            harness.paused = True
            environment.waiting.add(harness)
            harness.socket.pause()

    def adopt(self, harness: Harness, stream_id: str) -> None:
        """An acked stream goes on whose environment was elsewhere before."""
        environment = self._environments.get(harness.registration_id)
        if environment is None:
            return
        known = environment.routes.get(stream_id)
        if known is None and not self._is_full(environment, harness.caller):
            route = environment.routes[stream_id] = _Route(stream_id, harness)
            route.acked = route.answered = True
            harness.route = route
        elif known is not None and known.harness is not harness and known.key_digest == harness.key_digest:
            known.harness, harness.route = harness, known
            self._stop_expiry(known)

    def harness_closed(self, harness: Harness) -> None:
        """Its socket is gone."""
        harness.closed = True
        environment = self._environments.get(harness.registration_id)
        if environment is None:
            return
        environment.waiting.discard(harness)
        route, harness.route = harness.route, None
        if route is None or route.harness is not harness:
            return
        route.harness = None
        self._end_slow(environment, route)
        self._abandoned(environment, route)
        if route.acked:
            self._expire_later(harness.registration_id, environment, route)
        else:
            self._end_at_environment(environment, route, "harness_disconnected")
            self._forget_if_idle(harness.registration_id, environment)

    def harness_revoked(self, harness: Harness) -> None:
        """The key it came with is revoked: its stream ends at once, also one that could go on."""
        environment, route = self._environments.get(harness.registration_id), harness.route
        if environment is not None and route is not None and route.harness is harness:
            self._end_at_environment(environment, route, "harness_disconnected")
            self._reset(harness.socket, route.stream_id, KEY_REVOKED)
            harness.route = None
        harness.socket.close(POLICY, "the key was revoked")

    # Flow ----------------------------------------------------------------------------------------

    def environment_drained(self, registration_id: str) -> None:
        """An environment's socket has room again."""
        environment = self._environments.get(registration_id)
        if environment is not None:
            waiting, environment.waiting = environment.waiting, set()
            for harness in waiting:
                self._read_again(harness)

    def harness_drained(self, harness: Harness) -> None:
        """A harness's socket has room again."""
        environment = self._environments.get(harness.registration_id)
        if environment is not None and harness.route is not None:
            self._end_slow(environment, harness.route)

    def _read_again(self, harness: Harness) -> None:
        if harness.paused and not harness.closed:
            harness.paused = False
            harness.socket.resume()

    # The end of streams --------------------------------------------------------------------------

    def _end_both(self, environment: _Environment, route: _Route, reason: str) -> None:
        log.info("a stream was reset", stream=route.stream_id, reason=reason)
        self._end_at_environment(environment, route, "closed")
        if route.harness is not None:
            self._reset(route.harness.socket, route.stream_id, "closed")
            route.harness.route = None

    def _end_at_environment(self, environment: _Environment, route: _Route, reason: str) -> None:
        self._drop(environment, route, keep_harness=True)
        if environment.socket is not None:
            self._reset(environment.socket, route.stream_id, reason)

    def _end_at_harness(
        self, environment: _Environment, route: _Route, reason: str, code: int | None
    ) -> None:
        harness = route.harness
        self._drop(environment, route)
        if harness is not None:
            self._reset(harness.socket, route.stream_id, reason)
            if code is not None:
                harness.socket.close(code, reason)

    def _drop(self, environment: _Environment, route: _Route, *, keep_harness: bool = False) -> None:
        self._stop_expiry(route)
        self._stop_opening(route)
        self._end_slow(environment, route)
        if environment.routes.get(route.stream_id) is route:
            del environment.routes[route.stream_id]
        if route.harness is not None and not keep_harness:
            route.harness.route = None

    def _expire_later(self, registration_id: str, environment: _Environment, route: _Route) -> None:
        if route.expiry is None:
            route.expiry = self._loop.call_later(
                GRACE_SECONDS, self._expired, registration_id, environment, route
            )

    def _expired(self, registration_id: str, environment: _Environment, route: _Route) -> None:
        route.expiry = None
        if environment.socket is not None:
            self._end_at_environment(environment, route, "harness_disconnected")
        self._end_at_harness(environment, route, "environment_disconnected", GOING_AWAY)
        self._forget_if_idle(registration_id, environment)

    def _stop_expiry(self, route: _Route) -> None:
        if route.expiry is not None:
            route.expiry.cancel()
            route.expiry = None

    def _stop_opening(self, route: _Route) -> None:
        if route.opening is not None:
            route.opening.cancel()
            route.opening = None

    def _forget_if_idle(self, registration_id: str, environment: _Environment) -> None:
        if environment.socket is None and not environment.routes:
            self._environments.pop(registration_id, None)

    def _reset(self, socket: Socket, stream_id: str, reason: str) -> None:
        self.resets += 1
        socket.send(encode(Frame(stream_id, Reset(reason))))

    def _count(self, message: bytes | memoryview) -> None:
        self.frames += 1
        self.bytes += len(message)

    def close(self) -> None:
        """The node goes away and says nothing: whoever was on it comes back elsewhere."""
        environments, self._environments = self._environments, {}
        for environment in environments.values():
            for route in list(environment.routes.values()):
                self._drop(environment, route)

    # Looking -------------------------------------------------------------------------------------

    def streams(self) -> dict[str, list[dict[str, object]]]:
        """Every stream by registration: all that a router knows about them."""
        return {
            registration_id: [
                {"stream": route.stream_id, "acked": route.acked, "harness": route.harness is not None}
                for route in environment.routes.values()
            ]
            for registration_id, environment in self._environments.items()
        }

    def registrations(self) -> set[str]:
        """Those that have a socket, or streams that wait for one."""
        return set(self._environments)

    @property
    def online(self) -> int:
        return sum(environment.socket is not None for environment in self._environments.values())

    @property
    def stream_count(self) -> int:
        return sum(len(environment.routes) for environment in self._environments.values())


def _is_sane(stream_id: str) -> bool:
    """Whether an id can be kept and shown: short, and without control characters."""
    return len(stream_id.encode()) <= MAX_STREAM_ID_BYTES and stream_id.isprintable()
