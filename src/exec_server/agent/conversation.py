"""A thread's history as the input of a model, and the tokens it has cost. Pure.

What a provider would refuse is mended: a call that never got its answer gets one, an answer to no call is
left out, and so is what is no item. That is how a history looks whose writer was killed, or which somebody
else wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from ..events.model import Usage
from .history import is_said_by_user
from .items import understood
from .record import Record

__all__ = [
    "ABORTED",
    "SUMMARY_KIND",
    "answer_type",
    "conversation",
    "kept_items",
    "last_request_tokens",
    "mended",
    "sendable",
    "total_usage",
    "usage_record",
]

SUMMARY_KIND: Final = "compaction.summary"
"""What the message is that stands for everything before it; the reference's word."""

ABORTED: Final = "aborted"
"""What a call is answered that was never finished."""

_INTERNAL: Final = frozenset({"internal_chat_message_metadata_passthrough"})

_ANSWERED: Final = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "local_shell_call": "function_call_output",
}


def answer_type(item: dict[str, Any]) -> str | None:
    """The type of the item that answers a call; None for what is no call."""
    return _ANSWERED.get(str(item.get("type")))


def kept_items(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The items that still count, in order, as they were written: those since the last summary, and that."""
    items: list[dict[str, Any]] = []
    for record in records:
        if record.type == "response_item":
            items += _items([record.payload])
        elif record.type == "compacted":
            items = _after_compaction(record.payload, items)
    return items


def _items(written: Iterable[Any]) -> list[dict[str, Any]]:
    """What of it are items. A call without an id could not be answered."""
    items = [item for item in map(understood, written) if item is not None]
    return [item for item in items if answer_type(item) is None or isinstance(item.get("call_id"), str)]


def _after_compaction(payload: dict[str, Any], before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    instead = payload.get("replacement_history")
    if isinstance(instead, list):
        return _items(instead)
    # An older one has the summary alone: what the user said stays beside it.
    content = [{"type": "input_text", "text": str(payload.get("message", ""))}]
    about = {"content_item_kinds": [SUMMARY_KIND]}
    summary = {"type": "message", "role": "user", "content": content, next(iter(_INTERNAL)): about}
    return [*(item for item in before if is_said_by_user(item)), summary]


def conversation(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The items to send, in order."""
    return sendable(kept_items(records))


def sendable(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as a provider takes them: without what only we write into them, and whole."""
    plain = [{name: value for name, value in item.items() if name not in _INTERNAL} for item in items]
    return mended([item for item in plain if not _is_useless(item)])


def _is_useless(item: dict[str, Any]) -> bool:
    """Thoughts that only the provider could read, and that it was not asked to keep."""
    return item.get("type") == "reasoning" and not item.get("encrypted_content")


def mended(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with an answer to every call, and none to what was not called."""
    called = {item.get("call_id") for item in items if answer_type(item)}
    answered = {item.get("call_id") for item in items if item.get("type") in _ANSWERED.values()}
    whole: list[dict[str, Any]] = []
    for item in items:
        if item.get("type") in _ANSWERED.values() and item.get("call_id") not in called:
            continue
        whole.append(item)
        answer = answer_type(item)
        if answer and item.get("call_id") not in answered:
            whole.append({"type": answer, "call_id": item.get("call_id"), "output": ABORTED})
    return whole


def total_usage(records: Sequence[Record]) -> Usage:
    """What the whole thread has cost so far, as the last record that says so has it."""
    for record in reversed(records):
        if record.type != "event_msg" or record.payload.get("type") != "token_count":
            continue
        info = record.payload.get("info")
        total = info.get("total_token_usage") if isinstance(info, dict) else None
        if isinstance(total, dict):
            counts = {name: total.get(name) for name in Usage.__struct_fields__}
            return Usage(**{name: n for name, n in counts.items() if type(n) is int and n >= 0})
    return Usage()


def last_request_tokens(records: Sequence[Record]) -> int:
    """About how long the history is by now: what the last request and its answer had; 0 if nobody knows."""
    for record in reversed(records):
        if record.type == "compacted":
            return 0
        if record.type != "event_msg" or record.payload.get("type") != "token_count":
            continue
        info = record.payload.get("info")
        last = info.get("last_token_usage") if isinstance(info, dict) else None
        total = last.get("total_tokens") if isinstance(last, dict) else None
        if type(total) is int:
            return total
    return 0


def usage_record(total: Usage, last: Usage) -> dict[str, Any]:
    """The record that says so."""
    return {
        "type": "token_count",
        "info": {"total_token_usage": _counts(total), "last_token_usage": _counts(last)},
    }


def _counts(usage: Usage) -> dict[str, int]:
    counts = {name: int(getattr(usage, name)) for name in usage.__struct_fields__}
    return {**counts, "total_tokens": usage.input_tokens + usage.output_tokens}
