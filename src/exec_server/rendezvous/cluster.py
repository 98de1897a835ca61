"""Many nodes: a harness on one reaches an environment on another, over NATS.

The node with an environment's socket is its home; the routes are in that node's router and nowhere else. A
harness's socket on another node is a proxy: what it says goes to the subject of the environment, and what the
home has for it comes on a subject of its own. When an environment comes back on another node, that node says
so and the proxies claim their streams again. NATS delivers at most once, which is what the ends are made for.

    es.env.REG          to the home of a registration: frames of harnesses elsewhere
    es.here.REG         is anybody the home of it? no responder means no
    es.home.REG         I am its home now
    es.gone.REG         it is no longer current
    es.sock.ID          to a harness's socket
    es.alive            I am this node, and I am alive
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections import deque
from typing import Any, Final

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeout

from .. import log
from ..relay.frame import NOTHING_RECEIVED, BadFrame, Frame, Handshake, Reset, Resume, decode, encode
from .cluster_store import ClusterStore
from .door import Carrier, EnvironmentSocket, HarnessSocket, _Socket
from .router import GOING_AWAY, GRACE_SECONDS, Harness, Router
from .service import Presence
from .tickets import EnvironmentTicket, HarnessTicket

__all__ = ["Cluster", "ClusterUnreachable", "open_cluster_store"]

CONNECT_SECONDS: Final = 5.0
"""For the first connection to NATS; later ones are tried for as long as it takes."""

ALIVE_INTERVAL: Final = 1.0
DEAD_SECONDS: Final = 5.0
"""Silence of a node after which it is taken for dead."""

ASK_SECONDS: Final = 2.0
"""For the home of an environment to answer."""

QUEUE_BYTES: Final = 32 * 1024 * 1024
"""What may wait for NATS; beyond, frames are dropped."""

REFRESH_SECONDS: Final = 6 * 3600.0

FRAME, CLOSED, CLAIM = 0, 1, 2

_HEAD: Final = struct.Struct("!B16s16s32s")
"""Kind, node, socket, digest of the harness's key: in front of everything that goes to a home."""

_BACK: Final = struct.Struct("!B16sH")
"""Kind, node, close code: in front of everything that goes to a harness's socket."""


class ClusterUnreachable(Exception):
    """There is no NATS server with JetStream at that address."""


async def _connect(url: str) -> Nats:
    troubles: list[str] = []

    async def report(error: Exception) -> None:
        troubles[:] = [str(error) or type(error).__name__]
        log.info("the cluster's NATS connection has trouble", reason=troubles[0])

    connection = Nats()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await connection.connect(
                url, error_cb=report, max_reconnect_attempts=-1, reconnect_time_wait=1, connect_timeout=2
            )
    except (NatsError, OSError, ValueError) as error:
        await connection.close()
        reason = troubles[0] if troubles else str(error) or type(error).__name__
        raise ClusterUnreachable(f"cannot reach NATS at {url}: {reason}") from None
    return connection


async def open_cluster_store(url: str) -> ClusterStore:
    """The store alone, for commands that look after keys."""
    connection = await _connect(url)

    class Closing(ClusterStore):
        async def close(self) -> None:
            await connection.close()

    return await Closing.open(connection.jetstream())


