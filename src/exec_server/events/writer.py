"""Writing the stream. Strict: what would break a promise to readers is an error here, not there.

The promises (E1 to E12 of the specification): one outcome per turn, nothing left open at it, ids without
gaps, every field present, paths absolute and sorted, and lines that the most naive reader survives.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from threading import RLock
from typing import Any, Final, Protocol, TypeVar

from msgspec.structs import replace

from .encoding import encode, event_value, item_value
from .model import (
    COMPLETED,
    DECLINED,
    FAILED,
    IN_PROGRESS,
    AgentMessage,
    CollabToolCall,
    CommandExecution,
    ErrorEvent,
    ErrorItem,
    Failure,
    FileChange,
    KnownItem,
    McpToolCall,
    Phase,
    Reasoning,
    ThreadStarted,
    TodoList,
    TurnCompleted,
    TurnFailed,
    TurnStarted,
    Usage,
    status_of,
)
from .notice import Notice
from .truncation import Truncation

__all__ = ["EventWriter", "Misuse", "Output"]

K = TypeVar("K", bound=KnownItem)

SNAPSHOT_SECONDS: Final = 0.25
"""Least time between two snapshots of a running command."""

_ONLY_COMPLETED: Final = (AgentMessage, Reasoning, ErrorItem)
_WITH_STATUS: Final = (CommandExecution, FileChange, McpToolCall, CollabToolCall)
_EDIT_KINDS: Final = frozenset({"add", "delete", "update"})
_MAX_EXIT: Final = 2**31
_ABSOLUTE: Final = re.compile(r"/|[A-Za-z]:[\\/]|\\\\|file:")


class Misuse(RuntimeError):
    """The caller asked for a stream no reader should get."""


class Output(Protocol):
    """Where a stream goes: a file, or whatever takes its lines."""

    def write(self, line: bytes, /) -> int: ...

    def flush(self) -> None: ...


class EventWriter:
    """One stream. Safe to use from several threads; every event is written and flushed whole.

    When the reader has gone, `reader_gone` is true and writing does nothing: the work is the caller's to
    finish or to stop. `ext` adds our own extras under one key, `live_output` snapshots of running commands.
    """

    def __init__(
        self,
        file: Output,
        *,
        truncation: Truncation | None = None,
        ext: bool = False,
        live_output: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._file = file
        self._truncation = truncation or Truncation()
        self._ext = ext
        self._live_output = live_output
        self._clock = clock
        self._now = now
        self._lock = RLock()
        self._thread_id: str | None = None
        self._in_turn = False
        self._turns = 0
        self._next_id = 0
        self._open: dict[str, KnownItem] = {}
        self._began: dict[str, float] = {}
        self._snapshot_at: dict[str, float] = {}
        self._turn_began = 0.0
        self._total = Usage()
        self.reader_gone = False

    # Thread and turns ------------------------------------------------------------------------------

    def thread_started(self, thread_id: str) -> None:
        """The first event: a new id, or that of the thread which goes on."""
        with self._lock:
            if self._thread_id is not None:
                raise Misuse("the thread was started already")
            if not thread_id:
                raise Misuse("a thread needs an id")
            self._thread_id = thread_id
            self._write(event_value(ThreadStarted(thread_id=thread_id)))

    def turn_started(self) -> None:
        """A turn begins; until its outcome there is no other."""
        with self._lock:
            if self._thread_id is None:
                raise Misuse("a turn needs a thread: call thread_started first")
            if self._in_turn:
                raise Misuse("the turn before has no outcome yet")
            self._in_turn = True
            self._turns += 1
            self._turn_began = self._clock()
            self._write(event_value(TurnStarted()))

    def turn_completed(self, usage: Usage, *, ext: dict[str, Any] | None = None) -> None:
        """The turn ran to its end. `usage` is the total of the whole thread."""
        with self._lock:
            self._check_in_turn()
            for name in usage.__struct_fields__:
                if getattr(usage, name) < getattr(self._total, name):
                    raise Misuse(f"{name} is a total of the thread and cannot become smaller")
            self._total = usage
            self._close_open()
            self._outcome(event_value(TurnCompleted(usage=usage)), ext)

    def turn_failed(self, message: str, *, ext: dict[str, Any] | None = None) -> None:
        """The turn is given up, also by `interrupted` and `terminated`."""
        with self._lock:
            self._check_in_turn()
            self._close_open()
            self._outcome(event_value(TurnFailed(error=Failure(message=message))), ext)

    def fail(self, message: str, *, ext: dict[str, Any] | None = None) -> None:
        """Something fatal: the error, and the failed turn with the same words."""
        with self._lock:
            self._check_in_turn()
            self._write(event_value(ErrorEvent(message=message)))
            self.turn_failed(message, ext=ext)

    def notice(self, notice: Notice) -> None:
        """Something is tried again; the turn goes on."""
        with self._lock:
            self._check_in_turn()
            ext: dict[str, Any] = {"will_retry": True}
            if notice.attempt is not None and notice.max is not None:
                ext |= {"attempt": notice.attempt, "max_attempts": notice.max}
            self._write(event_value(ErrorEvent(message=notice.text)), ext)

    # Items -----------------------------------------------------------------------------------------

    def started(self, item: KnownItem, *, ext: dict[str, Any] | None = None) -> str:
        """Something begins; gives the id under which it goes on."""
        with self._lock:
            self._check_in_turn()
            if isinstance(item, _ONLY_COMPLETED):
                raise Misuse(f"{item.type} has no beginning, only a completion")
            if isinstance(item, TodoList) and any(isinstance(one, TodoList) for one in self._open.values()):
                raise Misuse("a turn has one plan: update it")
            if status_of(item) not in (None, IN_PROGRESS):
                raise Misuse(f"{item.type} starts `in_progress`, not `{status_of(item)}`")
            item = self._named(item)
            self._open[item.id] = item
            self._began[item.id] = self._clock()
            self._write_item("started", item, ext)
            return item.id

    def updated(self, item_id: str, item: KnownItem, *, ext: dict[str, Any] | None = None) -> bool:
        """A new snapshot of something that goes on; False if it was left out for being too soon."""
        with self._lock:
            self._check_open(item_id, item)
            if isinstance(item, CommandExecution):
                now = self._clock()
                if not self._live_output or now - self._snapshot_at.get(item_id, -1e9) < SNAPSHOT_SECONDS:
                    return False
                self._snapshot_at[item_id] = now
                item = replace(item, aggregated_output=self._truncation.cut(item.aggregated_output))
            elif not isinstance(item, TodoList):
                raise Misuse(f"{item.type} is not updated, only completed")
            if status_of(item) not in (None, IN_PROGRESS):
                raise Misuse(f"an update is `in_progress`, not `{status_of(item)}`")
            item = replace(item, id=item_id, raw={})
            self._open[item_id] = item
            self._write_item("updated", item, ext)
            return True

    def completed(
        self, item: KnownItem, item_id: str | None = None, *, ext: dict[str, Any] | None = None
    ) -> str:
        """Something is over. `item_id` is what `started` gave; what has no beginning gets its id here."""
        with self._lock:
            if item_id is None:
                if not isinstance(item, _ONLY_COMPLETED):
                    raise Misuse(f"{item.type} has to be started first")
                if not isinstance(item, ErrorItem) or self._thread_id is None or self._turns:
                    self._check_in_turn()  # warnings may also come before the first turn
                item = self._named(item)
            else:
                self._check_open(item_id, item)
                item = replace(item, id=item_id, raw={})
            if status_of(item) == IN_PROGRESS:
                raise Misuse(f"a completed {item.type} is not `in_progress`")
            self._close(item, ext)
            return item.id

    def todo(self, plan: TodoList) -> str:
        """The plan, whether it is the first of this turn or a new version of it."""
        with self._lock:
            for item_id, item in self._open.items():
                if isinstance(item, TodoList):
                    self.updated(item_id, plan)
                    return item_id
            return self.started(plan)

    @property
    def live_output(self) -> bool:
        """Whether snapshots of running commands are written, when there is one."""
        return self._live_output

    @property
    def extended(self) -> bool:
        """Whether anybody sees what is given as `ext`; what costs something need not be made otherwise."""
        return self._ext

    @property
    def open_items(self) -> dict[str, KnownItem]:
        """What was started and not completed, by id."""
        with self._lock:
            return dict(self._open)

    # How -------------------------------------------------------------------------------------------

    def _named(self, item: K) -> K:
        item = replace(item, id=f"item_{self._next_id}", raw={})
        _check_item(item)
        self._next_id += 1
        return item

    def _close(self, item: KnownItem, ext: dict[str, Any] | None) -> None:
        if isinstance(item, CommandExecution):
            whole = item.aggregated_output
            item = replace(item, aggregated_output=self._truncation.cut(whole))
            cut = item.aggregated_output != whole
            ext = {"output_bytes": len(whole.encode("utf-8", "replace")), "truncated": cut, **(ext or {})}
        began = self._began.pop(item.id, None)
        if began is not None:
            ext = {"duration_ms": round((self._clock() - began) * 1000), **(ext or {})}
        self._write_item("completed", item, ext)
        self._open.pop(item.id, None)
        self._snapshot_at.pop(item.id, None)

    def _close_open(self) -> None:
        """Nothing stays open at an outcome. The plan is closed last, as it is."""
        plans = [item for item in self._open.values() if isinstance(item, TodoList)]
        others = [item for item in self._open.values() if not isinstance(item, TodoList)]
        for item in others:
            self._close(replace(item, status=FAILED) if isinstance(item, _WITH_STATUS) else item, None)
        for plan in plans:
            self._close(plan, None)

    def _outcome(self, value: dict[str, Any], ext: dict[str, Any] | None) -> None:
        self._in_turn = False
        self._write(value, {"duration_ms": round((self._clock() - self._turn_began) * 1000), **(ext or {})})

    def _check_in_turn(self) -> None:
        if not self._in_turn:
            raise Misuse("there is no turn: call turn_started first")

    def _check_open(self, item_id: str, item: KnownItem) -> None:
        self._check_in_turn()
        known = self._open.get(item_id)
        if known is None:
            raise Misuse(f"{item_id} is not open")
        if type(known) is not type(item):
            raise Misuse(f"{item_id} is a {known.type} and does not become a {item.type}")

    def _write_item(self, phase: Phase, item: KnownItem, ext: dict[str, Any] | None) -> None:
        _check_item(item)
        self._write({"type": f"item.{phase}", "item": item_value(item)}, ext)

    def _write(self, value: dict[str, Any], ext: dict[str, Any] | None = None) -> None:
        if self._ext:
            value = {**value, "ext": {"ts": _timestamp(self._now()), **(ext or {})}}
        line = encode(value)  # before anything else, so that what cannot be written changes nothing
        if self.reader_gone:
            return
        try:
            self._file.write(line)
            self._file.flush()
        except (BrokenPipeError, ValueError):
            self.reader_gone = True


def _timestamp(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _check_item(item: KnownItem) -> None:
    status = status_of(item)
    allowed = {IN_PROGRESS, COMPLETED, FAILED} | ({DECLINED} if isinstance(item, CommandExecution) else set())
    if status is not None and status not in allowed:
        raise Misuse(f"{status!r} is no status of {item.type}")
    if isinstance(item, CommandExecution):
        code = item.exit_code
        if code is not None and not -_MAX_EXIT <= code < _MAX_EXIT:
            raise Misuse(f"exit code {code} does not fit 32 bits")
        if status == IN_PROGRESS and code is not None:
            raise Misuse("a command that runs has no exit code")
        if status == COMPLETED and code != 0:
            raise Misuse("`completed` means success: exit code 0")
    elif isinstance(item, FileChange):
        _check_paths(edit.path for edit in item.changes)
        for edit in item.changes:
            if edit.kind not in _EDIT_KINDS:
                raise Misuse(f"{edit.kind!r} is no kind of change")
    elif isinstance(item, Reasoning) and not item.text.strip():
        raise Misuse("reasoning without a text is not reported")


def _check_paths(paths: Iterable[str]) -> None:
    before = ""
    for path in paths:
        if not _ABSOLUTE.match(path):
            raise Misuse(f"{path!r} is not absolute")
        if path < before:
            raise Misuse("changes are sorted by path")
        before = path
