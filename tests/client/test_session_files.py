"""Files across broken connections."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from exec_server import ConnectionLost
from exec_server.client.client import connect
from exec_server.client.errors import TooManyCalls
from exec_server.client.rpc import MAX_CALLS
from exec_server.environments.environment import Environment
from exec_server.testing.faults import Faults, Refuse
from support.scripted_server import ScriptedServer
from support.server import RunningServer
from support.session import Drive, sent
from support.wait import eventually_async

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


def test_a_watch_that_waits_for_the_connection_is_set_up_once(drive: Drive, tmp_path: Path) -> None:
    async def scenario(machine: Environment, faults: Faults) -> None:
        await machine.files.exists(str(tmp_path))
        faults.refuse()
        faults.cut()
        await eventually_async(lambda: faults.refused)
        opening = asyncio.ensure_future(machine.files.watch(str(tmp_path)).__aenter__())
        await asyncio.sleep(0)
        faults.allow()
        changes = await opening
        (tmp_path / "seen").touch()
        assert str(tmp_path / "seen") in (await anext(changes)).paths
        assert len(sent(faults, "fs/watch")) == 1
        await changes.__aexit__(None, None, None)

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
