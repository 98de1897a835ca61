"""Fixtures: servers and connections to them. What they do is in support/."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from exec_server import log
from support.rpc import Peer, StdioPeer, WebSocketPeer
from support.sandbox import needs_bubblewrap
from support.server import RunningServer

__all__ = ["needs_bubblewrap"]

# What is compiled is kept, whatever the shell says: the suite starts thousands of processes, each of which
# would compile the package again, and every worker would rewrite the asserts of every module.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The suite tries the same examples each time, so that a red run is about the change it ran on. New ones are
# looked for by `make search`.
settings.register_profile(
    "tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tests"))


def pytest_configure(config: pytest.Config) -> None:
    """In a fresh checkout, rewrite the asserts of all modules once, and not in every worker at once."""
    here = Path(__file__).parent
    everything = config.args_source is config.ArgsSource.TESTPATHS
    if not everything or not config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        return
    if any(here.glob("agent/__pycache__/*-pytest-*.pyc")):
        return
    modules = sorted(map(str, here.rglob("test_*.py")))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    halves = [
        subprocess.Popen([*command, *modules[part::2]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for part in range(2)
    ]
    for half in halves:
        half.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long runs last."""
    items.sort(key=lambda item: item.get_closest_marker("soak") is not None)


@pytest.fixture
def fresh_log() -> Iterator[None]:
    """For tests that make this very process log: to the stderr of now, not of an earlier test."""
    log.configure("error", False)
    yield
    log.configure("error", False)


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """A listening server with the default settings, shared by all tests of this worker."""
    with RunningServer("--detach-ttl", "5") as running:
        yield running


@pytest.fixture(scope="session")
def unix_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The same on a Unix socket."""
    path = tmp_path_factory.mktemp("unix") / "sock"
    with RunningServer("--detach-ttl", "5", listen=f"unix://{path}") as running:
        yield running


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Start servers with settings of their own."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(RunningServer(*arguments, **options))


@pytest.fixture
def connect(server: RunningServer) -> Iterator[Callable[..., WebSocketPeer]]:
    """Open connections, to the shared server unless another is named; not yet initialized."""
    with ExitStack() as stack:

        def open_one(to: RunningServer = server, **options: Any) -> WebSocketPeer:
            return stack.enter_context(WebSocketPeer(to.url, to.pid, **options))

        yield open_one


@pytest.fixture
def start_stdio() -> Iterator[Callable[..., StdioPeer]]:
    """Start servers on stdio."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(StdioPeer(*arguments, **options))


@pytest.fixture(params=["websocket", "stdio"])
def new_peer(
    request: pytest.FixtureRequest,
    connect: Callable[..., WebSocketPeer],
    start_server: Callable[..., RunningServer],
    start_stdio: Callable[..., StdioPeer],
) -> Callable[..., Peer]:
    """Make a connection to a server with the given arguments, over either transport; not yet initialized."""

    def make(*arguments: str, env: dict[str, str] | None = None) -> Peer:
        if request.param == "stdio":
            return start_stdio(*arguments, env=env)
        if not arguments and env is None:
            return connect()
        return connect(start_server(*arguments, env=env))

    return make


@pytest.fixture
def peer(new_peer: Callable[..., Peer]) -> Peer:
    """A connection that is ready, over either transport."""
    ready = new_peer()
    ready.initialize()
    return ready


@pytest.fixture
def ws(connect: Callable[..., WebSocketPeer]) -> WebSocketPeer:
    """A WebSocket connection that is ready."""
    ready = connect()
    ready.initialize()
    return ready
