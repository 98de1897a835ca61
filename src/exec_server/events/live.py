"""A live view on a terminal: what is over scrolls by, what goes on stays at the bottom.

At the bottom: a spinner with the time and the tokens, what is running and for how long, the plan, and the
files that were changed. People complain most about silence during long commands and retries.
"""

from __future__ import annotations

import time
from threading import RLock
from types import TracebackType
from typing import IO, TYPE_CHECKING, Final, Self

from .full import Full
from .minimal import Clock, Options, Shown
from .model import FileChange, ItemEvent, Record, ThreadStarted, TodoList
from .printable import cut
from .wording import duration, edit_letter, notice_text, plan, short_form, shown_path, tokens, went_well

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

__all__ = ["LiveView"]

SHOWN_ITEMS: Final = 6
SHOWN_STEPS: Final = 12
SHOWN_FILES: Final = 6
"""Lines each part of the view takes at most; terminals are small and the rest is counted."""

REFRESHES_PER_SECOND: Final = 8
"""Enough for a spinner to look alive."""

MAX_FILES: Final = 10_000
"""Changed files remembered; beyond, only counted."""

_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class LiveView:
    """Use it as a context; feed it records. Printing goes through `console`, made for `file` if not given."""

    def __init__(
        self,
        options: Options,
        file: IO[str] | None = None,
        *,
        console: Console | None = None,
        colour: bool = True,
        clock: Clock = time.monotonic,
        refresh: bool = True,
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console(
            file=file, no_color=not colour, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._options = options
        self._clock = clock
        self._text = Full(options, clock, live=True)
        self._files: dict[str, str] = {}
        self._more_files = 0
        self._began = clock()
        self._lock = RLock()  # the view is drawn by a thread of its own
        self._live: Live = Live(
            console=self._console,
            get_renderable=self.view,
            auto_refresh=refresh,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    @property
    def text(self) -> Full:
        """The renderer of what is over; it holds the state."""
        return self._text

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def feed(self, record: Record) -> None:
        """Show one more record."""
        with self._lock:
            if isinstance(record, ThreadStarted):
                self._began = self._clock()
            shown = list(self._text.feed(record))
            if isinstance(record, ItemEvent) and isinstance(record.item, FileChange):
                self._note_files(record.item, record.phase == "completed")
        self._print(shown)

    def end(self) -> None:
        """Show what is left to say."""
        with self._lock:
            shown = list(self._text.end())
        self._print(shown)

    def _note_files(self, item: FileChange, over: bool) -> None:
        if not over or not went_well(item):
            return
        for edit in item.changes:
            path = shown_path(edit.path, self._options.cwd)
            if path in self._files or len(self._files) < MAX_FILES:
                self._files.pop(path, None)  # to the end: the newest are shown
                self._files[path] = edit_letter(edit.kind)
            else:
                self._more_files += 1

    def _print(self, shown: list[Shown]) -> None:
        from rich.text import Text

        for style, text in shown:
            self._console.print(Text(text, style=style), soft_wrap=True)

    # The view --------------------------------------------------------------------------------------

    def view(self) -> RenderableType:
        """What is at the bottom now."""
        from rich.console import Group

        with self._lock:
            return Group(*self._parts())

    def _parts(self) -> list[Text]:
        from rich.text import Text

        now = self._clock()
        columns = max(self._console.width - 1, 20)
        run = self._text.reducer.run
        lines: list[Shown] = []
        running = [state for state in run.open_items if not isinstance(state.item, TodoList)]
        spinner = _FRAMES[int(now * REFRESHES_PER_SECOND) % len(_FRAMES)]
        for state in running[:SHOWN_ITEMS]:
            if state.item is not None:
                age = duration(now - (state.first_at if state.first_at is not None else now))
                form = short_form(state.item, self._options.cwd)
                lines.append(("bold", f"{spinner} {cut(form, columns - len(age) - 4)}  {age}"))
        if len(running) > SHOWN_ITEMS:
            lines.append(("dim", f"  and {len(running) - SHOWN_ITEMS} more"))
        if run.todo is not None and run.todo.id in run.items:
            lines.extend(self._plan(run.todo))
        if self._files:
            lines.extend(self._changed())
        lines.append(self._status(now, spinner))
        return [Text(cut(text, columns), style=style, no_wrap=True) for style, text in lines]

    def _plan(self, todo: TodoList) -> list[Shown]:
        heading, steps = plan(todo)
        next_step = next((at for at, step in enumerate(todo.items) if not step.completed), 0)
        first = max(0, min(next_step - SHOWN_STEPS // 2, len(steps) - SHOWN_STEPS))
        lines: list[Shown] = [("cyan", heading)]
        for at, step in enumerate(steps[first : first + SHOWN_STEPS], first):
            style = "dim" if todo.items[at].completed else "bold" if at == next_step else ""
            lines.append((style, f"  {step}"))
        hidden = len(steps) - SHOWN_STEPS
        if hidden > 0:
            lines.append(("dim", f"  … {hidden} more"))
        return lines

    def _changed(self) -> list[Shown]:
        count = len(self._files) + self._more_files
        lines: list[Shown] = [("cyan", f"files {count}")]
        lines.extend(("", f"  {self._files[path]} {path}") for path in list(self._files)[-SHOWN_FILES:])
        if count > SHOWN_FILES:
            lines.append(("dim", f"  … {count - SHOWN_FILES} more"))
        return lines

    def _status(self, now: float, spinner: str) -> Shown:
        run = self._text.reducer.run
        turn = run.turn
        if turn is not None and turn.outcome is not None:
            word, style = turn.outcome, "green" if turn.outcome == "completed" else "red"
        elif run.retrying is not None:
            word, style = notice_text(run.retrying), "yellow"
        else:
            word, style = "working" if turn is not None else "waiting", "dim"
        parts = [f"{spinner} {word}", duration(now - self._began)]
        if turn is not None and turn.usage is not None:
            parts.append(tokens(turn.usage))
        return style, " · ".join(parts)
