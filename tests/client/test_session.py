"""A session and its broken connections: the scenarios of the specification (K5 to K20), on real servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import exec_server
from exec_server import Closed, ConnectionLost, Exited, Failed, Output, ProcessFailed
from exec_server.client import client, session
from exec_server.client.client import CATCH_UP_BYTES, Client, ConnectOptions, State, connect
from exec_server.client.errors import Recovering, SessionLost, TooManyCalls
from exec_server.client.rpc import MAX_CALLS
from exec_server.environments.environment import Environment
from exec_server.testing.faults import Cut, Delay, Duplicate, Faults, Hold, Refuse, Stall
from exec_server.testing.still import StillLoop, until
from exec_server.wire.handshake import InitializeParams
from support.machine import gone, running, sleep_forever
from support.scripted_server import ScriptedServer
from support.server import COMMAND, RunningServer
from support.wait import eventually_async

Scenario = Callable[[Environment, Faults], Awaitable[None]]
Drive = Callable[..., None]


@pytest.fixture(params=["websocket", "unix"])
def url(request: pytest.FixtureRequest, server: RunningServer, tmp_path: Path) -> Iterator[str]:
    """A server whose sessions can be resumed."""
    if request.param == "websocket":
        yield server.url
        return
    with RunningServer("--detach-ttl", "5", listen=f"unix://{tmp_path}/sock") as running:
        yield running.url


@pytest.fixture
def drive(server: RunningServer) -> Drive:
    """Run a scenario with a machine, and with the faults between us and it."""

    def go(scenario: Scenario, *plan: Any, url: str | None = None, **options: Any) -> None:
        async def main() -> None:
            faults = Faults(plan)
            async with asyncio.timeout(40):
                async with exec_server.connect(
                    url or server.url, wrap_dialer=faults.wrap, **options
                ) as machine:
                    await scenario(machine, faults)

        asyncio.run(main())

    return go


def sent(faults: Faults, method: str) -> list[dict[str, Any]]:
    """The params of every request of that method, on all connections."""
    messages = [json.loads(message) for message in faults.sent]
    return [message["params"] for message in messages if message["method"] == method]


def mentions(text: bytes) -> Callable[[bytes], bool]:
    return lambda message: text in message


COUNT = "i=0; while [ $i -lt {} ]; do i=$((i+1)); echo $i; sleep 0.002; done; exit 7"


# What comes back ---------------------------------------------------------------------------------


def test_output_goes_on_where_it_was(drive: Drive, url: str) -> None:
    """K5: resume, one `process/read`, no lost or repeated byte."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["sh", "-c", COUNT.format(100)])
        session_id = machine.session_id
        numbers, events = b"", []
        async for event in process.events():
            events.append(event)
            if isinstance(event, Output):
                before = len(numbers.split())
                numbers += event.data
                if before < 20 <= len(numbers.split()):
                    faults.cut()
        assert numbers.split() == [b"%d" % number for number in range(1, 101)]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert (await process.wait()).exit_code == 7
        assert (faults.connections, faults.cuts) == (2, 1)
        assert [params["resumeSessionId"] for params in sent(faults, "initialize")[1:]] == [session_id]
        reads = sent(faults, "process/read")
        assert len(reads) == 1
        assert (reads[0]["maxBytes"], reads[0]["waitMs"]) == (CATCH_UP_BYTES, 0)

    drive(scenario, url=url)


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize("where", ["before it arrives", "after it arrives", "at the answer"])
def test_a_write_is_applied_once(drive: Drive, tty: bool, where: str) -> None:
    """K6: the same write id again, whichever half of the exchange was lost."""
    plan = {
        "before it arrives": Cut("sent", 2, True, when=mentions(b'"process/write"')),
        "after it arrives": Cut("sent", 2, False, when=mentions(b'"process/write"')),
        "at the answer": Cut("received", 2, True, when=mentions(b'"accepted"')),
    }[where]

    async def scenario(machine: Environment, faults: Faults) -> None:
        script = "stty -echo 2>/dev/null; echo ready; while read x; do echo got $x; done"
        process = await machine.start(["sh", "-c", script], tty=tty, stdin=not tty)
        output = process.output()
        assert (await anext(output)).data.split() == [b"ready"]
        for word in (b"one\n", b"two\n", b"three\n"):
            await process.write(word)
        await process.close_stdin()
        text = b"".join([chunk.data async for chunk in output])
        assert text.split() == [b"got", b"one", b"got", b"two", b"got", b"three"]
        ids = [params["writeId"] for params in sent(faults, "process/write")]
        assert ids[:4] == ["1", "2", "2", "3"]
        assert faults.cuts == 1

    drive(scenario, plan)


