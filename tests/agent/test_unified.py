"""The two tools on a machine that follows a script and on a clock of their own: what is told, and ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.agent.exec import (
    ExecCommand,
    ToolError,
    WriteStdin,
)
from exec_server.agent.screen import ScreenUnavailable
from exec_server.agent.unified import Settings, UnifiedExec
from exec_server.agent.unified_events import (
    ExecCommandEnd,
    ExecCommandOutputDelta,
    ExecEvent,
    TerminalInteraction,
)
from exec_server.agent.unified_text import ToolOutput
from exec_server.client.errors import ConnectionLost, OutputLost, ProcessFailed, ServerRejected, StdinClosed
from exec_server.services import Failed
from support.scripted import ScriptedMachine, Step, exits, prints
from support.unified import end_of, names, scripted
from support.virtual_time import run_virtual


def test_what_was_shown_is_not_shown_again() -> None:
    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        first = await unified.exec_command(ExecCommand(cmd="x", yield_time_ms=1000), "c")
        second = await unified.write_stdin(WriteStdin(session_id=1000))
        third = await unified.write_stdin(WriteStdin(session_id=1000))
        assert [output.collected for output in (first, second, third)] == ["one", "two", "three"]
        assert third.exit_code == 0
        assert end_of(events).stdout == "onetwothree"
        assert names(events).count("TerminalInteraction") == 1, "only for the poll that found it running"

    script = [prints(0.5, "one"), prints(2, "two"), prints(10, "three"), *exits(10)]
    scripted(ScriptedMachine(script), body)


def test_an_exit_between_two_polls_is_told_by_the_second() -> None:
    """U9, and its end is told when it happens."""

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        await unified.exec_command(ExecCommand(cmd="x", yield_time_ms=250), "c")
        await asyncio.sleep(5)
        assert end_of(events).exit_code == 9
        assert unified.running() == []
        poll = await unified.write_stdin(WriteStdin(session_id=1000))
        assert poll.wall_time == 0
        assert (poll.exit_code, poll.session_id, poll.collected) == (9, None, "x")
        with pytest.raises(ToolError, match="Unknown process id 1000"):
            await unified.write_stdin(WriteStdin(session_id=1000))
        assert names(events) == ["Begin", "OutputDelta", "End"], "nothing was typed into what was over"

    scripted(ScriptedMachine([prints(1, "x"), *exits(1, 9)]), body)


def test_the_oldest_goes_when_there_are_too_many() -> None:
    """U11."""
    machine = ScriptedMachine()

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        async def start(number: int) -> ToolOutput:
            return await unified.exec_command(ExecCommand(cmd="sleep", yield_time_ms=250), f"c{number}")

        for number in range(64):
            await start(number)
        await unified.write_stdin(WriteStdin(session_id=1000, chars="\x03"))
        await start(64)
        assert [process.terminated for process in machine.started] == [0, 1] + [0] * 63
        assert len(unified.running()) == 64
        assert [command.number for command in unified.running()][:3] == [1000, 1002, 1003]
        await asyncio.sleep(1)
        assert end_of(events).call_id == "c1", "its end is told, too"
        with pytest.raises(ToolError, match="Unknown process id 1001"):
            await unified.write_stdin(WriteStdin(session_id=1001))

    scripted(machine, body)
    assert [process.terminated for process in machine.started] == [1] * 65, "U15: the thread ends them all"


def test_there_are_never_too_many_however_many_are_asked_for_at_once() -> None:
    """Nobody's command dies while somebody waits for it: those for which there is no room wait."""
    machine = ScriptedMachine()

    async def body(unified: UnifiedExec, _: list[ExecEvent]) -> None:
        most = 0

        async def start(number: int) -> ToolOutput:
            nonlocal most
            output = await unified.exec_command(ExecCommand(cmd="sleep", yield_time_ms=1000), f"c{number}")
            most = max(most, len(unified.running()))
            return output

        outputs = await asyncio.gather(*(start(number) for number in range(80)))
        assert most == len(unified.running()) == 64
        assert len({output.session_id for output in outputs} - {None}) == 80
        assert [process.terminated for process in machine.started].count(1) == 16
        assert len(machine.started) == 80

    scripted(machine, body)


def test_who_waits_for_room_can_be_cancelled() -> None:
    machine = ScriptedMachine()

    async def body(unified: UnifiedExec, _: list[ExecEvent]) -> None:
        first = asyncio.ensure_future(unified.exec_command(ExecCommand(cmd="sleep"), "c0"))
        await asyncio.sleep(1)
        second = asyncio.ensure_future(unified.exec_command(ExecCommand(cmd="sleep"), "c1"))
        await asyncio.sleep(1)
        assert len(machine.started) == 1
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert (await first).session_id == 1000
        assert len(machine.started) == 1

    scripted(machine, body, settings=Settings(sequential_ids=True, max_processes=1))


