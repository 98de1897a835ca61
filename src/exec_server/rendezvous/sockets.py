"""The WebSockets of a node as its router sees them, and where their frames go."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Final

from ..relay.link import WebSocketLink
from .audit import Visit
from .router import POLICY, Router
from .routes import Harness
from .tickets import EnvironmentTicket, HarnessTicket

__all__ = ["Carrier", "EnvironmentSocket", "HarnessSocket", "LocalCarrier"]

QUEUE_BYTES: Final = 8 * 1024 * 1024
"""Unsent bytes of a socket at which frames are dropped."""

FULL_BYTES: Final = 4 * 1024 * 1024
"""Unsent bytes of a socket at which whoever fills it is no longer read."""

IDLE_SECONDS: Final = 10.0
"""How long a harness's socket may be open without a stream."""

MAX_JUNK: Final = 256
JUNK_SECONDS: Final = 60.0
"""So many messages of one socket that are no frames, in so long, are no accident: it is cut off."""

UNSUPPORTED: Final = 1003

ROUTER_HOLD, CLUSTER_HOLD, HOME_HOLD = 1, 2, 4
"""Why a socket is not read: its other end is full, or the way to other nodes, or its other end on one."""


class Carrier(ABC):
    """Where the frames of sockets go: the router of this node, or the one that has the environment."""

    def __init__(self) -> None:
        self.sockets: set[_Socket] = set()
        """All that are open."""

    @abstractmethod
    def environment(self, ticket: EnvironmentTicket) -> EnvironmentSocket: ...

    @abstractmethod
    def harness(self, ticket: HarnessTicket) -> _Socket: ...


class _Socket(ABC):
    """A WebSocket of this node as the router sees it."""

    caller = ""
    """The id of the API key that opened it, or that registered what it serves."""
    until: float | None = None
    """When that key expires."""
    visit: Visit | None = None
    """What is written down of it."""

    def __init__(self, carrier: Carrier, full: int = FULL_BYTES, most: int = QUEUE_BYTES) -> None:
        """From `full` unsent bytes on whoever fills it has to wait, and from `most` on frames are dropped."""
        self.link = WebSocketLink(self, full, quoting=False)
        self._most = most
        self._open = carrier.sockets
        self._open.add(self)
        self._idle: asyncio.TimerHandle | None = None
        self._holds = 0
        self._junk = 0
        self._junk_since = 0.0

    def send(self, frame: bytes | memoryview) -> bool:
        if self.link.unsent() + len(frame) > self._most:
            return False
        if self.visit is not None:
            self.visit.sending(frame)
        self.link.send(frame)
        return True

    def count(self, message: bytes | memoryview) -> None:
        """Something has arrived on it."""
        if self.visit is not None:
            self.visit.received += len(message)

    def is_full(self) -> bool:
        return self.link.full

    def pause(self) -> None:
        self.hold(ROUTER_HOLD)

    def resume(self) -> None:
        self.release(ROUTER_HOLD)

    def hold(self, reason: int) -> None:
        """Read nothing from it until every reason is gone."""
        if not self._holds:
            self.link.pause_reading()
        self._holds |= reason

    def release(self, reason: int) -> None:
        if self._holds & reason:
            self._holds &= ~reason
            if not self._holds:
                self.link.resume_reading()

    @abstractmethod
    def opened(self) -> None: ...

    def watch_idle(self) -> None:
        """Look again and again whether there is a stream; who has none has no business here."""
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._look)

    def _look(self) -> None:
        if self.has_stream():
            self.watch_idle()
        else:
            self.close(POLICY, "no stream on this connection")

    def has_stream(self) -> bool:
        return True

    def stop_watching(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def close(self, code: int, reason: str) -> None:
        self._open.discard(self)
        self.stop_watching()
        if self.visit is not None:
            self.visit.ended(reason)
        self.link.close(code, reason)

    @abstractmethod
    def revoke(self) -> None:
        """The key behind it is revoked: it ends now, with all that is on it."""

    @abstractmethod
    def frame_arrived(self, message: bytes | memoryview) -> None: ...

    @abstractmethod
    def text_arrived(self) -> None: ...

    def junk_arrived(self) -> None:
        """A message that is no frame: dropped, unless there is no end to them."""
        now = asyncio.get_running_loop().time()
        if now - self._junk_since > JUNK_SECONDS:
            self._junk, self._junk_since = 0, now
        self._junk += 1
        if self._junk >= MAX_JUNK:
            self.link.refuse(POLICY, "too many messages that are no frames")

    @abstractmethod
    def link_drained(self) -> None: ...

    def link_closed(self, reason: str) -> None:
        if self.visit is not None:
            self.visit.ended(reason)
        self._open.discard(self)
        self.stop_watching()


class EnvironmentSocket(_Socket):
    """An environment's WebSocket."""

    def __init__(
        self,
        carrier: Carrier,
        router: Router,
        ticket: EnvironmentTicket,
        full: int = FULL_BYTES,
        most: int = QUEUE_BYTES,
    ) -> None:
        super().__init__(carrier, full, most)
        self._router = router
        self.registration_id = ticket.registration_id
        self.caller = ticket.caller

    def opened(self) -> None:
        self._router.environment_opened(self.registration_id, self)

    def frame_arrived(self, message: bytes | memoryview) -> None:
        self.count(message)
        if not self._router.environment_frame(self.registration_id, self, message):
            self.junk_arrived()

    def revoke(self) -> None:
        self._router.revoke(self.registration_id)

    def text_arrived(self) -> None:
        """Ignored, as environments do with text."""
        self.junk_arrived()

    def link_drained(self) -> None:
        self._router.environment_drained(self.registration_id)

    def link_closed(self, reason: str) -> None:
        super().link_closed(reason)
        self._router.environment_closed(self.registration_id, self)


class HarnessSocket(_Socket):
    """A harness's WebSocket, for an environment on this node."""

    def __init__(self, carrier: Carrier, router: Router, ticket: HarnessTicket) -> None:
        super().__init__(carrier)
        self._router = router
        self.caller = ticket.caller
        self.harness: Harness = router.harness_opened(
            ticket.registration_id, ticket.key_digest, self, ticket.caller
        )

    def opened(self) -> None:
        """Its first frame says what it is."""
        self.watch_idle()

    def has_stream(self) -> bool:
        return self.harness.route is not None

    def frame_arrived(self, message: bytes | memoryview) -> None:
        self.count(message)
        if not self._router.harness_frame(self.harness, message):
            self.junk_arrived()

    def revoke(self) -> None:
        self._router.harness_revoked(self.harness)

    def text_arrived(self) -> None:
        self.close(UNSUPPORTED, "frames are binary")

    def link_drained(self) -> None:
        self._router.harness_drained(self.harness)

    def close(self, code: int, reason: str) -> None:
        super().close(code, reason)
        self._router.harness_closed(self.harness)

    def link_closed(self, reason: str) -> None:
        super().link_closed(reason)
        self._router.harness_closed(self.harness)


class LocalCarrier(Carrier):
    """All sockets are here."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self._router = router

    def environment(self, ticket: EnvironmentTicket) -> EnvironmentSocket:
        return EnvironmentSocket(self, self._router, ticket)

    def harness(self, ticket: HarnessTicket) -> HarnessSocket:
        return HarnessSocket(self, self._router, ticket)
