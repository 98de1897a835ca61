"""One node that runs: its store, its router, its front door, until it is told to stop."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web
from msgspec import Struct

from .. import log
from ..local.process.terminal import StartedFrom
from ..transport.listener import Listener
from ..transport.lobby import Lobby
from .api import make_app
from .clock import SteadyClock
from .cluster_address import BadAddress, read_address
from .door import HEAD_SECONDS, Door
from .revocation import Revocations
from .router import GOING_AWAY, Router
from .service import Presence, Rendezvous, Settings
from .sockets import Carrier, LocalCarrier
from .store import EmbeddedStore, Registered, Store, StoreUnavailable
from .tickets import Signer

__all__ = ["Node", "NodeOptions", "Settings", "StartFailed", "open_store", "serve"]


LOCK_NAME: Final = "rendezvous.lock"
"""In the data directory; locked by the node that uses it, whose process id is in it."""

STORE_PATIENCE: Final = 1.0
"""Seconds that a node waits for others who write to its database; then whoever asked is told to ask again."""


MAX_GUESTS: Final = 4096
"""Connections nobody has vouched for, at once; fewer where there are few descriptors. A quarter of all
descriptors for one address, and half of them for all, leave the rest to those who have shown a key."""


class StartFailed(Exception):
    """The node cannot start like this; the text says what to change."""


class NodeOptions(Struct, frozen=True, kw_only=True):
    """How to run a node."""

    listen: str = "http://127.0.0.1:0"
    data: str | None = None
    """Directory of the embedded store; None keeps everything in memory."""
    cluster: str | None = None
    """URL of a NATS server with JetStream, or of several with commas in between, for many nodes."""
    cluster_credentials: str | None = None
    """A file with what NATS wants to know who we are."""
    cluster_replicas: int | None = None
    """Copies that NATS keeps; None is as many as there are servers for, up to three."""
    tls_cert: str | None = None
    tls_key: str | None = None
    public_url: str | None = None
    """How clients reach this node, where a proxy is in between."""
    insecure_http: bool = False
    settings: Settings = Settings()


class Node:
    """Use it as an async context: inside, it serves at `url`."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._host, self._port = _address(options)
        self.url = ""
        self.router: Router | None = None
        self._service: Rendezvous | None = None
        self._store: Store | None = None
        self._cluster: Any = None
        self._carrier: Carrier | None = None
        self._listener: Listener | None = None
        self._runner: web.AppRunner | None = None
        self._watching: asyncio.Future[None] | None = None
        self._lock: int | None = None
        self._tls: Any = None

    async def __aenter__(self) -> Node:
        try:
            await self._open()
        except StoreUnavailable as error:
            await self._close()
            raise StartFailed(str(error)) from None
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _open(self) -> None:
        options = self._options
        loop = asyncio.get_running_loop()
        tls = self._tls = _tls(options)
        router = self.router = Router(loop)
        carrier: Carrier
        ticket_clock: Callable[[], float] = time.time
        if options.cluster is None:
            if options.data is not None:
                self._lock = _lock(options.data)
            embedded = EmbeddedStore(options.data, patience=STORE_PATIENCE)
            ticket_clock = embedded.clock = SteadyClock(embedded.forgotten_until)
            self._store = embedded
            presence, carrier = Presence(router), LocalCarrier(router)
        else:
            cluster = _import_cluster()
            try:
                address = read_address(options.cluster, options.cluster_credentials)
                self._cluster = await cluster.Cluster.connect(address, router, options.cluster_replicas)
            except (BadAddress, cluster.ClusterUnreachable) as error:
                raise StartFailed(str(error)) from None
            self._store, presence, carrier = self._cluster.store, self._cluster, self._cluster
        self._carrier = carrier
        signer = Signer(await self._store.signing_secret())
        revocations = Revocations(self._store, router, carrier)
        revocations.on_secret = signer.take
        await revocations.look()
        if self._cluster is not None:
            self._cluster.on_revoked = revocations.tell
            self._cluster.store.on_secret = signer.take
        self._watching = asyncio.ensure_future(revocations.watch())
        service = self._service = Rendezvous(
            loop,
            self._store,
            signer,
            router,
            presence,
            options.settings,
            revocations=revocations,
            ticket_clock=ticket_clock,
        )
        self._runner = web.AppRunner(
            make_app(service, options.public_url),
            access_log=None,
            logger=_QUIET,
            lingering_time=0,
            shutdown_timeout=2.0,
        )
        await self._runner.setup()
        make_http = self._runner.server
        if make_http is None:
            raise StartFailed("aiohttp gave no server")
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self._host, self._port))
            self._listener = Listener(
                sock,
                lambda guest: Door(service, carrier, make_http, guest),
                tls,
                handshake_timeout=HEAD_SECONDS,
                lobby=_lobby(),
            )
        except OSError as error:
            sock.close()
            raise StartFailed(f"cannot listen on {options.listen}: {error.strerror}") from None
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{'https' if tls else 'http'}://{host}:{self._listener.port}"

    def reload(self) -> None:
        """Take the certificate that is in the files now, for connections from now on."""
        if self._tls is None:
            log.info("SIGHUP: there is no certificate to read again")
            return
        try:
            _tls(self._options)  # a pair that does not fit must not be half taken
            _load(self._tls, self._options)
        except StartFailed as error:
            log.error("this node goes on with the certificate it has", reason=str(error))
        else:
            log.info("the certificate was read again", file=self._options.tls_cert)

    async def registrations(self) -> list[Registered]:
        """What the store knows."""
        return [] if self._store is None else await self._store.registrations()

    async def _close(self) -> None:
        if self._service is not None:
            self._service.closing = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        if self.router is not None:
            self.router.close()
        if self._carrier is not None:
            for open_socket in list(self._carrier.sockets):
                open_socket.close(GOING_AWAY, "this node is going away")
        if self._runner is not None:
            await self._runner.cleanup()
        if self._cluster is not None:
            await self._cluster.close()
        if self._store is not None:
            await self._store.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


