"""From lines to events. Lenient: whatever a line holds, it becomes a record and the next line is read.

In strict mode what is merely noted otherwise is a StreamError: for tests of producers, not for people.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any, Final, NoReturn, TypeVar

import msgspec
from msgspec.structs import force_setattr

from .lines import MAX_LINE_BYTES, Line, split_lines, split_lines_async
from .model import (
    ITEM_KINDS,
    ErrorEvent,
    Event,
    Item,
    ItemEvent,
    MalformedEvent,
    Noise,
    Phase,
    Record,
    ThreadStarted,
    TurnCompleted,
    TurnFailed,
    TurnStarted,
    UnknownEvent,
    UnknownItem,
)

__all__ = ["StreamError", "parse_line", "read_events", "read_events_async"]

T = TypeVar("T", bound=msgspec.Struct)

NOISE_CHARACTERS: Final = 500
"""How much of a line that is no event is kept."""

MAX_DEPTH: Final = 128
"""Containers within containers: what the JSON library of the reference writes and reads at most. A bound that
is well below Python's own lets everything behind the reader walk through a value without care."""

_EVENT_KINDS: Final[
    dict[str, type[ThreadStarted | TurnStarted | TurnCompleted | TurnFailed | ErrorEvent]]
] = {kind.type: kind for kind in (ThreadStarted, TurnStarted, TurnCompleted, TurnFailed, ErrorEvent)}

_ITEM_PHASES: Final[dict[str, Phase]] = {
    "item.started": "started",
    "item.updated": "updated",
    "item.completed": "completed",
}

_OLD_ITEM_TYPES: Final = {"assistant_message": "agent_message"}
"""Spellings of early producers, read and never written."""


