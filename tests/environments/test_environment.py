"""The one object: its health, its configuration, and what it is made of."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import exec_server
from exec_server import ConnectionLost, Recovering, Unsupported
from exec_server.client.client import ConnectOptions, State
from exec_server.client.recovery import RENDEZVOUS
from exec_server.environments.environment import dialed
from exec_server.limits import Limits
from exec_server.testing.faults import Faults, Stall
from exec_server.testing.still import StillLoop, until
from exec_server.transport import websocket
from exec_server.transport.channel import Channel, Receiver
from support.server import RunningServer
from support.wait import eventually_async


def test_a_check_never_waits_for_a_repair(server: RunningServer) -> None:
    async def main() -> None:
        faults = Faults()
        async with exec_server.connect(server.url, wrap_dialer=faults.wrap) as machine:
            await machine.check()
            faults.refuse()
            faults.cut()
            await eventually_async(lambda: machine.state is State.RECOVERING)
            with pytest.raises(Recovering, match="exec-server environment is recovering"):
                await machine.check()
            faults.allow()
            await eventually_async(lambda: machine.connected)
            await machine.check()
        with pytest.raises(ConnectionLost, match="closed"):
            await machine.check()

    asyncio.run(main())


def test_a_check_that_is_not_answered_times_out(server: RunningServer) -> None:
    """After ten seconds, which take no time here."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        faults = Faults([Stall("received", 2)])
        machine = await exec_server.connect(server.url, wrap_dialer=faults.wrap)
        checking = asyncio.ensure_future(machine.check())
        await until(lambda: faults._current is not None and faults._current.stalled)
        loop.advance(10)
        with pytest.raises(TimeoutError, match=r"exec-server `environment/status` response after 10s"):
            await checking
        await machine.close()

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(main())


def test_configuration_is_read_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with exec_server.connect() as machine:
            found = await machine.read_config(str(tmp_path), [["mcp_servers"]], [["mcp_servers"]])
            assert found.config is not None
            monkeypatch.setattr(machine, "_capabilities", {})
            with pytest.raises(Unsupported, match="configuration files"):
                await machine.read_config(str(tmp_path), [["model"]])

    asyncio.run(main())


def test_any_dialer_will_do(server: RunningServer) -> None:
    """As a relay, or a host that hands over sockets, makes its environments."""

    async def main() -> None:
        calls = 0
        channels: list[Channel] = []

        async def dial(receiver: Receiver) -> Channel:
            nonlocal calls
            calls += 1
            channel = await websocket.connect(server.url, receiver, Limits(), headers={}, timeout=10)
            channels.append(channel)
            return channel

        options = ConnectOptions(client_name="somebody", backoff=RENDEZVOUS)
        async with await dialed(dial, "over there", options) as machine:
            assert repr(machine) == "<Environment over there connected>"
            assert machine.is_remote
            process = await machine.start(["sh", "-c", "echo one; read x; echo two"], stdin=True)
            output = process.output()
            assert (await anext(output)).data == b"one\n"
            channels[0].abort()
            await process.write(b"\n")
            assert [chunk.data async for chunk in output] == [b"two\n"]
            assert calls == 2

    asyncio.run(main())


def test_the_kernel_watches_over_connections(server: RunningServer) -> None:
    """A peer that vanished without a word, as after a sleep, is found out within a minute."""
    import socket

    async def main() -> None:
        async with exec_server.connect(server.url) as machine:
            channel = machine._rpc._channel
            assert isinstance(channel, websocket.WebSocketChannel)
            assert channel._transport is not None
            sock = channel._transport.underlying_transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000

    asyncio.run(main())


def test_what_is_shown_is_for_callers() -> None:
    async def run() -> None:
        async with exec_server.connect("in-process:") as machine:
            shown = {name for name in dir(machine) if not name.startswith("_")}
            assert {"run", "start", "files", "http", "call", "state", "session_id", "fail_fast"} <= shown
            assert not {"put_block", "tell", "forget", "losses", "call_for_part", "listen"} & shown
            assert all(hasattr(machine, name) for name in shown)

    asyncio.run(run())
