"""`exec-server run`: as if the command ran in this terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.cable import Cable
from support.machine import gone, running, sleep_forever
from support.server import COMMAND, RunningServer
from support.tls import certificate
from support.wait import eventually

LIMIT = 40


@pytest.fixture(params=["here", "there"])
def where(request: pytest.FixtureRequest, server: RunningServer) -> list[str]:
    return [] if request.param == "here" else ["--url", server.url]


def run(where: list[str], *words: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([COMMAND, "run", *where, *words], capture_output=True, timeout=LIMIT, **options)  # type: ignore[call-overload]


def test_output_error_and_code(where: list[str]) -> None:
    done = run(where, "--", "sh", "-c", "echo out; echo err >&2; exit 9")
    assert (done.stdout, done.stderr, done.returncode) == (b"out\n", b"err\n", 9)


def test_input_of_every_kind(where: list[str], tmp_path: Path) -> None:
    data = os.urandom(500_000)
    assert run(where, "--", "cat", input=data).stdout == data
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        assert run(where, "--", "cat", stdin=file).stdout == data
    assert run(where, "--", "cat", stdin=subprocess.DEVNULL).stdout == b""


def test_variables_and_directory(where: list[str]) -> None:
    done = run(where, "--cwd", "/usr", "--setenv", "A=b=c", "--", "sh", "-c", "pwd; echo $A")
    assert done.stdout == b"/usr\nb=c\n"
    assert run(where, "--setenv", "nonsense", "--", "true").returncode == 2


def test_credentials_are_handed_on_here_and_nowhere_else(server: RunningServer) -> None:
    """Here the command is as much ours as the terminal, unless it is sandboxed."""
    env = {**os.environ, "CODEX_API_KEY": "mine"}
    say = ("--", "sh", "-c", "echo [$CODEX_API_KEY]")
    assert run([], *say, env=env).stdout == b"[mine]\n"
    assert run([], "--setenv", "CODEX_API_KEY=other", *say, env=env).stdout == b"[other]\n"
    for where in (["--sandbox", "read-only"], ["--url", server.url]):
        assert run(where, *say, env=env).stdout == b"[]\n"


def test_signals_are_passed_on(where: list[str]) -> None:
    script = "trap 'echo got it; exit 6' TERM; echo ready; while :; do sleep 0.05; done"
    command = [COMMAND, "run", *where, "--", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == b"got it\n"
        assert process.wait(LIMIT) == 6


def test_death_by_signal_and_what_cannot_start(where: list[str]) -> None:
    assert run(where, "--", "sh", "-c", "kill -9 $$").returncode == 137
    done = run(where, "--", "no-such-program-anywhere")
    assert done.returncode == 127
    assert b"cannot run no-such-program-anywhere" in done.stderr
    assert b"No such file or directory" in done.stderr
    assert run(where, "--", "/etc").returncode == 126


def test_a_timeout_kills(where: list[str]) -> None:
    marker = sleep_forever()
    done = run(where, "--timeout", "1.5", "--", "sleep", marker)
    assert done.returncode == 124
    assert b"killed after 1.5s" in done.stderr
    gone(marker)


def test_the_time_begins_before_the_connection() -> None:
    with RunningServer() as stopped:
        stopped.process.send_signal(signal.SIGSTOP)
        try:
            done = run(["--url", stopped.url], "--timeout", "0.5", "--", "true")
        finally:
            stopped.process.send_signal(signal.SIGCONT)
    assert done.stderr == b"exec-server: 0.5s are over, and there is no connection\n"
    assert done.returncode == 124


def test_a_reader_that_leaves_ends_it(where: list[str]) -> None:
    marker = sleep_forever()
    script = f"exec '{COMMAND}' run {' '.join(where)} -- sh -c 'yes; sleep {marker}' | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=LIMIT)
    assert done.stdout == b"y\n"
    gone(marker)


def test_it_takes_its_tree_along_when_killed() -> None:
    marker = sleep_forever()
    process = subprocess.Popen([COMMAND, "run", "--", "sh", "-c", f"setsid sleep {marker} & sleep {marker}"])
    eventually(lambda: len(running(marker)) >= 3, "the tree")
    process.kill()
    process.wait(LIMIT)
    gone(marker)


def test_a_terminal_at_both_ends(where: list[str]) -> None:
    master, slave = pty.openpty()
    os.system(f"stty rows 31 cols 97 < {os.ttyname(slave)}")
    process = subprocess.Popen(
        [COMMAND, "run", *where, "--tty", "--", "sh", "-c", "stty size; read x; echo got $x"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    seen = b""
    while b"31 97" not in seen:
        seen += os.read(master, 4096)
    os.write(master, b"word\r")
    try:
        while part := os.read(master, 4096):
            seen += part
    except OSError:
        pass
    assert b"got word" in seen
    assert process.wait(LIMIT) == 0
    os.close(master)


@pytest.mark.parametrize("on_terminal", [True, False])
def test_an_outage_is_told_on_a_terminal_only(
    server: RunningServer, tmp_path: Path, on_terminal: bool
) -> None:
    go = tmp_path / "go"
    script = f"echo ready; until test -e '{go}'; do sleep 0.02; done; echo done"
    master, slave = pty.openpty()
    with Cable(server.url) as cable:
        process = subprocess.Popen(
            [COMMAND, "run", "--url", cable.url, "--", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=slave if on_terminal else subprocess.PIPE,
        )
        os.close(slave)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        cable.cut()
        if on_terminal:
            assert _until(master, "…") == "\nexec-server: connection lost; making it again …"
            cable.mend()
            assert _until(master, "again\n") == "\n\nexec-server: connected again\n"
        else:
            cable.mend()
        go.touch()
        out, err = process.communicate(timeout=LIMIT)
        assert (out, err, process.returncode) == (b"done\n", None if on_terminal else b"", 0)
    os.close(master)


def _until(terminal: int, wanted: str) -> str:
    """What a terminal shows, without the returns: the terminal adds some of its own."""
    seen = b""
    while wanted not in (text := seen.decode("utf-8", "ignore").replace("\r", "")):
        try:
            seen += os.read(terminal, 1)
        except OSError:
            pytest.fail(f"it ended; on the terminal was {text!r}")
    return text


def test_a_server_that_is_not_there() -> None:
    done = run(["--url", "ws://127.0.0.1:1"], "--", "true")
    assert done.returncode == 1
    assert done.stderr.startswith(b"Error: failed to connect to exec-server websocket")
    assert b"Traceback" not in done.stderr


def test_something_else_that_is_there(tmp_path: Path) -> None:
    done = run(["--url", "stdio:cat"], "--", "true")
    assert done.returncode == 1
    assert done.stderr.startswith(b"Error: stdio:cat: that is not an exec-server")
    cert, key = certificate(tmp_path)
    with RunningServer("--tls-cert", str(cert), "--tls-key", str(key), listen="wss://127.0.0.1:0") as server:
        done = run(["--url", server.url.replace("wss://", "ws://")], "--", "true")
    assert (done.returncode, b"its address begins with wss://" in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize("wrong", ["-1", "0", "nan", "inf"])
def test_a_time_that_is_none(wrong: str) -> None:
    done = run(["--timeout", wrong], "--", "true")
    assert (done.returncode, b"no number of seconds to wait" in done.stderr) == (2, True)


IMPORTED = """
import os, sys
sys.argv[1:] = ["run", "--", "true"]
heavy = ("aiohttp", "picows", "rich", "structlog", "jwt", "prometheus_client")
os._exit = lambda code: print([name for name in heavy if name in sys.modules])
from exec_server.cli import main
main()
"""


def test_nothing_heavy_is_imported_for_a_local_command() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
