"""server/dispatch.py: names and who does them."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exec_server.server import dispatch
from exec_server.server.dispatch import find
from support.rpc import WebSocketPeer
from support.server import COMMAND, RunningServer


@pytest.mark.parametrize(
    ("name", "family", "control"),
    [
        ("initialize", None, False),
        ("process/start", "exec", False),
        ("process/read", "exec", False),
        ("process/signal", "exec", True),
        ("process/terminate", "exec", True),
        ("environment/info", "environment info", True),
        ("environment/status", "environment status", True),
        ("environmentConfig/read", "environment config", False),
        ("http/request", "http", False),
        ("command/exec", "exec", False),
        ("command/exec/terminate", "exec", True),
    ],
)
def test_known(name: str, family: str | None, control: bool) -> None:
    method = find(name)
    assert method is not None
    assert (method.family, method.control) == (family, control)
    assert method.legacy == name.startswith("command/")


@pytest.mark.parametrize(
    "name", ["", "/", "process", "process/", "process/no", "no/such", "Process/start", "initialized"]
)
def test_unknown(name: str) -> None:
    assert find(name) is None
    assert find(name) is None


def test_a_family_costs_nothing_before_it_is_called() -> None:
    code = (
        "import sys\n"
        "from exec_server.server import dispatch\n"
        "handlers = lambda: {name for name in sys.modules if '.server.handlers.' in name}\n"
        "assert handlers() == set(), handlers()\n"
        "dispatch.find('process/start')\n"
        "assert handlers() == {'exec_server.server.handlers.processes'}, handlers()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_everything_can_be_loaded_ahead_without_what_it_only_needs_at_work() -> None:
    code = (
        "import os, sys\n"
        "from exec_server.server import dispatch\n"
        "descriptors = os.listdir('/proc/self/fd')\n"
        "rounds = 0\n"
        "while dispatch.load_next():\n"
        "    rounds += 1\n"
        "assert rounds == len(set(dispatch._FAMILIES.values())), rounds\n"
        "before = len(sys.modules)\n"
        "for name in ('process/start', 'http/request', 'command/exec', 'fs/walk', 'capabilities/x'):\n"
        "    dispatch.find(name)\n"
        "assert len(sys.modules) == before\n"
        "assert 'aiohttp' not in sys.modules\n"
        "assert os.listdir('/proc/self/fd') == descriptors\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_files_are_refused_properly_when_no_more_can_be_opened() -> None:
    """The very first of their calls, too; and when there are descriptors again, they are read as ever."""
    code = (
        "import asyncio, resource\n"
        "import exec_server\n"
        "from exec_server.server import dispatch\n"
        "async def refused(call):\n"
        "    try:\n"
        "        await call\n"
        "    except OSError as error:\n"
        "        return error.errno\n"
        "async def main():\n"
        "    async with exec_server.connect('in-process:') as client:\n"
        "        files = client.files\n"
        "        while dispatch.load_next():\n"
        "            pass\n"
        "        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))\n"
        "        try:\n"
        "            codes = [await refused(files.read('/etc/passwd')), await refused(files.list('/etc'))]\n"
        "        finally:\n"
        "            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "        assert codes == [24, 24], codes\n"
        "        assert await files.read('/etc/passwd')\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=40)


def test_the_first_calls_ever_when_no_more_can_be_opened() -> None:
    command = [COMMAND, "--listen", "ws://127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        try:
            with WebSocketPeer(server.stdout.readline().decode().strip()) as peer:
                peer.initialize()
                _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
                resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, hard))
                assert peer.call("environment/status") == {"status": "ready"}
                code, text = peer.refused("fs/readFile", {"path": "file:///etc/passwd"})
                assert (code, text) == (-32603, "No file descriptors available (os error 24)")
        finally:
            server.kill()


def test_families_are_imported_with_the_descriptors_put_by(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    server = start_server()
    peer = connect(server)
    peer.initialize()
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    inside = Path(f"/proc/{server.pid}/fd")
    highest = max(int(entry.name) for entry in inside.iterdir())
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (highest + 1, hard))
    before = len(list(inside.iterdir()))
    assert peer.refused("process/read", {"processId": "x"}) == (-32600, "unknown process id x")
    assert len(list(inside.iterdir())) == before, "and they are there again"


def test_a_family_that_could_not_be_imported_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls fail with the reason, every time, and work once it is gone."""
    monkeypatch.setattr(dispatch, "_loaded", set())
    monkeypatch.setattr(dispatch, "_methods", {})

    def fail(name: str, package: str | None = None) -> Any:
        raise ImportError("half an upgrade")

    with monkeypatch.context() as broken:
        broken.setattr(dispatch, "import_module", fail)
        for _ in range(2):
            with pytest.raises(ImportError, match="half an upgrade"):
                dispatch.find("fs/readFile")
    assert dispatch.find("fs/readFile") is not None
