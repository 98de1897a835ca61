"""local/sandbox/mountpoints.py: what a view needs on the host is there while it is needed, and then gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exec_server.local.sandbox import mountpoints
from support.rpc import WebSocketPeer
from support.sandbox import entry, run_in, start_in, workspace_write
from support.server import RunningServer
from support.wait import eventually

NAMES = (".agents", ".aws", ".codex", ".git")


def notes_on(folder: Path) -> list[str]:
    """Notes of anybody about anything below a folder."""
    found = []
    for name in os.listdir(mountpoints.folder()):
        try:
            text = Path(mountpoints.folder(), name).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            continue
        if text.startswith(os.fsencode(folder)):
            found.append(os.fsdecode(text))
    return found


# Notes alone -------------------------------------------------------------------------------------


def test_nothing_to_do_for_what_exists(tmp_path: Path) -> None:
    assert mountpoints.claim({os.fsencode(tmp_path): True}) is None
    assert notes_on(tmp_path) == []


def test_what_was_made_is_taken_away(tmp_path: Path) -> None:
    directory, file = tmp_path / "directory", tmp_path / "file"
    claim = mountpoints.claim({os.fsencode(directory): True, os.fsencode(file): False})
    assert claim is not None
    assert directory.is_dir()
    assert (file.stat().st_size, file.stat().st_mode & 0o777) == (0, 0o444)
    assert len(notes_on(tmp_path)) == 2
    claim.release(orderly=True)
    assert list(tmp_path.iterdir()) == []
    assert notes_on(tmp_path) == []
    claim.release()


def test_what_somebody_has_used_stays(tmp_path: Path) -> None:
    directory, file = tmp_path / "directory", tmp_path / "file"
    claim = mountpoints.claim({os.fsencode(directory): True, os.fsencode(file): False})
    assert claim is not None
    file.chmod(0o644)
    (directory / "content").touch()
    file.write_text("content")
    claim.release(orderly=True)
    assert sorted(tmp_path.iterdir()) == [directory, file]
    assert notes_on(tmp_path) == []


@pytest.mark.parametrize("first", [0, 1])
def test_who_leaves_last_takes_it_away(tmp_path: Path, first: int) -> None:
    """The second finds it already there, and needs it all the same."""
    point = tmp_path / "point"
    claims = [mountpoints.claim({os.fsencode(point): True}) for _ in range(2)]
    one, other = claims[first], claims[1 - first]
    assert one is not None
    assert other is not None
    one.release(orderly=True)
    assert point.is_dir()
    other.release(orderly=True)
    assert not point.exists()


def test_what_somebody_else_made_there_stays(tmp_path: Path) -> None:
    """Even if it is empty, and got the inode of what was there before."""
    points = {os.fsencode(tmp_path / "directory"): True, os.fsencode(tmp_path / "file"): False}
    claim = mountpoints.claim(points)
    assert claim is not None
    (tmp_path / "directory").rmdir()
    (tmp_path / "file").unlink()
    os.utime(tmp_path)  # clocks of file systems are coarse
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    os.utime(tmp_path / "directory", (1, 1))
    os.utime(tmp_path / "file", (1, 1))
    claim.release(orderly=True)
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]
    assert notes_on(tmp_path) == []


def test_nothing_is_made_or_taken_away_behind_a_link(tmp_path: Path) -> None:
    real, elsewhere = tmp_path / "real", tmp_path / "elsewhere"
    real.mkdir()
    claim = mountpoints.claim({os.fsencode(real / "point"): True})
    assert claim is not None
    real.rename(elsewhere)
    real.symlink_to(elsewhere)
    with pytest.raises(mountpoints.Turned, match="real is not what it was"):
        mountpoints.claim({os.fsencode(real / "other"): True})
    claim.release(orderly=True)
    assert os.listdir(elsewhere) == ["point"]
    assert notes_on(tmp_path) == []


NOTE_AND_DIE = """
import os, sys
from exec_server.local.sandbox import mountpoints
mountpoints.claim({os.fsencode(sys.argv[1]): True})
print("noted", flush=True)
os.kill(os.getpid(), 9)
"""


def test_notes_of_the_dead_are_swept_up(tmp_path: Path) -> None:
    point = tmp_path / "point"
    done = subprocess.run([sys.executable, "-c", NOTE_AND_DIE, str(point)], capture_output=True, check=False)
    assert done.stdout == b"noted\n", done.stderr
    assert point.is_dir()
    eventually(mountpoints.sweep, "nobody is just ending")
    assert not point.exists()
    assert notes_on(tmp_path) == []


def test_who_has_ended_and_was_not_reaped_is_gone(tmp_path: Path) -> None:
    point = tmp_path / "point"
    with subprocess.Popen([sys.executable, "-c", NOTE_AND_DIE, str(point)], stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        assert one.stdout.read() == b"noted\n"
        eventually(lambda: not mountpoints.is_running(one.pid), "it has ended")
        assert os.path.exists(f"/proc/{one.pid}")
        eventually(mountpoints.sweep, "nobody is just ending")
        assert not point.exists()


# The lock ----------------------------------------------------------------------------------------


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a folder that no other test uses."""
    monkeypatch.setattr(mountpoints, "_places", lambda: [str(tmp_path / "notes")])
    mountpoints.sweep()
    return tmp_path / "notes" / "lock"


