"""Histories that grow too long: the model sums up what happened, and the thread goes on from there.

The rollout keeps every line. A `compacted` record says what takes the place of everything before it, in the
reference's form: `replacement_history`, the items to go on with. So either program goes on with the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from .context import message
from .conversation import SUMMARY_KIND, answer_type, mended
from .history import is_said_by_user

if TYPE_CHECKING:
    from ..events.model import Usage
    from ..events.notice import Notice
    from .model import ModelClient

__all__ = ["COMPACTED", "DEFAULT_WINDOW", "Summarizer", "compacted", "limit_of", "shortened", "worth_it"]

COMPACTED: Final = "compacted"
"""The type of the record."""

DEFAULT_WINDOW: Final = 272_000
"""Tokens that a model is taken to have room for if nobody says; the reference's value for unknown models."""

USABLE: Final = 0.9
"""Part of the window after which a history is summed up; the rest is for the answer and for the summary."""

MAX_KEPT_CHARACTERS: Final = 80_000
"""Most of what the user said that is kept word by word, the newest first: about 20,000 tokens."""

PROMPT: Final = """\
The conversation has become too long to go on with as it is. Write a summary of it from which somebody who has
seen nothing else can go on: what is wanted, what has been done and found out, what was decided and why, which
files and commands matter, what failed, and what comes next. Keep exact names, paths and values. Be brief.
Answer with the summary alone; call no tools.
"""

PREFIX: Final = """\
The conversation before this point was summed up to make room. What the summary says was done has been done;
the machine is in the state that this has left. The summary:
"""


def limit_of(limit: int | None, window: int | None) -> int:
    """How many tokens a request may have before the history is summed up."""
    return limit if limit is not None else int((window or DEFAULT_WINDOW) * USABLE)


def worth_it(items: Sequence[dict[str, Any]]) -> bool:
    """Whether a summary would be shorter: what the user said is kept as it is."""
    return any(not is_said_by_user(item) for item in items)


def compacted(items: Sequence[dict[str, Any]], summary: str) -> dict[str, Any]:
    """The record: what the user said, as much of it as there is room for, and the summary of the rest."""
    kept: list[dict[str, Any]] = []
    room = MAX_KEPT_CHARACTERS
    for item in reversed(items):
        if not is_said_by_user(item):
            continue
        room -= sum(len(str(part.get("text", ""))) for part in item["content"] if isinstance(part, dict))
        if room < 0:
            break
        kept.insert(0, item)
    text = PREFIX + (summary or "(nothing was said)")
    return {"message": text, "replacement_history": [*kept, message("user", text, kind=SUMMARY_KIND)]}


def shortened(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newer half of what is summed up, for a model that has no room even for the request to do so."""
    return mended(items[(len(items) + 1) // 2 :])


class Summarizer:
    """Asks for a summary; `text` is what was answered. For `Answer`."""

    def __init__(
        self,
        client: ModelClient,
        instructions: str,
        items: Sequence[dict[str, Any]],
        *,
        notice: Callable[[Notice], None],
        counted: Callable[[Usage], None],
    ) -> None:
        self.client = client
        self.text = ""
        self._instructions = instructions
        self._items = items
        self._notice = notice
        self._counted = counted

    def request(self) -> dict[str, Any]:
        self.text = ""
        return {
            "instructions": self._instructions,
            "input": [*self._items, message("user", PROMPT)],
            "store": False,
        }

    def notice(self, notice: Notice) -> None:
        self._notice(notice)

    def began(self, item: dict[str, Any]) -> None:
        """Nothing of it is shown."""

    def said(self, item: dict[str, Any]) -> None:
        if answer_type(item) is not None or item.get("type") != "message":
            return
        content = item.get("content")
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                self.text += part["text"]

    async def called(self, item: dict[str, Any]) -> str:
        """It was offered nothing to call."""
        return f"unsupported call: {item.get('name')}"

    def answered(self, item: dict[str, Any], output: str | list[dict[str, Any]]) -> None:
        """Nobody is told."""

    def counted(self, usage: Usage) -> None:
        self._counted(usage)
