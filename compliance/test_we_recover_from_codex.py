"""Our environments on the reference's server: one behaviour, and no byte lost when the connection breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import exec_server
from compliance.programs import wait_until
from compliance.server import Server
from exec_server.environments.environment import Environment
from exec_server.testing import check_environment
from exec_server.testing.faults import Cut, Fault, Faults, Hold, random_cuts

NUMBERING = (
    "stty -echo 2>/dev/null; echo ready; n=0;"
    " while [ $n -lt {count} ]; do read x; n=$((n+1)); echo $n:$x; done; exit 5"
)
"""Numbers what it reads and knows when it is through: the reference cannot close a pipe's stdin."""


@pytest.fixture
def url(reference: Path, tmp_path: Path) -> Iterator[str]:
    """The reference's server, listening."""
    server = Server([str(reference), "exec-server"], tmp_path)
    try:
        yield server.url
    finally:
        server.stop()


def drive(url: str, plan: list[Fault], scenario: Any) -> Faults:
    faults = Faults(plan)

    async def main() -> None:
        async with asyncio.timeout(55), exec_server.connect(url, wrap_dialer=faults.wrap) as machine:
            await scenario(machine, faults)

    asyncio.run(main())
    return faults


def sent(faults: Faults, method: str) -> list[dict[str, Any]]:
    messages = [json.loads(message) for message in faults.sent]
    return [message["params"] for message in messages if message["method"] == method]


def test_the_reference_is_an_environment(reference_server: str | list[str]) -> None:
    """The same suite as for ours, as far as the reference has what it asks for."""
    faults = Faults()
    listening = isinstance(reference_server, str)
    report = asyncio.run(
        check_environment(
            lambda: exec_server.connect(reference_server, wrap_dialer=faults.wrap),
            faults=faults if listening else None,
        )
    )
    print(report)
    report.raise_for_failures()
    assert sum(outcome.result == "passed" for outcome in report.outcomes) >= (22 if listening else 20)


def test_output_goes_on_where_it_was(url: str, tmp_path: Path) -> None:
    """K5 and K11 on the reference: one resume, one read, the exit found in the hole it left."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        script = f"for i in $(seq 40); do echo $i; sleep 0.01; done; touch {tmp_path}/over; exit 7"
        process = await machine.start(["/bin/sh", "-c", script])
        output = process.output()
        text = (await anext(output)).data
        faults.refuse()
        faults.cut()
        await asyncio.to_thread(wait_until, (tmp_path / "over").exists, "the end of the output", 20.0)
        faults.allow()
        text += b"".join([chunk.data async for chunk in output])
        assert text.split() == [b"%d" % number for number in range(1, 41)]
        assert (await process.wait()).exit_code == 7

    faults = drive(url, [], scenario)
    assert faults.cuts == 1


@pytest.mark.parametrize("before", [True, False])
def test_a_write_is_applied_once(url: str, before: bool) -> None:
    """K6: the write is lost, or its answer; the id is the same, and the reference applies it once."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        script = NUMBERING.format(count=3)
        process = await machine.start(["/bin/sh", "-c", script], stdin=True)
        for word in (b"one\n", b"two\n", b"three\n"):
            await process.write(word)
        text = b"".join([chunk.data async for chunk in process.output()])
        assert text.split() == [b"ready", b"1:one", b"2:two", b"3:three"]
        assert [params["writeId"] for params in sent(faults, "process/write")] == ["1", "2", "2", "3"]

    drive(url, [Cut("sent", 2, before, when=lambda message: b'"process/write"' in message)], scenario)


def test_a_start_whose_answer_is_lost(url: str) -> None:
    """K7: not repeated, and ended after the recovery."""

    async def scenario(machine: Environment, faults: Faults) -> None:
        with pytest.raises(exec_server.ConnectionLost):
            await machine.start(["sleep", "600"], process_id="lost")
        done = await machine.run(["echo", "here"])
        assert done.stdout == b"here\n"
        assert sent(faults, "process/terminate")[0] == {"processId": "lost"}

    drive(url, [Cut("sent", 1, False, when=lambda message: b'"process/start"' in message), Hold()], scenario)


@pytest.mark.parametrize("seed", range(3))
def test_random_cuts(url: str, seed: int) -> None:
    """Pipes and a terminal, numbered both ways, while the connection breaks again and again."""
    count = 30

    async def scenario(machine: Environment, faults: Faults) -> None:
        async def persistent_start(**options: bool) -> exec_server.RemoteProcess:
            while True:
                try:
                    return await machine.start(["/bin/sh", "-c", NUMBERING.format(count=count)], **options)
                except exec_server.ConnectionLost:
                    continue

        async def exchange(**options: bool) -> None:
            process = await persistent_start(**options)
            output = process.output()
            text = (await anext(output)).data  # from here on the terminal does not echo
            for number in range(count):
                await process.write(b"line%d\n" % number)
            text += b"".join([chunk.data async for chunk in output])
            expected = [b"ready", *(b"%d:line%d" % (number + 1, number) for number in range(count))]
            assert text.split() == expected
            assert (await process.wait()).exit_code == 5

        await asyncio.gather(exchange(stdin=True), exchange(tty=True), exchange(stdin=True))

    faults = drive(url, [Cut("either", 12), *random_cuts(seed, 30, 14)], scenario)
    assert faults.cuts >= 5