def test_writes_made_at_the_same_time_keep_their_order(drive: Drive) -> None:
    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["cat"], stdin=True)
        faults.refuse()
        early = [asyncio.ensure_future(process.write(b"%d\n" % number)) for number in range(50)]
        await asyncio.sleep(0)
        faults.cut()
        await eventually_async(lambda: machine.state is State.RECOVERING)
        late = [asyncio.ensure_future(process.write(b"%d\n" % number)) for number in range(50, 100)]
        end = asyncio.ensure_future(process.close_stdin())
        await asyncio.sleep(0)
        faults.allow()
        await asyncio.gather(*early, *late, end)
        text = b"".join([chunk.data async for chunk in process.output()])
        assert text.split() == [b"%d" % number for number in range(100)]

    drive(scenario)


@pytest.mark.parametrize("arrived", [False, True])
def test_a_start_whose_answer_is_lost_is_not_repeated(drive: Drive, arrived: bool) -> None:
    """K7: the caller hears of it; what may have been started is ended once there is a connection."""
    marker = sleep_forever()

    async def scenario(machine: Environment, faults: Faults) -> None:
        with pytest.raises(ConnectionLost, match="transport disconnected"):
            await machine.start(["sleep", marker], process_id="mine")
        await eventually_async(lambda: machine.connected)
        await eventually_async(lambda: not running(marker), "the process being gone")
        assert sent(faults, "process/terminate") == [{"processId": "mine"}]
        assert len(sent(faults, "process/start")) == 1
        if not arrived:
            process = await machine.start(["echo", "again"], process_id="mine")
            assert (await process.communicate()).stdout == b"again\n"

    drive(scenario, Cut("sent", 1, not arrived, when=mentions(b'"process/start"')))
    gone(marker)


def test_a_process_that_ends_meanwhile(drive: Drive, tmp_path: Path) -> None:
    """K11: the rest of its output, its exit and its close arrive after the resume."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        script = f"echo first; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; echo last; exit 3"
        process = await machine.start(["sh", "-c", script])
        events = process.events()
        first = await anext(events)
        pid = int((await machine.list())[0].pid or 0)
        faults.refuse()
        faults.cut()
        (tmp_path / "go").touch()
        await eventually_async(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the process")
        faults.allow()
        rest = [event async for event in events]
        assert [event.seq for event in [first, *rest]] == [1, 2, 3, 4]  # type: ignore[union-attr]
        assert isinstance(rest[-1], Closed)
        assert [event.exit_code for event in rest if isinstance(event, Exited)] == [3]
        assert [event.data for event in rest if isinstance(event, Output)] == [b"last\n"]

    drive(scenario)


def test_output_that_is_gone_fails_its_process_alone(
    tmp_path: Path, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K12: said in so many words, the process is ended, and another one goes on."""

    def silent(*args: Any, **options: Any) -> InitializeParams:
        """As the reference, which acknowledges nothing: only the newest MiB is kept for it."""
        return InitializeParams(*args, **{**options, "acknowledges_output": None})

    monkeypatch.setattr(session, "InitializeParams", silent)
    with RunningServer() as plain:

        async def scenario(machine: Environment, faults: Faults) -> None:
            wait = f"echo ready; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; "
            marker = sleep_forever()
            loud = await machine.start(
                ["sh", "-c", f"{wait} seq 3000000; touch {tmp_path}/done; sleep {marker}"]
            )
            quiet = await machine.start(["sh", "-c", "echo ready; cat"], stdin=True)
            loud_events, quiet_output = loud.events(), quiet.output()
            await anext(loud_events)
            await anext(quiet_output)
            faults.refuse()
            faults.cut()
            (tmp_path / "go").touch()
            await eventually_async((tmp_path / "done").exists)
            faults.allow()
            last = [event async for event in loud_events][-1]
            assert isinstance(last, Failed)
            assert last.message.startswith(
                f"failed to recover process {loud.id}: process events are no longer"
            )
            with pytest.raises(ProcessFailed, match="no longer retained while recovering through sequence"):
                await loud.wait()
            assert (await loud.read()).failure == last.message
            await eventually_async(lambda: not running(marker), "the lost process being ended")
            await quiet.write(b"still here\n")
            assert (await anext(quiet_output)).data == b"still here\n"

        drive(scenario, url=plain.url)


