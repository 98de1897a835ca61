"""server/serve.py: how a server begins, where it listens, and how it ends."""

from __future__ import annotations

import os
import pty
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from support.frames import TEXT, RawSocket, frame
from support.machine import gone, running, sleep_forever
from support.rpc import StdioPeer, WebSocketPeer
from support.server import COMMAND, RunningServer, fail_to_start, server_environment
from support.tls import certificate, trusting
from support.wait import eventually

StartServer = Callable[..., RunningServer]
Connect = Callable[..., WebSocketPeer]

# Where -------------------------------------------------------------------------------------------


def test_the_default_is_a_free_port_of_loopback() -> None:
    process = subprocess.Popen([COMMAND], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        host, _, port = line.removeprefix("ws://").strip().partition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        with WebSocketPeer(line.strip()) as peer:
            peer.initialize()
    finally:
        process.terminate()
        rest, _ = process.communicate(timeout=20)
    assert (process.returncode, rest) == (0, b"")


def test_a_chosen_port(start_server: StartServer) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start_server(listen=f"ws://127.0.0.1:{port}")
    assert server.url == f"ws://127.0.0.1:{port}"
    code, out, err = fail_to_start("--listen", server.url)
    assert (code, out) == (1, "")
    assert err.startswith("Error: ")


def test_ipv6(start_server: StartServer, connect: Connect) -> None:
    server = start_server(listen="ws://[::1]:0")
    assert server.url.startswith("ws://[::1]:")
    peer = connect(server)
    peer.initialize()
    assert peer.run("echo", "x").stdout == b"x\n"
    peer.send_raw("nonsense")
    port = peer.raw.socket.getsockname()[1]
    prefix = f"failed to parse websocket JSON-RPC message from exec-server websocket [::1]:{port}: "
    assert peer.answer(-1)["error"]["message"].startswith(prefix)


def test_an_address_that_is_not_ours() -> None:
    code, out, err = fail_to_start("--listen", "ws://192.0.2.1:0", "--insecure-no-auth")
    assert (code, out) == (1, "")
    assert err.startswith("Error: ")
    assert "(os error " in err


def test_off(start_server: StartServer) -> None:
    server = start_server(listen="off")
    eventually(lambda: _handles(server.pid, signal.SIGTERM), "the server being ready")
    sockets = [link for link in _links(server.pid) if link.startswith("socket:")]
    assert len(sockets) <= 2  # the loop's own pair, nothing that listens
    assert server.end() == 0


def _handles(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        lines = dict(line.split(":", 1) for line in file.read().splitlines())
    return bool(int(lines["SigCgt"], 16) >> (number - 1) & 1)


def _links(pid: int) -> list[str]:
    return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]


def test_bad_addresses() -> None:
    code, out, err = fail_to_start("--listen", "ws://localhost:0")
    assert (code, out) == (1, "")
    assert err == "Error: invalid websocket --listen URL `ws://localhost:0`; expected `ws://IP:PORT`\n"
    code, _, err = fail_to_start("--listen", "http://127.0.0.1:0")
    assert code == 1
    assert err.startswith(
        "Error: unsupported --listen URL `http://127.0.0.1:0`; expected `ws://IP:PORT` or `stdio`"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-option"],
        ["--listen"],
        ["--concurrent-requests", "0"],
        ["--concurrent-requests", "x"],
        ["--concurrent-requests", "-1"],
        ["--listen", "off", "--listen", "off"],
        ["--ws-auth", "password"],
        ["--detach-ttl", "-1"],
        ["--max-processes", "0"],
        ["--ws-max-clock-skew-seconds", "1.5"],
        ["stray"],
        ["--exit-on-stdin-close=maybe"],
    ],
)
def test_bad_options(arguments: list[str]) -> None:
    code, out, err = fail_to_start(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


def test_a_bad_variable() -> None:
    code, out, err = fail_to_start(env={"CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE": "yes"})
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


# TLS ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


def test_wss(tls: tuple[Path, Path], start_server: StartServer, connect: Connect) -> None:
    cert, key = tls
    server = start_server("--tls-cert", str(cert), "--tls-key", str(key), listen="wss://127.0.0.1:0")
    assert server.url.startswith("wss://127.0.0.1:")
    peer = connect(server, ssl=trusting(cert))
    peer.initialize(binaryOutput=True)
    assert len(peer.run("head", "-c", "10000000", "/dev/zero").stdout) == 10_000_000
    process_id = peer.start("cat", pipeStdin=True)
    data = os.urandom(2_000_000)
    peer.write(process_id, data)
    peer.close_stdin(process_id)
    assert peer.finished(process_id).stdout == data
    with RawSocket(server.url, trusting(cert)) as raw:
        assert raw.ask(path="/readyz").status == 200
        assert raw.ask(path="/", headers={"Origin": "x"}).status == 403


def test_a_renewed_certificate_is_taken_on_sighup(tmp_path: Path, start_server: StartServer) -> None:
    cert, key = certificate(tmp_path)
    server = start_server(
        *("--tls-cert", str(cert), "--tls-key", str(key), "--log-level", "off"), listen="wss://127.0.0.1:0"
    )
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    before = cert.read_text()
    assert ssl.get_server_certificate(address, timeout=20).split() == before.split()
    certificate(tmp_path)
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: ssl.get_server_certificate(address, timeout=20) != before, "the new certificate")
    now = cert.read_text()
    assert ssl.get_server_certificate(address, timeout=20).split() == now.split()
    key.write_text("broken")
    server.process.send_signal(signal.SIGHUP)
    for _ in range(3):
        assert ssl.get_server_certificate(address, timeout=20).split() == now.split()
    assert server.process.poll() is None


