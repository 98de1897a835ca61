"""Sessions that do not come back, and servers that make no sense."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import exec_server
from exec_server import ConnectionLost, Failed, ProcessFailed
from exec_server.client import session
from exec_server.client.client import Client, ConnectOptions, State
from exec_server.client.errors import SessionLost
from exec_server.environments.environment import Environment
from exec_server.testing.faults import Faults, Hold, Refuse, Stall
from exec_server.testing.still import StillLoop, until
from support.scripted_server import ScriptedServer
from support.server import COMMAND, RunningServer
from support.session import COUNT, Drive, sent
from support.wait import eventually_async

# What does not come back -------------------------------------------------------------------------


def test_a_session_that_the_server_has_ended(drive: Drive) -> None:
    """K8: one attempt, every handle fails, the text names both errors."""
    with RunningServer("--detach-ttl", "0.05") as forgetful:

        async def scenario(machine: Environment, faults: Faults) -> None:
            processes = [await machine.start(["sleep", "60"]) for _ in range(3)]
            reading = asyncio.ensure_future(processes[0].read(after_seq=9, wait=50))
            faults.add(Refuse(3))
            faults.cut()
            for process in processes:
                with pytest.raises(
                    ProcessFailed,
                    match="^exec-server transport disconnected: cut by a test; failed to resume exec-server"
                    r" session: exec-server rejected request \(-32600\): unknown session id",
                ):
                    await process.wait()
            assert [event async for event in processes[1].events()] == [Failed(str(machine.failure))]
            result = await reading
            assert (result.failure, result.closed) == (str(machine.failure), True)
            with pytest.raises(SessionLost, match="unknown session id"):
                await machine.start(["true"])
            with pytest.raises(ConnectionLost):
                await processes[0].write(b"x")
            assert machine.state is State.FAILED
            assert len(sent(faults, "initialize")) == 2
            assert len(faults.attempted_at) == 5

        drive(scenario, url=forgetful.url)


def test_a_sleep_is_told_apart_from_a_blip(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunningServer("--detach-ttl", "0.05") as forgetful:

        async def scenario(machine: Environment, faults: Faults) -> None:
            process = await machine.start(["sleep", "60"])
            slept = session.asleep() + 3 * 3600
            monkeypatch.setattr(session, "asleep", lambda: slept)
            faults.add(Refuse(3))
            faults.cut()
            with pytest.raises(
                ProcessFailed, match=r"this machine slept for 3h00min, longer than the 0\.05s"
            ):
                await process.wait()
            assert isinstance(machine.failure, SessionLost)
            assert 3 * 3600 - 60 < machine.failure.slept < 3 * 3600 + 60

        drive(scenario, url=forgetful.url)


def test_a_program_that_stood_still_is_told_apart_from_a_server_that_was_restarted(
    server: RunningServer,
) -> None:
    async def lose(still: float) -> SessionLost:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        faults = Faults()
        async with exec_server.connect(server.url, wrap_dialer=faults.wrap) as machine:
            machine.session_id = "forgotten"
            loop.advance(still)  # as after SIGSTOP: time has passed, and the loss is news
            faults.cut()
            await until(lambda: machine.state is State.FAILED)
            assert isinstance(machine.failure, SessionLost)
            return machine.failure

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        stood, restarted = runner.run(lose(600)), runner.run(lose(1))
    assert str(stood).endswith(
        "(nothing was heard of the server for 10min; it keeps a session without a connection for 5s)"
    )
    assert str(restarted).endswith("unknown session id forgotten")
    assert (stood.slept, restarted.slept) == (0.0, 0.0)


def test_a_sleep_that_the_server_waited_for_is_nothing(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunningServer("--detach-ttl", "7200") as patient:

        async def scenario(machine: Environment, faults: Faults) -> None:
            assert machine.info.limits["detachTtlMs"] == 7_200_000
            process = await machine.start(["sh", "-c", COUNT.format(30)])
            slept = session.asleep() + 3600
            monkeypatch.setattr(session, "asleep", lambda: slept)
            faults.cut()
            done = await process.communicate()
            assert done.stdout.split() == [b"%d" % number for number in range(1, 31)]

        drive(scenario, url=patient.url)


def test_a_server_that_stays_away(server: RunningServer) -> None:
    """K10: after 25 seconds, which take no time here."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        faults = Faults()
        machine = await exec_server.connect(server.url, wrap_dialer=faults.wrap)
        process = await machine.start(["sleep", "60"])
        faults.refuse()
        faults.cut()
        await until(lambda: faults.refused == 1)
        for attempt in range(2, 250):
            loop.advance(0.1)
            await until(lambda attempt=attempt: faults.refused == attempt, f"attempt {attempt}")
        assert machine.state is State.RECOVERING
        loop.advance(0.3)
        await until(lambda: machine.state is State.FAILED)
        with pytest.raises(
            ProcessFailed,
            match=r"session: recovery timed out after 25s \(last attempt: refused by a test\)"
            r" \(away for 25s; the server keeps a session without a connection for 5s\)$",
        ):
            await process.wait()
        await machine.close()

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(main())