def test_a_process_waits_for_a_client_that_is_away(drive: Drive, tmp_path: Path) -> None:
    """However fast it writes and however long that takes: what is not acknowledged is not thrown away."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["sh", "-c", f"seq 6000000; touch {tmp_path}/done; sleep 600"])
        output = process.output()
        parts = [(await anext(output)).data]
        faults.refuse()
        faults.cut()
        await eventually_async(lambda: faults.refused >= 10, "a second without a connection")
        assert not (tmp_path / "done").exists()
        faults.allow()
        while not parts[-1].endswith(b"\n6000000\n"):
            parts.append((await anext(output)).data)
            if len(parts) == 300:
                faults.cut()
        assert b"".join(parts).split() == [b"%d" % number for number in range(1, 6_000_001)]
        await eventually_async((tmp_path / "done").exists)

    drive(scenario)


def test_a_slow_line_may_take_its_time(drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`recovery_timeout` is for having the session again; what has arrived stays when it breaks once more."""
    monkeypatch.setattr(client, "CATCH_UP_BYTES", 128 * 1024)
    size = 3 * 1024 * 1024
    script = f"echo ready; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; head -c {size} /dev/zero"

    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["sh", "-c", f"{script}; touch {tmp_path}/done; read x"], stdin=True)
        output = process.output()
        await anext(output)
        faults.add(Cut("received", at=9), Delay(0.15))
        faults.refuse()
        faults.cut()
        (tmp_path / "go").touch()
        await eventually_async((tmp_path / "done").exists)
        begun = time.monotonic()
        faults.allow()
        received = 0
        while received < size:
            received += len((await anext(output)).data)
        await machine.files.exists("/")
        assert time.monotonic() - begun > 3.0, "this proves nothing if it was quick"
        assert faults.connections == 3
        after = [params["afterSeq"] for params in sent(faults, "process/read")]
        assert len(after) > 20
        assert after == sorted(after)
        assert len(after) - len(set(after)) <= 1, "only what was on its way is asked for again"

    drive(scenario, Hold(), recovery_timeout=3.0)


def test_a_flood_loses_nothing(drive: Drive) -> None:
    """What is on its way when the line is cut is much more than the 1 MiB that is always retained."""
    last = 3_000_000

    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["seq", "1", str(last)])
        parts: list[bytes] = []
        size = cuts = 0
        async for chunk in process.output():
            parts.append(chunk.data)
            size += len(chunk.data)
            if size > (cuts + 1) * 6_000_000:  # so that the first acknowledgement comes before
                cuts += 1
                faults.cut()
        assert b"".join(parts) == subprocess.run(["seq", str(last)], capture_output=True, check=True).stdout
        assert faults.cuts >= 2  # one that comes while there is no connection cuts nothing
        assert sent(faults, "process/acknowledgeOutput")

    drive(scenario)


