"""The client against real servers: one suite, every transport."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import exec_server
from exec_server import Client, Closed, Exited, Output
from exec_server.client.client import INHERIT_ALL, connect
from exec_server.client.rpc import MAX_CALLS
from exec_server.environments.connect import IN_PROCESS, Target
from exec_server.limits import Limits
from exec_server.wire.process import SpawnMode
from support.client import target_of
from support.machine import gone, running, sleep_forever
from support.scripted_server import ScriptedServer
from support.server import COMMAND, RunningServer

Scenario = Callable[[Client], Awaitable[None]]
Run = Callable[[Scenario], None]


@pytest.fixture(params=["local", "in-process", "websocket", "unix", "stdio"])
def target(request: pytest.FixtureRequest) -> Target:
    """Something to connect to."""
    return target_of(request)


@pytest.fixture
def run(target: Target) -> Run:
    """Run a scenario with a client."""

    def go(scenario: Scenario) -> None:
        async def main() -> None:
            async with asyncio.timeout(30):
                async with exec_server.connect(target) as client:
                    await scenario(client)

        asyncio.run(main())

    return go


def test_run_gives_output_and_exit_code(run: Run) -> None:
    async def scenario(client: Client) -> None:
        done = await client.run(["sh", "-c", "printf out; printf err >&2; exit 7"])
        assert (done.stdout, done.stderr, done.exit_code) == (b"out", b"err", 7)
        assert not done.truncated

    run(scenario)


def test_input_goes_through_whole(run: Run) -> None:
    async def scenario(client: Client) -> None:
        data = os.urandom(1_000_000)
        done = await client.run(["cat"], data=data)
        assert done.stdout == data

    run(scenario)


def test_large_output_loses_nothing(run: Run) -> None:
    async def scenario(client: Client) -> None:
        # More small writes than a server keeps chunks, and then more bytes than it keeps.
        small = "i=0; while [ $i -lt 60000 ]; do echo $i; i=$((i+1)); done"
        process = await client.start(["sh", "-c", f"{small}; seq 60000 399999"])
        text = b"".join([chunk.data async for chunk in process.output()])
        assert text.split() == [b"%d" % number for number in range(400_000)]

    run(scenario)


def test_a_slow_reader_makes_only_its_own_process_wait(run: Run) -> None:
    async def scenario(client: Client) -> None:
        size = 40_000_000
        slow = await client.start(["head", "-c", str(size), "/dev/zero"])
        events = slow.output()
        first = await anext(events)
        # Nobody reads `slow` now; everything else still works, and its process is made to wait.
        for _ in range(5):
            assert (await client.run(["echo", "hi"])).stdout == b"hi\n"
        assert not slow.ended
        rest = sum([len(chunk.data) async for chunk in events])
        assert len(first.data) + rest == size

    run(scenario)


def test_waiting_without_reading_does_not_hang(run: Run) -> None:
    async def scenario(client: Client) -> None:
        process = await client.start(["head", "-c", "30000000", "/dev/zero"])
        assert (await process.wait()).exit_code == 0

    run(scenario)


def test_events_come_to_several_readers(run: Run) -> None:
    async def scenario(client: Client) -> None:
        process = await client.start(["sh", "-c", "echo one; read x; echo $x"], stdin=True)
        readers = [asyncio.ensure_future(_all(process)) for _ in range(3)]
        await process.write(b"two\n")
        await process.wait()
        readers.append(asyncio.ensure_future(_all(process)))
        for events in await asyncio.gather(*readers):
            assert b"".join(event.data for event in events if isinstance(event, Output)) == b"one\ntwo\n"
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            assert isinstance(events[-1], Closed)
            assert sum(isinstance(event, Exited) for event in events) == 1

    run(scenario)


async def _all(process: Any) -> list[Any]:
    return [event async for event in process.events()]


def test_a_late_reader_catches_up_from_the_server(run: Run) -> None:
    async def scenario(client: Client) -> None:
        process = await client.start(["sh", "-c", "i=0; while [ $i -lt 900 ]; do echo $i; i=$((i+1)); done"])
        first = [event async for event in process.output()]
        late = [event async for event in process.output(from_start=True)]
        assert b"".join(event.data for event in late) == b"".join(event.data for event in first)

    run(scenario)


def test_output_that_is_gone_is_reported_lost(run: Run) -> None:
    async def scenario(client: Client) -> None:
        # More than a server keeps for a client that is slow to say what has arrived.
        size = Limits().unacknowledged_output + 2 * Limits().retained_output
        process = await client.start(["head", "-c", str(size), "/dev/zero"])
        await process.wait()
        with pytest.raises(exec_server.OutputLost):
            async for _ in process.events():
                pass

    run(scenario)


def test_a_terminal(run: Run) -> None:
    async def scenario(client: Client) -> None:
        async with await client.start(
            ["sh", "-c", "stty size; stty -echo; read x; stty size; echo got $x"], tty=True, rows=11, cols=22
        ) as process:
            reader = process.output()
            assert (await anext(reader)).data.startswith(b"11 22")
            await process.resize(33, 44)
            await process.write(b"hello\n")
            text = b"".join([chunk.data async for chunk in reader])
            assert b"33 44\r\ngot hello\r\n" in text

    run(scenario)


def test_signals_and_termination(run: Run, target: Any) -> None:
    async def scenario(client: Client) -> None:
        script = "trap 'echo usr; exit 4' USR1; echo ready; while :; do sleep 0.05; done"
        process = await client.start(["sh", "-c", script])
        reader = process.output()
        await anext(reader)
        await process.signal("SIGUSR1")
        assert [chunk.data async for chunk in reader if chunk.stream == "stdout"] == [b"usr\n"]
        assert (await process.wait()).exit_code == 4

        marker = sleep_forever()
        tree = f"setsid sleep {marker} & (setsid sleep {marker} &); sleep {marker} & echo ready; wait"
        process = await client.start(["sh", "-c", tree])
        await anext(process.output())
        # In a process that is not ours alone nothing is marked, and only the group goes.
        assert await process.terminate() == (1 if target == IN_PROCESS else 4)
        assert (await process.wait()).exit_code == 137
        if target == IN_PROCESS:
            for pid in running(marker):
                os.kill(pid, 9)
        gone(marker)

        process = await client.start(
            ["sh", "-c", "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done"]
        )
        await anext(process.output())
        await process.terminate(grace=10)
        assert (await process.wait()).exit_code == 9

    run(scenario)


def test_leaving_the_context_leaves_nothing_behind(target: Any) -> None:
    marker = sleep_forever()

    async def main() -> None:
        async with exec_server.connect(target) as client:
            await client.start(["sleep", marker])
            escape = "" if target == IN_PROCESS else "setsid"
            await client.start(["sh", "-c", f"{escape} sleep {marker} & wait"])
            if target != IN_PROCESS:  # what an ended process left running goes, too
                left = await client.start(["sh", "-c", f"setsid sleep {marker} > /dev/null 2>&1 & exit 0"])
                await left.wait()
            async with await client.start(["sleep", marker]):
                pass
            while len(running(marker)) < (3 if target == IN_PROCESS else 4):
                await asyncio.sleep(0.01)

    asyncio.run(main())
    gone(marker)


def test_a_cancelled_start_leaves_nothing_behind(run: Run) -> None:
    marker = sleep_forever()

    async def scenario(client: Client) -> None:
        task = asyncio.ensure_future(client.start(["sleep", marker]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.call("environment/status", None, dict[str, str])
        await asyncio.to_thread(gone, marker)

    run(scenario)


def test_a_timeout_is_a_number(run: Run) -> None:
    async def scenario(client: Client) -> None:
        for call in (
            lambda: client.run(["true"], timeout=float("nan")),
            lambda: process.communicate(timeout=float("nan")),
            lambda: process.wait(timeout=float("nan")),
        ):
            async with await client.start(["true"]) as process:
                with pytest.raises(ValueError, match="a timeout is a number of seconds, not nan"):
                    await call()

    run(scenario)


def test_timeouts_kill_and_tell(run: Run) -> None:
    marker = sleep_forever()

    async def scenario(client: Client) -> None:
        told = b""
        for seconds in (0.2, 2, 10):  # where the machine has much to do, it has not begun so soon
            with pytest.raises(exec_server.CommunicateTimeout) as caught:
                await client.run(["sh", "-c", f"echo begun; sleep {marker}"], timeout=seconds)
            assert isinstance(caught.value, TimeoutError)
            assert caught.value.output is not None
            told = caught.value.output.stdout
            if told:
                break
        assert told == b"begun\n"
        process = await client.start(["sleep", marker])
        with pytest.raises(TimeoutError):
            await process.wait(0.01)
        assert not process.ended

    run(scenario)
    gone(marker)


def test_read_snapshot_and_collect(run: Run) -> None:
    async def scenario(client: Client) -> None:
        process = await client.start(["sh", "-c", "echo one; read x; echo two; read x"], stdin=True)
        first = await process.read(wait=10)
        assert first.chunks[0].data == b"one\n"
        assert not first.exited
        assert (await process.collect(0.05)).data == b"one\n"
        assert (await process.collect(0.01)).data == b""
        await process.write(b"\n")
        collected = await process.collect(0.5)
        assert collected.data == b"two\n"
        assert not collected.exited
        snapshot = await process.snapshot()
        assert (snapshot.stdout, snapshot.running, snapshot.truncated) == (b"one\ntwo\n", True, False)
        await process.close_stdin()
        ended = await process.collect(10)
        assert ended.exited
        assert ended.exit_code == 1
        assert (await process.snapshot()).exit_code == 1

    run(scenario)


def test_errors_say_who_was_wrong(run: Run) -> None:
    async def scenario(client: Client) -> None:
        with pytest.raises(exec_server.ServerRejected) as caught:
            await client.start(["/no/such/program"])
        assert caught.value.code == -32603
        assert "No such file or directory" in caught.value.message
        with pytest.raises(TypeError):
            await client.start("ls -l")
        process = await client.start(["true"])
        with pytest.raises(exec_server.StdinClosed):
            await process.write(b"x")
        await process.wait()
        with pytest.raises(exec_server.ServerRejected):
            await client.call("no/such/method", None, dict[str, str])

    run(scenario)


def test_an_environment_is_inherited_given_or_both(run: Run) -> None:
    async def scenario(client: Client) -> None:
        inherited = (await client.run(["env"])).stdout
        assert b"PATH=" in inherited
        assert (await client.run(["/usr/bin/env"], env={"A": "1"})).stdout == b"A=1\n"
        assert (await client.run(["pwd"], cwd="/usr/bin")).stdout == b"/usr/bin\n"
        assert (await client.run(["pwd"], cwd="file:///usr/lib")).stdout == b"/usr/lib\n"

    run(scenario)


def test_a_prepared_start_is_taken_as_it_is(run: Run) -> None:
    async def scenario(client: Client) -> None:
        only = {"ONLY": "this"}
        done = await client.run(["/bin/sh", "-c", "echo $ONLY ${HOME:-nowhere}"], env=only, spawn="prepared")
        assert done.stdout == b"this nowhere\n"
        assert (await client.run(["true"], spawn="direct")).exit_code == 0
        with pytest.raises(ValueError, match="inherits nothing"):
            await client.start(["true"], spawn="prepared")
        for more in ({"env_policy": INHERIT_ALL}, {"sandbox": exec_server.Sandbox.read_only()}):
            with pytest.raises(ValueError, match="carries no"):
                await client.start(["true"], env=only, spawn="prepared", **more)

    run(scenario)


def test_kinds_of_starts_a_server_may_refuse() -> None:
    async def main(flag: str, refused: SpawnMode, taken: SpawnMode) -> None:
        async with exec_server.connect([COMMAND, "--listen", "stdio", flag]) as client:
            env = {"PATH": "/usr/bin:/bin"}
            assert (await client.run(["echo", "x"], env=env, spawn=taken)).stdout == b"x\n"
            with pytest.raises(exec_server.ServerRejected, match=f"{refused} exec is disabled"):
                await client.run(["echo", "x"], env=env, spawn=refused)

    asyncio.run(main("--no-direct", "direct", "prepared"))
    asyncio.run(main("--no-prepared", "prepared", "direct"))


@pytest.mark.parametrize("known", [True, False])
def test_a_server_without_kinds_of_starts_is_not_told_one(known: bool) -> None:
    async def main() -> None:
        info = {"capabilities": {"processSpawnModes": known}}
        server = ScriptedServer(
            {
                "initialize": lambda _, __: {"sessionId": "s", "environmentInfo": info},
                "process/start": lambda _, params: {"processId": params["processId"]},
                "process/terminate": lambda _, __: {"running": True},
                "process/read": lambda _, __: None,
            }
        )
        client = await connect(server.dial)
        await client.start(["true"], env={}, spawn="prepared")
        assert server.sent("process/start")[0].get("spawn") == ("prepared" if known else None)
        server.hang_up()

    asyncio.run(main())


def test_listing(run: Run) -> None:
    async def scenario(client: Client) -> None:
        process = await client.start(["sleep", "30"], process_id="mine")
        (listed,) = [entry for entry in await client.list() if entry.process_id == "mine"]
        assert listed.argv == ["sleep", "30"]
        assert listed.state == "running"
        assert listed.pid is not None
        assert any(entry.process_id == "mine" for entry in await client.list(everybody=True))
        with pytest.raises(ValueError, match="process id 'mine' is already in use"):
            await client.start(["true"], process_id="mine")
        await process.terminate()

    run(scenario)


def test_what_start_takes_and_refuses() -> None:
    async def main() -> None:
        async with exec_server.connect(IN_PROCESS) as machine:
            assert (await machine.run(["pwd"], cwd=Path("/usr"))).stdout == b"/usr\n"
            words = (word for word in ("echo", "one", "two"))
            assert (await machine.run(words)).stdout == b"one two\n"
            with pytest.raises(TypeError, match="cwd is text or a path of text, not bytes"):
                await machine.start(["true"], cwd=b"/")  # type: ignore[arg-type]  # that is the point
            for wrong in ("true", b"true", 7):
                with pytest.raises(TypeError, match="argv is a list of words"):
                    await machine.start(wrong)  # type: ignore[arg-type]  # that is the point
            for size in ({"rows": 0}, {"cols": -1}, {"rows": 70000, "cols": 20}):
                with pytest.raises(ValueError, match="between 1 and 65535"):
                    await machine.start(["true"], tty=True, **size)  # type: ignore[arg-type]
            assert (await machine.run(["stty", "size"], tty=True, cols=99)).terminal == b"24 99\r\n"

    asyncio.run(main())


def test_an_empty_process_id_is_not_replaced() -> None:
    async def main() -> None:
        server = ScriptedServer(
            {
                "initialize": lambda _, __: {"sessionId": "s", "environmentInfo": {}},
                "process/start": lambda _, params: {"processId": params["processId"]},
            }
        )
        client = await connect(server.dial)
        await client.start(["true"], process_id="")
        assert [start["processId"] for start in server.sent("process/start")] == [""]
        server.hang_up()

    asyncio.run(main())


def test_calls_in_flight_are_bounded(run: Run) -> None:
    async def scenario(client: Client) -> None:
        process = await client.start(["sleep", "30"])
        wait = {"processId": process.id, "waitMs": 20000}
        waits = [
            asyncio.ensure_future(client.call("process/wait", wait, dict[str, Any])) for _ in range(MAX_CALLS)
        ]
        await asyncio.sleep(0)
        with pytest.raises(exec_server.TooManyCalls, match="limit of 1024 pending requests"):
            await client.call("environment/status", None, dict[str, str])
        await process.terminate()
        for result in await asyncio.gather(*waits):
            assert result["exitCode"] == 137

    run(scenario)


def test_a_server_that_dies_fails_everything_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        client = await exec_server.connect([COMMAND, "--listen", "stdio"])
        process = await client.start(["sleep", "30"])
        pid = int((await client.run(["sh", "-c", "echo $PPID"])).stdout)
        os.kill(pid, 9)
        with pytest.raises(exec_server.ProcessFailed, match="transport disconnected"):
            await process.wait(10)
        with pytest.raises(exec_server.ConnectionLost):
            await client.start(["true"])
        assert (await process.read()).failure is not None
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        ("http://127.0.0.1:1", exec_server.ExecServerError, "expected ws://HOST:PORT"),
        ("ws://127.0.0.1:1", OSError, "failed to connect to exec-server websocket"),
        ("unix:///no/such/socket", OSError, "failed to connect"),
        (["/no/such/server"], exec_server.ExecServerError, "failed to spawn exec-server"),
        (["/bin/true"], exec_server.ConnectionLost, "transport disconnected"),
    ],
)
def test_connections_that_cannot_be(target: Any, error: type[Exception], text: str) -> None:
    async def main() -> None:
        async with exec_server.connect(target):
            raise AssertionError("connected")

    with pytest.raises(error, match=text):
        asyncio.run(main())


def test_a_token_opens_the_door(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sesame\n")
    with RunningServer("--ws-auth", "capability-token", "--ws-token-file", str(token)) as server:

        async def main() -> None:
            with pytest.raises(OSError, match="HTTP 401 missing websocket bearer token"):
                await exec_server.connect(server.url)
            with pytest.raises(OSError, match="HTTP 401 invalid websocket bearer token"):
                await exec_server.connect(server.url, token="wrong")
            async with exec_server.connect(server.url, token="sesame") as client:
                assert (await client.run(["echo", "in"])).stdout == b"in\n"

        asyncio.run(main())


def test_messages_larger_than_a_frame(tmp_path: Path) -> None:
    with RunningServer("--retain-output", "20000000") as server:

        async def main() -> None:
            async with exec_server.connect(server.url) as client:
                process = await client.start(["sh", "-c", "wc -c; head -c 14000000 /dev/zero"], stdin=True)
                await process.write(bytes(14_000_000))
                await process.close_stdin()
                assert (await process.wait()).exit_code == 0
                snapshot = await process.snapshot()
                assert snapshot.stdout == b"14000000\n" + bytes(14_000_000)
                assert sum(len(chunk.data) for chunk in (await process.read()).chunks) == 14_000_009

        asyncio.run(main())


def test_cancelled_calls_do_not_count(run: Run) -> None:
    async def scenario(client: Client) -> None:
        process = await client.start(["sleep", "30"])
        for _ in range(3):
            reads = [asyncio.ensure_future(process.read(wait=3600)) for _ in range(300)]
            await asyncio.sleep(0)
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
        assert (await client.run(["echo", "hi"])).stdout == b"hi\n"

    run(scenario)


def test_what_is_not_text_is_refused_here(run: Run) -> None:
    async def scenario(client: Client) -> None:
        with pytest.raises(TypeError):
            await client.start(["echo", b"x"])  # type: ignore[list-item]
        with pytest.raises(TypeError):
            await client.start(["env"], env={"A": b"x"})  # type: ignore[dict-item]
        with pytest.raises(TypeError):
            await client.run(["cat"], data="text")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="absolute path"):
            await client.start(["pwd"], cwd="relative")

    run(scenario)


HOST = """
import asyncio, subprocess, sys, threading
import exec_server

async def main():
    children, done = [], threading.Event()

    def host():
        while not done.is_set() and len(children) < 60:
            children.append(subprocess.Popen(["sleep", "60"]))

    thread = threading.Thread(target=host)
    async with exec_server.connect({target!r}) as client:
        thread.start()
        for _ in range(40):
            await client.run(["true"])
        done.set()
        thread.join()
    died = [child for child in children if child.poll() is not None]
    for child in children:
        child.kill()
        child.wait()
    print(len(children) > 0, len(died))

asyncio.run(main())
"""


@pytest.mark.parametrize("target", [None, IN_PROCESS])
def test_what_else_the_host_starts_is_not_ours_to_kill(target: str | None) -> None:
    code = HOST.format(target=target)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout == "True 0\n", done.stderr
