"""transport/unix.py: a socket in the file system."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from support.frames import RawSocket
from support.machine import gone, sleep_forever
from support.rpc import WebSocketPeer
from support.server import RunningServer, fail_to_start


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short enough for an address."""
    return tmp_path_factory.mktemp("s") / "socket"


def test_serves_like_any_other(path: Path, start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--detach-ttl", "0.05", listen=f"unix://{path}")
    assert server.url == f"unix://{path}"
    with WebSocketPeer(server.url) as peer:
        peer.initialize()
        assert len(peer.run("head", "-c", "3000000", "/dev/zero").stdout) == 3_000_000
        marker = sleep_forever()
        peer.start("sleep", marker)
        peer.send_raw("nonsense")
        message = peer.answer(-1)["error"]["message"]
        assert message.startswith(
            "failed to parse websocket JSON-RPC message from exec-server websocket unix:"
        )
    gone(marker)
    with RawSocket(server.url) as raw:
        assert raw.ask(path="/readyz").status == 200


def test_only_the_owner_may_open_it(path: Path, start_server: Callable[..., RunningServer]) -> None:
    before = os.umask(0)
    try:
        start_server(listen=f"unix://{path}")
    finally:
        os.umask(before)
    mode = path.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_no_process_of_the_server_has_its_umask_changed(
    path: Path, start_server: Callable[..., RunningServer]
) -> None:
    server = start_server(listen=f"unix://{path}")
    with WebSocketPeer(server.url) as peer:
        peer.initialize()
        mask = os.umask(0)
        os.umask(mask)
        assert int(peer.run_shell("umask").stdout, 8) == mask


def test_a_socket_that_was_left_behind_is_replaced(
    path: Path, start_server: Callable[..., RunningServer]
) -> None:
    first = start_server(listen=f"unix://{path}")
    first.end(signal.SIGKILL)
    assert path.exists()
    second = start_server(listen=f"unix://{path}")
    with WebSocketPeer(second.url) as peer:
        peer.initialize()


def test_a_socket_in_use_is_left_alone(path: Path, start_server: Callable[..., RunningServer]) -> None:
    first = start_server(listen=f"unix://{path}")
    code, out, err = fail_to_start("--listen", f"unix://{path}")
    assert (code, out) == (1, "")
    assert err.startswith("Error: Address already in use")
    with WebSocketPeer(first.url) as peer:
        peer.initialize()


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.write_text("precious")
    code, _, err = fail_to_start("--listen", f"unix://{path}")
    assert code == 1
    assert err.startswith("Error: Address already in use")
    assert path.read_text() == "precious"


def test_a_place_that_does_not_exist(path: Path) -> None:
    code, _, err = fail_to_start("--listen", f"unix://{path}/no/such")
    assert code == 1
    assert err.startswith("Error: ")
    long = fail_to_start("--listen", "unix:///" + "x" * 200)
    assert long[0] == 1
    assert long[2].startswith("Error: ")


def test_the_socket_goes_with_the_server(path: Path, start_server: Callable[..., RunningServer]) -> None:
    server = start_server(listen=f"unix://{path}")
    assert server.end() == 0
    client = socket.socket(socket.AF_UNIX)
    with pytest.raises(OSError):
        client.connect(str(path))
    client.close()


@pytest.mark.parametrize("successor", ["a server", "a file"])
def test_what_took_the_place_of_the_socket_is_left_alone(
    path: Path, start_server: Callable[..., RunningServer], successor: str
) -> None:
    first = start_server(listen=f"unix://{path}")
    path.unlink()
    if successor == "a file":
        path.write_text("precious")
        assert first.end() == 0
        assert path.read_text() == "precious"
    else:
        second = start_server(listen=f"unix://{path}")
        assert first.end() == 0
        with WebSocketPeer(second.url) as peer:
            peer.initialize()