def test_a_slow_reader_loses_nothing(drive: Drive) -> None:
    """A process that waits for its reader goes on waiting while the connection is gone."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        size = 30_000_000
        process = await machine.start(["head", "-c", str(size), "/dev/zero"])
        await eventually_async(lambda: process.held)
        # Until everything that was under way has arrived, so that the cut loses none of it.
        while True:
            before = process.last_seq
            await asyncio.sleep(0.2)
            if process.last_seq == before:
                break
        faults.cut()
        await eventually_async(lambda: faults.connections == 2 and machine.connected)
        assert sum([len(chunk.data) async for chunk in process.output()]) == size

    drive(scenario)


def test_refusals_before_the_way_back(drive: Drive) -> None:
    """K9: while the server has not noticed (-32010) or is not there, there is another try every 100 ms."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        refusals = []
        faults.observer = lambda direction, message: (
            refusals.append(message) if b"-32010" in message else None
        )
        process = await machine.start(["sh", "-c", COUNT.format(20)])
        assert (await process.communicate()).exit_code == 7
        assert len(refusals) >= 3
        assert faults.refused == 2
        times = faults.attempted_at[1:]
        assert len(times) >= 6
        assert all(later - earlier > 0.09 for earlier, later in pairwise(times))

    cut = Cut("received", 3, when=mentions(b""), half_open=True, half_open_refusals=5)
    drive(scenario, cut, Refuse(2))


def test_connections_that_break_while_recovering(drive: Drive) -> None:
    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["sh", "-c", COUNT.format(50)])
        await anext(process.events())
        # At the first message, the handshake, the answers to the reads, and once more.
        faults.add(Cut("sent", 1), Cut("received", 1), Cut("sent", 3), Cut("received", 2), Hold())
        faults.cut()
        done = await process.communicate()
        assert done.stdout.split() == [b"%d" % number for number in range(1, 51)]
        assert faults.cuts == 5

    drive(scenario)


def test_duplicates_and_delays_change_nothing(drive: Drive) -> None:
    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["sh", "-c", "echo one; read x; echo $x; exit 4"], stdin=True)
        await process.write(b"two\n")
        faults.cut()
        done = await process.communicate()
        assert (done.stdout, done.exit_code) == (b"one\ntwo\n", 4)
        assert (await machine.files.metadata("/")).is_directory

    drive(scenario, Duplicate(), Delay(0.01))


# Who waits, and who does not ---------------------------------------------------------------------


def test_calls_wait_for_the_connection(drive: Drive, tmp_path: Path) -> None:
    """K13: made during a recovery, they are sent after it."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        states: list[State] = []
        stop = machine.on_state(states.append)
        process = await machine.start(["sh", "-c", "echo hello; sleep 60"])
        await anext(process.output())
        faults.refuse()
        faults.cut()
        await eventually_async(lambda: machine.state is State.RECOVERING)
        reading = asyncio.ensure_future(process.read(after_seq=0))
        writing = asyncio.ensure_future(machine.files.write(f"{tmp_path}/file", b"x"))
        starting = asyncio.ensure_future(machine.run(["echo", "new"]))
        await asyncio.sleep(0.05)
        assert not reading.done()
        assert not writing.done()
        assert not starting.done()
        faults.allow()
        assert [chunk.data for chunk in (await reading).chunks] == [b"hello\n"]
        await writing
        assert (await starting).stdout == b"new\n"
        stop()
        assert states == [State.RECOVERING, State.CONNECTED]

    drive(scenario)


def test_who_is_in_a_hurry_is_told_at_once(drive: Drive) -> None:
    """K14: a fail-fast call during a recovery raises and sends nothing."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["sleep", "60"])
        with machine.fail_fast():
            await machine.check()
        faults.refuse()
        faults.cut()
        await eventually_async(lambda: machine.state is State.RECOVERING)
        before = len(faults.sent)
        began = time.monotonic()
        with machine.fail_fast():
            for call in (
                process.read(),
                process.write(b"x"),
                process.terminate(),
                machine.files.read("/etc/passwd"),
                machine.start(["true"]),
            ):
                with pytest.raises(Recovering, match="exec-server environment is recovering"):
                    await call
        with pytest.raises(Recovering):
            await machine.check()
        assert time.monotonic() - began < 5
        assert len(faults.sent) == before
        faults.allow()
        await process.read()

    drive(scenario)