def test_a_server_that_does_not_answer_is_given_up(server: RunningServer) -> None:
    """Every attempt is stalled in the handshake: its own time limit, then the next one, then the end."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        faults = Faults([Hold(), Stall("received", 1), Stall("received", 1), Stall("received", 1)])
        machine = await exec_server.connect(server.url, wrap_dialer=faults.wrap)
        began = loop.time()
        faults.cut()
        while machine.state is not State.FAILED:
            loop.advance(0.5)
            await until(lambda: True)
        assert loop.time() - began >= 25
        assert faults.connections >= 3
        assert "recovery timed out after 25s" in str(machine.failure)
        await machine.close()

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(main())


def test_recovery_can_be_switched_off(drive: Drive) -> None:
    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["sleep", "60"])
        faults.cut()
        with pytest.raises(ProcessFailed, match=r"^exec-server transport disconnected: cut by a test$"):
            await process.wait()
        assert faults.connections == 1

    drive(scenario, recovery_timeout=0)


def test_a_restarted_server_knows_nothing_of_us() -> None:
    async def main() -> None:
        with RunningServer() as first:
            machine = await exec_server.connect(first.url)
            process = await machine.start(["sleep", "60"])
            first.end(signal.SIGKILL)
            address = first.url.removeprefix("ws://")
        with RunningServer(listen=f"ws://{address}"):
            with pytest.raises(ProcessFailed, match="unknown session id"):
                await process.wait()
            await machine.close()

    asyncio.run(main())


@pytest.mark.parametrize("target", [[COMMAND, "--listen", "stdio"], "in-process:"])
def test_where_there_is_no_way_back(target: Any) -> None:
    """K15: a server that dies with its connection is not looked for."""

    async def main() -> None:
        faults = Faults()
        async with exec_server.connect(target, wrap_dialer=faults.wrap) as machine:
            process = await machine.start(["sleep", "60"])
            faults.cut()
            with pytest.raises(ProcessFailed, match=r"^exec-server transport disconnected: cut by a test$"):
                await process.wait()
            with pytest.raises(ConnectionLost):
                await machine.start(["true"])
            assert faults.connections == 1

    asyncio.run(main())


# What no real server says ------------------------------------------------------------------------


def hello(server: ScriptedServer, params: dict[str, Any]) -> Any:
    return {"sessionId": "s", "environmentInfo": {"cwd": "file:///"}}


def scripted(answers: dict[str, Any], scenario: Callable[[Client, ScriptedServer], Awaitable[None]]) -> None:
    async def main() -> None:
        server = ScriptedServer({"initialize": hello, **answers})
        client = Client(ConnectOptions(recovery_timeout=3))
        await client.open(server.dial)
        async with asyncio.timeout(20):
            await scenario(client, server)
        await client.close()

    asyncio.run(main())


def started(server: ScriptedServer, params: dict[str, Any]) -> Any:
    return {"processId": params["processId"]}


def test_a_request_from_the_server_is_refused_politely() -> None:
    """K17."""

    async def scenario(client: Client, server: ScriptedServer) -> None:
        server.send({"id": "q", "method": "please/dance", "params": {}})
        await eventually_async(lambda: any(message.get("id") == "q" for message in server.received))
        answer = next(message for message in server.received if message.get("id") == "q")
        assert answer["error"] == {
            "code": -32601,
            "message": "exec-server client does not implement `please/dance` yet",
        }
        assert client.connected

    scripted({}, scenario)


def test_a_burst_before_the_answer_to_a_resume() -> None:
    """K18: a thousand notifications of a running process come first, and all are delivered."""
    burst = 1000

    def welcome(server: ScriptedServer, params: dict[str, Any]) -> Any:
        if params.get("resumeSessionId") is not None:
            for seq in range(2, burst + 2):
                server.notify("process/output", processId="p", seq=seq, stream="stdout", chunk="eA==")
        return hello(server, params)

    def read(server: ScriptedServer, params: dict[str, Any]) -> Any:
        assert params["afterSeq"] == 0
        first = {"seq": 1, "stream": "stdout", "chunk": "eA=="}
        return {
            "chunks": [first],
            "nextSeq": 2,
            "exited": False,
            "exitCode": None,
            "closed": False,
            "failure": None,
            "sandboxDenied": False,
        }

    async def scenario(client: Client, server: ScriptedServer) -> None:
        process = await client.start(["x"], process_id="p")
        server.hang_up()
        await eventually_async(lambda: process.last_seq == burst + 1)
        events = process.events()
        assert [event.seq for event in [await anext(events) for _ in range(burst + 1)]] == [  # type: ignore[union-attr]
            *range(1, burst + 2)
        ]
        server.notify("process/exited", processId="p", seq=burst + 2, exitCode=0, sandboxDenied=False)
        server.notify("process/closed", processId="p", seq=burst + 3)
        assert (await process.wait()).exit_code == 0

    scripted({"initialize": welcome, "process/start": started, "process/read": read}, scenario)


def test_another_session_than_ours_is_the_end() -> None:
    def stranger(server: ScriptedServer, params: dict[str, Any]) -> Any:
        return {"sessionId": "s" if params.get("resumeSessionId") is None else "t", "environmentInfo": {}}

    async def scenario(client: Client, server: ScriptedServer) -> None:
        server.hang_up()
        await eventually_async(lambda: client.state is State.FAILED)
        assert "exec-server initialized an unexpected session t" in str(client.failure)

    scripted({"initialize": stranger}, scenario)


def test_an_unusable_notification_starts_a_recovery() -> None:
    async def scenario(client: Client, server: ScriptedServer) -> None:
        server.notify("process/output", processId="p", seq="one")
        await eventually_async(lambda: len(server.sent("initialize")) == 2)
        await eventually_async(lambda: client.connected)

    scripted({}, scenario)


def test_a_server_that_talks_nonsense_does_not_keep_us_busy() -> None:
    """Every connection breaks as soon as it is made; there is a pause between any two."""

    def babble(server: ScriptedServer, params: dict[str, Any]) -> Any:
        if params.get("resumeSessionId") is not None:
            asyncio.get_running_loop().call_later(
                0.001, lambda: server.notify("process/output", processId="p", seq="one")
            )
        return hello(server, params)

    async def scenario(client: Client, server: ScriptedServer) -> None:
        loop = asyncio.get_running_loop()
        server.hang_up()
        await eventually_async(lambda: len(server.sent("initialize")) == 2)
        began = loop.time()
        await eventually_async(lambda: len(server.sent("initialize")) >= 6)
        assert loop.time() - began > 0.35

    scripted({"initialize": babble}, scenario)


def test_an_exit_without_a_verdict_is_asked_for_once() -> None:
    """K20: `exited` without `sandboxDenied` costs one `process/read`."""

    def read(server: ScriptedServer, params: dict[str, Any]) -> Any:
        assert (params["maxBytes"], params["waitMs"]) == (None, 0)
        return {
            "chunks": [],
            "nextSeq": 3,
            "exited": True,
            "exitCode": 1,
            "closed": True,
            "failure": None,
            "sandboxDenied": True,
        }

    async def scenario(client: Client, server: ScriptedServer) -> None:
        process = await client.start(["x"], process_id="p")
        server.notify("process/exited", processId="p", seq=1, exitCode=1)
        server.notify("process/closed", processId="p", seq=2)
        status = await process.wait()
        assert (status.exit_code, status.sandbox_denied) == (1, True)
        assert len(server.sent("process/read")) == 1

    scripted({"process/start": started, "process/read": read}, scenario)
