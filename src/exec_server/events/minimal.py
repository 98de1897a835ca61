"""One line per important thing: for logs and chat bridges. Also what every other text form builds on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from msgspec import Struct

from .model import (
    AgentMessage,
    CommandExecution,
    ErrorEvent,
    ErrorItem,
    FileChange,
    Item,
    ItemEvent,
    MalformedEvent,
    McpToolCall,
    Noise,
    Record,
    ThreadStarted,
    TodoList,
    TurnCompleted,
    TurnFailed,
    TurnStarted,
    UnknownEvent,
)
from .notice import parse_notice, readable
from .printable import cut, one_line, printable, width_of
from .reducer import CUT_OFF, ItemState, Keep, Reducer
from .wording import (
    command_result,
    command_script,
    edits,
    failure_reason,
    notice_text,
    short_form,
    went_well,
)

__all__ = ["DEFAULT_COLUMNS", "Minimal", "Options", "Shown", "Style"]

DEFAULT_COLUMNS: Final = 120
"""Where long commands are cut when no terminal says otherwise."""

Style = str
"""`dim`, `bold`, `red`, `green`, `yellow`, `cyan` or nothing. Layout never depends on it."""

Shown = tuple[Style, str]
"""A line to print, or several joined by LF."""

Clock = Callable[[], float]


class Options(Struct, frozen=True, kw_only=True):
    """How much to show. `output_lines` None is all; `reasoning` is `first`, `all` or `none`."""

    columns: int = DEFAULT_COLUMNS
    cwd: str | None = None
    output_lines: int | None = 20
    reasoning: str = "first"
    raw_output: bool = False
    timed: bool = True
    """Whether arrival times mean anything: not when a file is read."""
    without_answer: bool = False
    """The answer is shown elsewhere."""


class Minimal:
    """Feed it records, print what it gives."""

    def __init__(self, options: Options | None = None, clock: Clock = time.monotonic) -> None:
        self.options = options or Options()
        self.reducer = Reducer(Keep.OPEN)
        self._clock = clock
        self._last: str | None = None
        """The item whose line was printed last, if it was its start."""
        self._fatal: str | None = None
        """A fatal error that may yet be repeated by the outcome."""
        self._message: AgentMessage | None = None
        """A message that may turn out to be the answer."""

    def feed(self, record: Record) -> Iterator[Shown]:
        """What to print for one more record."""
        before = self.reducer.run.items.get(record.item.id) if isinstance(record, ItemEvent) else None
        if not self.reducer.feed(record, self._clock() if self.options.timed else None):
            yield from self.oddity(record)
            return
        if self._fatal is not None and not _may_stand_before_the_outcome(record):
            yield from self._show_fatal()
        match record:
            case ThreadStarted():
                yield from self.remark()
                yield from self.thread(record)
            case TurnStarted():
                yield from self.remark()
            case ItemEvent():
                yield from self.item(record, before)
            case ErrorEvent():
                notice = parse_notice(record.message)
                if notice is None:
                    self._fatal = record.message
                else:
                    yield from self.line("yellow", notice_text(notice))
            case TurnCompleted():
                yield from self._show_fatal()
                yield from self._left_open()
                yield from self.completed(record)
            case TurnFailed():
                if self._fatal != record.error.message:
                    yield from self._show_fatal()
                self._fatal = None
                yield from self._left_open()
                yield from self.failed(record)

    def end(self) -> Iterator[Shown]:
        """What to print when there is no more input."""
        yield from self.remark()
        yield from self._show_fatal()
        run = self.reducer.run
        if run.outcome == "incomplete":
            yield from self.line("red", f"stopped: {CUT_OFF}")
            for state in run.open_items:
                yield from self.unfinished(state)

    # What others do differently --------------------------------------------------------------------

    def oddity(self, record: Record) -> Iterator[Shown]:
        """A record that is no event, or an event that does not count."""
        del record
        return iter(())

    def thread(self, event: ThreadStarted) -> Iterator[Shown]:
        """A run begins."""
        yield from self.line("dim", f"thread {one_line(event.thread_id)}")

    def item(self, event: ItemEvent, before: ItemState | None) -> Iterator[Shown]:
        """An item event; `before` is what was known of the item."""
        item = event.item
        if event.phase != "completed":
            if isinstance(item, CommandExecution) and before is None:
                yield from self.started(item, f"$ {command_script(item.command)}")
            return
        match item:
            case CommandExecution():
                yield from self.command(item)
            case FileChange():
                yield from self.file_change(item)
            case McpToolCall() if not went_well(item):
                name = f"{one_line(item.server)}/{one_line(item.tool)}"
                yield from self.line("red", f"tool {name} failed: {failure_reason(item)}")
            case ErrorItem():
                yield from self.line("yellow", f"warning: {printable(item.message)}")
            case AgentMessage():
                yield from self.message(item)

    def message(self, item: AgentMessage) -> Iterator[Shown]:
        """Something the model said."""
        if self.options.without_answer:
            yield from self.remark()
            self._message = item
        elif item.text.strip():
            yield from self.line("", printable(item.text).rstrip("\n"))

    def remark(self) -> Iterator[Shown]:
        """A message that was held back and is not the answer."""
        if self._message is not None:
            message, self._message = self._message, None
            if message.text.strip():
                yield from self.line("", printable(message.text).rstrip("\n"))

    def command(self, item: CommandExecution) -> Iterator[Shown]:
        """A command that has ended."""
        yield from self.result(item, f"$ {command_script(item.command)}", command_result(item))

    def file_change(self, item: FileChange) -> Iterator[Shown]:
        """A patch that was applied, or not."""
        failed = "" if went_well(item) else " [failed]"
        yield from self.line("cyan", f"edit: {edits(item, self.options.cwd)}{failed}")

    def completed(self, event: TurnCompleted) -> Iterator[Shown]:
        """The turn is over."""
        del event
        self._message = None
        yield from self.line("green", "done")

    def failed(self, event: TurnFailed) -> Iterator[Shown]:
        """The turn failed."""
        yield from self.remark()
        yield from self.line("red", f"failed: {printable(readable(event.error.message))}")

    def unfinished(self, state: ItemState) -> Iterator[Shown]:
        """An item that was open when the stream ended."""
        if state.item is not None:
            form = short_form(state.item, self.options.cwd)
            yield from self.line("red", self.cut(f"  unfinished: {form}"))

    # Tools for them --------------------------------------------------------------------------------

    def line(self, style: Style, text: str) -> Iterator[Shown]:
        """Something that stands for itself."""
        self._last = None
        yield style, text

    def started(self, item: Item, text: str) -> Iterator[Shown]:
        """The beginning of something of which the result is to follow."""
        yield from self.line("bold", self.cut(text))
        self._last = item.id

    def result(self, item: Item, text: str, result: str) -> Iterator[Shown]:
        """How something ended: below its beginning if that is the line above, else with its name."""
        style = "green" if went_well(item) else "red"
        alone = not any(not isinstance(state.item, TodoList) for state in self.reducer.run.open_items)
        if self._last == item.id and alone:
            yield from self.line(style, f"  {result}")
        else:
            room = max(self.options.columns - width_of(result) - 2, 20)
            yield from self.line(style, f"{cut(text, room)}: {result}")

    def cut(self, text: str) -> str:
        """One line, as wide as is wanted."""
        return cut(text, self.options.columns)

    def _left_open(self) -> Iterator[Shown]:
        """What did not finish before the turn did is never to look like a success."""
        for state in self.reducer.run.open_items:
            if not isinstance(state.item, TodoList):
                yield from self.unfinished(state)

    def _show_fatal(self) -> Iterator[Shown]:
        if self._fatal is not None:
            message, self._fatal = self._fatal, None
            yield from self.line("red", f"error: {printable(readable(message))}")


def _may_stand_before_the_outcome(record: Record) -> bool:
    """The outcome repeats a fatal error; the end of the plan may come between."""
    match record:
        case TurnFailed() | TurnCompleted() | Noise() | UnknownEvent() | MalformedEvent():
            return True
        case ItemEvent():
            return isinstance(record.item, TodoList)
    return False