def test_sighup_ends_nothing(
    start_server: StartServer, connect: Connect, start_stdio: Callable[..., StdioPeer]
) -> None:
    server = start_server()
    peers = [connect(server), start_stdio()]
    for peer in peers:
        peer.initialize()
    os.kill(server.pid, signal.SIGHUP)
    os.kill(peers[1].server_pid, signal.SIGHUP)
    for peer in peers:
        # A child has the signal as it should be, not as we have it.
        assert peer.run("/bin/sh", "-c", "kill -HUP $$; echo no").exit_code == 129


def test_wss_is_for_those_who_speak_tls(
    tls: tuple[Path, Path], start_server: StartServer, connect: Connect
) -> None:
    cert, key = tls
    server = start_server("--tls-cert", str(cert), "--tls-key", str(key), listen="wss://127.0.0.1:0")
    with RawSocket(server.url) as raw:
        raw.send(b"GET /readyz HTTP/1.1\r\n\r\n")
        assert not raw.socket.recv(100).startswith(b"HTTP")
    with pytest.raises(ssl.SSLError):
        RawSocket(server.url, ssl.create_default_context())
    # A handshake that never comes to an end is no hindrance for others.
    with RawSocket(server.url) as half:
        half.send(b"\x16\x03\x01")
        peer = connect(server, ssl=trusting(cert))
        peer.initialize()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--listen", "wss://127.0.0.1:0"], "`wss://` needs `--tls-cert` and `--tls-key`"),
        (["--listen", "wss://127.0.0.1:0", "--tls-cert", "x"], "`wss://` needs `--tls-cert` and `--tls-key`"),
        (["--tls-cert", "x", "--tls-key", "y"], "`--tls-cert` and `--tls-key` need a `wss://` address"),
        (
            ["--listen", "wss://127.0.0.1:0", "--tls-cert", "/no/such", "--tls-key", "/no/such"],
            "cannot read /no/such, which `--tls-cert` and `--tls-key` name",
        ),
        (
            ["--listen", "wss://0.0.0.0:0", "--tls-cert", "x", "--tls-key", "y"],
            "refusing to start non-loopback",
        ),
    ],
)
def test_bad_tls_settings(arguments: list[str], text: str) -> None:
    code, out, err = fail_to_start(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("Error: ")
    assert text in err


def test_a_certificate_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("nonsense")
    code, out, err = fail_to_start(
        "--listen", "wss://127.0.0.1:0", "--tls-cert", str(file), "--tls-key", str(file)
    )
    assert (code, out) == (1, "")
    assert err.startswith("Error: ")
    assert "Traceback" not in err


# The end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_listening_server_at_once(
    start_server: StartServer, connect: Connect, number: int
) -> None:
    server = start_server()
    peer = connect(server)
    peer.initialize()
    process_id = peer.start("sleep", sleep_forever())
    peer.request("process/wait", {"processId": process_id})
    began = time.monotonic()
    assert server.end(number) == 0
    assert time.monotonic() - began < 10
    assert peer.ended()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_on_stdio_at_once(start_stdio: Callable[..., StdioPeer], number: int) -> None:
    peer = start_stdio()
    peer.initialize()
    peer.start("sleep", sleep_forever())
    assert peer.end(number) == 0
    assert peer.ended()


