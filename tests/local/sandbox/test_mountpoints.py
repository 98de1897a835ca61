"""local/sandbox/mountpoints.py: what a view needs on the host is there while it is needed, and then gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
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
        except FileNotFoundError:
            continue
        if text.startswith(os.fsencode(folder)):
            found.append(os.fsdecode(text))
    return found


# Notes alone -------------------------------------------------------------------------------------


def test_nothing_to_do_for_what_exists(tmp_path: Path) -> None:
    assert mountpoints.claim([os.fsencode(tmp_path)]) is None
    assert notes_on(tmp_path) == []


def test_what_was_made_is_taken_away(tmp_path: Path) -> None:
    directory, file = tmp_path / "directory", tmp_path / "file"
    claim = mountpoints.claim([os.fsencode(directory), os.fsencode(file)])
    assert claim is not None
    directory.mkdir()
    file.touch()
    assert len(notes_on(tmp_path)) == 2
    claim.release(orderly=True)
    assert list(tmp_path.iterdir()) == []
    assert notes_on(tmp_path) == []
    claim.release()


def test_what_somebody_has_used_stays(tmp_path: Path) -> None:
    directory, file = tmp_path / "directory", tmp_path / "file"
    claim = mountpoints.claim([os.fsencode(directory), os.fsencode(file)])
    assert claim is not None
    directory.mkdir()
    (directory / "content").touch()
    file.write_text("content")
    claim.release(orderly=True)
    assert sorted(tmp_path.iterdir()) == [directory, file]
    assert notes_on(tmp_path) == []


@pytest.mark.parametrize("first", [0, 1])
def test_who_leaves_last_takes_it_away(tmp_path: Path, first: int) -> None:
    """The second finds it already there, and needs it all the same."""
    point = tmp_path / "point"
    claims = [mountpoints.claim([os.fsencode(point)])]
    point.mkdir()
    claims.append(mountpoints.claim([os.fsencode(point)]))
    one, other = claims[first], claims[1 - first]
    assert one is not None
    assert other is not None
    one.release(orderly=True)
    assert point.is_dir()
    other.release(orderly=True)
    assert not point.exists()


NOTE_AND_DIE = """
import os, sys
from exec_server.local.sandbox import mountpoints
mountpoints.claim([os.fsencode(sys.argv[1])])
os.mkdir(sys.argv[1])
print("noted", flush=True)
os.kill(os.getpid(), 9)
"""


def test_notes_of_the_dead_are_swept_up(tmp_path: Path) -> None:
    point = tmp_path / "point"
    done = subprocess.run([sys.executable, "-c", NOTE_AND_DIE, str(point)], capture_output=True, check=False)
    assert done.stdout == b"noted\n", done.stderr
    assert point.is_dir()
    assert mountpoints.sweep()
    assert not point.exists()
    assert notes_on(tmp_path) == []


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
