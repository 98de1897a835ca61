"""cli/run.py: `--sandbox`, `--writable` and `--network`, for people."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.sandbox import FORBIDDING
from support.server import COMMAND, RunningServer, server_environment

pytestmark = pytest.mark.usefixtures("needs_bubblewrap")

NETWORK = "import socket; socket.create_server(('127.0.0.1', 0)); print('open')"


def run(*arguments: str, cwd: Path, within: Sequence[str] = ()) -> tuple[int, str, str]:
    done = subprocess.run(
        [*within, COMMAND, "run", *arguments],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env=server_environment(),
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    """Not below /tmp, which a workspace-write sandbox may write to."""
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as here,
        tempfile.TemporaryDirectory(dir="/var/tmp") as other,
    ):
        yield Path(here), Path(other)


def test_policies(folders: tuple[Path, Path]) -> None:
    here, other = folders
    script = f"touch here; touch {other}/there; true"
    assert run("--sandbox", "read-only", "--", "sh", "-c", script, cwd=here)[0] == 0
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    assert run("--sandbox", "workspace-write", "--", "sh", "-c", script, cwd=here)[0] == 0
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 0]
    assert run("--writable", str(other), "--", "sh", "-c", script, cwd=here) == (0, "", "")
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 1]
    assert run("--sandbox", "full-access", "--", "sh", "-c", "rm here", cwd=here)[0] == 0
    assert list(here.iterdir()) == []


def test_network(tmp_path: Path) -> None:
    python = ["--", "python3", "-c", NETWORK]
    assert run("--no-network", *python, cwd=tmp_path)[0] == 1
    assert run("--sandbox", "read-only", "--network", *python, cwd=tmp_path)[:2] == (0, "open\n")


def test_programs_that_are_not_there(folders: tuple[Path, Path]) -> None:
    """As without a sandbox: 127, or 126 for what is there and no program."""
    here, _ = folders
    (here / "text").write_text("text")
    for program, code, reason in [
        ("no-such-program", 127, "No such file or directory"),
        ("./no-such-program", 127, "No such file or directory"),
        ("./text", 126, "Permission denied"),
    ]:
        found, output, errors = run("--sandbox", "read-only", "--", program, "x", cwd=here)
        assert (found, output) == (code, "")
        assert f"exec-server: cannot run {program} in its sandbox: {reason}\n" in errors
        assert run("--", program, cwd=here)[0] == code
    imitation = "echo bwrap: execvp sh: No such file or directory >&2; echo more; exit 1"
    assert run("--sandbox", "read-only", "--", "sh", "-c", imitation, cwd=here)[0] == 1


def test_a_sandbox_that_cannot_be_had(folders: tuple[Path, Path]) -> None:
    """Nothing is missing but the sandbox: 126, and where to look for help."""
    here, _ = folders
    code, output, errors = run("--sandbox", "workspace-write", "--", "true", cwd=here, within=FORBIDDING)
    assert (code, output) == (126, "")
    assert "this needs bubblewrap, and `exec-server doctor` says what keeps it from working" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sandbox", "full-access", "--no-network"], "restricts nothing"),
        (["--sandbox", "read-only", "--writable", "x"], "nothing is --writable"),
        (["--sandbox", "none"], "is not one of"),
    ],
)
def test_what_makes_no_sense(arguments: list[str], words: str, tmp_path: Path) -> None:
    code, _, errors = run(*arguments, "--", "true", cwd=tmp_path)
    assert code == 2
    assert words in errors


def test_on_a_server(server: RunningServer, tmp_path: Path) -> None:
    url = ["--url", server.url]
    code, _, errors = run(*url, "--sandbox", "workspace-write", "--", "true", cwd=tmp_path)
    assert code == 2
    assert "--cwd" in errors
    options = ["--cwd", str(tmp_path), "--sandbox", "workspace-write"]
    code, output, _ = run(*url, *options, "--", "sh", "-c", "touch x; mkdir .git; ls -A", cwd=Path("/"))
    assert output.split() == [".agents", ".aws", ".codex", ".git", "x"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
