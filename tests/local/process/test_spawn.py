"""local/process/spawn.py: how a child begins, and that a failed beginning leaves nothing."""

from __future__ import annotations

import os
import resource
import signal
import stat
import termios
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from exec_server.local.process import tree
from exec_server.local.process.descriptors import keep_spare
from exec_server.local.process.spawn import Spawned, spawn
from exec_server.wire.errors import RpcError
from support.local import spec
from support.machine import descriptors
from support.machine import stat as process_stat
from support.wait import eventually


class Run:
    """A child that was let run to its end."""

    def __init__(self, spawned: Spawned) -> None:
        self.output = b""
        self.streams: dict[str, bytes] = {}
        for name, fd in spawned.outputs:
            os.set_blocking(fd, True)
            parts = []
            try:
                while part := os.read(fd, 65536):
                    parts.append(part)
            except OSError:
                pass  # the terminal is gone
            os.close(fd)
            self.streams[name] = b"".join(parts)
            self.output += self.streams[name]
        if spawned.stdin is not None and spawned.stdin not in [fd for _, fd in spawned.outputs]:
            os.close(spawned.stdin)
        assert spawned.pidfd is not None
        self.status = os.waitid(os.P_PIDFD, spawned.pidfd, os.WEXITED)
        os.close(spawned.pidfd)


