"""The one interface of everything that carries messages: a Channel, and whoever receives from it.

A channel never blocks: `send` takes the message and returns. When too much is unsent it tells its
receiver to pause, and again when there is room; receivers that go on sending only use memory.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Channel", "Receiver", "TooSlow"]


class Receiver(Protocol):
    """What a channel calls, always on the loop's thread."""

    def message_received(self, message: bytes) -> None:
        """A text message, or a binary one that the peer used for text."""

    def binary_received(self, message: bytes) -> None:
        """A binary message.

        A receiver that also has a method `view_received` may be given a view of the message there instead,
        where the channel can spare a copy. It is valid during the call only: whoever keeps it, copies it.
        """

    def writing_paused(self) -> None:
        """More is unsent than should be: stop producing."""

    def writing_resumed(self) -> None:
        """There is room again."""

    def channel_closed(self, reason: str) -> None:
        """The last call: the channel is gone, for this reason."""


class Channel(Protocol):
    """A connection that carries whole messages both ways."""

    peer: str
    """Who is at the other end, for error texts and logs."""

    parse_failure: str
    """What a malformed message from here is answered with, up to the detail."""

    carries_binary: bool
    """Whether binary messages arrive as such."""

    resumable: bool
    """Whether the peer may come back on another channel; false where the peer dies with it."""

    def send(self, message: bytes) -> None:
        """Send one text message."""

    def send_parts(self, head: bytes, body: bytes | memoryview, tail: bytes, *, binary: bool) -> None:
        """Send one message made of three parts, without putting them together first if possible."""

    def unsent(self) -> int:
        """Bytes taken but not yet given to the operating system."""

    def pause_reading(self) -> None:
        """Receive nothing for now."""

    def resume_reading(self) -> None:
        """Receive again."""

    def close(self) -> None:
        """Send what is unsent, then end."""

    def abort(self) -> None:
        """End now."""


class TooSlow(Exception):
    """The peer sends and does not read: it was disconnected to keep memory bounded."""