async def open_store(
    data: str | None, cluster: str | None, *, must_exist: bool = False, credentials: str | None = None
) -> Store:
    """The store of a node, without the node. `must_exist`: nothing is made where there is nothing."""
    if cluster is None:
        try:
            return EmbeddedStore(data, must_exist=must_exist)
        except StoreUnavailable as error:
            raise StartFailed(str(error)) from None
    module = _import_cluster()
    try:
        store: Store = await module.open_cluster_store(read_address(cluster, credentials))
    except (BadAddress, module.ClusterUnreachable) as error:
        raise StartFailed(str(error)) from None
    return store


def _lock(directory: str) -> int:
    """Be the only node of a directory: two would hand out what the other one does not know of."""
    os.makedirs(directory, 0o700, exist_ok=True)
    path = os.path.join(directory, LOCK_NAME)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(fd, 64).decode("ascii", "replace").strip()
        os.close(fd)
        raise StartFailed(
            f"another rendezvous runs with {directory}{f' (process {holder})' if holder else ''};"
            " for more than one node there is `--cluster`"
        ) from None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def _import_cluster() -> Any:
    try:
        from . import cluster
    except ImportError as error:
        raise StartFailed(
            f"a cluster needs more than is installed ({error}); install `exec-server[cluster]`"
        ) from None
    return cluster


def _lobby() -> Lobby:
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MAX_GUESTS if descriptors == resource.RLIM_INFINITY else min(MAX_GUESTS, descriptors // 2)
    return Lobby(most, max(1, most // 2))


def _raise_limit() -> None:
    """A socket is a descriptor, and the limit that programs are started with is meant for others."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.info("the limit on open files stays as it is", reason=str(error))


async def serve(options: NodeOptions) -> None:
    """Run a node until SIGTERM or SIGINT; its URL is the first line of stdout. SIGHUP: see Node.reload."""
    _raise_limit()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    node, terminal = Node(options), StartedFrom()
    loop.add_signal_handler(signal.SIGHUP, lambda: stop.set() if terminal.is_gone() else node.reload())
    async with node:
        try:
            os.write(1, f"{node.url}\n".encode())
        except OSError as error:
            log.warning("the address could not be written to stdout", url=node.url, reason=str(error))
        await stop.wait()


def _address(options: NodeOptions) -> tuple[str, int]:
    try:
        parts = urlsplit(options.listen)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not host or port is None or parts.path not in ("", "/"):
        raise StartFailed(f"cannot listen on `{options.listen}`; expected http://IP:PORT or https://IP:PORT")
    secure = options.tls_cert is not None and options.tls_key is not None
    if (options.tls_cert is None) != (options.tls_key is None):
        raise StartFailed("`--tls-cert` and `--tls-key` go together")
    if parts.scheme == "https" and not secure:
        raise StartFailed("`https://` needs `--tls-cert` and `--tls-key`")
    if parts.scheme == "http" and secure:
        raise StartFailed("`--tls-cert` and `--tls-key` need an `https://` address to `--listen` on")
    loopback = host == "localhost" or host.startswith("127.") or host == "::1"
    if parts.scheme == "http" and not loopback and not options.insecure_http:
        raise StartFailed(
            f"refusing to listen on {options.listen}: keys would travel in the clear; use https:// with"
            " `--tls-cert` and `--tls-key`, or `--insecure-http` behind a proxy that has the certificate"
        )
    return ("127.0.0.1" if host == "localhost" else host), port


def _tls(options: NodeOptions) -> Any:
    if options.tls_cert is None:
        return None
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load(context, options)
    return context


def _load(context: Any, options: NodeOptions) -> None:
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key, lambda: b"")
    except OSError as error:  # which those of TLS are, too
        raise StartFailed(
            f"{options.tls_cert} and {options.tls_key} are not a certificate chain and its key: {error}"
        ) from None


_QUIET: Final = logging.getLogger("exec_server.rendezvous.node")
_QUIET.disabled = True
"""For aiohttp, which quotes requests that it cannot read in its complaints, with the keys in them."""
