"""From values to lines: JSON as compact as the reference writes it, in the order of the specification."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from .model import (
    ErrorEvent,
    Event,
    Item,
    ItemEvent,
    McpToolCall,
    SearchAction,
    TurnCompleted,
    TurnFailed,
    UnknownItem,
    WebSearch,
)

__all__ = ["encode", "event_value", "item_value"]

_SURROGATES: Final = re.compile("[\ud800-\udfff]")
"""Halves of characters: JSON cannot carry them in UTF-8."""

_BREAKS: Final = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}
"""Escaped, so that readers which take them for the end of a line survive."""


def encode(value: dict[str, Any]) -> bytes:
    """One line. Raises ValueError for NaN and infinities, TypeError for what is not JSON."""
    text = _dump(value)
    if _SURROGATES.search(text):
        text = _dump(_whole(value))
    for char, escape in _BREAKS.items():
        text = text.replace(char, escape)
    return text.encode() + b"\n"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _whole(value: Any) -> Any:
    """The same without halves of characters; of keys that become equal the last counts."""
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_whole(name): _whole(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(entry) for entry in value]
    return value


def event_value(event: Event) -> dict[str, Any]:
    """An event as JSON."""
    value: dict[str, Any] = {"type": event.type}
    match event:
        case ItemEvent():
            value["item"] = item_value(event.item)
        case TurnCompleted():
            value["usage"] = msgspec.to_builtins(event.usage)
        case TurnFailed():
            value["error"] = {"message": event.error.message}
        case ErrorEvent():
            value["message"] = event.message
        case _:
            if thread_id := getattr(event, "thread_id", None):
                value["thread_id"] = thread_id
    return value


def item_value(item: Item) -> dict[str, Any]:
    """An item as JSON: all fields in their order, null where nothing is known."""
    if isinstance(item, UnknownItem):
        return dict(item.raw)
    value: dict[str, Any] = {"id": item.id, "type": item.type}
    for name in item.__struct_fields__:
        if name not in ("id", "raw"):
            value[name] = _value(getattr(item, name))
    if isinstance(item, McpToolCall):
        if item.result is not None:
            value["result"] = _without(value["result"], "_meta")
    elif isinstance(item, WebSearch):
        value["action"] = _action(item.action)
        return _without(value, "source_id")
    return _without(value, "phase")


def _value(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        return {encoded: _value(getattr(value, name)) for name, encoded in names}
    if isinstance(value, list | tuple):
        return [_value(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _value(entry) for name, entry in value.items()}
    return value


def _action(action: SearchAction) -> dict[str, Any]:
    """What an action has depends on its kind, so nothing is null here."""
    fields = _value(action)
    return {name: entry for name, entry in fields.items() if entry is not None}


def _without(value: dict[str, Any], name: str) -> dict[str, Any]:
    """Leave a field out if it is null."""
    if value.get(name) is None:
        value.pop(name, None)
    return value