@pytest.mark.parametrize(("dies_after", "code"), [(0.0, 137), (1.5, 137), (None, -1)])
def test_what_is_killed_ends_with_its_exit_code(dies_after: float | None, code: int) -> None:
    """However long it takes; unless it takes for ever, and then the end is told all the same."""
    machine = ScriptedMachine()

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        for call in ("a", "b"):
            await unified.exec_command(ExecCommand(cmd="sleep", yield_time_ms=250), call)
        for process in machine.started:
            process.dies_after = dies_after
        assert await unified.terminate(1000)
        assert not await unified.terminate(1000)
        await unified.close()
        ends = [event for event in events if isinstance(event, ExecCommandEnd)]
        assert sorted((end.call_id, end.exit_code) for end in ends) == [("a", code), ("b", code)]

    scripted(machine, body)


def test_an_interrupted_turn_does_not_lose_its_command() -> None:
    """U14."""
    machine = ScriptedMachine(
        [prints(0.5, "early "), prints(1.5, "and "), prints(5, "still here"), *exits(5)]
    )

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        call = asyncio.ensure_future(unified.exec_command(ExecCommand(cmd="x"), "c"))
        await asyncio.sleep(1)
        call.cancel()
        await asyncio.wait([call])
        assert [command.number for command in unified.running()] == [1000]
        poll = asyncio.ensure_future(unified.write_stdin(WriteStdin(session_id=1000, yield_time_ms=60_000)))
        await asyncio.sleep(1)
        poll.cancel()
        await asyncio.wait([poll])
        again = await unified.write_stdin(WriteStdin(session_id=1000, yield_time_ms=60_000))
        assert again.collected == "early and still here", "and nothing that was printed meanwhile"
        assert machine.started[0].terminated == 0

    scripted(machine, body)


def test_two_at_once_take_turns() -> None:
    """U10."""

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        await unified.exec_command(ExecCommand(cmd="x", tty=True, yield_time_ms=250), "c")
        loop = asyncio.get_running_loop()
        began = loop.time()
        calls = [unified.write_stdin(WriteStdin(session_id=1000, chars=char)) for char in "ab"]
        first, second = await asyncio.gather(*calls)
        assert loop.time() - began == pytest.approx(2 * 0.35)
        assert first.collected + second.collected == "12"
        assert [event.stdin for event in events if isinstance(event, TerminalInteraction)] == ["a", "b"]

    scripted(ScriptedMachine([prints(0.6, "1"), prints(0.9, "2")]), body)


def test_different_processes_are_talked_to_side_by_side() -> None:
    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        for number in range(3):
            await unified.exec_command(ExecCommand(cmd="x", yield_time_ms=250), f"c{number}")
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(
            *(unified.write_stdin(WriteStdin(session_id=1000 + number)) for number in range(3))
        )
        assert loop.time() - began == pytest.approx(5)

    scripted(ScriptedMachine(), body)


def test_a_machine_that_is_lost() -> None:
    """U17, in the first window, in a later one, and in between."""
    gone = "exec-server transport disconnected: reset"
    lost: list[Step] = [prints(0.5, "so far"), (1, Failed(gone))]

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        with pytest.raises(ToolError, match=f"^exec_command failed: Unified exec process failed: {gone}$"):
            await unified.exec_command(ExecCommand(cmd="x"), "a")
        end = end_of(events)
        assert (end.exit_code, end.stderr, end.aggregated_output) == (-1, gone, f"so far\n{gone}")
        events.clear()
        await unified.exec_command(ExecCommand(cmd="x", yield_time_ms=250), "b")
        with pytest.raises(ToolError, match=f"^write_stdin failed: Unified exec process failed: {gone}$"):
            await unified.write_stdin(WriteStdin(session_id=1001))
        await asyncio.sleep(1)
        assert end_of(events).exit_code == -1
        events.clear()
        with pytest.raises(ToolError, match=gone):
            await unified.exec_command(ExecCommand(cmd="x"), "c")
        assert names(events) == ["Begin", "End"]
        assert end_of(events).aggregated_output == gone, "also without any output"
        for number in (1000, 1001, 1002):
            with pytest.raises(ToolError, match="Unknown process id"):
                await unified.write_stdin(WriteStdin(session_id=number))

    scripted(ScriptedMachine(lost, lost, [(0.01, Failed(gone))], remote=True), body)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StdinClosed("closed"), None),
        (ProcessFailed("the server does not know process 'p' (unknownProcess)"), None),
        (
            ProcessFailed("the server does not know process 'p' (starting)"),
            "write_stdin failed: failed to write to stdin",
        ),
        (ConnectionLost("reset"), "write_stdin failed: Unified exec process failed: reset"),
    ],
)
def test_typing_that_does_not_arrive(error: Exception, text: str | None) -> None:
    machine = ScriptedMachine([prints(0.01, "x")])

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        await unified.exec_command(ExecCommand(cmd="x", tty=True, yield_time_ms=250), "c")
        machine.started[0].write_error = error
        call = unified.write_stdin(WriteStdin(session_id=1000, chars="a"))
        if text is None:
            output = await call
            assert (output.exit_code, output.session_id) == (None, None), "over, and nobody knows how"
            assert output.wall_time == pytest.approx(0.05)
        else:
            with pytest.raises(ToolError, match=f"^{text}$"):
                await call
        still = "starting" in str(error)
        assert bool(unified.running()) == still
        await asyncio.sleep(1)
        assert ("End" in names(events)) != still
        assert machine.started[0].terminated == (1 if isinstance(error, ConnectionLost) else 0)

    scripted(machine, body)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ServerRejected("process/signal", -32600, "unknown process id p"), None),
        (ConnectionLost("reset"), "write_stdin failed: Unified exec process failed: reset"),
    ],
)
def test_an_interrupt_that_does_not_arrive(error: Exception, text: str | None) -> None:
    machine = ScriptedMachine(exits(1, 5))

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        await unified.exec_command(ExecCommand(cmd="x", yield_time_ms=250), "c")
        machine.started[0].signal_error = error
        call = unified.write_stdin(WriteStdin(session_id=1000, chars="\x03", yield_time_ms=5000))
        if text is None:
            assert (await call).exit_code == 5, "it ended by itself"
        else:
            with pytest.raises(ToolError, match=f"^{text}$"):
                await call

    scripted(machine, body)


