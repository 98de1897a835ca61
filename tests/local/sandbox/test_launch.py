"""local/sandbox/launch.py: commands in sandboxes, through a real server, as its clients see them."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.process.spawn import SpawnSpec
from exec_server.local.sandbox import launch, mountpoints, probe
from exec_server.local.sandbox.plan import Bind, Plan, PrivateDevices
from exec_server.local.sandbox.probe import Backend
from exec_server.wire.errors import RpcError
from support.machine import sleep_forever
from support.rpc import Peer, WebSocketPeer
from support.sandbox import (
    FORBIDDING,
    entry,
    full_access,
    profile,
    read_only,
    run_in,
    scoped,
    start_in,
    workspace_write,
)
from support.server import COMMAND, RunningServer
from support.unprivileged import NOBODY, as_nobody, reachable_command
from support.wait import eventually

pytestmark = pytest.mark.usefixtures("needs_bubblewrap")

NO_NETWORK = profile(None)
"""Every file, but no network: filters alone."""

PLACES = {"bubblewrap": read_only(), "filter": NO_NETWORK, "plain": full_access(), "landlock": read_only()}


@pytest.fixture(scope="module")
def landlocked() -> Iterator[WebSocketPeer]:
    """A connection to a server that may make no user namespaces."""
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(command=(*FORBIDDING, COMMAND)))
        peer = stack.enter_context(WebSocketPeer(server.url, server.pid))
        peer.initialize()
        yield peer


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def peer(place: str, ws: WebSocketPeer, landlocked: WebSocketPeer) -> WebSocketPeer:
    return landlocked if place == "landlock" else ws


@pytest.fixture
def sandbox(place: str) -> dict[str, Any]:
    return PLACES[place]


# As any other process ----------------------------------------------------------------------------


def test_output_and_exit_code(peer: WebSocketPeer, sandbox: dict[str, Any]) -> None:
    record = run_in(peer, sandbox, "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (record.stdout, record.stderr, record.exit_code) == (b"out\n", b"err\n", 7)
    assert run_in(peer, sandbox, "sh", "-c", "kill -TERM $$").exit_code == 128 + signal.SIGTERM


def test_input(peer: WebSocketPeer, sandbox: dict[str, Any]) -> None:
    running = start_in(peer, sandbox, "cat", pipeStdin=True)
    assert peer.write(running, b"through") == "accepted"
    peer.close_stdin(running)
    assert peer.finished(running).stdout == b"through"
    assert run_in(peer, sandbox, "cat").stdout == b""


def test_terminal(peer: WebSocketPeer, place: str, sandbox: dict[str, Any]) -> None:
    script = "tty; stty size; trap 'stty size; exit 3' WINCH; echo ready; while :; do sleep 0.05; done"
    size = {"ptySize": {"rows": 30, "cols": 90}}
    running = start_in(peer, sandbox, "sh", "-c", script, tty=True, **size)
    peer.saw(running, b"ready")
    peer.call("process/resize", {"processId": running, "rows": 31, "cols": 91})
    record = peer.finished(running)
    assert record.exit_code == 3
    assert b"30 90" in record.terminal
    assert b"31 91" in record.terminal
    if place != "bubblewrap":  # inside, a private /dev/pts does not know the terminal's name
        assert record.terminal.startswith(b"/dev/pts/")


def test_environment(peer: WebSocketPeer, sandbox: dict[str, Any]) -> None:
    env = {"A": "1", "B": "two words", "C": "", "UMLAUT": "ü", "WITH": "a=b"}
    record = run_in(peer, sandbox, "/usr/bin/env", env=env)
    found = dict(line.split("=", 1) for line in record.stdout.decode().splitlines())
    found.pop("PWD", None)  # bubblewrap's
    assert found == env


def test_name(peer: WebSocketPeer, sandbox: dict[str, Any]) -> None:
    record = run_in(peer, sandbox, "cat", "/proc/self/cmdline", arg0="other name")
    assert record.stdout == b"other name\0/proc/self/cmdline\0"


def test_working_directory(peer: WebSocketPeer, sandbox: dict[str, Any], tmp_path: Path) -> None:
    record = run_in(peer, sandbox, "pwd", cwd=f"file://{tmp_path}")
    assert record.stdout.decode().strip() == str(tmp_path)
    params = {**peer.start_params(["pwd"], cwd=f"file://{tmp_path}/missing"), "sandbox": sandbox}
    assert peer.refused("process/start", params) == (-32603, "No such file or directory (os error 2)")


def test_a_program_that_is_not_there(peer: WebSocketPeer, sandbox: dict[str, Any]) -> None:
    """Peers expect a process that says so."""
    for program in ("no-such-program", "/no/such/program"):
        record = run_in(peer, sandbox, program)
        assert record.exit_code not in (0, None)
        assert b"No such file or directory" in record.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_command(
    peer: WebSocketPeer, sandbox: dict[str, Any], number: signal.Signals
) -> None:
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo heard; exit 5' {name}; echo ready; while :; do sleep 0.02; done"
    running = start_in(peer, sandbox, "sh", "-c", script)
    peer.saw(running, b"ready")
    sent = "interrupt" if number is signal.SIGINT else number.name
    peer.call("process/signal", {"processId": running, "signal": sent})
    record = peer.finished(running)
    assert (record.stdout, record.exit_code) == (b"ready\nheard\n", 5)


def test_a_signal_that_comes_early_is_not_lost(peer: WebSocketPeer, sandbox: dict[str, Any]) -> None:
    for _ in range(5):
        running = start_in(peer, sandbox, "sleep", "1000")
        peer.call("process/signal", {"processId": running, "signal": "interrupt"})
        assert peer.finished(running).exit_code == 128 + signal.SIGINT


def test_asked_to_go(peer: WebSocketPeer, sandbox: dict[str, Any]) -> None:
    running = start_in(peer, sandbox, "sh", "-c", "trap 'exit 9' TERM; echo up; while :; do sleep 0.02; done")
    peer.saw(running, b"up")
    peer.terminate(running, mode={"type": "graceful", "timeoutMs": 60_000})
    assert peer.finished(running).exit_code == 9


def test_terminate(peer: WebSocketPeer, sandbox: dict[str, Any]) -> None:
    running = start_in(peer, sandbox, "sh", "-c", "echo up; sleep 1000")
    peer.saw(running, b"up")
    assert peer.terminate(running) == {"running": True}
    assert peer.finished(running).exit_code == 137


def test_everybody_inside_is_marked(connect: Callable[..., WebSocketPeer]) -> None:
    """What marks a tree is inherited into the sandbox and can be seen from outside."""
    peer = connect()
    peer.initialize(extensions=True)
    away, inside = sleep_forever(), sleep_forever()
    running = start_in(peer, read_only(), "sh", "-c", f"setsid sleep {away} & echo up; sleep {inside}")
    marks = {
        mark_of(eventually(lambda argv=argv: pid_of(*argv), " ".join(argv)))
        for argv in (("sleep", away), ("sleep", inside))
    }
    assert len(marks) == 1
    assert b"unlimited" not in marks.pop().split()[3:4]
    # Those inside may be gone with the first of them before they are counted.
    assert peer.terminate(running)["killed"] >= 1
    assert peer.finished(running).exit_code == 137
    assert pid_of("sleep", away) is None


def pid_of(*argv: str) -> int | None:
    """A process with exactly this command line, seen from outside."""
    wanted = "".join(f"{word}\0" for word in argv).encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if Path(f"/proc/{name}/cmdline").read_bytes() == wanted:
                return int(name)
        except OSError:
            pass  # it has ended
    return None


def mark_of(pid: int) -> bytes:
    """The limit that marks a tree."""
    limits = Path(f"/proc/{pid}/limits").read_bytes().splitlines()
    return next(line for line in limits if line.startswith(b"Max realtime timeout"))


def test_a_program_that_may_not_be_run(peer: WebSocketPeer, sandbox: dict[str, Any]) -> None:
    record = run_in(peer, sandbox, "/etc/passwd")
    assert record.exit_code in (1, 126)
    assert b"Permission denied" in record.output


def test_listing_shows_the_command(place: str, connect: Callable[..., WebSocketPeer]) -> None:
    if place == "landlock":
        return
    peer = connect()
    peer.initialize(extensions=True)
    running = start_in(peer, PLACES[place], "sleep", "1000")
    assert peer.state(running)["argv"] == ["sleep", "1000"]
    peer.terminate(running)


def test_the_three_kinds_of_nothing(ws: WebSocketPeer) -> None:
    """What restricts nothing runs as it is; with filters alone there are no namespaces either."""
    host = os.readlink("/proc/self/ns/pid")
    external = {"windowsSandboxLevel": "disabled", "permissions": {"type": "external", "network": "enabled"}}
    show = ["sh", "-c", "readlink /proc/self/ns/pid; grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status"]
    for free in (full_access(), external, profile(None, network=True)):
        assert run_in(ws, free, *show).stdout.decode().split() == [host, "NoNewPrivs:", "0", "Seccomp:", "0"]
    filtered = run_in(ws, NO_NETWORK, *show).stdout.decode().split()
    assert filtered == [host, "NoNewPrivs:", "1", "Seccomp:", "2"]


# What is kept from it ----------------------------------------------------------------------------


def test_background_children_end_with_the_command(ws: WebSocketPeer, tmp_path: Path) -> None:
    marker = tmp_path / "alive"
    script = f"(while :; do touch {marker}; sleep 0.01; done) & while [ ! -e {marker} ]; do :; done"
    record = run_in(ws, workspace_write(tmp_path), "sh", "-c", script)
    assert record.exit_code == 0
    marker.unlink(missing_ok=True)
    # Had it lived on, it would have held the output open and the process would not have closed.
    assert not marker.exists()


def test_a_scoped_profile_shows_nothing_else(ws: WebSocketPeer, tmp_path: Path) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "hidden").write_text("secret")
    (tmp_path / "shown" / "file").write_text("content\n")
    sandbox = scoped(tmp_path / "shown")
    script = f"cat {tmp_path}/shown/file; ls -A {tmp_path}; cat {tmp_path}/hidden; pwd"
    record = run_in(ws, sandbox, "sh", "-c", script, cwd=f"file://{tmp_path}")
    assert record.stdout.decode().split() == ["content", "shown", "/"]
    assert b"No such file or directory" in record.stderr


def test_denied_paths(ws: WebSocketPeer, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("secret")
    (tmp_path / "key.env").write_text("secret")
    denied = [entry(tmp_path / "folder", "deny"), entry(f"{tmp_path}/*.env", "deny")]
    sandbox = workspace_write(tmp_path, more=denied)
    record = run_in(ws, sandbox, "sh", "-c", "cat folder/file; cat key.env", cwd=f"file://{tmp_path}")
    assert record.stdout == b""
    assert record.stderr.count(b"Permission denied") == 2
    assert (tmp_path / "key.env").read_text() == "secret"


def test_private_devices(ws: WebSocketPeer) -> None:
    listed = set(run_in(ws, read_only(), "ls", "/dev").stdout.decode().split())
    links = {"ptmx", "core", "stdin", "stdout", "stderr"}
    assert listed - links == {"null", "zero", "full", "random", "urandom", "tty", "shm", "pts", "fd"}


def test_variables_have_no_effect_outside(ws: WebSocketPeer, tmp_path: Path) -> None:
    """bubblewrap itself sees none of the command's variables, and other users see them nowhere."""
    running = start_in(
        ws, workspace_write(tmp_path), "sh", "-c", "echo up; exec sleep 1000", env={"LD_PRELOAD": "/x.so"}
    )
    ws.saw(running, b"up")
    keepers = [
        Path("/proc", pid)
        for pid in os.listdir("/proc")
        if pid.isdigit() and _command(pid).startswith(b"/usr/bin/bwrap")
    ]
    assert keepers
    for keeper in keepers:
        try:
            assert b"LD_PRELOAD" not in (keeper / "cmdline").read_bytes()
            assert b"LD_PRELOAD" not in (keeper / "maps").read_bytes()
        except OSError:
            continue
    ws.terminate(running)


