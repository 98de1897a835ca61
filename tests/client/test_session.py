"""A session and its broken connections: the scenarios of the specification (K5 to K20), on real servers."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import exec_server
from exec_server import Closed, ConnectionLost, Exited, Failed, Output, ProcessFailed
from exec_server.client import client, handshake
from exec_server.client.client import CATCH_UP_BYTES, State
from exec_server.client.errors import Recovering, TooManyCalls
from exec_server.client.rpc import MAX_CALLS
from exec_server.environments.environment import Environment
from exec_server.testing.faults import Cut, Delay, Duplicate, Faults, Hold, Refuse
from exec_server.testing.still import StillLoop, until
from exec_server.wire.handshake import InitializeParams
from support.machine import gone, running, sleep_forever
from support.server import RunningServer
from support.session import COUNT, Drive, mentions, sent
from support.wait import eventually_async

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


def test_a_long_write_gets_through_piece_by_piece(drive: Drive) -> None:
    """Connections that carry 900 KB each: all of it at once would never arrive."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["sha256sum"], stdin=True)
        data = os.urandom(1024 * 1024)
        faults.add(*(Cut("sent", at_byte=900_000) for _ in range(40)))
        faults.cut()
        work = [process.write(data), process.write(b"short"), process.write(data), process.close_stdin()]
        await asyncio.gather(*work)
        text = b"".join([chunk.data async for chunk in process.output()])
        assert text.split()[0].decode() == hashlib.sha256(data + b"short" + data).hexdigest()
        assert faults._plan, "all of them broke"

    drive(scenario, Hold())


def test_what_was_sent_is_sent_again_however_many_calls_there_are(drive: Drive) -> None:
    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["cat"], stdin=True)
        writes = [asyncio.ensure_future(process.write(b"%d\n" % number)) for number in range(MAX_CALLS)]
        await eventually_async(lambda: machine.state is State.RECOVERING)
        with pytest.raises(TooManyCalls):
            await process.write(b"one more\n")
        faults.allow()
        await asyncio.gather(*writes)
        await process.close_stdin()
        text = b"".join([chunk.data async for chunk in process.output()])
        assert text.split() == [b"%d" % number for number in range(MAX_CALLS)]

    drive(scenario, Cut("received", 1, True, when=mentions(b'"accepted"')), Refuse(2**31))


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

    monkeypatch.setattr(handshake, "InitializeParams", silent)
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
        process = await machine.start(["sh", "-c", f"seq 3500000; touch {tmp_path}/done; sleep 600"])
        output = process.output()
        parts = [(await anext(output)).data]
        faults.refuse()
        faults.cut()
        await eventually_async(lambda: faults.refused >= 10, "a second without a connection")
        assert not (tmp_path / "done").exists()
        faults.allow()
        while not parts[-1].endswith(b"\n3500000\n"):
            parts.append((await anext(output)).data)
            if len(parts) == 300:
                faults.cut()
        assert b"".join(parts).split() == [b"%d" % number for number in range(1, 3_500_001)]
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
        faults.add(Cut("received", at=9), Delay(0.075))
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


def test_a_line_that_breaks_before_a_part_is_through_gets_ahead(drive: Drive, tmp_path: Path) -> None:
    """Connections that carry 300 KB each: half a MiB at once would never arrive."""
    size = 768 * 1024
    script = f"echo ready; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; head -c {size} /dev/zero"

    async def scenario(machine: Environment, faults: Faults) -> None:
        process = await machine.start(["sh", "-c", f"{script}; touch {tmp_path}/done; read x"], stdin=True)
        output = process.output()
        await anext(output)
        faults.add(*(Cut("received", at_byte=300_000) for _ in range(40)))
        faults.refuse()
        faults.cut()
        (tmp_path / "go").touch()
        await eventually_async((tmp_path / "done").exists)
        faults.allow()
        received = 0
        while received < size:
            received += len((await anext(output)).data)
        assert 3 < faults.connections < 25, "every connection brings something, but for the first ones"
        assert faults._plan, "all of them broke"

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
        # One of them may have been used up by an attempt that came before the server had noticed the last.
        assert faults.cuts >= 4

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


def test_a_run_ends_in_time_whatever_the_server_says() -> None:
    """One that is stopped answers neither to the start nor to the kill; what may run is ended later."""
    marker = sleep_forever()

    async def late(loop: StillLoop, work: Awaitable[Any]) -> exec_server.CommunicateTimeout:
        task = asyncio.ensure_future(work)
        while not task.done():
            loop.advance(0.5)
            await asyncio.to_thread(time.sleep, 0.002)
        with pytest.raises(exec_server.CommunicateTimeout) as caught:
            await task
        return caught.value

    async def main(server: RunningServer) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        async with exec_server.connect(server.url) as machine:
            server.process.send_signal(signal.SIGSTOP)
            try:
                error = await late(loop, machine.run(["sleep", marker], timeout=2))
                assert (str(error), error.output) == (
                    "the server did not say within 2s that the process was started",
                    None,
                )
                server.process.send_signal(signal.SIGCONT)
                await machine.check()
                await asyncio.to_thread(gone, marker)
                running_it = asyncio.ensure_future(
                    machine.run(["sh", "-c", f"echo x; sleep {marker}"], timeout=3)
                )
                await until(lambda: any(each.running for each in machine._processes.values()))
                server.process.send_signal(signal.SIGSTOP)
                began = loop.time()
                error = await late(loop, running_it)
                assert str(error) == "the process did not finish within 3s and was terminated"
                assert loop.time() - began < 7
            finally:
                server.process.send_signal(signal.SIGCONT)
            await asyncio.to_thread(gone, marker)

    with RunningServer() as server, asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(main(server))


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
