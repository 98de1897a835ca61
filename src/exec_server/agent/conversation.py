"""A thread's history as the input of a model, and the tokens it has cost. Pure.

What a provider would refuse is mended: a call that never got its answer gets one, an answer to no call is
left out. That is how a history looks whose writer was killed, or which somebody else wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from ..events.model import Usage
from .record import Record

__all__ = ["ABORTED", "answer_type", "conversation", "total_usage", "usage_record"]

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


def conversation(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The items to send, in order."""
    items = [
        {name: value for name, value in record.payload.items() if name not in _INTERNAL}
        for record in records
        if record.type == "response_item"
    ]
    return _mended([item for item in items if not _is_useless(item)])


def _is_useless(item: dict[str, Any]) -> bool:
    """Thoughts that only the provider could read, and that it was not asked to keep."""
    return item.get("type") == "reasoning" and not item.get("encrypted_content")


def _mended(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    called = {item.get("call_id") for item in items if answer_type(item)}
    answered = {item.get("call_id") for item in items if item.get("type") in _ANSWERED.values()}
    mended: list[dict[str, Any]] = []
    for item in items:
        if item.get("type") in _ANSWERED.values() and item.get("call_id") not in called:
            continue
        mended.append(item)
        answer = answer_type(item)
        if answer and item.get("call_id") not in answered:
            mended.append({"type": answer, "call_id": item.get("call_id"), "output": ABORTED})
    return mended


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


def usage_record(total: Usage, last: Usage) -> dict[str, Any]:
    """The record that says so."""
    return {
        "type": "token_count",
        "info": {"total_token_usage": _counts(total), "last_token_usage": _counts(last)},
    }


def _counts(usage: Usage) -> dict[str, int]:
    counts = {name: int(getattr(usage, name)) for name in usage.__struct_fields__}
    return {**counts, "total_tokens": usage.input_tokens + usage.output_tokens}
