"""The way to a cluster's NATS servers, and why there may be none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from nats.aio.client import Client as Nats
from nats.errors import Error as NatsError
from nats.js.errors import APIError

from .. import log
from ..relay.frame import MAX_FRAME_BYTES
from .cluster_address import ClusterAddress
from .cluster_sockets import TO_HOME, TO_PROXY
from .cluster_store import ClusterStore

__all__ = ["ClusterUnreachable", "connect", "open_cluster_store", "open_for_node"]

CONNECT_SECONDS: Final = 5.0
"""For the first connection to NATS; later ones are tried for as long as it takes."""

UNWELCOME: Final = "Authorization Violation"

NEEDED_PAYLOAD: Final = MAX_FRAME_BYTES + max(TO_HOME.size, TO_PROXY.size)
"""Of a message that NATS has to take."""


class ClusterUnreachable(Exception):
    """There is no NATS server with JetStream at that address."""


async def connect(address: ClusterAddress, on_lost: Callable[[], object] = lambda: None) -> Nats:
    """`on_lost` is called whenever the connection is, and what was on its way with it."""
    troubles: list[str] = []

    async def lost() -> None:
        on_lost()

    async def report(error: Exception) -> None:
        troubles[:] = [str(error) or type(error).__name__]
        log.info("the cluster's NATS connection has trouble", reason=troubles[0])
        if connecting and UNWELCOME in troubles[0]:
            raise error  # to try again and again would not help

    connection, connecting = Nats(), True
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await connection.connect(
                list(address.servers),
                **address.options(),
                error_cb=report,
                disconnected_cb=lost,
                max_reconnect_attempts=-1,
                reconnect_time_wait=1,
                connect_timeout=2,
            )
    except (NatsError, OSError, ValueError, ImportError) as error:
        reason = troubles[0] if troubles else str(error) or type(error).__name__
        connecting = False
        await _close_all(connection)
        raise ClusterUnreachable(f"cannot reach NATS at {address}: {reason}") from None
    connecting = False
    return connection


async def _close_all(connection: Nats) -> None:
    """Interrupted between two attempts, the client takes itself for closed, with a socket open."""
    await connection.close()
    transport = vars(connection).get("_transport")
    if transport is not None:
        transport.close()


async def open_cluster_store(address: ClusterAddress) -> ClusterStore:
    """The store alone, for commands that look after keys."""
    connection = await connect(address)

    class Closing(ClusterStore):
        async def close(self) -> None:
            await connection.close()

    try:
        return await Closing.open(connection)
    except (NatsError, TimeoutError) as error:
        await connection.close()
        raise _no_jetstream(address, error) from None


async def open_for_node(connection: Nats, address: ClusterAddress, replicas: int | None) -> ClusterStore:
    """The store of a node, in as many copies as it should have, if NATS is fit for a cluster."""
    if connection.max_payload < NEEDED_PAYLOAD:
        raise ClusterUnreachable(
            f"NATS at {address} takes messages of {connection.max_payload} bytes, and a cluster needs"
            f" {NEEDED_PAYLOAD}; raise `max_payload` in its configuration (NATS's own is 1048576)"
        )
    try:
        store = await ClusterStore.open(connection, replicas)
        await store.set_replicas()
    except (NatsError, TimeoutError) as error:
        if replicas is not None and isinstance(error, APIError):
            raise ClusterUnreachable(
                f"NATS at {address} does not keep {replicas} copies: {error.description}"
            ) from None
        raise _no_jetstream(address, error) from None
    return store


def _no_jetstream(address: ClusterAddress, error: Exception) -> ClusterUnreachable:
    reason = str(error) or type(error).__name__
    return ClusterUnreachable(f"NATS at {address} has no JetStream that can be used: {reason}")
