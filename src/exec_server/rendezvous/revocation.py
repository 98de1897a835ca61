"""What ends while it runs because somebody said so elsewhere: keys that are revoked, environments removed.

Keys are kept in the store, where commands change them without asking a node. A node looks every second, and
in a cluster also when it is told; then it cuts every connection that a revoked key has opened or registered.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from .. import log
from .store import Store, StoreUnavailable

if TYPE_CHECKING:
    from .door import Carrier
    from .router import Router

__all__ = ["Revocations"]

LOOK_SECONDS: Final = 1.0


class Revocations:
    """The keys that are revoked, as far as this node knows."""

    def __init__(self, store: Store, router: Router, carrier: Carrier) -> None:
        self._store = store
        self._router = router
        self._carrier = carrier
        self._told = asyncio.Event()
        self._known: frozenset[str] = frozenset()
        self._in_trouble = False

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
            log.warning("keys were revoked", keys=len(fresh), connections_cut=len(cut))
            for socket in cut:
                socket.revoke()
        if await self._store.was_edited():
            current = {registration.id for registration in await self._store.registrations()}
            for registration_id in self._router.registrations() - current:
                self._router.supersede(registration_id)

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