def test_who_comes_second_to_a_process_that_is_over() -> None:
    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        await unified.exec_command(ExecCommand(cmd="x", yield_time_ms=250), "c")
        calls = [unified.write_stdin(WriteStdin(session_id=1000)) for _ in range(2)]
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, ToolOutput)
        assert first.exit_code == 6
        assert str(second) == "write_stdin failed: Unknown process id 1000"

    scripted(ScriptedMachine(exits(1, 6)), body)


def test_output_that_was_lost_on_the_way() -> None:
    machine = ScriptedMachine([])

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        call = asyncio.ensure_future(unified.exec_command(ExecCommand(cmd="x"), "c"))
        await asyncio.sleep(1)
        machine.started[0].happen(OutputLost("p", 3))
        with pytest.raises(ToolError, match="output of process 'p' after number 3 is no longer retained"):
            await call
        assert end_of(events).exit_code == -1

    scripted(machine, body)


def test_a_listener_that_fails_loses_nothing(capsys: pytest.CaptureFixture[str], fresh_log: None) -> None:
    def broken(event: ExecEvent) -> None:
        raise RuntimeError("listener")

    async def main() -> None:
        machine: Any = ScriptedMachine([prints(0.1, "out"), *exits(0.2)])
        unified = UnifiedExec({"m": machine}, "m", emit=broken)
        output = await unified.exec_command(ExecCommand(cmd="x"), "c")
        assert output.collected == "out"
        await unified.close()

    run_virtual(main())
    assert "a listener of command events failed" in capsys.readouterr().err


def test_no_terminal_no_screen() -> None:
    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        await unified.exec_command(ExecCommand(cmd="x", yield_time_ms=250), "c")
        with pytest.raises(ScreenUnavailable, match="process 1000 has no terminal; start it with tty=true"):
            unified.screen(1000)

    scripted(ScriptedMachine([]), body)


TEXTS = st.lists(
    st.tuples(st.floats(0, 20), st.sampled_from(["a", "bb\n", "é", "🎉" * 3, "x" * 9000])), max_size=6
)


@settings(max_examples=60)
@given(TEXTS, st.floats(0, 25), st.integers(-1, 255), st.booleans(), st.sampled_from([250, 1000, 10_000]))
def test_everything_is_reported_once(
    texts: list[tuple[float, str]], ends: float, code: int, remote: bool, window: int
) -> None:
    """Whatever a command prints and whenever: all of it is told, once, in order, and then the end."""
    printed = sorted((min(at, ends), text) for at, text in texts)
    script: list[Step] = [*(prints(at, text) for at, text in printed), *exits(ends, code)]
    whole = "".join(text for _, text in printed)

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        output = await unified.exec_command(ExecCommand(cmd="x", yield_time_ms=window), "c")
        told = output.collected
        while output.session_id is not None:
            assert output.exit_code is None
            output = await unified.write_stdin(WriteStdin(session_id=output.session_id))
            told += output.collected
        assert output.exit_code == code
        assert told == whole
        assert names(events)[0] == "Begin"
        assert names(events)[-1] == "End"
        assert end_of(events).aggregated_output == whole
        deltas = [event.chunk for event in events if isinstance(event, ExecCommandOutputDelta)]
        assert b"".join(deltas).decode() == whole
        for chunk in deltas:
            chunk.decode()
        assert unified.running() == []

    scripted(ScriptedMachine(script, remote=remote), body)