class Cluster(Presence, Carrier):
    """This node among the others."""

    def __init__(self, connection: Nats, store: ClusterStore, router: Router) -> None:
        Presence.__init__(self, router)
        Carrier.__init__(self)
        self.store = store
        self.node = secrets.token_bytes(16)
        self.router = router
        self._nats = connection
        self._homes: dict[str, list[Any]] = {}
        """Subscriptions for environments whose home is here."""
        self._remote: dict[bytes, _RemoteHarness] = {}
        """Harnesses elsewhere that are on streams of environments here."""
        self._proxies: dict[bytes, _Proxy] = {}
        """Harnesses here whose environments may be elsewhere."""
        self._heard: dict[bytes, float] = {}
        self._outgoing: deque[tuple[str, bytes]] = deque()
        self._outgoing_bytes = 0
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    async def connect(cls, url: str, router: Router) -> Cluster:
        """Join the cluster of a NATS server."""
        connection = await _connect(url)
        try:
            store = await ClusterStore.open(connection.jetstream())
            cluster = cls(connection, store, router)
            for subject, receive in (
                ("es.alive", cluster._alive),
                ("es.home.*", cluster._moved),
                ("es.gone.*", cluster._gone),
            ):
                await connection.subscribe(subject, cb=receive)
        except NatsError as error:
            await connection.close()
            raise ClusterUnreachable(f"NATS at {url} has no JetStream that can be used: {error}") from None
        for work in (cluster._send_all(), cluster._watch(), cluster._refresh()):
            cluster._start(work)
        return cluster

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._nats.close()

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Presence ------------------------------------------------------------------------------------

    async def is_online(self, registration_id: str) -> bool:
        if self.router.is_online(registration_id):
            return True
        try:
            await self._nats.request(f"es.here.{registration_id}", b"", timeout=ASK_SECONDS)
        except (NoRespondersError, NatsTimeout):
            return False
        return True

    async def supersede(self, registration_id: str) -> None:
        self.router.supersede(registration_id)
        self.say(f"es.gone.{registration_id}", self.node)

    async def _gone(self, message: Msg) -> None:
        self.router.supersede(message.subject.rpartition(".")[2])

    # Sockets of this node ------------------------------------------------------------------------

    def environment(self, ticket: EnvironmentTicket) -> EnvironmentSocket:
        return _HomeSocket(self, self.router, ticket.registration_id)

    def harness(self, ticket: HarnessTicket) -> HarnessSocket | _Proxy:
        if self.router.is_online(ticket.registration_id):
            return HarnessSocket(self, self.router, ticket)
        return _Proxy(self, ticket)

    async def become_home(self, registration_id: str) -> None:
        """An environment has connected here: its frames come here, and everybody is told."""
        if registration_id not in self._homes:
            self._homes[registration_id] = []
            for subject, receive in (
                (f"es.env.{registration_id}", self._for_environment),
                (f"es.here.{registration_id}", self._here),
            ):
                self._homes[registration_id].append(await self._nats.subscribe(subject, cb=receive))
            await self._nats.flush()
        self.say(f"es.home.{registration_id}", self.node)

    async def leave_home(self, registration_id: str) -> None:
        """The environment is gone from here."""
        for subscription in self._homes.pop(registration_id, ()):
            await subscription.unsubscribe()

    async def _here(self, message: Msg) -> None:
        if self.router.is_online(message.subject.rpartition(".")[2]):
            await message.respond(self.node)

    async def _moved(self, message: Msg) -> None:
        """An environment has a home, which may be a new one."""
        registration_id, node = message.subject.rpartition(".")[2], message.data
        if node != self.node:
            await self.leave_home(registration_id)
            self._give_away(registration_id)
        for proxy in list(self._proxies.values()):
            if proxy.registration_id == registration_id:
                proxy.home_found(node)

    def _give_away(self, registration_id: str) -> None:
        """An environment is elsewhere now. Proxies claim their streams there by themselves; harnesses that
        were on the same node as it are cut, and come back through a proxy."""
        plain = self.router.forget(registration_id)
        for remote in list(self._remote.values()):
            if remote.harness.registration_id == registration_id:
                self.forget_remote(remote.id)
        for socket in list(self.sockets):
            if isinstance(socket, _HomeSocket) and socket.registration_id == registration_id:
                socket.close(1000, "the environment is connected to another node")
            elif isinstance(socket, HarnessSocket) and socket.harness.registration_id == registration_id:
                if socket.harness in plain:
                    socket.send(encode(Frame(plain[socket.harness], Reset("environment_disconnected"))))
                socket.close(GOING_AWAY, "the environment is connected to another node")

    # Frames for environments here ----------------------------------------------------------------

    async def _for_environment(self, message: Msg) -> None:
        if len(message.data) < _HEAD.size:
            return
        registration_id = message.subject.rpartition(".")[2]
        kind, node, socket_id, digest = _HEAD.unpack_from(message.data)
        content = message.data[_HEAD.size :]
        remote = self._remote.get(socket_id)
        if kind == CLOSED:
            if remote is not None:
                remote.gone()
            return
        if remote is None:
            remote = self._remote[socket_id] = _RemoteHarness(
                self, node, socket_id, registration_id, digest.hex()
            )
            self._heard.setdefault(node, asyncio.get_running_loop().time())
        if kind == CLAIM:
            self.router.adopt(remote.harness, content.decode())
        else:
            self.router.harness_frame(remote.harness, content)

    def forget_remote(self, socket_id: bytes) -> None:
        self._remote.pop(socket_id, None)

    # Proxies -------------------------------------------------------------------------------------

    async def open_proxy(self, proxy: _Proxy) -> Any:
        """Listen for what the home has for it."""

        async def receive(message: Msg) -> None:
            if len(message.data) >= _BACK.size:
                kind, node, code = _BACK.unpack_from(message.data)
                proxy.from_home(kind, node, code, message.data[_BACK.size :])

        subscription = await self._nats.subscribe(f"es.sock.{proxy.id.hex()}", cb=receive)
        await self._nats.flush()
        return subscription

    def add_proxy(self, proxy: _Proxy) -> None:
        self._proxies[proxy.id] = proxy

    def drop_proxy(self, proxy: _Proxy, subscription: Any) -> None:
        self._proxies.pop(proxy.id, None)
        if subscription is not None:
            self._start(subscription.unsubscribe())

    # Saying and hearing --------------------------------------------------------------------------

    def say(self, subject: str, content: bytes) -> bool:
        """Publish, in order; False when too much waits already."""
        if self._outgoing_bytes + len(content) > QUEUE_BYTES:
            return False
        self._outgoing.append((subject, content))
        self._outgoing_bytes += len(content)
        self._wake.set()
        return True

    async def _send_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outgoing:
                subject, content = self._outgoing.popleft()
                self._outgoing_bytes -= len(content)
                try:
                    await self._nats.publish(subject, content)
                except NatsError as error:
                    log.warning("a frame could not be handed to NATS", reason=str(error))

    async def _alive(self, message: Msg) -> None:
        self._heard[message.data] = asyncio.get_running_loop().time()

    async def _watch(self) -> None:
        """Say that we are alive, and notice who is not."""
        while True:
            self.say("es.alive", self.node)
            now = asyncio.get_running_loop().time()
            dead = {node for node, heard in self._heard.items() if now - heard > DEAD_SECONDS}
            for node in dead:
                del self._heard[node]
                log.warning("a node of the cluster is gone", node=node.hex())
            for remote in list(self._remote.values()):
                if remote.node in dead:
                    remote.gone()
            for proxy in list(self._proxies.values()):
                proxy.tick(now, dead)
            await asyncio.sleep(ALIVE_INTERVAL)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            for registration_id in list(self._homes):
                try:
                    await self.store.refresh(registration_id)
                except NatsError as error:
                    log.warning("a registration could not be refreshed", reason=str(error))

    def home_opened(self, registration_id: str) -> None:
        self._start(self.become_home(registration_id))

    def home_closed(self, registration_id: str) -> None:
        self._start(self.leave_home(registration_id))

    def proxy_opened(self, proxy: _Proxy) -> None:
        self._start(proxy.listen())