def test_a_signal_before_anything_was_said(
    start_stdio: Callable[..., StdioPeer], start_server: StartServer
) -> None:
    peer = start_stdio()
    peer.alive()
    assert peer.end(signal.SIGTERM) == 0
    assert start_server().end(signal.SIGINT) == 0


@pytest.mark.parametrize("words", [(), ("rendezvous", "--data")])
def test_a_server_whose_terminal_is_closed_ends(tmp_path: Path, words: tuple[str, ...]) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(COMMAND, [COMMAND, *words, *([str(tmp_path)] if words else ())])
    said = b""
    while not said.endswith(b"\n"):
        said += os.read(terminal, 1024)
    assert b"://127.0.0.1:" in said
    os.kill(pid, signal.SIGHUP)  # from somebody else: it has a terminal still
    port = int(said.decode().strip().rpartition(":")[2])
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=20) as answer:
        assert answer.status == 200
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


GOODBYE = "trap 'echo bye > {note}; exit 0' TERM; echo ready; while :; do sleep 0.01; done"


def test_the_end_gives_grace_to_who_uses_it(
    start_server: StartServer, connect: Connect, tmp_path: Path
) -> None:
    server = start_server("--shutdown-grace", "20")
    peer = connect(server)
    peer.initialize()
    note = tmp_path / "note"
    peer.saw(peer.shell(GOODBYE.format(note=note)), b"ready")
    began = time.monotonic()
    assert server.end() == 0
    assert note.read_text() == "bye\n"
    assert time.monotonic() - began < 15


def test_the_end_of_stdio_gives_grace_too(start_stdio: Callable[..., StdioPeer], tmp_path: Path) -> None:
    for number, how in enumerate(("signal", "end of input")):
        peer = start_stdio("--shutdown-grace", "20")
        peer.initialize()
        note = tmp_path / str(number)
        peer.saw(peer.shell(GOODBYE.format(note=note)), b"ready")
        if how == "signal":
            assert peer.end() == 0
        else:
            peer.end_of_input()
            assert peer.process.wait(20) == 0
        assert note.read_text() == "bye\n"


def test_grace_has_an_end(start_server: StartServer, connect: Connect) -> None:
    server = start_server("--shutdown-grace", "0.2")
    peer = connect(server)
    peer.initialize()
    marker = sleep_forever()
    peer.saw(peer.shell(f"trap '' TERM; echo ready; sleep {marker}"), b"ready")
    began = time.monotonic()
    assert server.end() == 0
    assert 0.2 <= time.monotonic() - began < 10
    gone(marker)