@pytest.mark.parametrize("arrived", [False, True])
def test_what_is_not_repeated_says_so(drive: Drive, arrived: bool, tmp_path: Path) -> None:
    """Nobody knows whether a signal, a kill or a file operation took effect; the caller decides."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["sleep", "60"])

        async def lost(method: bytes, call: Callable[[], Awaitable[Any]]) -> None:
            faults.add(Cut("sent", 1, not arrived, when=mentions(method)))
            faults.cut()
            await eventually_async(lambda: machine.connected and not faults._plan)
            with pytest.raises(ConnectionLost, match="exec-server transport disconnected"):
                await call()
            await eventually_async(lambda: machine.connected)

        await lost(b"fs/writeFile", lambda: machine.files.write(f"{tmp_path}/file", b"x"))
        await lost(b"fs/getMetadata", lambda: machine.files.metadata("/"))
        await lost(b"process/signal", lambda: process.signal("SIGUSR1"))
        await lost(b"process/terminate", lambda: process.terminate())
        assert len(sent(faults, "fs/writeFile")) == 1
        assert (tmp_path / "file").exists() in ((True, False) if arrived else (False,))

    drive(scenario)


def test_leaving_ends_processes_also_over_a_bad_connection(server: RunningServer) -> None:
    marker = sleep_forever()

    async def main() -> None:
        faults = Faults()
        async with exec_server.connect(server.url, wrap_dialer=faults.wrap) as machine:
            async with await machine.start(["sleep", marker]):
                faults.add(Cut("sent", 1, True, when=mentions(b"process/terminate")), Hold())
                faults.cut()
                await eventually_async(lambda: machine.connected)
            assert not running(marker)
            await machine.start(["sleep", marker])
            faults.add(Cut("sent", 1, True, when=mentions(b"process/terminateAll")), Hold())
            faults.cut()
            await eventually_async(lambda: machine.connected)
        assert not running(marker)

    asyncio.run(main())


def test_closing_does_not_wait_for_a_server_that_is_gone(server: RunningServer) -> None:
    """Five seconds are enough for a goodbye; what was started ends with the session."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        faults = Faults()
        machine = await exec_server.connect(server.url, wrap_dialer=faults.wrap)
        process = await machine.start(["sleep", "60"])
        waiting = asyncio.ensure_future(process.read(after_seq=5))
        faults.refuse()
        faults.cut()
        await until(lambda: machine.state is State.RECOVERING)
        closing = asyncio.ensure_future(machine.close())
        await until(lambda: machine._waiters)
        loop.advance(5.0)
        await closing
        assert machine.state is State.CLOSED
        assert (await waiting).failure is not None
        with pytest.raises(ProcessFailed):
            await process.wait()
        with pytest.raises(ConnectionLost, match="closed"):
            await machine.run(["true"])
        await machine.close()

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(main())


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


# Files -------------------------------------------------------------------------------------------


