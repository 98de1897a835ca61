"""Many nodes: a harness on one reaches an environment on another, over NATS.

The node with an environment's socket is its home; the routes are in that node's router and nowhere else. A
harness's socket on another node is a proxy: what it says goes to the subject of the environment, and what the
home has for it comes on a subject of its own. When an environment comes back on another node, that node says
so and the proxies claim their streams again. NATS delivers at most once, which is what acked ends are made
for; plain streams that may have lost something are ended.

NATS cannot be made to wait, so whoever fills it is: sockets whose frames pile up on the way to it are not
read, a proxy whose harness takes nothing tells the home, and a home whose environment takes nothing tells the
proxies. Where that is not enough, frames are dropped.

    es.env.REG          to the home of a registration: frames of harnesses elsewhere
    es.here.REG         is anybody the home of it? no responder means no
    es.home.REG         I am its home now
    es.gone.REG         it is no longer current
    es.revoked          a key was revoked: see which
    es.sock.ID          to a harness's socket
    es.alive            I am this node, and I am alive
    es.time             and this is what time it is here
"""

from __future__ import annotations

import asyncio
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeout

from .. import log
from ..relay.frame import Frame, Reset, encode
from .clock import PeerClocks
from .cluster_address import ClusterAddress
from .cluster_connection import ClusterUnreachable, connect, open_cluster_store, open_for_node
from .cluster_sockets import CLAIM, CLOSED, FULL, ROOM, TO_HOME, TO_PROXY, HomeSocket, Proxy, RemoteHarness
from .cluster_store import ClusterStore
from .router import GOING_AWAY, Router
from .service import Presence
from .sockets import CLUSTER_HOLD, Carrier, EnvironmentSocket, HarnessSocket, _Socket
from .store import StoreUnavailable
from .tickets import EnvironmentTicket, HarnessTicket

__all__ = ["Cluster", "ClusterUnreachable", "open_cluster_store"]

ALIVE_INTERVAL: Final = 1.0
DEAD_SECONDS: Final = 5.0
"""Silence of a node after which it is taken for dead."""

ASK_SECONDS: Final = 2.0
"""For the home of an environment to answer."""

QUEUE_BYTES: Final = 32 * 1024 * 1024
"""What may wait for NATS; beyond, frames are dropped."""

CROWDED_BYTES: Final = 2 * 1024 * 1024
ROOMY_BYTES: Final = 512 * 1024
"""What waits for NATS when sockets that add to it are no longer read, and when they are again."""

REFRESH_SECONDS: Final = 6 * 3600.0

LOOK_SECONDS: Final = 2.0
"""How often a node looks whether NATS still has what all nodes have between them."""

REPLICAS_SECONDS: Final = 60.0
"""How often it looks whether there are servers for more copies of that."""

WAS_LOST: Final = (
    "NATS has lost what it kept; environments that registered before are found again when they register anew,"
    " as they do after a restart of this node"
)

