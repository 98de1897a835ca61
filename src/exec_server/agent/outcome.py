"""How a turn ends."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["Outcome"]


class Outcome(Struct, frozen=True):
    """How a turn ended: with an answer, perhaps, or with what went wrong."""

    answer: str | None
    error: str | None

    @property
    def completed(self) -> bool:
        return self.error is None
