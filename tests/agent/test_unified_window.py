"""agent/unified_window.py: how long a call waits."""

from __future__ import annotations

import asyncio

import pytest

from exec_server.agent.exec import (
    ExecCommand,
    ToolError,
    WriteStdin,
)
from exec_server.agent.unified import Settings, UnifiedExec
from exec_server.agent.unified_events import (
    ExecEvent,
)
from exec_server.services import EnvironmentFacts, Shell
from support.scripted import ScriptedMachine, Step, exits, prints
from support.unified import end_of, names, scripted


@pytest.mark.parametrize(
    ("asked", "window"), [(1, 250), (250, 250), (30_000, 30_000), (99_999, 30_000), (None, 10_000)]
)
def test_windows_of_exec_command(asked: int | None, window: int) -> None:
    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        output = await unified.exec_command(ExecCommand(cmd="sleep", yield_time_ms=asked), "c")
        assert output.wall_time == pytest.approx(window / 1000)
        assert output.session_id == 1000
        assert output.exit_code is None

    scripted(ScriptedMachine([]), body)


def test_windows_on_windows() -> None:
    machine = ScriptedMachine([])
    machine.info = EnvironmentFacts(shell=Shell("cmd", "cmd.exe"), cwd="file:///C:/", platform_os="windows")

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        output = await unified.exec_command(ExecCommand(cmd="sleep", yield_time_ms=250), "c")
        assert output.wall_time == pytest.approx(10)

    scripted(machine, body)


@pytest.mark.parametrize(
    ("chars", "asked", "window"),
    [
        ("x", None, 250),
        ("x", 1, 250),
        ("x", 20_000, 20_000),
        ("x", 99_999, 30_000),
        ("", None, 5000),
        ("", 250, 5000),
        ("", 60_000, 60_000),
        ("", 999_999, 300_000),
    ],
)
def test_windows_of_write_stdin(chars: str, asked: int | None, window: int) -> None:
    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        await unified.exec_command(ExecCommand(cmd="cat", tty=True, yield_time_ms=250), "c")
        output = await unified.write_stdin(WriteStdin(session_id=1000, chars=chars, yield_time_ms=asked))
        assert output.wall_time == pytest.approx(window / 1000)

    scripted(ScriptedMachine([]), body)


@pytest.mark.parametrize(("most", "window"), [(60_000, 60), (1000, 5)])
def test_the_longest_poll_is_a_setting(most: int, window: float) -> None:
    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        await unified.exec_command(ExecCommand(cmd="cat", yield_time_ms=250), "c")
        output = await unified.write_stdin(WriteStdin(session_id=1000, yield_time_ms=10**6))
        assert output.wall_time == pytest.approx(window)

    scripted(ScriptedMachine([]), body, settings=Settings(sequential_ids=True, max_poll_ms=most))


@pytest.mark.parametrize("remote", [False, True])
def test_the_exit_ends_a_window_at_once(remote: bool) -> None:
    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        output = await unified.exec_command(ExecCommand(cmd="x"), "c")
        assert output.wall_time == pytest.approx(3 - 0.15), "after the early window of 150 ms"
        assert (output.exit_code, output.session_id) == (4, None)
        assert names(events) == ["Begin", "OutputDelta", "End"], "all told before the call returns"
        again = await unified.exec_command(ExecCommand(cmd="x", yield_time_ms=250), "d")
        assert again.session_id is not None
        poll = await unified.write_stdin(WriteStdin(session_id=again.session_id))
        assert poll.wall_time == pytest.approx(3 - 0.4)

    script = [prints(1, "out"), *exits(3, 4)]
    scripted(ScriptedMachine(script, script, remote=remote), body)


def test_output_held_open_by_somebody_else_on_this_machine() -> None:
    """U18: a child of the command keeps its stdout; the call goes on without it."""

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        output = await unified.exec_command(ExecCommand(cmd="x"), "c")
        assert output.exit_code == 0
        assert output.wall_time == pytest.approx(1 - 0.15 + 0.05)
        assert names(events) == ["Begin", "OutputDelta"]
        await asyncio.sleep(1)
        assert end_of(events).aggregated_output == "early late", (
            "what came within 100 ms is in the transcript"
        )

    late: list[Step] = [
        prints(0.5, "early"),
        *exits(1, closed=False),
        prints(1.08, " late"),
        prints(1.5, " too late"),
    ]
    scripted(ScriptedMachine(late), body)


def test_an_exit_that_is_never_closed_on_another_machine() -> None:
    """U19: without `closed` more may come, so the window is used up; then the code is told."""

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        output = await unified.exec_command(ExecCommand(cmd="x"), "c")
        assert output.wall_time == pytest.approx(10)
        assert (output.exit_code, output.session_id) == (7, None)
        with pytest.raises(ToolError, match="Unknown process id 1000"):
            await unified.write_stdin(WriteStdin(session_id=1000))
        await asyncio.sleep(1)
        assert end_of(events).exit_code == 7

    scripted(ScriptedMachine(exits(1, 7, closed=False), remote=True), body)


def test_questions_to_a_person_stop_the_clock() -> None:
    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        call = asyncio.ensure_future(unified.exec_command(ExecCommand(cmd="x", yield_time_ms=1000), "c"))
        await asyncio.sleep(0.5)
        with unified.paused():
            await asyncio.sleep(60)
            with unified.paused():
                await asyncio.sleep(60)
            assert not call.done()
        output = await call
        assert output.wall_time == pytest.approx(1 + 120)
        assert output.session_id is not None

    scripted(ScriptedMachine([]), body)


def test_a_pause_before_a_window_is_not_counted_in_it() -> None:
    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        with unified.paused():
            await asyncio.sleep(60)
        output = await unified.exec_command(ExecCommand(cmd="x", yield_time_ms=1000), "c")
        assert output.wall_time == pytest.approx(1)

    scripted(ScriptedMachine([]), body)
