"""The sockets of a cluster: an environment's at its home, a harness's elsewhere, as seen from both."""

from __future__ import annotations

import asyncio
import secrets
import struct
from typing import TYPE_CHECKING, Any, Final

from ..relay.frame import NOTHING_RECEIVED, BadFrame, Frame, Handshake, Reset, Resume, decode, encode
from ..relay.reasons import KEY_REVOKED
from .router import GOING_AWAY, GRACE_SECONDS, POLICY, Router
from .routes import Harness
from .sockets import HOME_HOLD, EnvironmentSocket, _Socket
from .tickets import EnvironmentTicket, HarnessTicket

if TYPE_CHECKING:
    from .cluster import Cluster

__all__ = ["CLAIM", "CLOSED", "FULL", "ROOM", "TO_HOME", "TO_PROXY", "HomeSocket", "Proxy", "RemoteHarness"]

FULL_BYTES: Final = 1024 * 1024
QUEUE_BYTES: Final = 32 * 1024 * 1024
"""Unsent bytes of a socket at which the other node is told, and at which frames are dropped. In between is
room for what is on its way through NATS when it is told."""

HOLD_SECONDS: Final = 2.0
"""After which a proxy that was told to wait goes on by itself: the word to go on may have been lost. If it is
too early, it is told again."""

FRAME, CLOSED, CLAIM, FULL, ROOM, HOLD, GO = range(7)
"""Kinds. To a home: FULL and ROOM say whether a harness takes what comes; to a proxy: HOLD and GO, whether an
environment does."""

TO_HOME: Final = struct.Struct("!B16s16s32s32s")
"""Kind, node, socket, digest of the harness's key, id of its API key: in front of all that goes to a home."""

TO_PROXY: Final = struct.Struct("!B16sH")
"""Kind, node, close code: in front of everything that goes to a harness's socket."""


class HomeSocket(EnvironmentSocket):
    """An environment's socket on this node."""

    def __init__(self, cluster: Cluster, router: Router, ticket: EnvironmentTicket) -> None:
        super().__init__(cluster, router, ticket, FULL_BYTES, QUEUE_BYTES)
        self._cluster = cluster

    def opened(self) -> None:
        super().opened()
        self._cluster.home_opened(self.registration_id, self)

    def link_closed(self, reason: str) -> None:
        super().link_closed(reason)
        self._cluster.home_closed(self.registration_id, self)

    def close(self, code: int, reason: str) -> None:
        super().close(code, reason)
        self._cluster.home_closed(self.registration_id, self)


class RemoteHarness:
    """A harness on another node, as the router of this one sees it."""

    def __init__(
        self, cluster: Cluster, node: bytes, socket_id: bytes, registration_id: str, digest: str, caller: str
    ) -> None:
        self._cluster = cluster
        self.node = node
        self.id = socket_id
        self._subject = f"es.sock.{socket_id.hex()}"
        self._loop = asyncio.get_running_loop()
        self._full = False
        self._held_at: float | None = None
        self.harness: Harness = cluster.router.harness_opened(registration_id, digest, self, caller)

    def send(self, frame: bytes | memoryview) -> bool:
        taken = self._say(FRAME, 0, frame)
        self._cluster.hold_home(self.harness.registration_id)
        return taken

    def _say(self, kind: int, code: int = 0, content: bytes | memoryview = b"") -> bool:
        return self._cluster.say(
            self._subject, b"".join((TO_PROXY.pack(kind, self._cluster.node, code), content))
        )

    def is_full(self) -> bool:
        return self._full

    def pause(self) -> None:
        self._held_at = self._loop.time()
        self._say(HOLD)

    def hold_again(self) -> None:
        """A frame came: if it should not have come, the other node has gone on too early."""
        if self._held_at is not None and self._loop.time() - self._held_at > HOLD_SECONDS / 2:
            self.pause()

    def resume(self) -> None:
        self._held_at = None
        self._say(GO)

    def said(self, kind: int) -> None:
        """What the other node tells about the socket."""
        if kind == CLOSED:
            self.gone()
            return
        self._full = kind == FULL
        if kind == ROOM:
            self._cluster.router.harness_drained(self.harness)

    def close(self, code: int, reason: str) -> None:
        self._say(CLOSED, code, reason.encode())
        self.gone()

    def gone(self) -> None:
        """Its socket or its node is no more."""
        self._cluster.forget_remote(self.id)
        self._cluster.router.harness_closed(self.harness)