class StreamError(ValueError):
    """Strict mode: the producer broke the rules of the stream, in this line."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


class _NotAnEvent(Exception):
    pass


def read_events(
    blocks: Iterable[bytes], *, strict: bool = False, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Record]:
    """The records of a stream given as blocks of bytes, each as soon as its line is complete."""
    for line in split_lines(blocks, max_line_bytes):
        yield parse_line(line, strict=strict)


async def read_events_async(
    blocks: AsyncIterable[bytes], *, strict: bool = False, max_line_bytes: int = MAX_LINE_BYTES
) -> AsyncIterator[Record]:
    """The same for blocks that have to be waited for."""
    async for line in split_lines_async(blocks, max_line_bytes):
        yield parse_line(line, strict=strict)


def parse_line(line: Line | bytes | str, *, strict: bool = False) -> Record:
    """The record in one line. Raises only in strict mode, and then StreamError."""
    if isinstance(line, str):
        line = line.encode("utf-8", "surrogatepass")
    if isinstance(line, bytes):
        line = Line(1, line, len(line))
    try:
        if line.overlong:
            raise _NotAnEvent(f"a line of {line.size} bytes, more than are read at once")
        record = _parse(line)
    except _NotAnEvent as error:
        reason = str(error)
        if not line.terminated and not line.overlong:
            reason = f"the stream was cut off in this line ({reason})"
        if strict:
            raise StreamError(line.number, reason) from None
        # Four bytes are the most a character takes.
        text = line.data[: 4 * NOISE_CHARACTERS].decode("utf-8", "replace")[:NOISE_CHARACTERS]
        return Noise(line=line.number, text=text, reason=reason)
    if strict and isinstance(record, MalformedEvent):
        raise StreamError(line.number, f"{record.type}: {record.reason}")
    return record


def _parse(line: Line) -> Record:
    raw = _decode(line.data.decode("utf-8", "replace"))
    kind = raw.get("type")
    if not isinstance(kind, str):
        raise _NotAnEvent("an object without a `type`")
    try:
        event = _event(kind, raw)
    except msgspec.ValidationError as error:
        return MalformedEvent(raw=raw, line=line.number, type=kind, reason=_plainly(error))
    if event is None:
        return UnknownEvent(raw=raw, line=line.number, type=kind)
    force_setattr(event, "raw", raw)
    force_setattr(event, "line", line.number)
    return event


def _event(kind: str, raw: dict[str, Any]) -> Event | None:
    phase = _ITEM_PHASES.get(kind)
    if phase is not None:
        item = raw.get("item")
        if not isinstance(item, dict):
            raise msgspec.ValidationError("`item` is missing or not an object")
        return ItemEvent(phase=phase, item=_item(item))
    if kind == "session.created":
        return ThreadStarted(
            thread_id=_convert({"thread_id": raw.get("session_id")}, ThreadStarted).thread_id
        )
    event_kind = _EVENT_KINDS.get(kind)
    if event_kind is None:
        return None
    if event_kind is TurnCompleted and isinstance(usage := raw.get("usage"), dict):
        return _convert({"usage": _without_nulls(usage)}, TurnCompleted)
    return _convert(raw, event_kind)


def _item(raw: dict[str, Any]) -> Item:
    kind = raw.get("type", raw.get("item_type"))
    item_id = raw.get("id")
    if not isinstance(item_id, str):
        raise msgspec.ValidationError("`item.id` is missing or not a string")
    if not isinstance(kind, str):
        raise msgspec.ValidationError("`item.type` is missing or not a string")
    item_kind = ITEM_KINDS.get(_OLD_ITEM_TYPES.get(kind, kind))
    if item_kind is None:
        return UnknownItem(id=item_id, type=kind, raw=raw)
    try:
        item = _convert(raw, item_kind)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"item {kind}: {_plainly(error)}") from None
    force_setattr(item, "raw", raw)
    return item


def _convert(raw: dict[str, Any], kind: type[T]) -> T:
    """Typed, with null as good as absent. What a producer calls `raw` or `line` is not ours."""
    fields = _without_nulls(raw)
    fields.pop("raw", None)
    fields.pop("line", None)
    return msgspec.convert(fields, kind)


def _without_nulls(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if value is not None}


def _plainly(error: msgspec.ValidationError) -> str:
    return str(error).replace(" - at `$.", " at `").replace("Object missing", "missing")


# JSON --------------------------------------------------------------------------------------------


def _decode(text: str) -> dict[str, Any]:
    """The object in a line. Of duplicate keys the last counts.

    The exception: one producer writes the `id` of an item twice, first its own and then the provider's. The
    first is the item's, the second goes to `source_id`. Looking for duplicates is slow, so it is done only
    where `id` is written more than once, or in letters that hide it.
    """
    try:
        if text.count('"id"') < 2 and "\\u0069" not in text and "\\u0064" not in text:
            raw = json.loads(text, parse_constant=_no_constants)
            doubled: dict[int, list[Any]] = {}
        else:
            raw, doubled = _decode_noting_ids(text)
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise _NotAnEvent(f"not JSON: {reason}") from None
    except RecursionError:
        raise _NotAnEvent("JSON that is nested too deeply") from None
    if not isinstance(raw, dict):
        raise _NotAnEvent("JSON, but not an object")
    if text.count("[") + text.count("{") > MAX_DEPTH and _too_deep(raw):
        raise _NotAnEvent("JSON that is nested too deeply")
    item = raw.get("item")
    ids = doubled.get(id(item))
    if ids is not None and isinstance(item, dict):
        item["id"] = ids[0]
        item.setdefault("source_id", ids[-1])
    return raw


def _decode_noting_ids(text: str) -> tuple[Any, dict[int, list[Any]]]:
    doubled: dict[int, list[Any]] = {}
    owners: list[dict[str, Any]] = []  # kept alive, so that no other object gets their address

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            ids = [value for name, value in pairs if name == "id"]
            if len(ids) > 1:
                doubled[id(made)] = ids
                owners.append(made)
        return made

    return json.loads(text, object_pairs_hook=build, parse_constant=_no_constants), doubled


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _no_constants(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
