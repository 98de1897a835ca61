"""From events to a state: what the thread has done, what is going on, how it ended.

Everything that changes the state is in `Reducer.feed`. It never raises unless it was made strict; what a
producer should not have done is a diagnostic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from .model import (
    AgentMessage,
    ErrorEvent,
    ErrorItem,
    Item,
    ItemEvent,
    MalformedEvent,
    Noise,
    Phase,
    Record,
    ThreadStarted,
    TodoList,
    TurnCompleted,
    TurnFailed,
    TurnStarted,
    UnknownEvent,
    UnknownItem,
    Usage,
    status_of,
)
from .notice import Notice, parse_notice
from .reader import StreamError

__all__ = ["CUT_OFF", "ItemState", "Keep", "Reducer", "Run", "Tally", "Turn"]

T = TypeVar("T")

KEPT_ODDITIES: Final = 100
"""Noise lines and diagnostics kept, newest first; all are counted. A stream of garbage has no end."""

REMEMBERED_IDS: Final = 4096
"""Threads of which the total is known, and finished items of which the id is when nothing else is kept."""

CUT_OFF: Final = "stream ended before the turn finished"


class Keep(Enum):
    """How much of what is over stays in memory."""

    EVERYTHING = "everything"
    """Every run with the last snapshot of every item."""
    OUTLINE = "outline"
    """The last run; of finished items only what a summary needs, not what they printed."""
    OPEN = "open"
    """What is going on, in constant memory however long the stream is."""


class Tally(Generic[T]):
    """Everything is counted, and the newest few (or all) are kept."""

    def __init__(self, most: int | None) -> None:
        self.kept: deque[T] = deque(maxlen=most)
        self.count = 0

    def add(self, entry: T) -> None:
        self.kept.append(entry)
        self.count += 1

    def __iter__(self) -> Iterator[T]:
        return iter(self.kept)

    @property
    def last(self) -> T | None:
        return self.kept[-1] if self.kept else None


class ItemState(Struct):
    """An item and what has happened to it. Times are the reader's clock: the stream has none."""

    id: str
    type: str
    phases: list[Phase]
    item: Item | None
    """The last snapshot; None when it is over and was not to be kept."""
    status: str | None
    source_id: str | None
    first_at: float | None
    last_at: float | None

    @property
    def open(self) -> bool:
        return "completed" not in self.phases


class Turn(Struct):
    """A turn. `outcome` is None while it runs."""

    outcome: str | None = None
    error: str | None = None
    usage: Usage | None = None
    raw_usage: dict[str, Any] | None = None
    usage_delta: Usage | None = None
    """What this turn added; None where the total before it is not known."""
    answer: str | None = None
    final_answer: str | None = None
    """The last message marked as final, in streams that mark them."""
    fatal: str | None = None
    started_at: float | None = None
    ended_at: float | None = None


class Run:
    """What one process wrote: from one `thread.started` to the next."""

    def __init__(self, thread_id: str | None, keep: Keep) -> None:
        most = KEPT_ODDITIES if keep is Keep.OPEN else None
        self.thread_id = thread_id
        self.turns: list[Turn] = []
        self.items: dict[str, ItemState] = {}
        """By id, in the order of their first appearance."""
        self.messages: Tally[str] = Tally(most)
        self.notices: Tally[Notice] = Tally(most)
        self.warnings: Tally[str] = Tally(most)
        self.fatal_errors: Tally[str] = Tally(most)
        self.todo: TodoList | None = None
        self.retrying: Notice | None = None
        """The last notice, until any other event shows that the retry worked."""

    @property
    def turn(self) -> Turn | None:
        """The last turn."""
        return self.turns[-1] if self.turns else None

    @property
    def open_items(self) -> list[ItemState]:
        return [state for state in self.items.values() if state.open]

    @property
    def outcome(self) -> str:
        """As it would be if the input ended here: completed, failed, incomplete or none."""
        return "none" if self.turn is None else self.turn.outcome or "incomplete"

    @property
    def error(self) -> str | None:
        """Why the last turn failed, or the last thing said before the stream ended."""
        if self.turn is None:
            return None
        return self.turn.error if self.turn.outcome is not None else self.turn.fatal

    @property
    def answer(self) -> str | None:
        """The answer of the last turn, if that was completed and had one."""
        if self.turn is None or self.turn.outcome != "completed":
            return None
        return self.turn.answer if self.turn.final_answer is None else self.turn.final_answer


