"""A loop at a standstill: timers wait for the test, everything else does not."""

from __future__ import annotations

import asyncio

import pytest

from exec_server.testing.still import StillLoop, until


def test_time_passes_when_told() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        happened: list[str] = []
        loop.call_later(30, happened.append, "late")
        loop.call_later(10, happened.append, "early")
        reader, writer = await asyncio.open_connection(*address)
        assert await reader.read() == b"real bytes"
        writer.close()
        assert happened == []
        loop.advance(10)
        await until(lambda: happened == ["early"])
        loop.advance(20)
        await until(lambda: len(happened) == 2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await until(lambda: False)
        return happened

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"real bytes")
        writer.close()

    address: tuple[str, int] = ("", 0)

    async def both() -> list[str]:
        nonlocal address
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        async with server:
            return await main()

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        assert runner.run(both()) == ["early", "late"]
