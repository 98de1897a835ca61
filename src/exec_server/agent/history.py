"""Turns in a history: where they begin, which were taken back, and the last few of them. Pure.

A turn begins with something somebody really said: a message of the user's, or one of another agent that asks
for a turn. What a program says in the user's name (where it is, which instructions there are) begins none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from .record import SESSION_META, Record

__all__ = ["begins_turn", "is_said_by_user", "last_turns", "turn_starts", "without_rolled_back"]

SAID_BY_PROGRAMS: Final = (
    "<environment_context>",
    "<user_instructions>",
    "<user_shell_command>",
    "<user_action>",
    "<turn_aborted>",
    "<skill>",
    "<subagent_notification>",
    "<recommended_plugins>",
    "# AGENTS.md instructions",
)
"""How messages begin that a program writes as the user, in records that do not say who wrote them."""


def begins_turn(record: Record) -> bool:
    """Whether a turn begins here."""
    if record.type == "inter_agent_communication":
        return record.payload.get("trigger_turn") is True
    return record.type == "response_item" and is_said_by_user(record.payload)


def is_said_by_user(payload: dict[str, Any]) -> bool:
    """Whether an item is a message of the user's own, and not of a program in the user's name."""
    if payload.get("type") != "message" or payload.get("role") != "user":
        return False
    kinds = _kinds(payload)
    if kinds:
        return any(kind.startswith("user.") for kind in kinds)
    return not _text(payload).lstrip().startswith(SAID_BY_PROGRAMS)


def _kinds(payload: dict[str, Any]) -> list[str]:
    """What the parts of a message are, where its writer said so: `user.text`, for example."""
    about = payload.get("internal_chat_message_metadata_passthrough")
    kinds = about.get("content_item_kinds") if isinstance(about, dict) else None
    return [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list) else []


def _text(payload: dict[str, Any]) -> str:
    content = payload.get("content")
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return str(part["text"])
    return ""


def turn_starts(records: Sequence[Record]) -> list[int]:
    """The places at which turns begin."""
    return [place for place, record in enumerate(records) if begins_turn(record)]


def without_rolled_back(records: Iterable[Record]) -> list[Record]:
    """The history that still counts: turns that were taken back are gone, and so is the word of it."""
    kept: list[Record] = []
    starts: list[int] = []
    for record in records:
        if record.type == SESSION_META:
            continue
        taken_back = _rolled_back(record)
        if taken_back is None:
            if begins_turn(record):
                starts.append(len(kept))
            kept.append(record)
        elif taken_back and starts:
            del kept[starts[-min(taken_back, len(starts))] :]
            del starts[-taken_back:]
    return kept


def _rolled_back(record: Record) -> int | None:
    """How many turns a record takes back; None if it is about something else."""
    if record.type != "event_msg" or record.payload.get("type") != "thread_rolled_back":
        return None
    number = record.payload.get("num_turns")
    return number if type(number) is int and number > 0 else 0


def last_turns(records: Iterable[Record], count: int) -> list[Record]:
    """The last `count` turns of what still counts, or all of them; never what was there before the first."""
    kept = without_rolled_back(records)
    starts = turn_starts(kept)
    if count <= 0 or not starts:
        return []
    return kept[starts[-min(count, len(starts))] :]
