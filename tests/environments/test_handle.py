"""One handle: one attempt for everybody, what is remembered of it, and who keeps it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from exec_server.client.client import ConnectOptions
from exec_server.client.errors import ConnectionLost, ExecServerError, ProtocolError
from exec_server.environments.connect import IN_PROCESS, connect
from exec_server.environments.environment import Environment
from exec_server.environments.handle import Handle, HandleClosed, ObservedStatus
from exec_server.environments.readiness import Readiness
from exec_server.testing.faults import Faults
from exec_server.testing.still import StillLoop, until
from support.openers import Gate, settle
from support.scripted_server import ScriptedServer
from support.server import RunningServer
from support.wait import eventually_async

REFUSED = ConnectionRefusedError("connection refused")
NONSENSE = ProtocolError("nonsense")


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(main())


def test_nothing_happens_before_somebody_asks() -> None:
    async def scenario() -> None:
        gate = Gate()
        handle = Handle("worker", gate)
        await settle()
        assert (handle.state, gate.attempts) == (Readiness.NOT_STARTED, 0)
        assert not handle.startup_finished()
        assert handle.readiness() is None
        assert await handle.status() == ObservedStatus("pending")
        assert gate.attempts == 0
        await handle.close()

    run(scenario)


def test_a_thousand_waiters_share_one_attempt() -> None:
    async def scenario() -> None:
        gate = Gate()
        handle = Handle("worker", gate)
        waiters = [asyncio.ensure_future(handle.environment()) for _ in range(1000)]
        handle.start()
        await settle()
        assert (handle.state, gate.attempts) == (Readiness.STARTING, 1)
        assert not handle.startup_finished()
        assert handle.readiness() is None
        assert await handle.status() == ObservedStatus("pending")
        await gate.open()
        (machine,) = set(await asyncio.gather(*waiters))
        assert machine.session_id == gate.opened[0].session_id
        assert handle.readiness() == "ready"
        assert handle.startup_finished()
        assert await handle.status() == ObservedStatus("ready")
        await handle.wait_until_ready()
        handle.start()
        assert gate.attempts == 1
        await handle.close()

    run(scenario)


def test_one_who_stops_waiting_stops_nobody_else() -> None:
    async def scenario() -> None:
        gate = Gate()
        handle = Handle("worker", gate)
        impatient = asyncio.ensure_future(handle.wait_until_ready())
        patient = asyncio.ensure_future(handle.wait_until_ready())
        await settle()
        impatient.cancel()
        await settle()
        assert impatient.cancelled()
        await gate.open()
        await patient
        assert gate.attempts == 1
        await handle.close()

    run(scenario)


def test_a_failure_that_may_pass_is_tried_again_by_the_next_who_asks() -> None:
    async def scenario() -> None:
        gate = Gate()
        handle = Handle("worker", gate)
        waiters = [asyncio.ensure_future(handle.wait_until_ready()) for _ in range(3)]
        await settle()
        await gate.fail(REFUSED)
        assert await asyncio.gather(*waiters, return_exceptions=True) == [REFUSED] * 3
        assert (handle.state, handle.error) == (Readiness.UNREACHABLE, REFUSED)
        assert handle.startup_finished()
        assert handle.readiness() is REFUSED
        assert await handle.status() == ObservedStatus("disconnected", "connection refused")
        assert gate.attempts == 1
        # The next ones share another attempt, whose failure is forgotten, too, whatever it is.
        waiters = [asyncio.ensure_future(handle.wait_until_ready()) for _ in range(3)]
        await settle()
        assert (handle.state, gate.attempts) == (Readiness.RETRYING, 2)
        assert handle.startup_finished()
        assert handle.readiness() is None
        await gate.fail(NONSENSE)
        assert await asyncio.gather(*waiters, return_exceptions=True) == [NONSENSE] * 3
        waiter = asyncio.ensure_future(handle.environment())
        await settle()
        await gate.open()
        assert (await waiter).session_id == gate.opened[0].session_id
        assert (handle.readiness(), handle.error) == ("ready", None)
        await handle.close()

    run(scenario)


@pytest.mark.parametrize(("reconnects", "error"), [(True, NONSENSE), (False, REFUSED)])
def test_a_failure_for_good_is_the_same_for_everybody(reconnects: bool, error: Exception) -> None:
    async def scenario() -> None:
        gate = Gate()
        handle = Handle("worker", gate, reconnects=reconnects)
        first = asyncio.ensure_future(handle.wait_until_ready())
        await settle()
        await gate.fail(error)
        with pytest.raises(type(error)) as caught:
            await first
        for _ in range(3):
            with pytest.raises(type(error)) as again:
                await handle.environment()
            assert again.value is caught.value
        handle.start()
        await settle()
        assert (handle.state, gate.attempts) == (Readiness.FAILED, 1)
        assert handle.readiness() is error
        assert await handle.status() == ObservedStatus("disconnected", str(error))
        await handle.close()

    run(scenario)


def test_this_machine_is_always_there() -> None:
    async def scenario() -> None:
        gate = Gate()
        handle = Handle("local", gate, local=True)
        assert handle.startup_finished()
        assert handle.readiness() == "ready"
        assert await handle.status() == ObservedStatus("ready")
        await handle.wait_until_ready()
        await handle.wait_until_connected()
        assert gate.attempts == 0
        used = asyncio.ensure_future(handle.environment())
        await settle()
        await gate.open()
        assert (await (await used).run(["echo", "hi"])).stdout == b"hi\n"
        await handle.close()

    run(scenario)


def test_a_handle_that_nobody_holds_gives_up_its_attempt() -> None:
    async def scenario() -> None:
        gate = Gate()
        handle = Handle("worker", gate)
        handle.start()
        await settle()
        del handle
        await eventually_async(lambda: gate.cancelled == 1, "the attempt to be given up")

    run(scenario)


def test_a_handle_that_somebody_waits_for_is_held() -> None:
    async def scenario() -> None:
        gate = Gate()
        waiter = asyncio.ensure_future(Handle("worker", gate).environment())
        await settle()
        gc.collect()
        await gate.open()
        assert (await waiter).session_id == gate.opened[0].session_id

    run(scenario)


def test_a_connection_that_nobody_holds_is_closed() -> None:
    async def scenario() -> None:
        gate = Gate()
        handle = Handle("worker", gate)
        handle.start()
        await settle()
        await gate.open()
        (environment,) = gate.opened
        assert environment.connected
        del handle
        gc.collect()
        await eventually_async(lambda: not environment.connected, "the connection to be closed")

    run(scenario)


def test_who_holds_the_machine_or_a_running_process_holds_the_handle() -> None:
    async def scenario() -> None:
        gate = Gate()
        handle = Handle("worker", gate)
        handle.start()
        await settle()
        await gate.open()
        (opened,) = gate.opened
        machine = await handle.environment()
        assert await handle.environment() is machine
        assert handle.environment_now() is machine
        process = await machine.start(["cat"], stdin=True)
        files = machine.files
        gone = weakref.ref(handle)
        del handle
        gc.collect()
        await settle()
        await process.write(b"still ")
        del machine
        gc.collect()
        await settle()
        assert (await process.communicate(b"here")).stdout == b"still here"
        assert await files.exists("/")
        del process
        await eventually_async(lambda: (gc.collect(), gone() is None)[1], "the handle to be dropped")
        await eventually_async(lambda: not opened.connected, "the connection to be closed")
        with pytest.raises(ConnectionLost, match="replaced by environment/add, or dropped"):
            await files.exists("/")

    run(scenario)


def test_closing_ends_the_attempt_and_tells_who_waits() -> None:
    async def scenario() -> None:
        gate = Gate()
        handle = Handle("worker", gate)
        waiter = asyncio.ensure_future(handle.wait_until_ready())
        await settle()
        await handle.close()
        await handle.close()
        with pytest.raises(HandleClosed):
            await waiter
        with pytest.raises(HandleClosed):
            await handle.environment()
        assert (gate.cancelled, gate.attempts) == (1, 1)
        assert (await handle.status()).status == "disconnected"
        assert isinstance(handle.readiness(), HandleClosed)

    run(scenario)


@pytest.mark.parametrize("fails", [False, True])
def test_an_opener_that_does_not_hear_that_it_is_over(fails: bool) -> None:
    async def scenario() -> None:
        opened: list[Environment] = []
        begun = asyncio.Event()

        async def deaf() -> Environment:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if fails:
                    raise ConnectionResetError("interrupted") from None
            opened.append(await _connect(IN_PROCESS))
            return opened[0]

        handle = Handle("worker", deaf)
        waiter = asyncio.ensure_future(handle.environment())
        await begun.wait()
        await handle.close()
        assert handle.state is Readiness.CLOSED
        with pytest.raises(ConnectionResetError if fails else HandleClosed):
            await waiter
        assert not any(environment.connected for environment in opened)

    run(scenario)


def test_a_listener_that_fails_changes_nothing(fresh_log: None, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        handle = Handle("worker", lambda: _connect(IN_PROCESS))

        def fail(_: bool) -> None:
            raise ZeroDivisionError

        stop = handle.on_connection(fail)
        seen: list[bool] = []
        handle.on_connection(seen.append)
        await handle.wait_until_ready()
        assert (handle.readiness(), seen) == ("ready", [True])
        stop()
        stop()
        await handle.close()
        assert seen == [True, False]

    run(scenario)
    assert capsys.readouterr().err.count("a listener of an environment failed") == 1


def test_closing_ends_what_runs_there() -> None:
    async def scenario() -> None:
        handle = Handle("worker", lambda: _connect(IN_PROCESS))
        environment = await handle.environment()
        process = await environment.start(["sleep", "1000"])
        await handle.close()
        assert (await process.wait()).exit_code != 0
        assert not environment.connected

    run(scenario)


async def _connect(target: str, **options: Any) -> Environment:
    return await connect(target, **options)


# Connections that break --------------------------------------------------------------------------


def test_a_repair_is_not_a_failure(server: RunningServer) -> None:
    async def scenario() -> None:
        faults = Faults()
        handle = Handle("worker", lambda: _connect(server.url, wrap_dialer=faults.wrap))
        seen: list[bool] = []
        handle.on_connection(seen.append)
        environment = await handle.environment()
        faults.refuse()
        faults.cut()
        await eventually_async(lambda: not environment.connected, "the loss to be noticed")
        assert (handle.state, handle.connected) == (Readiness.READY, False)
        assert handle.startup_finished()
        assert handle.readiness() is None
        recovering = ObservedStatus("disconnected", "exec-server environment is recovering")
        assert await handle.status() == recovering
        waiter = asyncio.ensure_future(handle.wait_until_connected())
        await settle()
        assert not waiter.done()
        faults.allow()
        await waiter
        assert (handle.readiness(), handle.connected) == ("ready", True)
        assert await handle.environment() is environment
        assert seen == [True, False, True]
        await handle.close()
        assert seen == [True, False, True, False]

    run(scenario)


def test_a_session_that_is_gone_for_good_is_replaced_for_the_next_who_asks(server: RunningServer) -> None:
    async def scenario() -> None:
        faults = Faults()
        options = {"wrap_dialer": faults.wrap, "recovery_timeout": 0.2}
        handle = Handle("worker", lambda: _connect(server.url, **options))
        environment = await handle.environment()
        faults.refuse()
        faults.cut()
        await eventually_async(lambda: handle.state is Readiness.UNREACHABLE, "the session to be given up")
        assert "failed to resume exec-server session" in str(handle.readiness())
        assert "failed to resume exec-server session" in str((await handle.status()).error)
        with pytest.raises(OSError, match="refused by a test"):
            await handle.wait_until_ready()
        faults.allow()
        fresh = await handle.environment()
        assert fresh is not environment
        assert (await fresh.run(["echo", "again"])).stdout == b"again\n"
        await handle.close()

    run(scenario)


def test_a_program_that_died_is_not_started_again() -> None:
    async def scenario() -> None:
        answers = {"initialize": lambda *_: {"sessionId": "s", "environmentInfo": {}}}
        server = ScriptedServer(answers, resumable=False)
        handle = Handle("worker", lambda: _scripted(server), lazy=True, reconnects=False)
        await handle.environment()
        server.hang_up()
        await eventually_async(lambda: handle.state is Readiness.FAILED, "the end to be noticed")
        with pytest.raises(ExecServerError) as first:
            await handle.environment()
        with pytest.raises(ExecServerError) as second:
            await handle.environment()
        assert first.value is second.value
        await handle.close()

    run(scenario)


async def _scripted(server: ScriptedServer) -> Environment:
    environment = Environment(ConnectOptions(), "scripted", remote=True)
    await environment.open(server.dial)
    return environment


def test_a_status_that_is_not_answered_is_disconnected_after_ten_seconds() -> None:
    async def scenario() -> None:
        answers = {"initialize": lambda *_: {"sessionId": "s", "environmentInfo": {}}}
        server = ScriptedServer(answers)
        handle = Handle("worker", lambda: _scripted(server))
        await handle.environment()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        asking = asyncio.ensure_future(handle.status())
        await until(lambda: server.sent("environment/status") == [None], "the question")
        loop.advance(9.5)
        await until(lambda: True)
        assert not asking.done()
        loop.advance(1.0)
        status = await asking
        assert status.status == "disconnected"
        assert "timed out waiting for exec-server `environment/status` response after 10s" in str(
            status.error
        )
        # It was only a look: nothing was repaired, and the connection is as it was.
        assert handle.state is Readiness.READY
        await handle.close()

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(scenario())
