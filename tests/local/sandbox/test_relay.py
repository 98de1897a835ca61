"""local/sandbox/relay.py: in a managed network only the proxies can be reached, and they can."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.rpc import Peer, Record, WebSocketPeer
from support.sandbox import FORBIDDING, full_access, profile, read_only
from support.server import COMMAND, RunningServer
from support.unprivileged import as_nobody, reachable_command
from support.wait import eventually

SCRIPT = """
import os, socket, sys
from urllib.parse import urlsplit
proxy = urlsplit(os.environ["HTTP_PROXY"])
with socket.create_connection((proxy.hostname, proxy.port)) as opened:
    opened.sendall(b"x" * 100_000); opened.shutdown(socket.SHUT_WR)
    print(opened.makefile().read())
for family, address in ((2, ("127.0.0.1", int(sys.argv[1]))), (1, "/nowhere"), (16, (0, 0))):
    try:
        socket.socket(family).connect(address); print("reached")
    except OSError as error: print(type(error).__name__)
"""


@pytest.fixture
def proxy() -> Iterator[int]:
    """Something that listens on loopback, reads to the end and says how much it was."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, connection.makefile("rb") as stream:
                    connection.sendall(f"heard {len(stream.read())}".encode())

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def start(peer: Peer, proxy: int | None, sandbox: dict[str, Any], *argv: str) -> str:
    env = {"PATH": "/usr/bin:/bin", **({} if proxy is None else {"HTTP_PROXY": f"http://localhost:{proxy}"})}
    params = peer.start_params(argv, env=env, enforceManagedNetwork=True, sandbox=sandbox)
    assert peer.call("process/start", params)["sandboxType"] == "linuxSeccomp"
    name: str = params["processId"]
    return name


def run(peer: Peer, proxy: int | None, sandbox: dict[str, Any], *argv: str) -> Record:
    return peer.finished(start(peer, proxy, sandbox, *argv))


@pytest.fixture(scope="module", params=["root", "nobody"])
def somebody(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """A connection to a server of root's, or of whoever has fewer rights."""
    options = {"command": reachable_command(), "cwd": "/", **as_nobody()} if request.param == "nobody" else {}
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(**options))
        peer = stack.enter_context(WebSocketPeer(server.url, server.pid))
        peer.initialize()
        yield peer


@pytest.mark.usefixtures("needs_bubblewrap")
@pytest.mark.parametrize("policy", [read_only(), profile(None), full_access(), profile(None, network=True)])
def test_only_the_proxy_is_reached(somebody: Peer, proxy: int, policy: dict[str, Any]) -> None:
    record = run(somebody, proxy, policy, "python3", "-c", SCRIPT, str(proxy))
    assert record.exit_code == 0, record.output
    assert record.stdout.decode().splitlines() == [
        "heard 100000",
        "ConnectionRefusedError",
        "PermissionError",
        "PermissionError",
    ]


@pytest.mark.usefixtures("needs_bubblewrap")
def test_devices_work_where_everything_can_be_written(somebody: Peer, proxy: int) -> None:
    record = run(
        somebody, proxy, full_access(), "sh", "-c", "echo > /dev/null && head -c 3 /dev/zero | wc -c"
    )
    assert record.stdout.strip() == b"3"


@pytest.mark.usefixtures("needs_bubblewrap")
def test_without_proxies_nothing_runs(ws: WebSocketPeer) -> None:
    record = run(ws, None, read_only(), "echo", "ran")
    assert (record.exit_code, record.stdout) == (101, b"")
    assert record.stderr == (
        b"failed to prepare host proxy routing bridge: "
        b"managed proxy mode requires proxy environment variables\n"
    )


def relays(server: int) -> list[str]:
    """Processes that a server has started for relaying."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == server and b"relay.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("needs_bubblewrap")
@pytest.mark.parametrize("how", ["exit", "terminate"])
def test_the_relay_ends_with_the_command(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer], proxy: int, how: str
) -> None:
    server = start_server()
    peer = connect(server)
    peer.initialize()
    running = start(peer, proxy, read_only(), "sh", "-c", "echo up; exec sleep 1000")
    peer.saw(running, b"up")
    assert len(relays(server.pid)) == 1
    if how == "exit":
        peer.call("process/signal", {"processId": running, "signal": "interrupt"})
    else:
        peer.terminate(running)
    peer.finished(running)
    eventually(lambda: not relays(server.pid), "the end of the relay")
    # Reaped, too: nobody is left of it, not even a corpse.
    eventually(lambda: "python" not in children(server.pid, exclude="guardian.py"), "the end of its remains")


def children(pid: int, exclude: str) -> str:
    names = ""
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for number in child.read_text().split():
            try:
                if exclude.encode() not in Path(f"/proc/{number}/cmdline").read_bytes():
                    names += Path(f"/proc/{number}/comm").read_text()
            except OSError:
                continue
    return names


def test_landlock_refuses(proxy: int) -> None:
    with (
        RunningServer(command=(*FORBIDDING, COMMAND)) as server,
        WebSocketPeer(server.url, server.pid) as peer,
    ):
        peer.initialize()
        env = {"HTTP_PROXY": f"http://127.0.0.1:{proxy}"}
        params = peer.start_params(["true"], env=env, enforceManagedNetwork=True, sandbox=read_only())
        code, message = peer.refused("process/start", params)
        assert code == -32602
        assert "network of its own" in message