def _command(pid: str) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""


def test_more_masks_than_descriptors(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer], tmp_path: Path
) -> None:
    command = ("/bin/bash", "-c", 'ulimit -Sn 128; exec "$@"', "bash", COMMAND)
    peer = connect(start_server(command=command))
    peer.initialize()
    for number in range(200):
        (tmp_path / f"{number}.env").write_text("secret")
    sandbox = workspace_write(tmp_path, more=[entry(f"{tmp_path}/*.env", "deny")])
    record = run_in(peer, sandbox, "sh", "-c", "cat *.env; exit 3", cwd=f"file://{tmp_path}")
    assert (record.stdout, record.exit_code) == (b"", 3)
    assert record.stderr.count(b"Permission denied") == 200


def test_more_than_bubblewrap_takes_is_refused(ws: WebSocketPeer) -> None:
    env = {f"V{number}": "x" for number in range(3100)}
    params = {**ws.start_params(["true"], env=env), "sandbox": read_only()}
    code, message = ws.refused("process/start", params)
    assert code == -32602
    assert message.startswith("failed to prepare process sandbox: the sandbox and its command would take ")


def test_our_notes_cannot_be_seen_inside() -> None:
    """Whoever could would have files of anybody's taken away in our name, or lock them for ever."""
    steps = (Bind(b"/", b"/", writable=True), PrivateDevices())
    spec = SpawnSpec(argv=["true"], cwd="/", env={}, tty=False, pipe_stdin=False)
    notes = os.fsencode(mountpoints.folder())
    for readable, writable, hidden in (
        ((b"/",), (), True),
        ((), (b"/",), True),
        ((b"/etc",), (b"/usr",), False),
    ):
        plan = Plan(kind="view", network="closed", steps=steps, readable=readable, writable=writable)
        made = launch.carry_out(plan, probe.backend(), spec)
        words = os.read(made.inherited[-1], 10_000)
        mask = b"\0".join([b"--perms", b"000", b"--tmpfs", notes, b"--remount-ro", notes])
        assert (mask in words) is hidden
        made.close()
        assert made.release is not None
        made.release(None)