def test_a_watch_is_set_up_again(drive: Drive, tmp_path: Path) -> None:
    async def scenario(machine: Environment, faults: Faults) -> None:
        async with machine.files.watch(str(tmp_path)) as changes:
            faults.refuse()
            faults.cut()
            (tmp_path / "unseen").touch()
            await eventually_async(lambda: faults.refused)
            faults.allow()
            change = await anext(changes)
            assert (change.paths, change.overflowed) == ([str(tmp_path)], True)
            (tmp_path / "seen").touch()
            while str(tmp_path / "seen") not in change.paths:
                change = await anext(changes)
            assert not change.overflowed

    drive(scenario)


def test_a_watch_ends_when_there_is_no_way_back(drive: Drive, tmp_path: Path) -> None:
    with RunningServer("--detach-ttl", "0.05") as forgetful:

        async def scenario(machine: Environment, faults: Faults) -> None:
            async with machine.files.watch(str(tmp_path)) as changes:
                missing = await machine.files.watch_missing([f"{tmp_path}/not-there"])
                assert missing is not None
                faults.add(Refuse(3))
                faults.cut()
                with pytest.raises(ConnectionLost, match="unknown session id"):
                    await anext(changes)
                with pytest.raises(ConnectionLost, match="unknown session id"):
                    await missing

        drive(scenario, url=forgetful.url)


def test_who_waits_for_a_file_looks_again(drive: Drive, tmp_path: Path) -> None:
    async def scenario(machine: Environment, faults: Faults) -> None:
        missing = await machine.files.watch_missing([f"{tmp_path}/not-there"])
        assert missing is not None
        faults.cut()
        await missing

    drive(scenario)


def test_an_open_file_goes_with_its_connection(drive: Drive, tmp_path: Path) -> None:
    """A stream that was interrupted says so; one that is written is never taken for whole."""
    large = tmp_path / "large"
    large.write_bytes(bytes(12_000_000))
    target = tmp_path / "target"
    target.write_bytes(b"old")

    async def scenario(machine: Environment, faults: Faults) -> None:
        blocks = machine.files.stream(str(large))
        await anext(blocks)
        faults.cut()
        await eventually_async(lambda: faults.connections == 2 and machine.connected)
        with pytest.raises(ConnectionLost):
            async for _ in blocks:
                pass

        async def content() -> Any:
            yield b"new content"
            faults.cut()
            await eventually_async(lambda: faults.connections == 3 and machine.connected)

        with pytest.raises(ConnectionLost, match="was open on a connection that is gone"):
            await machine.files.write_stream(str(target), content())
        assert await machine.files.read(str(large)) == bytes(12_000_000)

    drive(scenario)


def test_no_room_left_to_clean_up() -> None:
    """What nobody can hear the failure of ends the connection, which ends what was to be cleaned up."""

    async def main() -> None:
        server = ScriptedServer(
            {
                "initialize": lambda _, __: {"sessionId": "s", "environmentInfo": {}},
                "process/start": lambda _, __: None,
            }
        )
        client = await connect(server.dial)
        held = [asyncio.ensure_future(client.call("slow", None, Any)) for _ in range(MAX_CALLS - 1)]
        start = asyncio.ensure_future(client.start(["true"], process_id="p"))
        await eventually_async(lambda: server.sent("process/start"), "every place taken")
        client.tell("fs/close", {"handleId": "first"})
        await eventually_async(lambda: server.sent("fs/close"), "the one place that is kept for it")
        with pytest.raises(TooManyCalls):  # whoever can hear it is told, and nothing else happens
            await client.call("process/terminate", {"processId": "x"}, Any)
        assert client.losses == 0
        client.tell("fs/close", {"handleId": "second"})
        lost = await asyncio.gather(*held, start, return_exceptions=True)
        assert client.losses == 1
        assert {str(error) for error in lost} == {
            "exec-server transport disconnected: too many calls are pending to clean up with `fs/close`"
        }
        await eventually_async(lambda: client.connected, "the session going on")
        assert server.sent("process/terminate") == [{"processId": "p"}], "the start is undone"
        server.hang_up()

    asyncio.run(main())
