"""Escapes of an owner who is not root: what a mode forbids, he allows himself the next moment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.rpc import PATH, WebSocketPeer
from support.sandbox import entry, read_only, run_in, workspace_write
from support.server import RunningServer
from support.unprivileged import NOBODY, as_nobody, reachable_command

pytestmark = pytest.mark.usefixtures("needs_bubblewrap")


@pytest.fixture(scope="module")
def owner() -> Iterator[WebSocketPeer]:
    """A connection to the server of an ordinary user."""
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(command=reachable_command(), cwd="/", **as_nobody()))
        peer = stack.enter_context(WebSocketPeer(server.url, server.pid))
        peer.initialize()
        yield peer


@pytest.fixture
def workspace() -> Iterator[Path]:
    """Of that user. Where it is, he may go."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        place = Path(folder)
        place.chmod(0o755)
        (place / "w/conf/priv").mkdir(parents=True)
        (place / "w/conf/priv/secret.env").write_text("s3cret")
        (place / "link.env").symlink_to(place / "w/conf/priv/secret.env")
        give(place)
        yield place / "w"


def give(place: Path) -> None:
    if os.getuid() == 0:
        for folder, directories, files in os.walk(place):
            for name in (*directories, *files):
                os.chown(Path(folder) / name, NOBODY, NOBODY, follow_symlinks=False)


@pytest.mark.parametrize("pattern", ["**/*.env", "conf/**", "conf/priv/*.env", "../link.*"])
@pytest.mark.parametrize("mode", ["400", "000", "200", "100"])
def test_what_a_pattern_denies_is_not_hidden_from_it(
    owner: WebSocketPeer, workspace: Path, pattern: str, mode: str
) -> None:
    """One command takes the directory's mode away, the next gives it back."""
    box = workspace_write(workspace, more=[entry(os.path.normpath(f"{workspace}/{pattern}"), "deny")])
    cwd = workspace.as_uri()
    assert b"s3cret" not in run_in(owner, box, "cat", "conf/priv/secret.env", cwd=cwd).output
    run_in(owner, box, "chmod", mode, "conf/priv", cwd=cwd)
    script = "chmod 700 conf/priv; cat conf/priv/secret.env; echo changed >> conf/priv/secret.env"
    record = run_in(owner, box, "sh", "-c", script, cwd=cwd)
    assert b"s3cret" not in record.output
    assert (workspace / "conf/priv/secret.env").read_text() == "s3cret"


def test_covers_go_whatever_becomes_of_the_mode(owner: WebSocketPeer, workspace: Path) -> None:
    box = workspace_write(workspace)
    assert run_in(owner, box, "chmod", "555", ".", cwd=workspace.as_uri()).exit_code == 0
    assert os.listdir(workspace) == ["conf"]
    assert workspace.stat().st_mode & 0o777 == 0o555


def test_nobody_inside_holds_up_others(owner: WebSocketPeer, workspace: Path) -> None:
    """The notes of an account are locked for moments by its servers, and by nobody else."""
    run_in(owner, workspace_write(workspace), "true")  # who needs notes makes them
    user = NOBODY if os.getuid() == 0 else os.getuid()
    found = [place for place in places(user) if os.path.isdir(place)]
    assert found
    script = "".join(f"ls {place}; flock -n {place}/lock echo locked; " for place in found)
    record = run_in(owner, read_only(), "sh", "-c", script)
    assert record.stdout == b""


def places(user: int) -> list[str]:
    """Where the notes of an account can be."""
    return [f"{parent}/exec-server-sandboxes-{user}" for parent in (f"/run/user/{user}", "/tmp")]


def test_a_name_of_its_own_runs_no_file_of_the_user(owner: WebSocketPeer, workspace: Path) -> None:
    """An old bubblewrap needs a shell to start a command under another name."""
    home = workspace / "home"
    home.mkdir()
    (home / ".bashrc").write_text("echo from-bashrc\n")
    (home / ".profile").write_text("echo from-profile\n")
    env = {"PATH": PATH, "HOME": str(home)}
    record = run_in(owner, read_only(), "/usr/bin/env", arg0="other", env=env, cwd="file:///")
    assert record.exit_code == 0
    assert b"from-" not in record.output