HOLD = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(lock: Path) -> Iterator[int]:
    """Somebody who has the lock and does not let go of it."""
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"held\n"
        yield one.pid


def test_nobody_waits_for_ever_for_the_lock(
    lock: Path, holder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mountpoints, "LOCK_SECONDS", 0.1)
    with pytest.raises(mountpoints.Locked) as caught:
        mountpoints.claim({os.fsencode(tmp_path / "point"): True})
    assert str(lock) in str(caught.value)
    assert f"process {holder} (python" in str(caught.value)
    assert not (tmp_path / "point").exists()


def test_who_is_not_waited_for_does_not_wait_for_the_lock(lock: Path, holder: int, tmp_path: Path) -> None:
    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        mountpoints.claim({os.fsencode(tmp_path / "point"): True}, check)


def test_who_has_nothing_to_note_needs_no_lock(
    lock: Path, holder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mountpoints, "_swept", True)  # the first one of a process looks what others left
    assert mountpoints.claim({os.fsencode(tmp_path): True}) is None
    assert mountpoints.claim({}) is None


def test_what_is_locked_is_left_for_later(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = mountpoints.claim({os.fsencode(tmp_path / "point"): True})
    assert claim is not None
    monkeypatch.setattr(mountpoints, "LOCK_SECONDS", 0.1)
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"held\n"
        assert not claim.release(orderly=True)
        assert (tmp_path / "point").is_dir()
    monkeypatch.undo()
    monkeypatch.setattr(mountpoints, "_places", lambda: [str(lock.parent)])
    assert claim.release(orderly=True)
    assert not (tmp_path / "point").exists()


def test_children_do_not_keep_the_lock(lock: Path, tmp_path: Path) -> None:
    """One that was forked meanwhile has the same open file, and may live on for long."""
    ready, done = os.pipe()
    with mountpoints._locked():
        child = os.fork()
        if child == 0:
            os.close(done)
            os.read(ready, 1)
            os._exit(0)
    try:
        claim = mountpoints.claim({os.fsencode(tmp_path / "point"): True})
        assert claim is not None
        assert claim.release(orderly=True)
    finally:
        os.close(done)
        os.waitpid(child, 0)
        os.close(ready)


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "notes"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    monkeypatch.setattr(mountpoints, "_places", lambda: [str(place)])
    with pytest.raises(PermissionError, match="only this account"):
        mountpoints.folder()
    place.rmdir()
    place.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="only this account"):
        mountpoints.folder()