STAMP: Final = struct.Struct("!16sd")
"""Node, and its time."""


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
        self._remote: dict[bytes, RemoteHarness] = {}
        """Harnesses elsewhere that are on streams of environments here."""
        self._proxies: dict[bytes, Proxy] = {}
        """Harnesses here whose environments may be elsewhere."""
        self._heard: dict[bytes, float] = {}
        self._outgoing: deque[tuple[str, bytes]] = deque()
        self._outgoing_bytes = 0
        self._waiting: set[_Socket] = set()
        """Sockets that are not read until NATS has taken what they brought."""
        self._home_sockets: dict[str, HomeSocket] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.on_revoked: Callable[[], object] = lambda: None
        """Called when somebody has revoked a key."""
        self._clocks = PeerClocks()
        self._off: dict[bytes, float] = {}

    @classmethod
    async def connect(cls, address: ClusterAddress, router: Router, replicas: int | None = None) -> Cluster:
        """Join the cluster of NATS servers. `replicas` are the copies they keep of what is in the store; None
        is as many as there are servers for, up to three."""
        joined: list[Cluster] = []

        def lost() -> None:
            for member in joined:
                member._end_plain()

        connection = await connect(address, lost)
        try:
            cluster = cls(connection, await open_for_node(connection, address, replicas), router)
            joined.append(cluster)
            for subject, receive in (
                ("es.alive", cluster._alive),
                ("es.time", cluster._time),
                ("es.home.*", cluster._moved),
                ("es.gone.*", cluster._gone),
                ("es.revoked", cluster._revoked),
            ):
                await connection.subscribe(subject, cb=receive)
        except BaseException:
            await connection.close()
            raise
        for work in (cluster._send_all(), cluster._watch(), cluster._refresh(), cluster._look_after()):
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
        if not self._nats.is_connected:
            raise StoreUnavailable("there is no connection to NATS")
        try:
            await self._nats.request(f"es.here.{registration_id}", b"", timeout=ASK_SECONDS)
        except (NoRespondersError, NatsTimeout):
            return False
        except NatsError as error:
            raise StoreUnavailable(f"NATS cannot be asked: {error}") from None
        return True

    async def supersede(self, registration_id: str) -> None:
        self.router.supersede(registration_id)
        self.say(f"es.gone.{registration_id}", self.node)

    def trouble(self) -> str | None:
        if not self._off:
            return WAS_LOST if self.store.was_lost else None
        worst = max(self._off.values(), key=abs)
        return (
            f"the clock of this node is {abs(worst):.0f} s {'behind' if worst > 0 else 'ahead of'} another's"
            f" ({len(self._off)} nodes differ); streams between them may be refused"
        )

    async def _revoked(self, _: Msg) -> None:
        self.store.forget_revoked()
        self.on_revoked()

    async def _gone(self, message: Msg) -> None:
        self.router.supersede(message.subject.rpartition(".")[2])

    # Sockets of this node ------------------------------------------------------------------------

    def environment(self, ticket: EnvironmentTicket) -> EnvironmentSocket:
        return HomeSocket(self, self.router, ticket)

    def harness(self, ticket: HarnessTicket) -> HarnessSocket | Proxy:
        if self.router.is_online(ticket.registration_id):
            return HarnessSocket(self, self.router, ticket)
        return Proxy(self, ticket)

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
            if isinstance(socket, HomeSocket) and socket.registration_id == registration_id:
                socket.close(1000, "the environment is connected to another node")
            elif isinstance(socket, HarnessSocket) and socket.harness.registration_id == registration_id:
                if socket.harness in plain:
                    socket.send(encode(Frame(plain[socket.harness], Reset("environment_disconnected"))))
                socket.close(GOING_AWAY, "the environment is connected to another node")

    # Frames for environments here ----------------------------------------------------------------

    async def _for_environment(self, message: Msg) -> None:
        if len(message.data) < TO_HOME.size:
            return
        registration_id = message.subject.rpartition(".")[2]
        kind, node, socket_id, digest, caller = TO_HOME.unpack_from(message.data)
        content = message.data[TO_HOME.size :]
        remote = self._remote.get(socket_id)
        if kind in (CLOSED, FULL, ROOM):
            if remote is not None:
                remote.said(kind)
            return
        if remote is None:
            remote = self._remote[socket_id] = RemoteHarness(
                self, node, socket_id, registration_id, digest.hex(), caller.hex()
            )
            self._heard.setdefault(node, asyncio.get_running_loop().time())
        if kind == CLAIM:
            self.router.adopt(remote.harness, content.decode())
        else:
            remote.hold_again()
            self.router.harness_frame(remote.harness, content)

    def forget_remote(self, socket_id: bytes) -> None:
        self._remote.pop(socket_id, None)

    # Proxies -------------------------------------------------------------------------------------

    async def open_proxy(self, proxy: Proxy) -> Any:
        """Listen for what the home has for it."""

        async def receive(message: Msg) -> None:
            if len(message.data) >= TO_PROXY.size:
                kind, node, code = TO_PROXY.unpack_from(message.data)
                proxy.from_home(kind, node, code, message.data[TO_PROXY.size :])

        subscription = await self._nats.subscribe(f"es.sock.{proxy.id.hex()}", cb=receive)
        await self._nats.flush()
        return subscription

    def add_proxy(self, proxy: Proxy) -> None:
        self._proxies[proxy.id] = proxy

    def drop_proxy(self, proxy: Proxy, subscription: Any) -> None:
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

    def hold_if_crowded(self, socket: _Socket | None) -> None:
        """Whoever adds to what waits for NATS waits, too."""
        if socket is not None and self._outgoing_bytes > CROWDED_BYTES and socket not in self._waiting:
            self._waiting.add(socket)
            socket.hold(CLUSTER_HOLD)

    def hold_home(self, registration_id: str) -> None:
        """The same for an environment here, whose frames go to another node."""
        self.hold_if_crowded(self._home_sockets.get(registration_id))

    def forget_socket(self, socket: _Socket) -> None:
        self._waiting.discard(socket)

    def _end_plain(self) -> None:
        """What was on its way is lost. Acked ends send it again; plain ones would wait for it for ever."""
        for proxy in list(self._proxies.values()):
            proxy.way_lost()
        for remote in list(self._remote.values()):
            route = remote.harness.route
            if route is None or not route.acked:
                remote.gone()

    async def _send_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outgoing:
                subject, content = self._outgoing.popleft()
                self._outgoing_bytes -= len(content)
                if self._waiting and self._outgoing_bytes < ROOMY_BYTES:
                    waiting, self._waiting = self._waiting, set()
                    for socket in waiting:
                        socket.release(CLUSTER_HOLD)
                try:
                    await self._nats.publish(subject, content)
                except NatsError as error:
                    log.warning("a frame could not be handed to NATS", reason=str(error))

    async def _alive(self, message: Msg) -> None:
        self._heard[message.data] = asyncio.get_running_loop().time()

    async def _time(self, message: Msg) -> None:
        if len(message.data) == STAMP.size:
            node, stamp = STAMP.unpack(message.data)
            self._clocks.heard(node, stamp, time.time())

    def _compare_clocks(self) -> None:
        before, self._off = self._off, self._clocks.off()
        for node in self._off.keys() - before.keys():
            log.error(
                "the clock of another node differs from ours; tickets of one are refused by the other",
                node=node.hex(),
                seconds_ahead=round(self._off[node]),
            )
        if before and not self._off:
            log.info("the clocks of the nodes agree again")

    async def _watch(self) -> None:
        """Say that we are alive, and notice who is not."""
        while True:
            self.say("es.alive", self.node)
            self.say("es.time", STAMP.pack(self.node, time.time()))
            self._compare_clocks()
            now = asyncio.get_running_loop().time()
            dead = {node for node, heard in self._heard.items() if now - heard > DEAD_SECONDS}
            for node in dead:
                del self._heard[node]
                self._clocks.forget(node)
                log.warning("a node of the cluster is gone", node=node.hex())
            for remote in list(self._remote.values()):
                if remote.node in dead:
                    remote.gone()
            for proxy in list(self._proxies.values()):
                proxy.tick(now, dead)
            await asyncio.sleep(ALIVE_INTERVAL)

    async def _look_after(self) -> None:
        """See that what the nodes have between them is there, and in enough places."""
        loop = asyncio.get_running_loop()
        copies_at = loop.time() + REPLICAS_SECONDS
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.store.check()
                if loop.time() >= copies_at:
                    copies_at = loop.time() + REPLICAS_SECONDS
                    await self.store.set_replicas()
            except StoreUnavailable:
                pass  # the store says in the log what has to be said, and whoever asks for our health is told
            except (NatsError, OSError, TimeoutError) as error:
                log.info("NATS cannot be asked for more copies", reason=str(error) or type(error).__name__)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            for registration_id in list(self._homes):
                try:
                    await self.store.refresh(registration_id)
                except (NatsError, StoreUnavailable) as error:
                    log.warning("a registration could not be refreshed", reason=str(error))

    def home_opened(self, registration_id: str, socket: HomeSocket) -> None:
        self._home_sockets[registration_id] = socket
        self._start(self.become_home(registration_id))

    def home_closed(self, registration_id: str, socket: HomeSocket) -> None:
        self.forget_socket(socket)
        if self._home_sockets.get(registration_id) is socket:
            del self._home_sockets[registration_id]
        if not self.router.is_online(registration_id):
            self._start(self.leave_home(registration_id))

    def proxy_opened(self, proxy: Proxy) -> None:
        self._start(proxy.listen())