class _HomeSocket(EnvironmentSocket):
    """An environment's socket on this node."""

    def __init__(self, cluster: Cluster, router: Router, registration_id: str) -> None:
        super().__init__(cluster, router, registration_id)
        self._cluster = cluster

    def opened(self) -> None:
        super().opened()
        self._cluster.home_opened(self.registration_id)

    def link_closed(self, reason: str) -> None:
        super().link_closed(reason)
        if not self._cluster.router.is_online(self.registration_id):
            self._cluster.home_closed(self.registration_id)

    def close(self, code: int, reason: str) -> None:
        super().close(code, reason)
        if not self._cluster.router.is_online(self.registration_id):
            self._cluster.home_closed(self.registration_id)


class _RemoteHarness:
    """A harness on another node, as the router of this one sees it."""

    def __init__(
        self, cluster: Cluster, node: bytes, socket_id: bytes, registration_id: str, digest: str
    ) -> None:
        self._cluster = cluster
        self.node = node
        self.id = socket_id
        self._subject = f"es.sock.{socket_id.hex()}"
        self.harness: Harness = cluster.router.harness_opened(registration_id, digest, self)

    def send(self, frame: bytes) -> bool:
        return self._cluster.say(self._subject, _BACK.pack(FRAME, self._cluster.node, 0) + frame)

    def is_full(self) -> bool:
        return False

    def pause(self) -> None:
        """NATS cannot be made to wait; frames are dropped where it is too much."""

    def resume(self) -> None:
        """See above."""

    def close(self, code: int, reason: str) -> None:
        self._cluster.say(self._subject, _BACK.pack(CLOSED, self._cluster.node, code) + reason.encode())
        self.gone()

    def gone(self) -> None:
        """Its socket or its node is no more."""
        self._cluster.forget_remote(self.id)
        self._cluster.router.harness_closed(self.harness)


