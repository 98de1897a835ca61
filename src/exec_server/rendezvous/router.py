"""The router: carries frames between harnesses and environments, and sees nothing but whose they are.

    harness socket --(claims a stream id)--> route <--(frames of that id)-- environment socket

Frames pass unchanged and in order. A plain stream ends when a socket of it does, and the other end is told; a
stream whose two ends acknowledge (both said so in their handshakes) waits 30 seconds for the socket to come
back. Knows nothing of sockets: they are given to it, here or on another node.
"""

from __future__ import annotations

from typing import Final

from .. import log
from ..loop import Loop
from ..relay.frame import BadFrame, Frame, Handshake, Reset, decode, encode
from ..relay.reasons import HANDSHAKES_PAUSED, KEY_REVOKED
from .claims import (
    ANSWER_SECONDS,
    CLAIM_SECONDS,
    Refusal,
    abandoned,
    claim,
    is_full,
    is_shut,
    why_not_to_try,
)
from .routes import Environment, Harness, Route, Socket

__all__ = ["Router"]

GRACE_SECONDS: Final = 30.0
"""How long an acked stream waits for a socket to come back."""

LEARNING_SECONDS: Final = 5.0
"""After an environment has connected, how long acked streams nobody knows may be those of harnesses that are
still on their way back, e.g. after a restart. As long as an end calls for its peer."""

SLOW_SECONDS: Final = 3.0
"""How long a harness that does not take what it was sent may keep its whole environment waiting; then its
stream is reset. A busy machine is slow for a second now and then."""

NORMAL, GOING_AWAY, POLICY = 1000, 1001, 1008