def test_names_as_the_kernel_writes_them() -> None:
    assert mountpoints._escaped(b"/a b\tc\nd\\e") == rb"/a\040b\011c\012d\134e"


# With sandboxes ----------------------------------------------------------------------------------

pytest_needs = pytest.mark.usefixtures("needs_bubblewrap")


@pytest_needs
def test_nothing_is_left_after_the_end(ws: WebSocketPeer, tmp_path: Path) -> None:
    sandbox = workspace_write(tmp_path, more=[entry(tmp_path / "no" / "such", "deny")])
    record = run_in(ws, sandbox, "ls", "-A", cwd=f"file://{tmp_path}")
    assert record.stdout.decode().split() == [*NAMES, "no"]
    assert list(tmp_path.iterdir()) == []
    assert notes_on(tmp_path) == []


@pytest_needs
@pytest.mark.parametrize("how", ["terminate", "signal", "keeper"])
def test_nothing_is_left_after_a_kill(ws: WebSocketPeer, tmp_path: Path, how: str) -> None:
    running = start_in(ws, workspace_write(tmp_path), "sh", "-c", "echo up; exec sleep 1000")
    ws.saw(running, b"up")
    assert sorted(path.name for path in tmp_path.iterdir()) == list(NAMES)
    if how == "terminate":
        ws.terminate(running)
    elif how == "signal":
        ws.call("process/signal", {"processId": running, "signal": "interrupt"})
    else:
        keeper = next(
            int(pid)
            for pid in os.listdir("/proc")
            if pid.isdigit() and is_keeper(int(pid), ws.server_pid) and watches(int(pid), tmp_path)
        )
        os.kill(keeper, signal.SIGKILL)
    ws.finished(running)
    assert list(tmp_path.iterdir()) == []
    assert notes_on(tmp_path) == []


def is_keeper(pid: int, server: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return "(bwrap)" in stat and int(stat.rpartition(")")[2].split()[1]) == server
    except OSError:
        return False


def watches(pid: int, folder: Path) -> bool:
    """Whether the view that a keeper keeps has this folder in it."""
    child = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    return f" {folder} " in Path(f"/proc/{child}/mountinfo").read_text()


@pytest_needs
def test_two_sandboxes_share_a_mount_point(ws: WebSocketPeer, tmp_path: Path) -> None:
    """The end of one must not take away what protects the other."""
    one = start_in(ws, workspace_write(tmp_path), "sh", "-c", "echo up; read line", pipeStdin=True)
    ws.saw(one, b"up")
    script = "echo up; read line; mkdir .git/hooks; rmdir .git; mkdir .git; ls -A"
    options = {"cwd": f"file://{tmp_path}", "pipeStdin": True}
    two = start_in(ws, workspace_write(tmp_path), "sh", "-c", script, **options)
    ws.saw(two, b"up")
    ws.write(one, b"\n")
    ws.finished(one)
    assert sorted(path.name for path in tmp_path.iterdir()) == list(NAMES)
    ws.write(two, b"\n")
    record = ws.finished(two)
    assert record.stdout.split() == [b"up", *(name.encode() for name in NAMES)]
    assert b"Read-only file system" in record.stderr
    assert list(tmp_path.iterdir()) == []
    assert notes_on(tmp_path) == []


@pytest_needs
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_server_ends(
    start_server: Callable[..., RunningServer],
    connect: Callable[..., WebSocketPeer],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    server = start_server()
    peer = connect(server)
    peer.initialize()
    running = start_in(peer, workspace_write(tmp_path), "sh", "-c", "echo up; exec sleep 1000")
    peer.saw(running, b"up")
    assert len(list(tmp_path.iterdir())) == len(NAMES)
    server.end(number)
    eventually(lambda: not list(tmp_path.iterdir()), "the end of the mount points")
    eventually(lambda: not notes_on(tmp_path), "the end of the notes")