# Denials -----------------------------------------------------------------------------------------


def test_denials_are_seen(peer: WebSocketPeer, place: str, sandbox: dict[str, Any], tmp_path: Path) -> None:
    script = (
        f"touch {tmp_path}/x" if place in ("bubblewrap", "landlock") else "echo permission denied; exit 1"
    )
    running = start_in(peer, sandbox, "sh", "-c", script)
    record = peer.finished(running)
    assert record.exit_code == 1
    assert record.sandbox_denied is True
    assert peer.read(running)["sandboxDenied"] is True
    assert list(tmp_path.iterdir()) == []


def test_who_knows_extensions_gets_the_better_answer(connect: Callable[..., WebSocketPeer]) -> None:
    for extensions in (False, True):
        peer = connect()
        peer.initialize(extensions=extensions)
        running = start_in(peer, read_only(), "sh", "-c", "echo test_sandbox.py failed; exit 1")
        record = peer.finished(running)
        assert record.sandbox_denied is not extensions
        assert peer.read(running)["sandboxDenied"] is not extensions
        running = start_in(peer, read_only(), "sh", "-c", "echo > /x")
        assert peer.finished(running).sandbox_denied is True


# Errors ------------------------------------------------------------------------------------------


def test_without_a_mechanism_nothing_starts() -> None:
    plan = Plan(kind="view", network="closed", readable=(b"/",))
    spec = SpawnSpec(argv=["true"], cwd="/", env={}, tty=False, pipe_stdin=False)
    backend = Backend(name="none", reasons=("bubblewrap is not installed; install it", "no Landlock"))
    with pytest.raises(RpcError) as caught:
        launch.carry_out(plan, backend, spec)
    assert caught.value.code == -32602
    assert caught.value.message == (
        "sandbox intent cannot be enforced on this executor: "
        "bubblewrap is not installed; install it; no Landlock"
    )
    only_filters = Backend(name="filter", filters=True)
    with pytest.raises(RpcError):
        launch.carry_out(plan, only_filters, spec)
    assert launch.carry_out(Plan(kind="filter", network="closed"), only_filters, spec).confine is not None


