"""A connection that is no longer ours to be reached on: its streams go on, and it ends with the last of them.

So it is when an environment takes another key while it runs. What was agreed upon with the old one stays
good; whoever comes from now on is told of the new one, and arrives on another connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from .link import WebSocketLink
from .streams import Streams

__all__ = ["REPLACED_KEY", "Retiring"]

LOOK_SECONDS: Final = 1.0
REPLACED_KEY: Final = "the environment has registered again"


class Retiring:
    """Streams of an earlier registration, and their connection."""

    def __init__(
        self, streams: Streams, link: WebSocketLink, on_end: Callable[[Retiring], object] = lambda _: None
    ) -> None:
        self._streams = streams
        self._link: WebSocketLink | None = link
        self._on_end = on_end
        link.hand_to(self)
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        if len(self._streams):
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        elif self._link is not None:
            self.close()
            self._on_end(self)

    def close(self) -> None:
        """End what is left."""
        self._timer.cancel()
        self._streams.close()
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def frame_arrived(self, message: bytes | memoryview) -> None:
        self._streams.frame_arrived(message)

    def text_arrived(self) -> None:
        """Nothing of ours."""

    def link_drained(self) -> None:
        self._streams.link_drained()

    def link_closed(self, reason: str) -> None:
        self._timer.cancel()
        self._link = None
        self._streams.link_lost(reason)
        self._streams.give_up(REPLACED_KEY)  # there will be no other connection for them
        self._on_end(self)