class Router:
    """All of one node."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._environments: dict[str, Environment] = {}
        self.frames = 0
        self.bytes = 0
        self.dropped = 0
        self.resets = 0
        self.retired: dict[str, str] = {}
        """Registrations that their own environment has replaced, and by which: they last as long as their
        connection, if nothing happens to the next."""

    # Environments --------------------------------------------------------------------------------

    def environment_opened(self, registration_id: str, socket: Socket) -> None:
        """An environment has connected; a socket it had before is replaced."""
        environment = self._environments.setdefault(registration_id, Environment())
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
                route.stop_expiry()

    def environment_closed(self, registration_id: str, socket: Socket) -> None:
        """Its socket is gone."""
        environment = self._environments.get(registration_id)
        if environment is None or environment.socket is not socket:
            return
        environment.socket = None
        for route in list(environment.routes.values()):
            environment.end_slow(route)
            if route.acked:
                self._expire_later(registration_id, environment, route)
            else:
                self._end_at_harness(environment, route, "environment_disconnected", GOING_AWAY)
        environment.read_waiting()
        self._forget_if_idle(registration_id, environment)

    def retire(self, registration_id: str, successor: str) -> None:
        """The registration is no longer current, but that is its environment's own doing: streams go on."""
        if registration_id in self._environments:
            self.retired[registration_id] = successor

    def end_retired(self) -> None:
        """Those that have no stream left: whoever still waits for some on one was not told of the next."""
        for registration_id in list(self.retired):
            environment = self._environments.get(registration_id)
            if environment is None or not environment.routes:
                self.supersede(registration_id)

    def supersede(self, registration_id: str) -> None:
        """The registration is no longer current: everything on it ends."""
        self._end_all(registration_id, "superseded", NORMAL, "superseded by a newer registration")

    def revoke(self, registration_id: str) -> None:
        """The key it was registered with is revoked: the same."""
        self._end_all(registration_id, KEY_REVOKED, POLICY, "the key of this environment was revoked")

    def _end_all(self, registration_id: str, reason: str, code: int, text: str) -> None:
        environment = self._environments.pop(registration_id, None)
        self.retired.pop(registration_id, None)
        for old in [old for old, successor in self.retired.items() if successor == registration_id]:
            self._end_all(old, reason, code, text)
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
                environment.drop(route)
        return plain

    def is_online(self, registration_id: str) -> bool:
        environment = self._environments.get(registration_id)
        return environment is not None and environment.socket is not None

    def environment_frame(self, registration_id: str, socket: Socket, message: bytes | memoryview) -> bool:
        """A message from an environment's socket. False when it is no frame."""
        environment = self._environments.get(registration_id)
        if environment is None or environment.socket is not socket:
            return True
        try:
            frame = decode(message)
        except BadFrame as error:
            log.debug("a frame of an environment was dropped", reason=str(error))
            self.dropped += 1
            return False
        route = environment.routes.get(frame.stream_id)
        body = frame.body
        if route is None:
            learning = frame.acknowledges and self._loop.time() < environment.learning_until
            if type(body) is not Reset and not learning:
                self._reset(socket, frame.stream_id, "harness_disconnected")
            return True
        harness = route.harness
        if type(body) is Handshake:
            route.acked = route.acked or (route.offered and frame.acknowledges)
            route.answered = True
            route.stop_opening()
        elif type(body) is Reset and is_shut(environment, route, body.reason, self._loop.time()):
            if harness is not None:
                self._reset(harness.socket, frame.stream_id, HANDSHAKES_PAUSED)
            environment.drop(route)
            return True
        if harness is not None:
            self._forward_to_harness(environment, route, harness, message)
        if type(body) is Reset:
            environment.drop(route)
        return True

    def _forward_to_harness(
        self, environment: Environment, route: Route, harness: Harness, message: bytes | memoryview
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

    def _too_slow(self, environment: Environment, route: Route) -> None:
        self._end_both(environment, route, f"the harness did not take what came within {SLOW_SECONDS:g} s")

    # Harnesses -----------------------------------------------------------------------------------

    def harness_opened(
        self, registration_id: str, key_digest: str, socket: Socket, caller: str = ""
    ) -> Harness:
        """A harness has connected; its first frame says which stream it is."""
        return Harness(registration_id, key_digest, socket, caller)

    def harness_frame(self, harness: Harness, message: bytes | memoryview) -> bool:
        """A message from a harness's socket. False when it is no frame."""
        environment = self._environments.get(harness.registration_id)
        try:
            frame = decode(message)
        except BadFrame as error:
            log.debug("a frame of a harness was dropped", reason=str(error))
            self.dropped += 1
            return False
        if environment is None:
            self._reset(harness.socket, frame.stream_id, "environment_disconnected")
            harness.socket.close(GOING_AWAY, "the environment is not connected")
            return True
        route = harness.route
        if route is None or route.stream_id != frame.stream_id:
            route = self._claim(environment, harness, frame)
            if route is None:
                return True
        if type(frame.body) is Handshake and not self._let_try(environment, route, harness, frame):
            return True
        self._forward_to_environment(environment, route, harness, message)
        if type(frame.body) is Reset:
            abandoned(environment, route, self._loop.time())
            environment.drop(route)
        return True

    def _let_try(self, environment: Environment, route: Route, harness: Harness, frame: Frame) -> bool:
        """Whether a handshake is passed on."""
        if route.answered:
            return True
        now = self._loop.time()
        refused = why_not_to_try(environment, route, harness, now)
        if refused is not None:
            self._reset(harness.socket, route.stream_id, refused)
            environment.drop(route)
            return False
        route.offered = frame.acknowledges
        if route.tried_at is None:
            route.tried_at = now
            route.stop_opening()
            route.opening = self._loop.call_later(ANSWER_SECONDS, self._not_opened, environment, route)
        return True

    def _not_opened(self, environment: Environment, route: Route) -> None:
        """There was no handshake in time, or no answer to it."""
        route.opening = None
        if environment.routes.get(route.stream_id) is not route:
            return
        harness = route.harness
        self._end_both(environment, route, "there was no handshake in time")
        if harness is not None:
            harness.socket.close(POLICY, "there was no handshake in time")

    def _claim(self, environment: Environment, harness: Harness, frame: Frame) -> Route | None:
        """The stream that a frame begins or goes on with, if it may."""
        route = claim(environment, harness, frame)
        if isinstance(route, Refusal):
            if route.reset is not None:
                self._reset(harness.socket, frame.stream_id, route.reset)
            if route.close is not None:
                harness.socket.close(POLICY, route.close)
            return None
        before, route.harness = route.harness, harness
        if before is not harness:
            if before is not None:
                before.route = None
                before.socket.close(NORMAL, "the stream goes on elsewhere")
            if environment.socket is not None:
                route.stop_expiry()
        elif not route.answered:
            route.opening = self._loop.call_later(CLAIM_SECONDS, self._not_opened, environment, route)
        harness.route = route
        return route

    def _forward_to_environment(
        self, environment: Environment, route: Route, harness: Harness, message: bytes | memoryview
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
        if known is None and not is_full(environment, harness.caller):
            harness.route = environment.add(stream_id, harness, acked=True)
        elif known is not None and known.harness is not harness and known.key_digest == harness.key_digest:
            known.harness, harness.route = harness, known
            known.stop_expiry()

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
        environment.end_slow(route)
        abandoned(environment, route, self._loop.time())
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
            environment.read_waiting()

    def harness_drained(self, harness: Harness) -> None:
        """A harness's socket has room again."""
        environment = self._environments.get(harness.registration_id)
        if environment is not None and harness.route is not None:
            environment.end_slow(harness.route)

    # The end of streams --------------------------------------------------------------------------

    def _end_both(self, environment: Environment, route: Route, reason: str) -> None:
        log.info("a stream was reset", stream=route.stream_id, reason=reason)
        self._end_at_environment(environment, route, "closed")
        if route.harness is not None:
            self._reset(route.harness.socket, route.stream_id, "closed")
            route.harness.route = None

    def _end_at_environment(self, environment: Environment, route: Route, reason: str) -> None:
        environment.drop(route, keep_harness=True)
        if environment.socket is not None:
            self._reset(environment.socket, route.stream_id, reason)

    def _end_at_harness(self, environment: Environment, route: Route, reason: str, code: int | None) -> None:
        harness = route.harness
        environment.drop(route)
        if harness is not None:
            self._reset(harness.socket, route.stream_id, reason)
            if code is not None:
                harness.socket.close(code, reason)

    def _expire_later(self, registration_id: str, environment: Environment, route: Route) -> None:
        if route.expiry is None:
            route.expiry = self._loop.call_later(
                GRACE_SECONDS, self._expired, registration_id, environment, route
            )

    def _expired(self, registration_id: str, environment: Environment, route: Route) -> None:
        route.expiry = None
        if environment.socket is not None:
            self._end_at_environment(environment, route, "harness_disconnected")
        self._end_at_harness(environment, route, "environment_disconnected", GOING_AWAY)
        self._forget_if_idle(registration_id, environment)

    def _forget_if_idle(self, registration_id: str, environment: Environment) -> None:
        if environment.socket is None and not environment.routes:
            self._environments.pop(registration_id, None)
            self.retired.pop(registration_id, None)

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
                environment.drop(route)

    # Looking -------------------------------------------------------------------------------------

    def streams(self) -> dict[str, list[dict[str, object]]]:
        """Every stream by registration."""
        return {registration_id: self.streams_of(registration_id) for registration_id in self._environments}

    def streams_of(self, registration_id: str) -> list[dict[str, object]]:
        """All that a router knows about the streams of one."""
        environment = self._environments.get(registration_id)
        return [
            {
                "stream": route.stream_id,
                "acked": route.acked,
                "harness": route.harness is not None,
                **({} if route.harness is None else route.harness.listed()),
            }
            for route in (environment.routes.values() if environment is not None else ())
        ]

    def registrations(self) -> set[str]:
        """Those that have a socket, or streams that wait for one."""
        return set(self._environments)

    @property
    def online(self) -> int:
        return sum(environment.socket is not None for environment in self._environments.values())

    @property
    def stream_count(self) -> int:
        return sum(len(environment.routes) for environment in self._environments.values())