def test_a_second_signal_does_not_wait_for_the_first(start_server: StartServer, connect: Connect) -> None:
    server = start_server("--shutdown-grace", "600")
    peer = connect(server)
    peer.initialize()
    marker = sleep_forever()
    process_id = peer.shell(
        f"trap 'echo asked' TERM; echo ready; setsid sleep {marker} & while :; do sleep 0.01; done"
    )
    peer.saw(process_id, b"ready")
    server.process.send_signal(signal.SIGTERM)
    peer.saw(process_id, b"asked")
    assert server.end(signal.SIGTERM) == 0
    gone(marker)


def test_the_end_of_stdin_is_nothing_to_a_listening_server(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server()
    assert server.process.stdin is not None
    server.process.stdin.close()
    peer = connect(server)
    peer.initialize()
    assert peer.run("echo", "x").stdout == b"x\n"


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_the_end_of_stdin_can_be_the_end(start_server: StartServer, connect: Connect, how: str) -> None:
    if how == "flag":
        server = start_server("--exit-on-stdin-close")
    else:
        server = start_server(env={"CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE": "true"})
    assert server.process.stdin is not None
    peer = connect(server)
    peer.initialize()
    marker = sleep_forever()
    peer.start("sleep", marker)
    policy = {"inherit": "all", "ignoreDefaultExcludes": True, "exclude": [], "set": {}, "includeOnly": []}
    assert b"EXIT_ON_STDIN" not in peer.run("env", envPolicy=policy).stdout
    server.process.stdin.write(b"ignored\n")
    server.process.stdin.flush()
    assert peer.run("echo", "x").stdout == b"x\n"
    server.process.stdin.close()
    assert server.process.wait(20) == 0
    gone(marker)


def test_no_stdin_at_all_is_the_end_of_it() -> None:
    done = subprocess.run(
        [COMMAND, "--exit-on-stdin-close"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
        env=server_environment(),
    )
    assert done.returncode == 0
    assert done.stderr == b""


def test_a_server_can_be_ended_while_clients_come_and_go(start_server: StartServer) -> None:
    server = start_server("--detach-ttl", "0")
    peers = []
    marker = sleep_forever()
    for _ in range(10):
        peer = WebSocketPeer(server.url)
        peer.initialize()
        peer.request("process/start", peer.start_params(["sleep", marker]))
        peers.append(peer)
    for peer in peers[::2]:
        peer.drop()
    assert server.end() == 0
    gone(marker)
    for peer in peers[1::2]:
        assert peer.ended()
        peer.close()


def test_hello_is_for_people(start_server: StartServer) -> None:
    process = subprocess.Popen(
        [COMMAND, "--hello"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    url = process.stdout.readline().decode().strip()
    process.terminate()
    out, err = process.communicate(timeout=20)
    assert out == b""
    assert url in err.decode()


def test_many_connections_at_once(start_server: StartServer) -> None:
    server = start_server()
    raws = [RawSocket(server.url).upgrade() for _ in range(300)]
    for raw in raws:
        raw.send(frame(TEXT, b'{"id":1,"method":"initialize","params":{"clientName":"x"}}'))
    assert len({raw.message()["result"]["sessionId"] for raw in raws}) == 300
    for raw in raws:
        raw.close()
    with RawSocket(server.url) as raw:
        eventually(
            lambda: "exec_server_connections 0.0" in raw.ask(path="/metrics").body, "everybody being gone"
        )


def test_processes_are_not_stopped_by_the_keys_of_the_servers_terminal() -> None:
    # A server in a terminal is ended by ^C; what it started is in sessions of its own.
    marker = sleep_forever()
    with RunningServer() as server, WebSocketPeer(server.url) as peer:
        peer.initialize()
        peer.start("sleep", marker)
        [pid] = eventually(lambda: running(marker), "the sleeper being there")
        assert os.getpgid(pid) != os.getpgid(server.pid)
        assert os.getsid(pid) != os.getsid(server.pid)
