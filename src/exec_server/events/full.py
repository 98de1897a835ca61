"""Everything a person may want to see of a run, as text."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Final

from .minimal import Clock, Minimal, Options, Shown
from .model import (
    AgentMessage,
    CollabToolCall,
    CommandExecution,
    ErrorItem,
    FileChange,
    Item,
    ItemEvent,
    MalformedEvent,
    McpToolCall,
    Noise,
    Reasoning,
    Record,
    TodoList,
    TodoStep,
    TurnCompleted,
    TurnFailed,
    TurnStarted,
    UnknownEvent,
    UnknownItem,
    WebSearch,
)
from .printable import cut, one_line, printable, safe
from .reducer import ItemState
from .wording import (
    agent_call,
    agent_states,
    command_result,
    command_script,
    compact,
    content_blocks,
    duration,
    edit_letter,
    failure_reason,
    first_line,
    plan,
    search,
    shown_path,
    tokens,
    truncated,
    went_well,
)

__all__ = ["Full", "answer_text", "output_tail"]

LONGEST_LINE_COLUMNS: Final = 2000
"""Where a line of output is cut unless all of it is wanted: minified files have one line of a megabyte."""


class Full(Minimal):
    """`live` leaves out what a live view shows while it happens: beginnings, and the plan on its way."""

    def __init__(
        self, options: Options | None = None, clock: Clock = time.monotonic, *, live: bool = False
    ) -> None:
        super().__init__(options, clock)
        self._live = live
        self._plan: tuple[TodoStep, ...] | None = None
        """The plan that was printed last."""
        self._took: float | None = None

    def feed(self, record: Record) -> Iterator[Shown]:
        match record:
            case ItemEvent(item=TodoList() | ErrorItem()) | TurnCompleted():
                pass  # may stand between the answer and the end
            case TurnStarted():
                self._plan = None
            case UnknownEvent() | MalformedEvent() | Noise():
                pass
            case _:
                yield from self.remark()
        yield from super().feed(record)

    def oddity(self, record: Record) -> Iterator[Shown]:
        match record:
            case Noise():
                yield from self.line("dim", self.cut(f"# line {record.line}: {one_line(record.text)}"))
            case UnknownEvent():
                yield from self._unknown(record.type, record.raw)
            case MalformedEvent():
                reason = one_line(record.reason)
                yield from self.line("dim", self.cut(f"# line {record.line}: bad {record.type}: {reason}"))

    def item(self, event: ItemEvent, before: ItemState | None) -> Iterator[Shown]:
        item = event.item
        self._took = self._duration(event, before)
        if isinstance(item, UnknownItem):
            yield from self._unknown(item.type, item.raw)
        elif isinstance(item, TodoList):
            yield from self._todo(item, event.phase == "completed")
        elif event.phase == "completed":
            yield from self._completed_item(event, before)
        elif before is None and not self._live:
            yield from self._started_item(item)

    def _started_item(self, item: Item) -> Iterator[Shown]:
        match item:
            case CommandExecution():
                yield from self.started(item, f"$ {command_script(item.command)}")
            case McpToolCall():
                yield from self.started(item, _tool(item))
            case CollabToolCall():
                yield from self.started(item, agent_call(item))

    def _completed_item(self, event: ItemEvent, before: ItemState | None) -> Iterator[Shown]:
        item = event.item
        match item:
            case McpToolCall():
                result = "ok" if went_well(item) else f"failed: {failure_reason(item)}"
                yield from self.result(item, _tool(item), self._timed(result))
                if blocks := content_blocks(item):
                    yield from self.line("dim", self.cut(f"  {blocks}"))
            case CollabToolCall():
                result = "ok" if went_well(item) else "failed"
                yield from self.result(item, agent_call(item), self._timed(result))
                for state in agent_states(item):
                    yield from self.line("dim", self.cut(f"  {state}"))
            case WebSearch():
                yield from self.line("cyan", self.cut(search(item)))
            case Reasoning():
                yield from self._reasoning(item)
            case _:
                yield from super().item(event, before)

    # Items -----------------------------------------------------------------------------------------

    def command(self, item: CommandExecution) -> Iterator[Shown]:
        result = self._timed(command_result(item))
        yield from self.result(item, f"$ {command_script(item.command)}", result)
        hidden, lines = output_tail(item.aggregated_output, self.options)
        if truncated(item.aggregated_output):
            yield from self.line("dim", "  (output truncated by the producer)")
        if hidden and lines:
            yield from self.line("dim", f"  … {hidden} {'line' if hidden == 1 else 'lines'} hidden")
        if lines:
            yield from self.line("dim", "\n".join(f"  │ {line}" for line in lines))

    def file_change(self, item: FileChange) -> Iterator[Shown]:
        style = "cyan" if went_well(item) else "red"
        yield from self.line(style, f"edit: {one_line(item.status)}")
        for edit in item.changes:
            path = shown_path(edit.path, self.options.cwd)
            yield from self.line("", f"  {edit_letter(edit.kind)} {path}")

    def message(self, item: AgentMessage) -> Iterator[Shown]:
        self._message = item
        return iter(())

    def remark(self) -> Iterator[Shown]:
        if self._message is not None:
            message, self._message = self._message, None
            if message.text.strip():
                yield from self.line("dim", f"says: {printable(message.text).rstrip()}")

    def _reasoning(self, item: Reasoning) -> Iterator[Shown]:
        if self.options.reasoning == "none":
            return
        text = printable(item.text).replace("**", "").strip("\n")
        if self.options.reasoning != "all":
            text = first_line(text)
        yield from self.line("dim", f"thinks: {text}")

    def _todo(self, item: TodoList, last: bool) -> Iterator[Shown]:
        if item.items == self._plan or (self._live and not last):
            return
        self._plan = item.items
        heading, lines = plan(item)
        yield from self.line("cyan", heading)
        for line in lines:
            yield from self.line("", f"  {line}")

    def _unknown(self, kind: str, raw: dict[str, Any]) -> Iterator[Shown]:
        columns = max(self.options.columns - len(kind) - 3, 20)
        yield from self.line("dim", self.cut(f"? {one_line(kind)} {compact(raw, columns)}"))

    # Outcomes --------------------------------------------------------------------------------------

    def completed(self, event: TurnCompleted) -> Iterator[Shown]:
        message, self._message = self._message, None
        if message is not None and message.text.strip():
            yield from self.line("bold", answer_text(message.text))
        text = f"done · {tokens(event.usage)} — thread total"
        turn = self.reducer.run.turn
        if turn is not None and turn.usage_delta is not None:
            text += f"; this turn {tokens(turn.usage_delta).removeprefix('tokens ')}"
        yield from self.line("green", text + self._elapsed())

    def failed(self, event: TurnFailed) -> Iterator[Shown]:
        for style, text in super().failed(event):
            yield style, text + self._elapsed()

    def _elapsed(self) -> str:
        turn = self.reducer.run.turn
        if turn is None or turn.started_at is None or turn.ended_at is None:
            return ""
        return f" · {duration(turn.ended_at - turn.started_at)}"

    # Time ------------------------------------------------------------------------------------------

    def _duration(self, event: ItemEvent, before: ItemState | None) -> float | None:
        """What the producer measured, or else we did."""
        ext = event.raw.get("ext")
        said = ext.get("duration_ms") if isinstance(ext, dict) else None
        if isinstance(said, int | float) and not isinstance(said, bool):
            return said / 1000
        if before is None or before.first_at is None:
            return None
        return self._clock() - before.first_at

    def _timed(self, result: str) -> str:
        return result if self._took is None else f"{result} ({duration(self._took)})"


def output_tail(output: str, options: Options) -> tuple[int, list[str]]:
    """How many lines of a command's output are hidden, and the last ones, which are shown."""
    text = output if options.raw_output else printable(output)
    text = text.removesuffix("\n")
    if not text.strip():
        return 0, []
    lines = text.split("\n")
    if options.output_lines is None:
        return 0, lines
    shown = lines[-options.output_lines :] if options.output_lines else []
    return len(lines) - len(shown), [cut(line, LONGEST_LINE_COLUMNS) for line in shown]


def answer_text(text: str) -> str:
    """An answer, with JSON made readable."""
    stripped = text.strip()
    if stripped[:1] in ("{", "["):
        try:
            return safe(json.dumps(json.loads(stripped), indent=2, ensure_ascii=False))
        except (ValueError, RecursionError):
            pass
    return printable(text).rstrip("\n")


def _tool(item: McpToolCall) -> str:
    arguments = "" if item.arguments is None else f" {compact(item.arguments)}"
    return f"tool {one_line(item.server)}/{one_line(item.tool)}{arguments}"
