"""Unified exec on real machines: commands, terminals, sandboxes, and what programs paint."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import exec_server
from exec_server.agent.exec import (
    DirectExec,
    ExecCommand,
    Prepare,
    PreparedExec,
    ToolError,
    WriteStdin,
)
from exec_server.agent.screen import ScreenView
from exec_server.agent.unified import Settings, UnifiedExec
from exec_server.agent.unified_events import (
    ExecCommandBegin,
    ExecCommandEnd,
    ExecCommandOutputDelta,
    ExecEvent,
    TerminalInteraction,
)
from exec_server.agent.unified_start import SandboxDenied
from exec_server.agent.unified_text import ToolOutput
from exec_server.client.sandbox import Sandbox
from exec_server.version import __version__
from exec_server.wire.sandbox import SandboxContext
from support.server import RunningServer
from support.wait import eventually_async

Body = Callable[[UnifiedExec, list[ExecEvent]], Awaitable[None]]


def names(events: Sequence[ExecEvent]) -> list[str]:
    return [type(event).__name__.removeprefix("ExecCommand") for event in events]


def end_of(events: Sequence[ExecEvent]) -> ExecCommandEnd:
    (end,) = [event for event in events if isinstance(event, ExecCommandEnd)]
    return end


# Real commands on a real machine ----------------------------------------------------------------------------


@asynccontextmanager
async def on(target: str | None, **options: Any) -> AsyncIterator[tuple[UnifiedExec, list[ExecEvent]]]:
    events: list[ExecEvent] = []
    async with exec_server.connect(target) as machine:
        settings = options.pop("settings", Settings(sequential_ids=True, login_allowed=False))
        unified = UnifiedExec({"m": machine}, "m", emit=events.append, settings=settings, **options)
        try:
            yield unified, events
        finally:
            await unified.close()


@pytest.fixture(params=["here", "there"])
def target(request: pytest.FixtureRequest, server: RunningServer) -> str:
    """The same behaviour on this machine and across a connection."""
    return "in-process:" if request.param == "here" else server.url


def test_a_command(target: str) -> None:
    """U1 and U4."""

    async def main() -> None:
        async with on(target) as (unified, events):
            output = await unified.exec_command(ExecCommand(cmd="echo hi"), "c")
            assert output.text().endswith(
                "\nProcess exited with code 0\nOriginal token count: 1\nOutput:\nhi\n"
            )
            assert names(events) == ["Begin", "OutputDelta", "End"]
            assert end_of(events).status == "completed"
            events.clear()
            failed = await unified.exec_command(ExecCommand(cmd="echo out; echo err >&2; exit 3"), "d")
            assert failed.exit_code == 3
            assert sorted(failed.collected.split()) == ["err", "out"]
            assert end_of(events).status == "failed"
            assert {event.call_id for event in events} == {"d"}

    asyncio.run(main())


def test_a_conversation_on_a_terminal(target: str) -> None:
    """U5."""

    async def main() -> None:
        async with on(target) as (unified, events):
            loop = "while read x; do echo got:$x; done; echo bye"
            first = await unified.exec_command(ExecCommand(cmd=loop, tty=True, yield_time_ms=250), "c")
            assert first.session_id is not None
            for word in ("one", "two", "three"):
                await type_until(unified, first.session_id, f"{word}\n", f"got:{word}\r\n")
            last = await until_over(unified, first.session_id, "\x04")
            assert "bye\r\n" in last.collected
            assert last.exit_code == 0
            typed = [
                event.stdin for event in events if isinstance(event, TerminalInteraction) and event.stdin
            ]
            assert typed == ["one\n", "two\n", "three\n", "\x04"]
            assert names(events)[-1] == "End"

    asyncio.run(main())


async def type_until(unified: UnifiedExec, number: int, chars: str, wanted: str) -> str:
    """Type, and look until the answer is there: a busy machine may need more than one window."""
    seen = (await unified.write_stdin(WriteStdin(session_id=number, chars=chars))).collected
    for _ in range(4):
        if wanted in seen:
            return seen
        seen += (await unified.write_stdin(WriteStdin(session_id=number))).collected
    raise AssertionError(f"{wanted!r} is not in {seen!r}")


async def until_over(unified: UnifiedExec, number: int, chars: str) -> ToolOutput:
    output = await unified.write_stdin(WriteStdin(session_id=number, chars=chars, yield_time_ms=10_000))
    while output.session_id is not None:
        output = await unified.write_stdin(WriteStdin(session_id=number))
    return output


def test_without_a_terminal(target: str, tmp_path: Path) -> None:
    """U6, U7 and U8."""
    ready = tmp_path / "ready"

    async def main() -> None:
        async with on(target) as (unified, events):
            trap = f"trap 'echo stopped; exit 7' INT; touch {ready}; while :; do sleep 0.05; done"
            started = await unified.exec_command(ExecCommand(cmd=trap, yield_time_ms=250), "c")
            assert started.session_id == 1000
            await eventually_async(ready.exists, "the trap")
            with pytest.raises(ToolError) as caught:
                await unified.write_stdin(WriteStdin(session_id=1000, chars="x"))
            assert str(caught.value) == (
                "write_stdin failed: stdin is closed for this session;"
                " rerun exec_command with tty=true to keep stdin open"
            )
            stopped = await until_over(unified, 1000, "\x03")
            assert stopped.exit_code == 7
            assert stopped.collected == "stopped\n"
            assert [event.stdin for event in events if isinstance(event, TerminalInteraction)][-1] == "\x03"
            with pytest.raises(ToolError, match=r"^write_stdin failed: Unknown process id 12345$"):
                await unified.write_stdin(WriteStdin(session_id=12345))

    asyncio.run(main())


def test_a_flood(target: str) -> None:
    """U12: the numbers of the reference for 3.2 MB, and every byte of it in deltas."""

    async def main() -> None:
        async with on(target) as (unified, events):
            flood = "awk 'BEGIN { for (i = 0; i < 400000; i++) printf \"%07d\\n\", i }'"
            output = await unified.exec_command(ExecCommand(cmd=flood, yield_time_ms=30_000), "c")
            assert output.exit_code == 0
            assert "Original token count: 800000\n" in output.text()
            assert "\n... 2151424 bytes omitted ...\n" in output.text()
            end = end_of(events)
            assert len(end.aggregated_output) == 1_048_607
            assert end.aggregated_output.endswith("0399999\n")
            deltas = [event.chunk for event in events if isinstance(event, ExecCommandOutputDelta)]
            assert sum(map(len, deltas)) == 3_200_000
            assert max(map(len, deltas)) <= 8192

    asyncio.run(main())


def test_a_child_that_keeps_the_output_open(tmp_path: Path) -> None:
    """U18 for real: the shell is gone, what it left behind holds its stdout."""
    release = tmp_path / "release"

    async def main() -> None:
        async with on("in-process:") as (unified, events):
            left = f"(until [ -e {release} ]; do sleep 0.05; done; echo late) & echo early"
            output = await unified.exec_command(ExecCommand(cmd=left, yield_time_ms=30_000), "c")
            assert output.exit_code == 0
            assert output.collected == "early\n"
            assert output.wall_time < 20
            await eventually_async(lambda: "End" in names(events), "the end")
            release.touch()

    asyncio.run(main())


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def test_the_thread_ends_everything(target: str, tmp_path: Path) -> None:
    """U15 for real."""

    async def main() -> None:
        async with on(target) as (unified, events):
            for number in range(3):
                start = f"echo $$ > {tmp_path}/{number}; exec sleep 600"
                await unified.exec_command(ExecCommand(cmd=start, yield_time_ms=250), f"c{number}")
            files = [tmp_path / str(number) for number in range(3)]
            await eventually_async(
                lambda: all(file.exists() and file.read_text() for file in files), "the pids"
            )
            assert [command.number for command in unified.running()] == [1000, 1001, 1002]
            assert await unified.terminate(1001)
            assert not await unified.terminate(1001)
            await unified.close()
            assert unified.running() == []
            assert names(events).count("End") == 3
            for file in files:
                pid = int(file.read_text())
                await eventually_async(
                    lambda pid=pid: not os.path.exists(f"/proc/{pid}"), f"the end of {pid}"
                )

    asyncio.run(main())


def test_a_server_that_dies_under_a_command(tmp_path: Path) -> None:
    """U17 for real: stdio cannot be connected again."""
    file = tmp_path / "pid"

    async def main() -> None:
        events: list[ExecEvent] = []
        async with exec_server.connect([sys.executable, "-m", "exec_server", "--listen", "stdio"]) as machine:
            unified = UnifiedExec(
                {"m": machine}, "m", emit=events.append, settings=Settings(login_allowed=False)
            )
            start = ExecCommand(cmd=f"echo $PPID > {file}; exec sleep 600", yield_time_ms=250)
            started = await unified.exec_command(start, "c")
            assert started.session_id is not None
            os.kill(int(await eventually_async(lambda: file.exists() and file.read_text(), "the pid")), 9)
            with pytest.raises(ToolError, match="write_stdin failed: Unified exec process failed: "):
                await unified.write_stdin(WriteStdin(session_id=started.session_id, yield_time_ms=60_000))
            await eventually_async(lambda: "End" in names(events), "the end")
            assert end_of(events).exit_code == -1
            assert end_of(events).stderr
            await unified.close()

    asyncio.run(main())


def confined(sandbox: SandboxContext) -> Prepare:
    async def prepare(request: DirectExec, call: ExecCommand) -> PreparedExec:
        return request.confined(sandbox)

    return prepare


def test_a_real_sandbox(target: str, tmp_path: Path) -> None:
    """U16 for real. Whether the refusal comes within 150 ms is up to the machine; that it comes is not."""
    file = tmp_path / "not-here"

    async def main() -> None:
        async with on(target, prepare=confined(Sandbox.read_only())) as (unified, events):
            assert (await unified.exec_command(ExecCommand(cmd="echo in"), "a")).collected == "in\n"
            events.clear()
            try:
                output = await unified.exec_command(ExecCommand(cmd=f"touch {file}"), "b")
                assert names(events)[-1] == "End"
            except SandboxDenied as denied:
                output = denied.result
                assert events == []
            assert output.exit_code == 1
            assert "touch: " in output.collected

    asyncio.run(main())
    assert not file.exists()


@pytest.mark.parametrize("prepare", [None, confined(Sandbox.read_only())])
def test_a_shell_that_is_not_there_is_replaced(tmp_path: Path, prepare: Any, needs_bubblewrap: None) -> None:
    (tmp_path / "sh").touch()

    async def main() -> None:
        async with on(None, prepare=prepare) as (unified, _):
            for shell in ("/nope/zsh", str(tmp_path / "sh")):
                call = ExecCommand(cmd="echo hi", shell=shell, login=False)
                assert (await unified.exec_command(call, "a")).exit_code == 0

    asyncio.run(main())


def test_a_command_knows_for_whom_it_runs() -> None:
    thread = "0195d2c8-0000-7000-8000-000000000001"
    show = ExecCommand(cmd='echo "$CODEX_THREAD_ID $CODEX_TOOL_CALL_ID $CODEX_VERSION"', login=False)

    async def main(thread_id: str) -> str:
        async with on(None, thread_id=thread_id) as (unified, _):
            return (await unified.exec_command(show, "call-1")).collected

    assert asyncio.run(main(thread)) == f"{thread} call-1 {__version__}\n"
    assert asyncio.run(main("t")) == f"t  {__version__}\n", "a thread that has no name for the machine"


def test_a_server_that_takes_no_direct_starts(start_server: Callable[..., RunningServer]) -> None:
    """What was decided down to the last variable is started; what the machine would have to add to is not."""
    server = start_server("--no-direct")

    async def prepare(request: DirectExec, call: ExecCommand) -> DirectExec:
        if call.justification == "as it is":
            return request
        return request.final({"PATH": "/usr/bin:/bin", "PAGER": "less", "ONLY": "this"})

    async def main() -> None:
        async with on(server.url, prepare=prepare) as (unified, _):
            command = "echo $ONLY $PAGER ${HOME:-nowhere} $0"
            output = await unified.exec_command(ExecCommand(cmd=command), "a")
            assert output.exit_code == 0
            assert output.collected.startswith("this cat nowhere ")
            terminal = await unified.exec_command(ExecCommand(cmd="test -t 1", tty=True), "b")
            assert terminal.exit_code == 0
            with pytest.raises(ToolError, match="direct exec is disabled"):
                await unified.exec_command(ExecCommand(cmd="true", justification="as it is"), "c")
        async with on(server.url, prepare=confined(Sandbox.read_only())) as (unified, _):
            with pytest.raises(ToolError, match="direct exec is disabled"):
                await unified.exec_command(ExecCommand(cmd="true"), "d")

    asyncio.run(main())


# Screens ----------------------------------------------------------------------------------------------------

PAINTER = Settings(sequential_ids=True, login_allowed=False, tty_term="linux")

PAGER = """
import curses
def main(window):
    top, lines = 0, [f"line {number}" for number in range(100)]
    while True:
        window.erase()
        for row in range(curses.LINES - 1):
            window.addstr(row, 0, lines[top + row])
        window.addstr(curses.LINES - 1, 0, f"-- at {top} --", curses.A_REVERSE)
        window.refresh()
        key = window.getch()
        if key == ord("q"):
            return
        top = min(max(top + {ord(" "): 23, ord("b"): -23}.get(key, 0), 0), 77)
