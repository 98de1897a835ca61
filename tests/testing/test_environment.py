"""One suite of behaviour for every kind of environment: nobody above can tell them apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import exec_server
from exec_server.environments.connect import Target
from exec_server.environments.environment import Environment
from exec_server.testing import Report, check_environment
from exec_server.testing.faults import Faults
from relay.stage import KEY, stage
from support.client import target_of


@pytest.fixture(params=["local", "in-process", "websocket", "unix", "stdio"])
def target(request: pytest.FixtureRequest) -> Target:
    """Every way to reach a machine without anybody in between."""
    return target_of(request)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@asynccontextmanager
async def website() -> AsyncIterator[str]:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(body=b"hello")

    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/"  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


def test_it_behaves_like_an_environment(target: Target) -> None:
    async def main() -> Report:
        faults = Faults()
        resumable = isinstance(target, str) and target.startswith(("ws://", "unix://"))
        async with website() as address:
            return await check_environment(
                lambda: exec_server.connect(target, wrap_dialer=faults.wrap),
                web_address=address,
                faults=faults if resumable else None,
            )

    report = asyncio.run(main())
    report.raise_for_failures()
    skipped = {outcome.name for outcome in report.outcomes if outcome.result == "skipped"}
    assert all("connection" in name for name in skipped), skipped
    assert len(report.outcomes) - len(skipped) >= 32


def test_a_machine_behind_a_relay_behaves_the_same(tmp_path: Path) -> None:
    async def main() -> Report:
        faults = Faults()
        async with website() as address, stage(tmp_path) as relay:
            relay.start_environment()
            await relay.connected.wait()
            url = f"relay+{relay.node.url}/env-1"
            return await check_environment(
                lambda: exec_server.connect(url, token=KEY, wrap_dialer=faults.wrap),
                web_address=address,
                faults=faults,
            )

    report = asyncio.run(main())
    report.raise_for_failures()
    assert not [outcome for outcome in report.outcomes if outcome.result == "skipped"]


def test_differences_are_found() -> None:
    """A machine that lies about its files and drops output fails the checks that look there."""

    class Lying(Environment):
        async def run(self, argv: Any, **options: Any) -> Any:
            done = await super().run(argv, **options)
            return exec_server.Completed(done.stdout, b"", done.terminal, done.exit_code)

    @asynccontextmanager
    async def maker() -> AsyncIterator[Environment]:
        async with exec_server.connect() as machine:
            machine.__class__ = Lying
            yield machine

    report = asyncio.run(check_environment(maker, only="output per stream"))
    assert [outcome.result for outcome in report.outcomes] == ["failed"]
    with pytest.raises(AssertionError, match="output per stream and the exit code"):
        report.raise_for_failures()


def test_an_environment_that_cannot_be_made_fails() -> None:
    report = asyncio.run(check_environment(lambda: exec_server.connect("ws://127.0.0.1:1"), only="it says"))
    assert "failed to connect" in report.outcomes[0].detail


def test_a_check_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no check has 'no such check' in its name"):
        asyncio.run(check_environment(lambda: exec_server.connect(), only="no such check"))
