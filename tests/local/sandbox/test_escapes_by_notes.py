"""Ways out by the notes on mount points: who could write some would have files of anybody's taken away, and
who is taken for dead has what covers his missing names taken away."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from exec_server.local.sandbox import mountpoints
from support.rpc import WebSocketPeer
from support.sandbox import entry, profile, run_in, start_in, workspace_write
from support.server import COMMAND, RunningServer
from support.wait import eventually


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for them that no other test uses."""
    monkeypatch.setattr(mountpoints, "_places", lambda: [str(tmp_path / "notes")])
    return Path(mountpoints.folder())


# Planted notes -----------------------------------------------------------------------------------


def test_nobody_inside_makes_a_folder_for_notes(ws: WebSocketPeer) -> None:
    """Not even where notes are not kept today: the next server may find no better place."""
    sandbox = profile([entry(":root", "read"), entry(":slash_tmp", "write")])
    for place in mountpoints._places():
        script = f"""
mkdir -m 700 {place} && echo made; ls {place}; touch {place}/planted && echo planted
mv {place} {place}.moved && echo moved; rmdir {place} && echo removed
"""
        assert run_in(ws, sandbox, "sh", "-c", script).stdout == b""
        if os.path.lexists(place):
            assert not os.path.lexists(f"{place}/planted")
            found = os.lstat(place)
            assert (found.st_uid, found.st_mode & 0o777) == (os.geteuid(), 0o700)


@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize("known", [False, True])
def test_planted_notes_take_nothing_away(tmp_path: Path, notes: Path, form: str, known: bool) -> None:
    """Where Landlock is all there is, a command that may write there can write them."""
    file, directory = tmp_path / "__init__.py", tmp_path / "empty"
    file.touch()
    directory.mkdir()
    for target in (file, directory):
        name = hashlib.blake2b(os.fsencode(target), digest_size=16).hexdigest()
        found = target.stat()
        text = os.fsencode(target)
        if known:
            text += b"\0%d %d %d" % (found.st_dev, found.st_ino, found.st_mtime_ns)
        owner = "999999.1" if form == "old" else f"{'0' * 16}-1"
        (notes / f"{name}.{owner}.1").write_bytes(text)
    eventually(mountpoints.sweep, "nobody is just ending")
    assert file.exists()
    assert directory.is_dir()
    assert sorted(os.listdir(notes)) == ["lock"]


def test_what_is_not_a_note_does_no_harm(tmp_path: Path, notes: Path) -> None:
    (notes / "folder").mkdir()
    (notes / "name.of.1").write_bytes(b"/\0x y z")
    (notes / f"{'1' * 16}-1.server").touch()
    eventually(mountpoints.sweep, "nobody is just ending")
    claim = mountpoints.claim({os.fsencode(tmp_path / "point"): True})
    assert claim is not None
    assert claim.release(orderly=True)
    assert not (tmp_path / "point").exists()


# Other process-id namespaces ---------------------------------------------------------------------

APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--propagation", "private", "--mount-proc"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make process-id namespaces alone")

NOTE_AND_WAIT = """
import os, sys
from exec_server.local.sandbox import mountpoints
mountpoints._places = lambda: [sys.argv[1]]
mountpoints.claim({os.fsencode(sys.argv[2]): True})
print("noted", flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
os._exit(0)
"""


@needs_root
def test_a_server_elsewhere_is_not_taken_for_dead(
    tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = tmp_path / "point"
    command = [*APART, sys.executable, "-c", NOTE_AND_WAIT, str(notes), str(point)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"noted\n"
        mountpoints.sweep()
        ours = mountpoints.claim({os.fsencode(point): True})
        assert ours is not None
        ours.release(orderly=True)
        assert point.is_dir(), "somebody needs it"
        other.stdin.close()
    mountpoints.sweep()
    assert point.is_dir(), "somebody may be left of it, whom nobody sees from here"
    monkeypatch.setattr(mountpoints, "FOREIGN_PATIENCE", -1.0)
    eventually(mountpoints.sweep, "nobody is just ending")
    assert not point.exists()
    assert len(os.listdir(notes)) == 3, "the lock, and what we are known by"


RUNNER = """
import os, sys
print("up", flush=True)
while not os.path.exists("stop"):
    try:
        os.makedirs(".git/hooks")
        print("made", flush=True)
        break
    except OSError:
        pass
"""


@needs_root
@pytest.mark.usefixtures("needs_bubblewrap")
def test_servers_of_two_containers_share_a_workspace(tmp_path: Path) -> None:
    with ExitStack() as stack:

        def container() -> WebSocketPeer:
            server = stack.enter_context(RunningServer(command=(*APART, COMMAND)))
            stack.callback(server.process.wait, 20)
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            stack.callback(os.kill, int(children[0]), signal.SIGTERM)  # the one outside would ignore it
            peer = stack.enter_context(WebSocketPeer(server.url, server.pid))
            peer.initialize()
            return peer

        one = container()
        running = start_in(
            one, workspace_write(tmp_path), sys.executable, "-c", RUNNER, cwd=tmp_path.as_uri()
        )
        one.saw(running, b"up")
        other = container()
        for _ in range(2):
            assert run_in(other, workspace_write(tmp_path), "true").exit_code == 0
        (tmp_path / "stop").touch()
        assert one.finished(running).stdout == b"up\n"
    eventually(lambda: os.listdir(tmp_path) == ["stop"], "the end of the covers")


# Badges ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("needs_bubblewrap")
def test_nobody_s_sandbox_is_ended_for_want_of_a_file(tmp_path: Path) -> None:
    """Who clears up old files may take away by what a server is known to live; the sandbox goes on."""
    with RunningServer() as server, WebSocketPeer(server.url, server.pid) as peer:
        peer.initialize()
        running = start_in(
            peer, workspace_write(tmp_path), "sh", "-c", "echo up; read line; echo on", pipeStdin=True
        )
        peer.saw(running, b"up")
        (worn,) = badges_on(tmp_path)
        Path(mountpoints.folder(), f"{worn}.server").unlink()
        mountpoints.sweep()
        peer.write(running, b"\n")
        assert b"on" in peer.finished(running).stdout
        assert run_in(peer, workspace_write(tmp_path), "true").exit_code == 0
        assert list(tmp_path.iterdir()) == []


def badges_on(folder: Path) -> set[str]:
    """Worn by those in whose view there is a mount on something in the folder."""
    found: set[str] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            mounts = Path(f"/proc/{name}/mountinfo").read_bytes()
        except OSError:
            continue
        worn = mountpoints._BADGED.search(mounts)
        if worn is not None and b" %b/.git " % os.fsencode(folder) in mounts:
            found.add(worn[1].decode())
    return found