curses.wrapper(main)
"""


async def screen_until(unified: UnifiedExec, number: int, wanted: str, chars: str = "") -> ScreenView:
    """Press keys, and look until something is on the screen."""
    if chars:
        await unified.write_stdin(WriteStdin(session_id=number, chars=chars))
    return await eventually_async(
        lambda: view if wanted in (view := unified.screen(number)).text else None, f"{wanted!r} on the screen"
    )


def test_a_program_that_paints(target: str, tmp_path: Path) -> None:
    program = tmp_path / "pager.py"
    program.write_text(PAGER)

    async def main() -> None:
        async with on(target, settings=PAINTER) as (unified, _):
            start = ExecCommand(
                cmd=f"{sys.executable} {program}; echo over; read x", tty=True, yield_time_ms=250
            )
            number = (await unified.exec_command(start, "c")).session_id
            assert number is not None
            view = await screen_until(unified, number, "-- at 0 --")
            assert view.rows[0] == "line 0"
            assert view.rows[23] == "-- at 0 --"
            view = await screen_until(unified, number, "-- at 23 --", " ")
            assert view.rows[0] == "line 23"
            view = await screen_until(unified, number, "-- at 0 --", "b")
            assert view.rows[:2] == ["line 0", "line 1"]
            await screen_until(unified, number, "over", "q")
            last = await until_over(unified, number, "\n")
            assert last.exit_code == 0
            with pytest.raises(ToolError, match="Unknown process id"):
                unified.screen(number)

    asyncio.run(main())


@pytest.mark.skipif(shutil.which("vim") is None, reason="vim is not installed here")
def test_vim(tmp_path: Path) -> None:
    file = tmp_path / "note.txt"
    file.write_text("first\nsecond\n")

    async def main() -> None:
        async with on("in-process:", settings=PAINTER) as (unified, _):
            start = ExecCommand(cmd=f"vim -u NONE -N {file}", tty=True, yield_time_ms=250)
            number = (await unified.exec_command(start, "c")).session_id
            assert number is not None
            view = await screen_until(unified, number, "second")
            assert view.rows[:3] == ["first", "second", "~"]
            view = await screen_until(unified, number, "third", "Gothird\x1b")
            assert view.rows[2] == "third"
            await eventually_async(lambda: unified.screen(number).cursor == (2, 4), "the end of typing")
            done = await until_over(unified, number, ":wq\r")
            assert done.exit_code == 0

    asyncio.run(main())
    assert file.read_text() == "first\nsecond\nthird\n"


def test_begin_says_what_runs_where(target: str) -> None:
    async def main() -> None:
        async with on(target) as (unified, events):
            await unified.exec_command(ExecCommand(cmd="pwd", workdir="/"), "c")
            begin = events[0]
            assert isinstance(begin, ExecCommandBegin)
            assert (begin.call_id, begin.process_id, begin.cwd) == ("c", 1000, "file:///")
            assert begin.command[1:] == ["-c", "pwd"]
            assert begin.source == "unified_exec_startup"
            assert end_of(events).stdout == "/\n"

    asyncio.run(main())
