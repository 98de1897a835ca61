"""The live view, drawn on a terminal that is looked at."""

from __future__ import annotations

import io
import json
from typing import Any

import pyte
import pytest
from hypothesis import given, settings
from rich.console import Console

from exec_server.events.live import SHOWN_FILES, SHOWN_ITEMS, SHOWN_STEPS, LiveView
from exec_server.events.minimal import Options
from exec_server.events.reader import read_events
from support.streams import GARBAGE, NAMES, stream


class Terminal:
    """A live view and the screen it draws on. Time is in the hands of the test."""

    def __init__(self, rows: int = 24, columns: int = 80) -> None:
        self.file = io.StringIO()
        self.now = 1000.0
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self.screen)
        console = Console(
            file=self.file, force_terminal=True, width=columns, height=rows, highlight=False, markup=False,
            color_system="standard", legacy_windows=False,
        )  # fmt: skip
        self.view = LiveView(Options(columns=columns), console=console, clock=lambda: self.now, refresh=False)

    def feed(self, *events: Any) -> None:
        for event in events:
            data = event if isinstance(event, bytes) else json.dumps(event).encode()
            for record in read_events([data]):
                self.view.feed(record)

    def rows(self) -> list[str]:
        self.view._live.refresh()
        return self.drawn()

    def drawn(self) -> list[str]:
        self._stream.feed(self.file.getvalue().replace("\n", "\r\n"))
        self.file.seek(0)
        self.file.truncate()
        return [row.rstrip() for row in self.screen.display if row.strip()]


THREAD = {"type": "thread.started", "thread_id": "t"}
TURN = {"type": "turn.started"}


def item(phase: str, item_id: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"item.{phase}", "item": {"id": item_id, "type": kind, **fields}}


def command(phase: str, item_id: str = "c", text: str = "make test") -> dict[str, Any]:
    over = phase == "completed"
    fields: dict[str, Any] = {"aggregated_output": "", "exit_code": None, "status": "in_progress"}
    if over:
        fields = {"aggregated_output": "all well\n", "exit_code": 0, "status": "completed"}
    return item(phase, item_id, "command_execution", command=text, **fields)


def test_a_run_from_the_first_event_to_the_last() -> None:
    terminal = Terminal()
    with terminal.view:
        assert "waiting" in terminal.rows()[-1]
        terminal.feed(THREAD, TURN, command("started"))
        terminal.now += 75
        rows = terminal.rows()
        assert rows[0] == "thread t"
        assert rows[1][1:] == " $ make test  1m 15s"
        assert rows[2][1:] == " working · 1m 15s"
        steps = [{"text": "build", "completed": True}, {"text": "ship", "completed": False}]
        edits = [{"path": "/src/a.py", "kind": "update"}, {"path": "/src/b.py", "kind": "add"}]
        terminal.feed(
            item("started", "p", "todo_list", items=steps),
            item("completed", "f", "file_change", changes=edits, status="completed"),
        )
        assert terminal.rows()[-7:-1] == [
            "plan 1/2",
            "  [x] build",
            "  [ ] ship",
            "files 2",
            "  M /src/a.py",
            "  A /src/b.py",
        ]
        terminal.feed({"type": "error", "message": "Reconnecting... 2/5 (gone)"})
        assert "retrying 2/5" in terminal.rows()[-1]
        terminal.feed(command("completed"))
        rows = terminal.rows()
        assert "$ make test: ok (1m 15s)" in rows
        assert "  │ all well" in rows
        assert "working" in rows[-1], "the retry worked"
        terminal.feed({"type": "turn.completed", "usage": {"input_tokens": 1500}})
        rows = terminal.rows()
        assert rows[-1][1:].startswith(" completed · 1m 15s · tokens in 1,500 out 0")
        terminal.view.end()
    rows = terminal.drawn()
    assert rows[-1] == "done · tokens in 1,500 out 0 — thread total · 1m 15s"
    assert not [row for row in rows if "working" in row or row.startswith("files")], "the view is gone"


def test_long_lists_are_cut() -> None:
    terminal = Terminal(rows=40)
    with terminal.view:
        terminal.feed(THREAD, TURN)
        for number in range(SHOWN_ITEMS + 3):
            terminal.feed(command("started", f"c{number}", f"sleep {number}"))
        done = SHOWN_STEPS
        steps = [{"text": f"step {number}", "completed": number < done} for number in range(SHOWN_STEPS * 2)]
        terminal.feed(item("started", "p", "todo_list", items=steps))
        changes = [{"path": f"/f{number}", "kind": "add"} for number in range(SHOWN_FILES + 5)]
        terminal.feed(item("completed", "f", "file_change", changes=changes, status="completed"))
        rows = terminal.rows()
        assert "  and 3 more" in rows
        assert f"  … {SHOWN_STEPS} more" in rows
        assert "  … 5 more" in rows
        assert f"  [ ] step {done}" in rows, "what is next is in view"
        assert f"  A /f{SHOWN_FILES + 4}" in rows, "the newest files are"


def test_it_fits_a_narrow_terminal() -> None:
    terminal = Terminal(columns=30)
    with terminal.view:
        terminal.feed(THREAD, TURN, command("started", text="x" * 500))
        rows = terminal.rows()
        assert len(rows) == 3
        assert all(len(row) < 30 for row in rows)
        assert rows[1].endswith("…  0.0s")


def test_nothing_from_the_stream_reaches_the_terminal_as_control() -> None:
    terminal = Terminal()
    evil = "a\x1b]0;owned\x07\x1b[2J\x1b[1;1Hb\x9b2Jc\r\x08"
    with terminal.view:
        terminal.feed(
            {"type": "thread.started", "thread_id": evil},
            TURN,
            command("started", text=evil),
            item("started", "p", "todo_list", items=[{"text": evil, "completed": False}]),
            item("completed", "f", "file_change", changes=[{"path": evil, "kind": evil}], status="completed"),
            item("completed", "m", "agent_message", text=evil),
            item("started", "t", "mcp_tool_call", server=evil, tool=evil, status="in_progress"),
            {"type": "error", "message": evil},
        )
        rows = terminal.rows()
    assert rows[0] == "thread abc", "the first line is still there"
    assert terminal.screen.title == ""


@settings(max_examples=25)
@given(GARBAGE)
def test_garbage(data: bytes) -> None:
    terminal = Terminal()
    with terminal.view:
        for record in read_events([data]):
            terminal.view.feed(record)
            terminal.view.view()
        terminal.view.end()


@pytest.mark.parametrize("name", NAMES)
def test_every_recording(name: str) -> None:
    terminal = Terminal(rows=100)
    with terminal.view:
        for record in read_events([stream(name)]):
            terminal.view.feed(record)
            terminal.rows()
        terminal.view.end()
    rows = terminal.drawn()
    assert rows[0].startswith("thread ")
    assert not [row for row in rows if "working" in row]
