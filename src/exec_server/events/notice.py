"""Two things share the `error` event: a notice that something is tried again, and what ends the turn."""

from __future__ import annotations

import json
import re
from typing import Final

from msgspec import Struct

__all__ = ["Notice", "parse_notice", "readable"]

_NOTICE: Final = re.compile(
    r"Reconnecting\.\.\. (?:([0-9]+)/([0-9]+)|waiting for network)(?: \((.*)\))?", re.DOTALL
)

_MAX_DIGITS: Final = 18
"""A count with more digits than that is not one anybody made."""


class Notice(Struct, frozen=True):
    """Something is tried again; the turn goes on. Without a count it waits for the network, without end."""

    attempt: int | None
    max: int | None
    detail: str | None

    @property
    def text(self) -> str:
        """As the producer writes it."""
        where = "waiting for network" if self.attempt is None else f"{self.attempt}/{self.max}"
        detail = "" if self.detail is None else f" ({self.detail})"
        return f"Reconnecting... {where}{detail}"


def parse_notice(message: str) -> Notice | None:
    """The notice in an `error` event; None if the message is fatal."""
    found = _NOTICE.fullmatch(message)
    if found is None:
        return None
    attempt, most, detail = found.groups()
    if attempt is None:
        return Notice(None, None, detail)
    if max(len(attempt), len(most)) > _MAX_DIGITS:
        return None
    return Notice(int(attempt), int(most), detail)


def readable(message: str) -> str:
    """The sentence in an error message, which may itself be a JSON document from a provider."""
    if not message.lstrip().startswith("{"):
        return message
    try:
        document = json.loads(message)
        inner = document["error"]["message"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return message
    return inner if isinstance(inner, str) and inner else message
