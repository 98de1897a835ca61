"""agent/unified_start.py: what is started, and what is said of what is not."""

from __future__ import annotations

import asyncio

import pytest

from exec_server.agent.exec import (
    Declined,
    DirectExec,
    ExecCommand,
    PreparedExec,
    ToolError,
)
from exec_server.agent.unified import Settings, UnifiedExec
from exec_server.agent.unified_events import (
    ExecEvent,
)
from exec_server.agent.unified_start import SandboxDenied
from exec_server.client.errors import ServerRejected
from exec_server.services import Closed, Exited
from exec_server.wire.sandbox import Disabled, SandboxContext
from support.scripted import ScriptedMachine, Step, exits, prints
from support.unified import end_of, names, scripted


def test_an_interrupt_before_the_command_was_announced_ends_it() -> None:
    machine = ScriptedMachine([])

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        call = asyncio.ensure_future(unified.exec_command(ExecCommand(cmd="x"), "c"))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.wait([call])
        assert unified.running() == []
        assert events == []
        await asyncio.sleep(0)
        assert machine.started[0].terminated == 1

    scripted(machine, body)


def test_a_sandbox_that_refuses_at_once() -> None:
    """U16."""
    denied: list[Step] = [prints(0.05, "Read-only file system"), (0.1, Exited(0, 1, True)), (0.1, Closed(0))]
    unsaid: list[Step] = [prints(0.05, "no"), (0.1, Exited(0, 2, None)), (0.1, Closed(0))]
    late: list[Step] = [(1.0, Exited(0, 1, True)), (1.0, Closed(0))]
    machine = ScriptedMachine(denied, unsaid, late)

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        with pytest.raises(SandboxDenied) as caught:
            await unified.exec_command(ExecCommand(cmd="touch /usr/x"), "c")
        assert caught.value.result.exit_code == 1
        assert str(caught.value).endswith(
            "\nWall time: 0.0000 seconds\nProcess exited with code 1\nOriginal token count: 6\nOutput:\n"
            "Read-only file system"
        )
        assert events == []
        output = await unified.exec_command(ExecCommand(cmd="x"), "d")
        assert output.exit_code == 2, "a machine that does not say is asked, and says no"
        assert (await unified.exec_command(ExecCommand(cmd="x"), "e")).exit_code == 1, "later it is a failure"
        assert names(events) == ["Begin", "OutputDelta", "End", "Begin", "End"]

    scripted(machine, body)


def test_what_the_machine_is_asked_for() -> None:
    machine = ScriptedMachine(exits(0.1), exits(0.1))

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        await unified.exec_command(ExecCommand(cmd="echo hi", workdir="sub", tty=True), "call")
        await unified.exec_command(ExecCommand(cmd="echo hi", login=False), "call")

    settings = Settings(sequential_ids=True, tty_term="linux", rows=40, cols=120)
    scripted(machine, body, settings=settings, thread_id="t", session_id="s")
    terminal, plain = machine.options
    assert terminal["argv"] == ["/bin/bash", "-lc", "echo hi"]
    assert terminal["process_id"].startswith("1000-")
    assert len(terminal["process_id"]) == 5 + 36
    assert terminal["cwd"] == "file:///project/sub"
    assert (terminal["tty"], terminal["stdin"], terminal["rows"], terminal["cols"]) == (True, False, 40, 120)
    assert terminal["env"]["TERM"] == "linux"
    assert terminal["env_policy"].inherit == "all"
    assert plain["argv"] == ["/bin/bash", "-c", "echo hi"]
    assert (plain["tty"], plain["stdin"], plain["rows"], plain["sandbox"]) == (False, False, None, None)
    assert plain["env"]["TERM"] == "dumb"
    assert plain["env"]["CODEX_THREAD_ID"] == "t"


def test_policy_decides_what_is_started() -> None:
    machine = ScriptedMachine(exits(0.1))
    sandbox = SandboxContext(permissions=Disabled(), windows_sandbox_level="disabled")

    async def prepare(request: DirectExec, call: ExecCommand) -> DirectExec:
        if "rm" in call.cmd:
            raise Declined("rm is not allowed")
        assert call.justification == "please"
        return PreparedExec(
            argv=["wrapped", *request.argv], cwd=request.cwd, env=request.env, sandbox=sandbox
        )

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        await unified.exec_command(ExecCommand(cmd="ls", justification="please"), "c")
        assert machine.options[0]["argv"] == ["wrapped", "/bin/bash", "-lc", "ls"]
        assert machine.options[0]["sandbox"] is sandbox
        events.clear()
        with pytest.raises(ToolError, match=r"^exec_command failed: rm is not allowed$"):
            await unified.exec_command(ExecCommand(cmd="rm -r /"), "d")
        assert names(events) == ["Begin", "End"], "what was refused is seen"
        end = end_of(events)
        assert (end.status, end.exit_code, end.aggregated_output) == ("declined", None, "rm is not allowed")
        assert len(machine.started) == 1

    scripted(machine, body, prepare=prepare)


def test_what_cannot_be_started() -> None:
    machine = ScriptedMachine()
    machine.start_error = ServerRejected("process/start", -32600, "No such file or directory (os error 2)")

    async def body(unified: UnifiedExec, events: list[ExecEvent]) -> None:
        text = "Failed to create unified exec process: No such file or directory (os error 2)"
        with pytest.raises(ToolError) as caught:
            await unified.exec_command(ExecCommand(cmd="x"), "c")
        assert str(caught.value) == f"exec_command failed: {text}"
        end = end_of(events)
        assert (end.exit_code, end.status, end.aggregated_output) == (-1, "failed", text)
        with pytest.raises(ToolError, match="unknown turn environment id `mars`"):
            await unified.exec_command(ExecCommand(cmd="x", environment_id="mars"), "c")
        with pytest.raises(ToolError, match="query parameters are not allowed"):
            await unified.exec_command(ExecCommand(cmd="x", workdir="file:///x?y"), "c")
        machine.start_error = None
        output = await unified.exec_command(ExecCommand(cmd="x", yield_time_ms=250), "c")
        assert output.session_id is not None, "numbers of what did not start are free"

    scripted(machine, body)