def run(*argv: str, **more: Any) -> Run:
    return Run(spawn(spec(*argv, **more)))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No descriptor more than before, and the same limit."""

    def now() -> tuple[set[int], tuple[int, int]]:
        return set(descriptors(os.getpid())), resource.getrlimit(resource.RLIMIT_RTTIME)

    keep_spare()  # what is put by for hard times is there from the first kill on
    before = now()
    yield
    assert now() == before


def refused(*argv: str, **more: Any) -> str:
    with pytest.raises(RpcError) as refusal:
        spawn(spec(*argv, **more))
    assert refusal.value.code == -32603
    return refusal.value.message


@pytest.mark.parametrize("tty", [False, True])
def test_failures(tmp_path: Path, tty: bool) -> None:
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    kind = "PTY" if tty else "pipe"
    missing, denied = "No such file or directory (os error 2)", "Permission denied (os error 13)"
    assert refused("", tty=tty) == f"missing program for {kind} spawn"
    assert refused("/no/such", tty=tty) == missing
    assert refused("./plain", cwd=str(tmp_path), tty=tty) == denied
    assert refused(str(tmp_path), tty=tty) == denied
    assert refused("./plain/x", cwd=str(tmp_path), tty=tty) == "Not a directory (os error 20)"
    assert refused("./" + "x" * 300, tty=tty) == "File name too long (os error 36)"
    assert refused("true", "a\0b", tty=tty) == "nul byte found in provided data"
    assert refused("tr\0ue", tty=tty) == "nul byte found in provided data"
    assert refused("true", arg0="\0", tty=tty) == "nul byte found in provided data"
    for env in ({"A": "\0"}, {"\0": "A"}):
        text = "nul byte found in provided data" if tty else "data provided contains a nul byte"
        assert refused("true", env=env, tty=tty) == text
    assert refused("true", cwd="/no/such", tty=tty) == missing
    assert refused("true", cwd=str(plain), tty=tty) == "Not a directory (os error 20)"
    too_long = "Argument list too long (os error 7)"
    assert refused("/bin/true", "x" * 131_072, tty=tty) == too_long
    assert refused("/bin/true", env={"A": "x" * 131_072}, tty=tty) == too_long
    assert refused("/bin/true", *["x" * 1000] * 10_000, tty=tty) == too_long


def test_a_name_that_is_nowhere() -> None:
    missing = "No such file or directory (os error 2)"
    assert refused("no-such-program") == missing
    assert refused("true", env={"PATH": ""}) == missing
    assert refused("x" * 255) == missing
    assert refused("x" * 256) == "File name too long (os error 36)"
    assert refused("no-such-program", env={"PATH": "/bin:/usr/bin"}, tty=True) == (
        'Unable to spawn no-such-program because:\nNo viable candidates found in PATH "/bin:/usr/bin"'
    )
    assert refused("no-such-program", env={}, tty=True) == (
        "Unable to spawn no-such-program because:\nUnable to resolve the PATH"
    )


def script(path: Path, text: str, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return path


@pytest.mark.parametrize("tty", [False, True])
def test_where_a_program_is_looked_for(tmp_path: Path, tty: bool) -> None:
    script(tmp_path / "one" / "tool", "echo one")
    script(tmp_path / "two" / "tool", "echo two")
    script(tmp_path / "locked" / "tool", "echo locked", mode=0o644)
    script(tmp_path / "tool", "echo here")

    def of(path: str | None, name: str = "tool") -> str:
        env = {} if path is None else {"PATH": path}
        return run(name, cwd=str(tmp_path), env=env, tty=tty).output.decode().strip()

    assert of(f"{tmp_path}/one:{tmp_path}/two") == "one"
    assert of(f"{tmp_path}/none:{tmp_path}/two") == "two"
    assert of("one") == "one"  # relative to the directory of the child
    assert of("none::two") == "here"  # an empty entry is that directory
    assert of(f"{tmp_path}/locked:{tmp_path}/two") == "two"
    assert of("none", "./two/tool") == "two"
    assert of("none", "two/tool") == "two"
    assert run("true", env={}, tty=tty).status.si_status == 0  # the default path
    assert (
        refused("tool", cwd=str(tmp_path), env={"PATH": "locked"}, tty=tty)
        == "Permission denied (os error 13)"
    )


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize("arg0", [None, "", "other name", "/x/y"])
def test_arg0_replaces_only_the_name(arg0: str | None, tty: bool) -> None:
    done = run("cat", "/proc/self/cmdline", arg0=arg0, tty=tty)
    assert done.output == f"{'cat' if arg0 is None else arg0}\0/proc/self/cmdline\0".encode()


@pytest.mark.parametrize("tty", [False, True])
def test_environment_is_exactly_what_was_given(tty: bool) -> None:
    env = {"PATH": "/usr/bin:/bin", "": "empty name", "A=B": "c", "Ü": "ü", "NL": "a\nb"}
    done = run("cat", "/proc/self/environ", env=env, tty=tty)
    words = done.output.replace(b"\r\n", b"\n").split(b"\0")[:-1]
    assert sorted(words) == sorted(f"{name}={value}".encode() for name, value in env.items())


@pytest.mark.parametrize("tty", [False, True])
def test_arguments_are_bytes(tty: bool) -> None:
    # A path that is not UTF-8 comes as text with surrogates.
    done = run("printf", "%s", "\udcff\udcfe", "ü", "", tty=tty)
    assert done.output == b"\xff\xfe" + "ü".encode()


def test_session_and_descriptors_on_pipes() -> None:
    spawned = spawn(spec("cat", pipe_stdin=True))
    try:
        here = process_stat(spawned.pid)
        assert here.group == here.session == spawned.pid
        assert here.terminal == 0
        assert here.parent == os.getpid()
        assert spawned.stdin is not None
        fds = [spawned.stdin, *(fd for _, fd in spawned.outputs)]
        assert not any(os.get_blocking(fd) or os.get_inheritable(fd) for fd in fds)
        assert all(fd > 2 for fd in fds)
    finally:
        assert spawned.stdin is not None
        os.close(spawned.stdin)
        spawned.stdin = None
        Run(spawned)


def test_stdin_is_empty_unless_asked_for() -> None:
    assert run("cat").output == b""
    assert run("readlink", "/proc/self/fd/0").output == b"/dev/null\n"


def test_session_and_descriptors_on_a_terminal() -> None:
    done = run("/bin/sh", "-c", 'tty; cut -d" " -f1,5,6,8 /proc/$$/stat; stty -a', tty=True)
    name, ids, *settings = done.output.decode().split("\r\n")
    assert name.startswith("/dev/pts/")
    pid, group, session, foreground = ids.split()
    assert pid == group == session == foreground
    assert "rows 24; columns 80" in settings[0]
    for word in ("icanon", "echo", "opost", "onlcr", "isig"):
        assert word in " ".join(settings).split()


def test_the_size_of_a_terminal() -> None:
    assert run("stty", "size", tty=True, rows=50, cols=132).output == b"50 132\r\n"


def test_the_terminal_is_the_controlling_one() -> None:
    assert run("/bin/sh", "-c", "echo hello > /dev/tty", tty=True).output == b"hello\r\n"


@pytest.mark.parametrize("tty", [False, True])
def test_signals_are_as_they_are_by_default(tty: bool) -> None:
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    thread = Thread(target=int)  # with threads, the C library has handlers for signals of its own: 32 and 33
    thread.start()
    thread.join()
    try:
        done = run("cat", "/proc/self/status", tty=tty)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGPIPE, before[0])
        signal.signal(signal.SIGHUP, before[1])
    lines = dict(line.split(":", 1) for line in done.output.decode().splitlines())
    for name in ("SigBlk", "SigIgn", "SigCgt"):
        assert int(lines[name], 16) == 0, name


def test_umask_and_limits_are_inherited(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run("touch", str(tmp_path / "file"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    assert run("/bin/sh", "-c", "ulimit -S -c").output.strip() in (str(soft).encode(), b"unlimited")


@pytest.mark.parametrize("tty", [False, True])
def test_a_tag_is_carried_by_the_child_alone(tty: bool) -> None:
    tag = (1 << 30 | 12345) << 32 | 1
    spawned = spawn(spec("sleep", "60", tty=tty, tag=tag))
    try:
        assert (spawned.pid, tag) in list(tree.processes())
        assert (os.getpid(), tag) not in list(tree.processes())
        assert tree.kill_tagged(tag.__eq__) == 1
        eventually(lambda: process_stat(spawned.pid).state == "Z", "the end of the child")
        assert tree.kill_tagged(tag.__eq__) == 0  # a corpse is not killed again
    finally:
        done = Run(spawned)
    assert (done.status.si_code, done.status.si_status) == (os.CLD_KILLED, signal.SIGKILL)


def test_the_terminal_hangs_up_when_nobody_holds_it() -> None:
    spawned = spawn(spec("sleep", "60", tty=True))
    os.close(spawned.outputs[0][1])
    spawned.outputs, spawned.stdin = [], None
    done = Run(spawned)
    assert done.status.si_status == signal.SIGHUP


def test_keys_of_a_terminal() -> None:
    spawned = spawn(spec("/bin/sh", "-c", "echo ready; exec sleep 60", tty=True))
    fd = spawned.outputs[0][1]
    eventually(lambda: _read(fd), "the child to be there")
    assert termios.tcgetattr(fd)[6][termios.VINTR] == b"\x03"
    os.write(fd, b"\x03")
    assert Run(spawned).status.si_status == signal.SIGINT


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 100)
    except BlockingIOError:
        return b""
