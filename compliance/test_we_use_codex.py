"""Our client and our conformance kit against the reference's server, over WebSocket and stdio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import exec_server
from compliance.programs import wait_until
from exec_server import Client
from exec_server.testing import check_server

Target = str | list[str]
Scenario = Callable[[Client], Awaitable[None]]


@pytest.fixture
def target(reference_server: Target) -> Target:
    """The reference's server."""
    return reference_server


def drive(target: Target, scenario: Scenario) -> None:
    """Run a scenario with a client."""

    async def main() -> None:
        async with asyncio.timeout(60), exec_server.connect(target) as client:
            await scenario(client)

    asyncio.run(main())


def test_the_reference_conforms(target: Target) -> None:
    """The kit asks for nothing the reference does not do, so that any server can be put through it."""
    report = asyncio.run(check_server(target))
    print(report)
    report.raise_for_failures()


def test_output_exit_code_and_directory(target: Target) -> None:
    async def scenario(client: Client) -> None:
        done = await client.run(["/bin/sh", "-c", "pwd; echo err >&2; exit 3"], cwd="/usr")
        assert (done.stdout, done.stderr, done.exit_code) == (b"/usr\n", b"err\n", 3)

    drive(target, scenario)


def test_large_output_is_whole(target: Target) -> None:
    async def scenario(client: Client) -> None:
        process = await client.start(["seq", "0", "199999"])
        text = b"".join([chunk.data async for chunk in process.output()])
        assert text.split() == [b"%d" % number for number in range(200000)]
        assert (await process.wait()).exit_code == 0

    drive(target, scenario)


def test_a_terminal_and_its_input(target: Target) -> None:
    async def scenario(client: Client) -> None:
        async with await client.start(["/bin/sh", "-c", "stty -echo; echo ready; cat"], tty=True) as process:
            reader = process.output()
            assert (await anext(reader)).data == b"ready\r\n"
            await process.write(b"typed\n")
            assert (await anext(reader)).data == b"typed\r\n"
            await process.close_stdin()
            assert (await process.wait()).exit_code == 0

    drive(target, scenario)


def test_interrupt_terminate_and_what_is_missing(target: Target) -> None:
    async def scenario(client: Client) -> None:
        script = "trap 'exit 5' INT; echo ready; while :; do sleep 0.05; done"
        process = await client.start(["/bin/sh", "-c", script])
        await anext(process.output())
        await process.signal("interrupt")
        assert (await process.wait()).exit_code == 5
        process = await client.start(["sleep", "600"])
        assert await process.terminate() is None
        assert (await process.wait()).exit_code == 137
        with pytest.raises(exec_server.Unsupported):
            await process.signal("SIGUSR1")
        with pytest.raises(exec_server.Unsupported):
            await process.resize(10, 10)
        with pytest.raises(exec_server.Unsupported):
            await client.list()
        with pytest.raises(exec_server.StdinCloseUnsupported):
            await client.run(["cat"], data=b"never ends")

    drive(target, scenario)


def test_snapshot_and_collect_fall_back(target: Target) -> None:
    async def scenario(client: Client) -> None:
        process = await client.start(["/bin/sh", "-c", "echo one; sleep 0.3; echo two; sleep 600"])
        assert (await process.collect(0.15)).data == b"one\n"
        collected = b""
        while collected != b"two\n":
            collected += (await process.collect(0.2)).data
        snapshot = await process.snapshot()
        assert (snapshot.stdout, snapshot.running, snapshot.truncated) == (b"one\ntwo\n", True, False)

    drive(target, scenario)


def test_leaving_leaves_nothing_behind(target: Target, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    async def scenario(client: Client) -> None:
        await client.start(
            ["/bin/sh", "-c", f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 600"]
        )
        await asyncio.to_thread(wait_until, pid_file.exists, "the process's pid", 10.0)

    drive(target, scenario)
    stat = Path(f"/proc/{pid_file.read_text().strip()}/stat")
    wait_until(lambda: not stat.exists() or ") Z " in stat.read_text(), "the process to be gone", 10.0)
