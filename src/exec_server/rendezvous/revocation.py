"""What ends while it runs because somebody said so elsewhere: keys that are revoked, environments removed.

Keys are kept in the store, where commands change them without asking a node. A node looks every second, and
in a cluster also when it is told; then it cuts every connection that a revoked key has opened or registered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from .. import log
from .store import Store, StoreUnavailable

if TYPE_CHECKING:
    from .router import Router
    from .sockets import Carrier

__all__ = ["Revocations"]

LOOK_SECONDS: Final = 1.0


class Revocations:
    """The keys that are revoked, as far as this node knows."""

    def __init__(
        self, store: Store, router: Router, carrier: Carrier, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._store = store
        self._router = router
        self._carrier = carrier
        self._told = asyncio.Event()
        self._known: frozenset[str] = frozenset()
        self._looked = False
        self._in_trouble = False
        self.on_secret: Callable[[bytes], object] = lambda _: None
        """Called with the signing secret, which may be another one, when somebody has changed something."""
        self.seen = 0
        """Keys that were revoked while we looked."""
        self.cut = 0
        """Connections that ended with their key."""

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._known

    def tell(self) -> None:
        """There is something new: look now."""
        self._told.set()

    async def look(self) -> None:
        """Find what is new, and end what has to end."""
        before, self._known = self._known, await self._store.revoked()
        fresh = self._known - before
        if fresh:
            cut = [socket for socket in self._carrier.sockets if socket.caller in fresh]
            if self._looked:
                log.warning("keys were revoked", keys=len(fresh), connections_cut=len(cut))
            self.seen += len(fresh) if self._looked else 0
            self.cut += len(cut)
            for socket in cut:
                socket.revoke()
        self._looked = True
        self._end_expired()
        self._router.end_retired()
        if await self._store.was_edited():
            self.on_secret(await self._store.signing_secret())
            ours = self._router.registrations() - self._router.retired.keys()
            for registration_id in ours - await self._store.current(ours):
                self._router.supersede(registration_id)

    def _end_expired(self) -> None:
        """What an expired key has opened goes as if it were revoked; it takes no looking up."""
        now = self._clock()
        over = [found for found in self._carrier.sockets if found.until is not None and found.until <= now]
        if over:
            log.warning("keys have expired", connections_cut=len(over))
            self.cut += len(over)
        for socket in over:
            socket.revoke()

    async def watch(self) -> None:
        """For as long as the node runs."""
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._told.wait()
            except TimeoutError:
                pass
            self._told.clear()
            try:
                await self.look()
            except StoreUnavailable as error:
                if not self._in_trouble:
                    log.error("cannot see which keys are revoked", reason=str(error))
                self._in_trouble = True
            else:
                self._in_trouble = False
