"""What late readers of a process get, and from where (K3 and K4)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from exec_server import Closed, Exited, Output, OutputLost, ProcessFailed, StdinClosed
from exec_server.client.client import Client, ConnectOptions
from exec_server.client.process import HISTORY_EVENTS, RemoteProcess
from exec_server.wire import base64
from support.scripted_server import ScriptedServer
from support.wait import eventually_async

Scenario = Callable[[RemoteProcess, ScriptedServer], Awaitable[None]]


def read_result(chunks: dict[int, bytes], next_seq: int) -> dict[str, Any]:
    return {
        "chunks": [
            {"seq": seq, "stream": "stdout", "chunk": base64.encode(data)} for seq, data in chunks.items()
        ],
        "nextSeq": next_seq,
        "exited": True,
        "exitCode": 0,
        "closed": True,
        "failure": None,
        "sandboxDenied": False,
    }


def drive(chunks: dict[int, bytes], retained: dict[int, bytes], scenario: Scenario) -> list[dict[str, Any]]:
    """A process that wrote these chunks and ended, of which the server still has some; what was read."""
    last = len(chunks)

    async def main() -> list[dict[str, Any]]:
        server = ScriptedServer(
            {
                "initialize": lambda *_: {"sessionId": "s", "environmentInfo": {}},
                "process/start": lambda _, params: {"processId": params["processId"]},
                "process/read": lambda _, params: read_result(
                    {seq: data for seq, data in retained.items() if seq > (params["afterSeq"] or 0)}, last + 3
                ),
            }
        )
        client = Client(ConnectOptions())
        await client.open(server.dial)
        process = await client.start(["x"], process_id="p")
        for seq, data in chunks.items():
            chunk = base64.encode(data)
            server.notify("process/output", processId="p", seq=seq, stream="stdout", chunk=chunk)
        server.notify("process/exited", processId="p", seq=last + 1, exitCode=0, sandboxDenied=False)
        server.notify("process/closed", processId="p", seq=last + 2)
        await eventually_async(lambda: process.ended)
        async with asyncio.timeout(20):
            assert len([event async for event in process.events()]) == last + 2  # the first reader
            await scenario(process, server)
        await client.close()
        return server.sent("process/read")

    return asyncio.run(main())


def test_a_late_reader_gets_what_is_remembered_and_reads_the_rest() -> None:
    """K3: 300 tiny events; the last 256 are here, the others come from the server in one read."""
    chunks = {seq: b"%d" % seq for seq in range(1, 301)}

    async def scenario(process: RemoteProcess, server: ScriptedServer) -> None:
        assert len(process._history) == HISTORY_EVENTS
        events = [event async for event in process.events()]
        assert [event.seq for event in events] == list(range(1, 303))  # type: ignore[union-attr]

    reads = drive(chunks, chunks, scenario)
    assert [read["afterSeq"] for read in reads] == [0]


def test_a_large_event_is_not_kept_here() -> None:
    """K4: two MiB in one event are too much to remember; the exit and the close still are."""
    chunks = {1: bytes(2 * 1024 * 1024)}

    async def scenario(process: RemoteProcess, server: ScriptedServer) -> None:
        assert [type(event) for event in process._history] == [Exited, Closed]
        events = [event async for event in process.events()]
        assert [type(event) for event in events] == [Output, Exited, Closed]

    drive(chunks, chunks, scenario)


def test_what_nobody_has_any_more_is_said_to_be_lost() -> None:
    chunks = {seq: b"%d" % seq for seq in range(1, 301)}

    async def scenario(process: RemoteProcess, server: ScriptedServer) -> None:
        with pytest.raises(OutputLost, match="after number 0 is no longer retained"):
            async for _ in process.events():
                pass

    drive(chunks, {}, scenario)


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        ("stdinClosed", StdinClosed, "has no open stdin"),
        ("unknownProcess", ProcessFailed, r"does not know process 'p' \(unknownProcess\)"),
    ],
)
def test_writes_that_are_not_taken(status: str, error: type[Exception], text: str) -> None:
    async def scenario(process: RemoteProcess, server: ScriptedServer) -> None:
        server._answers["process/write"] = lambda *_: {"status": status}
        with pytest.raises(error, match=text):
            await process.write(b"x")

    drive({}, {}, scenario)
