"""What a stream comes down to, as one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from .model import Record
from .reader import read_events
from .reducer import Keep, Reducer

__all__ = ["summarise", "summary_of"]


def summarise(source: str | Iterable[bytes] | Iterable[Record]) -> dict[str, Any]:
    """The summary of a file, of blocks of bytes, or of records; of the last run, if there are several.

    Memory is that of the summary itself, not of the stream.
    """
    if isinstance(source, str):
        with open(source, "rb") as file:
            return summarise(iter(lambda: file.read(1024 * 1024), b""))
    reducer = Reducer(Keep.OUTLINE)
    entries: Iterator[Any] = iter(source)
    first = next(entries, None)
    everything = entries if first is None else chain([first], entries)
    records = read_events(everything) if isinstance(first, bytes) else everything
    for record in records:
        reducer.feed(record)
    return summary_of(reducer)


def summary_of(reducer: Reducer) -> dict[str, Any]:
    """The summary of what was fed so far, as if the input ended here."""
    run = reducer.run
    turn = run.turn
    items = []
    for state in run.items.values():
        entry: dict[str, Any] = {
            "id": state.id,
            "type": state.type,
            "status": state.status,
            "phases": list(state.phases),
        }
        if state.source_id is not None:
            entry["source_id"] = state.source_id
        items.append(entry)
    return {
        "thread_id": run.thread_id,
        "outcome": run.outcome,
        "answer": run.answer,
        "messages": list(run.messages),
        "error": run.error,
        "fatal_errors": list(run.fatal_errors),
        "notices": [{"attempt": n.attempt, "max": n.max, "detail": n.detail} for n in run.notices],
        "warnings": list(run.warnings),
        "usage": None if turn is None else turn.raw_usage,
        "items": items,
        "open_items": [state.id for state in run.open_items],
    }
