"""The items of a conversation: which there are, and what a model or a record wrote as one. Pure.

Models, gateways and other programs write what is almost an item, or nothing that anybody knows. An endpoint
refuses a whole request for one of those, in every step from then on.
"""

from __future__ import annotations

import json
from typing import Any, Final

__all__ = ["texts_of", "understood"]

KNOWN: Final = frozenset(
    {
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "local_shell_call",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
        "image_generation_call",
        "compaction",
        "compaction_summary",
        "context_compaction",
    }
)
"""What endpoints take."""

NEEDED: Final = {
    "function_call": ("name",),
    "custom_tool_call": ("name",),
    "function_call_output": ("call_id",),
    "custom_tool_call_output": ("call_id",),
}
"""Texts without which an item of that type is none."""


def understood(item: Any) -> dict[str, Any] | None:
    """The item that was meant, as it is to be kept and sent; None if it is none."""
    if not isinstance(item, dict):
        return None
    kind = item.get("type")
    if not isinstance(kind, str) or kind not in KNOWN:
        return None
    if not all(isinstance(item.get(name), str) and item[name] for name in NEEDED.get(kind, ())):
        return None
    if kind == "message":
        return _message(item)
    if kind == "function_call" and not isinstance(item.get("arguments"), str):
        # An object instead of the text of one; without any, it is a call that will be told so.
        given = item.get("arguments")
        return {**item, "arguments": "" if given is None else json.dumps(given)}
    return item


def _message(item: dict[str, Any]) -> dict[str, Any] | None:
    role = item.get("role", "assistant")
    if role not in ("assistant", "user", "developer"):
        return None  # what a system says is for its provider alone
    content = item.get("content")
    if isinstance(content, str):
        part = "output_text" if role == "assistant" else "input_text"
        content = [{"type": part, "text": content}]
    if not isinstance(content, list):
        return None
    return {**item, "role": role, "content": [part for part in content if isinstance(part, dict)]}


def texts_of(parts: Any, *names: str, between: str) -> str:
    """The texts of a message's parts, or of a thought's."""
    found: list[str] = []
    for part in parts if isinstance(parts, list) else []:
        for name in names:
            if isinstance(part, dict) and isinstance(part.get(name), str):
                found.append(part[name])
                break
    return between.join(found)