FAKE = """#!/bin/sh
case "$*" in
  --help) exec {real} --help;;
  --version) echo bubblewrap 9.9;;
  *--args*) echo "bwrap: this one is broken" >&2; exit 1;;
  *) exec {real} "$@";;
esac
"""


def test_a_sandbox_that_fails_runs_nothing(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer], tmp_path: Path
) -> None:
    """It passed its trial and then breaks: the process fails, and nothing weaker is used instead."""
    fake = tmp_path / "bin" / "bwrap"
    fake.parent.mkdir()
    fake.write_text(FAKE.format(real="/usr/bin/bwrap"))
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    peer = connect(start_server(env={"PATH": f"{fake.parent}:/usr/bin:/bin"}))
    peer.initialize()
    record = run_in(peer, read_only(), "touch", str(tmp_path / "ran"))
    assert (record.exit_code, record.stderr) == (1, b"bwrap: this one is broken\n")
    assert not (tmp_path / "ran").exists()
    assert peer.call("environment/info")["sandbox"] == {
        "backend": "bubblewrap",
        "version": "bubblewrap 9.9",
        "landlockAbi": peer.call("environment/info")["sandbox"]["landlockAbi"],
    }


def test_paths_of_another_system(ws: WebSocketPeer) -> None:
    foreign = "file:///C:/x"
    entries = [entry(":root", "read")]
    cases = [
        (profile([*entries, entry("/C:/x", "write")]), "invalid sandbox permission path URI: "),
        (
            {**profile(entries), "cwd": foreign},
            f"sandbox cwd URI `{foreign}` is not valid on this exec-server",
        ),
        ({**profile(entries), "workspaceRoots": [foreign]}, f"sandbox workspace root URI `{foreign}` is not"),
    ]
    for sandbox, words in cases:
        code, message = ws.refused("process/start", {**ws.start_params(["true"]), "sandbox": sandbox})
        assert code == -32602
        assert message.startswith(words)


