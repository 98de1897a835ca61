"""Does a stream keep the promises of its producer?

Two sets of rules: what has been seen to hold for the reference (I1 to I10), and what our own writer promises
on top of it (E1 to E12). A violation names its rule and its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from msgspec import Struct

from .model import (
    ITEM_KINDS,
    AgentMessage,
    CommandExecution,
    ErrorEvent,
    ErrorItem,
    FileChange,
    ItemEvent,
    MalformedEvent,
    McpToolCall,
    Noise,
    Reasoning,
    Record,
    ThreadStarted,
    TodoList,
    TurnCompleted,
    TurnFailed,
    TurnStarted,
    UnknownEvent,
    UnknownItem,
    Usage,
)
from .notice import parse_notice

__all__ = ["Violation", "check"]

_ONLY_COMPLETED: Final = (AgentMessage, Reasoning, ErrorItem)
_OPTIONAL_FIELDS: Final = frozenset({"raw", "phase", "source_id"})
_ABSOLUTE: Final = re.compile(r"/|[A-Za-z]:[\\/]|\\\\|file:|\$")
"""Also the placeholders of recordings."""


class Violation(Struct, frozen=True):
    """A broken rule. `line` 0 is the end of the input."""

    rule: str
    line: int
    text: str

    def __str__(self) -> str:
        where = f"line {self.line}" if self.line else "end of input"
        return f"{where}: {self.rule}: {self.text}"


def check(records: Iterable[Record], *, ours: bool = False) -> Iterator[Violation]:
    """Every violation, in the order of the lines."""
    checker = _Checker(ours)
    for record in records:
        yield from checker.feed(record)
    yield from checker.end()


class _Checker:
    def __init__(self, ours: bool) -> None:
        self._ours = ours
        self._events = 0
        self._threads = 0
        self._turns = 0
        self._in_turn = False
        self._open: dict[str, str] = {}
        self._seen: set[str] = set()
        self._fatal: str | None = None
        self._usage = Usage()

    def feed(self, record: Record) -> Iterator[Violation]:
        match record:
            case Noise():
                yield Violation("format", record.line, record.reason)
                return
            case MalformedEvent():
                yield Violation("format", record.line, f"{record.type}: {record.reason}")
                return
            case UnknownEvent():
                if self._ours:
                    yield Violation("format", record.line, f"unknown event {record.type}")
                return
        self._events += 1
        if self._events == 1 and not isinstance(record, ThreadStarted):
            yield self._broken("1", record, f"the first event is {record.type}, not thread.started")
        yield from self._after_fatal(record)
        match record:
            case ThreadStarted():
                self._threads += 1
                if self._threads > 1:
                    yield self._broken("1", record, "a second thread.started")
            case TurnStarted():
                yield from self._turn_started(record)
            case TurnCompleted() | TurnFailed():
                yield from self._outcome(record)
            case ErrorEvent():
                yield from self._placed(record)
                if parse_notice(record.message) is None:
                    self._fatal = record.message
            case ItemEvent():
                yield from self._item(record)

    def end(self) -> Iterator[Violation]:
        if self._fatal is not None:
            yield Violation(self._rule("I9", "E10"), 0, "a fatal error without turn.failed")
        if self._ours and self._in_turn:
            yield Violation("E2", 0, "the last turn has no outcome")

    # Turns -----------------------------------------------------------------------------------------

    def _turn_started(self, event: TurnStarted) -> Iterator[Violation]:
        self._turns += 1
        if self._in_turn:
            yield self._broken("2", event, "a turn starts before the outcome of the one before")
        elif not self._ours and self._turns > 1:
            yield self._broken("2", event, "a second turn.started")
        self._in_turn = True

    def _outcome(self, event: TurnCompleted | TurnFailed) -> Iterator[Violation]:
        if not self._in_turn:
            yield self._broken("4" if not self._ours else "2", event, "an outcome outside a turn")
        self._in_turn = False
        if self._ours and self._open:
            yield self._broken("3", event, f"still open: {', '.join(self._open)}")
        if not isinstance(event, TurnCompleted) or not self._ours:
            return
        usage = event.raw.get("usage")
        missing = [
            name for name in Usage.__struct_fields__ if not isinstance(usage, dict) or name not in usage
        ]
        if missing:
            yield self._broken("8", event, f"usage without {', '.join(missing)}")
        for name in Usage.__struct_fields__:
            if getattr(event.usage, name) < getattr(self._usage, name):
                yield self._broken("8", event, f"the total {name} becomes smaller")
        self._usage = event.usage

    def _after_fatal(self, event: Record) -> Iterator[Violation]:
        if self._fatal is None:
            return
        if (
            isinstance(event, ItemEvent)
            and event.phase == "completed"
            and (self._ours or isinstance(event.item, TodoList))
        ):
            return
        rule = self._rule("I9", "E10")
        if not isinstance(event, TurnFailed):
            yield Violation(rule, event.line, "a fatal error is not followed by turn.failed")
        elif event.error.message != self._fatal:
            yield Violation(rule, event.line, "turn.failed says something else than the fatal error")
        self._fatal = None

    def _placed(self, event: ErrorEvent | ItemEvent) -> Iterator[Violation]:
        """Only warnings may come before the first turn, and nothing after an outcome."""
        if self._in_turn:
            return
        if self._turns:
            yield self._broken("4" if not self._ours else "11", event, f"{event.type} after the outcome")
        elif not (isinstance(event, ItemEvent) and isinstance(event.item, ErrorItem)):
            yield self._broken("3" if not self._ours else "2", event, f"{event.type} before turn.started")

    # Items -----------------------------------------------------------------------------------------

    def _item(self, event: ItemEvent) -> Iterator[Violation]:
        item = event.item
        yield from self._placed(event)
        if item.id not in self._seen:
            expected = f"item_{len(self._seen)}"
            if item.id != expected:
                yield self._broken("6", event, f"the next new id is {expected}, not {item.id}", "ids")
            self._seen.add(item.id)
            if event.phase != "completed":
                self._open[item.id] = item.type
            elif self._ours and not isinstance(item, _ONLY_COMPLETED):
                yield self._broken("4", event, f"{item.type} is completed without having been started")
        elif item.id not in self._open:
            yield self._broken("6", event, f"{item.id} was completed already", "I6")
        elif event.phase == "started":
            yield self._broken("6", event, f"{item.id} is started again", "I6")
        elif self._open[item.id] != item.type:
            yield self._broken("6", event, f"{item.id} was a {self._open[item.id]}", "I6")
        if event.phase == "completed":
            self._open.pop(item.id, None)
        if self._ours:
            yield from self._own_item(event)

    def _own_item(self, event: ItemEvent) -> Iterator[Violation]:
        item, raw = event.item, event.item.raw
        if isinstance(item, UnknownItem):
            yield self._broken("4", event, f"unknown item {item.type}")
            return
        if event.phase == "started" and isinstance(item, _ONLY_COMPLETED):
            yield self._broken("4", event, f"{item.type} is started")
        if event.phase == "updated" and not isinstance(item, TodoList | CommandExecution):
            yield self._broken("5", event, f"{item.type} is updated")
        status = raw.get("status")
        if status is not None and (status == "in_progress") != (event.phase != "completed"):
            yield self._broken("3", event, f"{event.type} with status {status}")
        for name in _missing_fields(item.type, raw):
            yield self._broken("7", event, f"{item.type} without {name}")
        result = raw.get("result") if isinstance(item, McpToolCall) else None
        if isinstance(result, dict) and result.get("_meta", result) is None:
            yield self._broken("7", event, "`_meta` is left out when there is none")
        if isinstance(item, FileChange):
            paths = [edit.path for edit in item.changes]
            if paths != sorted(paths):
                yield self._broken("12", event, "changes are not sorted by path")
            for path in paths:
                if not _ABSOLUTE.match(path):
                    yield self._broken("12", event, f"{path} is not absolute")

    # Rules -----------------------------------------------------------------------------------------

    def _rule(self, theirs: str, ours: str) -> str:
        return ours if self._ours else theirs

    def _broken(self, number: str, event: Any, text: str, theirs: str | None = None) -> Violation:
        return Violation(self._rule(theirs or f"I{number}", f"E{number}"), event.line, text)


def _missing_fields(kind: str, raw: dict[str, Any]) -> list[str]:
    fields = ITEM_KINDS[kind].__struct_fields__
    return [name for name in fields if name not in _OPTIONAL_FIELDS and name not in raw]
