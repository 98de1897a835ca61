"""Whether a node is well. Anybody may ask, so that is found out once a second at most, for all who do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from ..loop import Loop
from .store import Store, StoreUnavailable

__all__ = ["Health"]

GOOD_SECONDS: Final = 1.0
"""For how long an answer is good; it costs a write."""


class Health:
    """What is wrong with the store of a node, if anything is."""

    def __init__(self, loop: Loop, store: Store, report: Callable[[StoreUnavailable], object]) -> None:
        self._loop = loop
        self._store = store
        self._report = report
        self._until = 0.0
        self._wrong: str | None = None
        self._looking: asyncio.Task[None] | None = None

    async def wrong(self) -> str | None:
        """The answer, which may be a second old."""
        if self._loop.time() >= self._until:
            if self._looking is None:
                self._looking = asyncio.ensure_future(self._look())
            await asyncio.shield(self._looking)
        return self._wrong

    async def _look(self) -> None:
        try:
            await self._store.check()
        except StoreUnavailable as error:
            self._report(error)
            self._wrong = str(error)
        else:
            self._wrong = None
        finally:
            self._until = self._loop.time() + GOOD_SECONDS
            self._looking = None

    def forget(self) -> None:
        """The next one who asks gets a new answer."""
        self._until = 0.0