class _Proxy(_Socket):
    """A harness's socket on this node whose environment has its home elsewhere."""

    def __init__(self, cluster: Cluster, ticket: HarnessTicket) -> None:
        super().__init__(cluster)
        self._cluster = cluster
        self.id = secrets.token_bytes(16)
        self.registration_id = ticket.registration_id
        self._head = (cluster.node, self.id, bytes.fromhex(ticket.key_digest))
        self._subject = f"es.env.{ticket.registration_id}"
        self._early: list[bytes] | None = []
        self._subscription: Any = None
        self._closed = False
        self._stream_id: str | None = None
        self._offered = False
        self._acked = False
        self._home: bytes | None = None
        self._orphaned_at: float | None = None

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

    def frame_arrived(self, message: bytes) -> None:
        if self._early is not None:
            self._early.append(message)
            if len(self._early) > 16:
                self._finish(GOING_AWAY, "too much before the way was open")
            return
        try:
            frame = decode(message)
        except BadFrame:
            return
        self._learn(frame)
        if not self._cluster.say(self._subject, _HEAD.pack(FRAME, *self._head) + message) and not self._acked:
            self._finish(GOING_AWAY, "the cluster is overloaded")

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
        try:
            frame = decode(content)
        except BadFrame:
            return
        if type(frame.body) is Handshake and self._offered and frame.acknowledges:
            self._acked = True
        if not self.send(content) and not self._acked:
            self._finish(GOING_AWAY, "the harness takes nothing")

    def home_found(self, node: bytes) -> None:
        """The environment has connected somewhere: claim the stream there, or end it."""
        if self._stream_id is None:
            return
        self._home, self._orphaned_at = node, None
        if self._acked:
            self._cluster.say(self._subject, _HEAD.pack(CLAIM, *self._head) + self._stream_id.encode())
        else:
            self._lose()

    def tick(self, now: float, dead: set[bytes]) -> None:
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

    def text_arrived(self) -> None:
        self._finish(1003, "frames are binary")

    def link_drained(self) -> None:
        """The home is not told; what was too much is gone."""

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
            self._cluster.say(self._subject, _HEAD.pack(CLOSED, *self._head))
            self._cluster.drop_proxy(self, self._subscription)
