"""A tenant that has as many environments as it may have: whose place a new one can take."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from .. import log
from .store import Store

if TYPE_CHECKING:
    from .service import Presence

__all__ = ["make_room"]

NEVER_CONNECTED_SECONDS: Final = 60.0
OFFLINE_SECONDS: Final = 24 * 3600.0
"""Since when a registration that is not connected makes room for a new one, when its tenant has no more: it
never was connected, or it was."""

AT_ONCE: Final = 64
"""Environments that are looked at together."""

TRIES: Final = 1000
"""After which it is given up; others take what is found, or all of them are there."""


async def make_room(store: Store, presence: Presence, tenant: str, now: float) -> bool:
    """Forget the environment of a tenant that has been away for longest, if it has been away for long.

    It is known when they connected. Those that are found to be there count as seen now, so that each of them
    is looked at once a day however often somebody asks."""
    for _ in range(TRIES):
        away = await store.idle(tenant, now - NEVER_CONNECTED_SECONDS, now - OFFLINE_SECONDS, AT_ONCE)
        if not away:
            return False
        online = await asyncio.gather(*(presence.is_online(old.id) for old in away))
        for old, there in zip(away, online, strict=True):
            if not there and await store.remove_registration(old):
                log.info("a registration made room for another", environment=old.environment, tenant=tenant)
                return True
        await store.touch([old for old, there in zip(away, online, strict=True) if there], now)
    return False
