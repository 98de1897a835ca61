"""Attending a command: it can be stopped whatever has become of the server, and of whoever reads."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.cable import Cable
from support.machine import gone, running, sleep_forever
from support.server import COMMAND, RunningServer
from support.wait import eventually

LIMIT = 20
"""Less than the 25 s after which a connection that is lost is given up."""


@contextmanager
def lost(server: RunningServer, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A command whose connection was cut, and what marks it."""
    marker = sleep_forever()
    with Cable(server.url) as cable:
        command = [COMMAND, "run", "--url", cable.url, *options, "--", "sh", "-c", f"echo r; sleep {marker}"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"r\n"
            cable.cut()
            yield process, marker
        finally:
            process.kill()
            process.communicate()
            for pid in running(marker):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_while_the_connection_is_lost(server: RunningServer, number: signal.Signals) -> None:
    with lost(server) as (process, _):
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == 128 + number
        assert b"the connection is lost: whether the command still runs is not known\n" in said
        assert b"Traceback" not in said


def test_the_time_is_over_while_the_connection_is_lost(server: RunningServer) -> None:
    with lost(server, "--timeout", "1.5") as (process, marker):
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == 124
        expected = b"1.5s are over, and the connection is lost: whether the command still runs is not known\n"
        assert said == b"exec-server: " + expected
        assert running(marker)  # so it would not have been true that it was killed


def test_the_second_signal_ends_it_when_the_server_does_not_answer() -> None:
    with RunningServer() as server:
        command = [COMMAND, "run", "--url", server.url, "--", "sh", "-c", "echo r; sleep 600"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"r\n"
        os.kill(server.pid, signal.SIGSTOP)
        try:
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=LIMIT)
            assert process.returncode == 130
            assert b"stopped by SIGINT, and the server does not answer" in said
        finally:
            os.kill(server.pid, signal.SIGCONT)
            process.kill()


def test_signals_that_get_through_are_the_commands_affair() -> None:
    script = "n=0; trap 'n=$((n+1)); echo $n' INT; echo 0; while [ $n -lt 3 ]; do sleep 0.05; done; exit 7"
    with subprocess.Popen(
        [COMMAND, "run", "--", "sh", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for number in range(3):
            assert process.stdout.readline() == b"%d\n" % number
            process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"3\n"
        assert process.wait(LIMIT) == 7


def test_ctrl_c_on_a_raw_terminal_ends_it_while_the_connection_is_lost(server: RunningServer) -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    with Cable(server.url) as cable:
        process = subprocess.Popen(
            [COMMAND, "run", "--url", cable.url, "--tty", "--", "sh", "-c", "echo ready; sleep 600"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        try:
            _read_until(master, b"ready")
            cable.cut()
            os.write(master, b"a few keys ")
            _read_until(master, b"connection lost")
            os.write(master, b"\x03")
            _read_until(master, b"whether the command still runs is not known")
            assert process.wait(LIMIT) == 130
            assert termios.tcgetattr(slave) == before
        finally:
            process.kill()
            process.wait()
            os.close(slave)
            os.close(master)


def _read_until(terminal: int, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        seen += os.read(terminal, 4096)


@contextmanager
def unread(*options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that writes into a pipe which is full, and which nobody reads."""
    marker = sleep_forever()
    read_end, write_end = os.pipe()
    script = f"yes > /dev/stdout & sleep {marker} & wait"
    process = subprocess.Popen(
        [COMMAND, "run", *options, "--", "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=write_end,
        stderr=subprocess.PIPE,
    )
    try:
        eventually(lambda: _waiting_bytes(read_end) > 32 * 1024, "a pipe that is full")
        yield process
    finally:
        process.kill()
        process.communicate()
        os.close(read_end)
        os.close(write_end)
        gone(marker)


def _waiting_bytes(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_although_nobody_reads(number: signal.Signals) -> None:
    with unread() as process:
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == 128 + number
        assert said == b"exec-server: the command has ended, and nobody reads the rest of its output\n"


def test_the_time_is_over_although_nobody_reads() -> None:
    with unread("--timeout", "1.5") as process:
        _, said = process.communicate(timeout=LIMIT)
        assert (process.returncode, said) == (124, b"exec-server: killed after 1.5s\n")


def test_output_that_cannot_be_written_is_an_error() -> None:
    for redirected, reason in ((">&-", "Bad file descriptor"), ("> /dev/full", "No space left on device")):
        done = subprocess.run(
            ["sh", "-c", f"'{COMMAND}' run -- echo hi {redirected}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert (done.returncode, done.stderr) == (1, f"exec-server: write error: {reason}\n")
    quiet = subprocess.run(["sh", "-c", f"'{COMMAND}' run -- true >&- 2>&-"], timeout=LIMIT)
    assert quiet.returncode == 0


def test_ctrl_c_before_there_is_a_command_is_quiet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"ws://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [COMMAND, "run", "--url", url, "--", "true"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        silent.settimeout(LIMIT)
        connection, _ = silent.accept()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT)
        connection.close()
        assert (process.returncode, said) == (130, b"")