class Proxy(_Socket):
    """A harness's socket on this node whose environment has its home elsewhere."""

    def __init__(self, cluster: Cluster, ticket: HarnessTicket) -> None:
        super().__init__(cluster, FULL_BYTES, QUEUE_BYTES)
        self._cluster = cluster
        self.id = secrets.token_bytes(16)
        self.registration_id = ticket.registration_id
        self.caller = ticket.caller
        self._head = (
            cluster.node,
            self.id,
            bytes.fromhex(ticket.key_digest),
            bytes.fromhex(ticket.caller),
        )
        self._subject = f"es.env.{ticket.registration_id}"
        self._early: list[bytes] | None = []
        self._subscription: Any = None
        self._closed = False
        self._stream_id: str | None = None
        self._offered = False
        self._acked = False
        self._home: bytes | None = None
        self._orphaned_at: float | None = None
        self._told_full = False
        self._held_at: float | None = None

    def has_stream(self) -> bool:
        return self._stream_id is not None

    def opened(self) -> None:
        self.watch_idle()
        self._cluster.add_proxy(self)
        self._cluster.proxy_opened(self)

    async def listen(self) -> None:
        subscription = await self._cluster.open_proxy(self)
        self._subscription = subscription
        if self._closed:
            self._cluster.drop_proxy(self, subscription)
            return
        early, self._early = self._early, None
        for message in early or ():
            self.frame_arrived(message)

    def frame_arrived(self, message: bytes | memoryview) -> None:
        if self._early is not None:
            self._early.append(bytes(message))
            if len(self._early) > 16:
                self._finish(GOING_AWAY, "too much before the way was open")
            return
        self.count(message)
        try:
            frame = decode(message)
        except BadFrame:
            self.junk_arrived()
            return
        self._learn(frame)
        if not self._say(FRAME, message) and not self._acked:
            self._finish(GOING_AWAY, "the cluster is overloaded")
        self._cluster.hold_if_crowded(self)

    def _say(self, kind: int, content: bytes | memoryview = b"") -> bool:
        return self._cluster.say(self._subject, b"".join((TO_HOME.pack(kind, *self._head), content)))

    def _learn(self, frame: Frame) -> None:
        body = frame.body
        if type(body) is Handshake:
            self._stream_id, self._offered = frame.stream_id, frame.acknowledges
        elif type(body) is Resume and frame.acknowledges:
            self._stream_id = frame.stream_id
            self._acked = self._acked or body.next_seq > 0 or frame.ack not in (0, NOTHING_RECEIVED)

    def from_home(self, kind: int, node: bytes, code: int, content: bytes) -> None:
        self._home, self._orphaned_at = node, None
        if kind == CLOSED:
            self._finish(code, content.decode("utf-8", "replace"))
            return
        if kind == HOLD:
            self._held_at = asyncio.get_running_loop().time()
            self.hold(HOME_HOLD)
            return
        if kind == GO:
            self._go_on()
            return
        try:
            frame = decode(content)
        except BadFrame:
            return
        if type(frame.body) is Handshake and self._offered and frame.acknowledges:
            self._acked = True
        if not self.send(content) and not self._acked:
            self._finish(GOING_AWAY, "the harness takes nothing")
        elif self.is_full() and not self._acked and not self._told_full:
            self._told_full = True
            self._say(FULL)

    def _go_on(self) -> None:
        self._held_at = None
        self.release(HOME_HOLD)

    def home_found(self, node: bytes) -> None:
        """The environment has connected somewhere: claim the stream there, or end it."""
        if self._stream_id is None:
            return
        self._home, self._orphaned_at = node, None
        if self._acked:
            self._say(CLAIM, self._stream_id.encode())
        else:
            self._lose()

    def way_lost(self) -> None:
        """Something may have been lost between here and the home."""
        if not self._acked:
            self._lose()

    def tick(self, now: float, dead: set[bytes]) -> None:
        """Once a second: `dead` are nodes that are no more."""
        if self._held_at is not None and now - self._held_at > HOLD_SECONDS:
            self._go_on()
        if self._home is not None and self._home in dead:
            self._home = None
            if not self._acked:
                self._lose()
                return
            self._orphaned_at = now
        if self._orphaned_at is not None and now - self._orphaned_at > GRACE_SECONDS:
            self._lose()

    def _lose(self) -> None:
        """The environment does not come back to this stream."""
        if self._stream_id is not None:
            self.send(encode(Frame(self._stream_id, Reset("environment_disconnected"))))
        self._finish(GOING_AWAY, "environment_disconnected")

    def revoke(self) -> None:
        if self._stream_id is not None:
            # Said to both ends, so that a stream that could go on does not wait for it.
            self._say(FRAME, encode(Frame(self._stream_id, Reset("harness_disconnected"))))
            self.send(encode(Frame(self._stream_id, Reset(KEY_REVOKED))))
        self._finish(POLICY, "the key was revoked")

    def text_arrived(self) -> None:
        self._finish(1003, "frames are binary")

    def link_drained(self) -> None:
        if self._told_full:
            self._told_full = False
            self._say(ROOM)

    def close(self, code: int, reason: str) -> None:
        self._finish(code, reason)

    def _finish(self, code: int, reason: str) -> None:
        super().close(code, reason)
        self._end()

    def link_closed(self, reason: str) -> None:
        super().link_closed(reason)
        self._end()

    def _end(self) -> None:
        if not self._closed:
            self._closed = True
            self._say(CLOSED)
            self._cluster.forget_socket(self)
            self._cluster.drop_proxy(self, self._subscription)