# As an ordinary user -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def nobodys(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """A connection to the server of a user without any rights of its own."""
    command = reachable_command()
    if request.param == "landlock":
        command = [command[0], "-I", FORBIDDING[-1], *command]
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(command=command, cwd="/", **as_nobody()))
        peer = stack.enter_context(WebSocketPeer(server.url, server.pid))
        peer.initialize()
        yield peer


def test_ordinary_user(nobodys: Peer) -> None:
    record = run_in(nobodys, read_only(), "sh", "-c", "id -u; echo > /tmp/x; grep CapBnd /proc/self/status")
    user = NOBODY if os.getuid() == 0 else os.getuid()
    assert record.stdout.split()[0] == str(user).encode()
    assert b"Read-only file system" in record.stderr or b"Permission denied" in record.stderr
    assert run_in(nobodys, read_only(), "python3", "-c", "import socket; socket.socket()").exit_code == 1
    running = start_in(nobodys, read_only(), "sh", "-c", "setsid sleep 1000 & echo up; sleep 1000")
    nobodys.saw(running, b"up")
    nobodys.terminate(running)
    assert nobodys.finished(running).exit_code == 137


def test_ordinary_user_writes_its_workspace(nobodys: Peer, request: pytest.FixtureRequest) -> None:
    if "landlock" in request.node.name:
        return  # it refuses: see test_escapes.py
    with tempfile.TemporaryDirectory() as folder:
        if os.getuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        record = run_in(
            nobodys,
            workspace_write(folder),
            "sh",
            "-c",
            "touch x; mkdir .git/y; ls -A",
            cwd=f"file://{folder}",
        )
        assert record.stdout.decode().split() == [".agents", ".aws", ".codex", ".git", "x"]
        assert os.listdir(folder) == ["x"]