class Reducer:
    """Feed it records; look at its properties whenever you like.

    `new_threads`: a thread first seen here is known to be new, so that its first total of tokens is also
    what its first turn used. The stream does not tell a new thread from a resumed one.
    """

    def __init__(
        self, keep: Keep = Keep.EVERYTHING, *, strict: bool = False, new_threads: bool = False
    ) -> None:
        self._keep = keep
        self._strict = strict
        self._new_threads = new_threads
        self._totals: dict[str, Usage] = {}
        self._finished: dict[str, None] = {}
        self.runs: list[Run] = [Run(None, keep)]
        self.events = 0
        """Valid events of known types."""
        self.unknown_events: dict[str, int] = {}
        self.unknown_items: dict[str, int] = {}
        self.malformed = 0
        self.noise: Tally[Noise] = Tally(KEPT_ODDITIES)
        self.diagnostics: Tally[str] = Tally(KEPT_ODDITIES)

    @property
    def run(self) -> Run:
        """The last run."""
        return self.runs[-1]

    def feed(self, record: Record, at: float | None = None) -> bool:
        """Take one record, seen at a time of the caller's clock. False if it changed nothing."""
        match record:
            case Noise():
                self.noise.add(record)
                return False
            case MalformedEvent():
                self.malformed += 1
                self.diagnostics.add(f"line {record.line}: {record.type}: {record.reason}")
                return False
            case UnknownEvent():
                _count(self.unknown_events, record.type)
                return False
        self.events += 1
        notice = parse_notice(record.message) if isinstance(record, ErrorEvent) else None
        self.run.retrying = notice
        match record:
            case ThreadStarted():
                self._thread_started(record)
            case TurnStarted():
                self._turn_started(at)
            case TurnCompleted() | TurnFailed():
                return self._outcome(record, at)
            case ErrorEvent():
                self._late(record.line, record.type)
                if notice is not None:
                    self.run.notices.add(notice)
                else:
                    self._fatal(record.message)
            case ItemEvent():
                self._late(record.line, record.type)
                return self._item(record, at)
        return True

    # Runs and turns ------------------------------------------------------------------------------

    def _thread_started(self, event: ThreadStarted) -> None:
        run = self.run
        if run.thread_id is None and not run.turns and not run.items:
            run.thread_id = event.thread_id
            return
        if self._keep is not Keep.EVERYTHING:
            self.runs.clear()
        self._finished.clear()
        self.runs.append(Run(event.thread_id, self._keep))

    def _turn_started(self, at: float | None) -> None:
        run = self.run
        if run.turn is not None and run.turn.outcome is None:
            run.turn.outcome, run.turn.error = "incomplete", run.turn.fatal
        if self._keep is not Keep.EVERYTHING:
            run.turns.clear()
        run.turns.append(Turn(started_at=at))
        run.todo = None

    def _outcome(self, event: TurnCompleted | TurnFailed, at: float | None) -> bool:
        run = self.run
        turn = run.turn
        if turn is None:
            self._odd(event.line, f"{event.type} without turn.started")
            turn = Turn()
            run.turns.append(turn)
        elif turn.outcome is not None:
            self._odd(event.line, f"a second outcome, {event.type}; the first one counts")
            return False
        turn.ended_at = at
        if isinstance(event, TurnFailed):
            turn.outcome, turn.error = "failed", event.error.message
            return True
        turn.outcome, turn.usage = "completed", event.usage
        usage = event.raw.get("usage")
        turn.raw_usage = usage if isinstance(usage, dict) else None
        if run.thread_id is not None and turn.raw_usage is not None:
            before = self._totals.get(run.thread_id)
            if before is None and self._new_threads:
                before = Usage()
            turn.usage_delta = None if before is None else event.usage.since(before)
            _remember(self._totals, run.thread_id, event.usage)
        return True

    def _fatal(self, message: str) -> None:
        self.run.fatal_errors.add(message)
        if self.run.turn is not None and self.run.turn.outcome is None:
            self.run.turn.fatal = message

    # Items ---------------------------------------------------------------------------------------

    def _item(self, event: ItemEvent, at: float | None) -> bool:
        run, item = self.run, event.item
        if isinstance(item, UnknownItem):
            _count(self.unknown_items, item.type)
        state = run.items.get(item.id)
        finished = item.id in self._finished if state is None else not state.open
        if finished:
            self._odd(event.line, f"{event.type} for {item.id}, which was completed; the first result counts")
            return False
        if state is None:
            state = ItemState(item.id, item.type, [], None, None, None, at, at)
            run.items[item.id] = state
        elif event.phase == "started":
            self._odd(event.line, f"{item.id} is started again")
        state.type, state.item, state.status, state.last_at = item.type, item, status_of(item), at
        state.source_id = getattr(item, "source_id", None) or state.source_id
        if self._keep is not Keep.OPEN or event.phase not in state.phases:
            state.phases.append(event.phase)
        if isinstance(item, TodoList):
            run.todo = item
        if event.phase == "completed":
            self._completed(item, state)
        return True

    def _completed(self, item: Item, state: ItemState) -> None:
        run = self.run
        if isinstance(item, AgentMessage):
            run.messages.add(item.text)
            if run.turn is not None and run.turn.outcome is None:
                run.turn.answer = item.text
                if item.phase == "final_answer":
                    run.turn.final_answer = item.text
        elif isinstance(item, ErrorItem):
            run.warnings.add(item.message)
        if self._keep is not Keep.EVERYTHING:
            state.item = None
        if self._keep is Keep.OPEN:
            del run.items[state.id]
            _remember(self._finished, state.id, None)

    # Oddities ------------------------------------------------------------------------------------

    def _late(self, line: int, what: str) -> None:
        turn = self.run.turn
        if turn is not None and turn.outcome is not None:
            self._odd(line, f"{what} after the outcome of the turn")

    def _odd(self, line: int, text: str) -> None:
        if self._strict:
            raise StreamError(line, text)
        self.diagnostics.add(f"line {line}: {text}")


def _count(counts: dict[str, int], name: str) -> None:
    if name in counts or len(counts) < KEPT_ODDITIES:
        counts[name] = counts.get(name, 0) + 1


def _remember(known: dict[str, T], name: str, value: T) -> None:
    """The newest few; the oldest make room."""
    known.pop(name, None)
    known[name] = value
    if len(known) > REMEMBERED_IDS:
        del known[next(iter(known))]
