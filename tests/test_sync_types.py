"""The types of the blocking twin: made of the asynchronous ones, up to date, and of use."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from exec_server import services, sync

ROOT = Path(__file__).parent.parent
STUB = Path(sync.__file__).with_suffix(".pyi")
LIMIT = 300
"""Seconds: mypy reads the whole library, on a machine that may have much else to do."""

EXAMPLE = """
from contextlib import closing
from exec_server import Completed, sync

def lines(machine: sync.Environment, path: str) -> list[bytes]:
    return b"".join(machine.files.stream(path)).splitlines()

with sync.connect("ws://127.0.0.1:1", token="t") as machine:
    done: Completed = machine.run(["uname"], cwd="/", timeout=5)
    with machine.start(["cat"], stdin=True) as process, machine.files.watch("/tmp") as changes:
        process.write(lines(machine, "/etc/hostname")[0])
        code: int = process.wait().exit_code + len(next(changes).paths)
        with closing(process.output()) as output:
            print(done.stdout.decode(), code, [chunk.data for chunk in output])
"""

MISTAKES = {
    'machine.run("uname", cwdd="/")': "call-arg",
    'machine.start(["cat"], tty="yes")': "arg-type",
    "machine.files.read(5)": "arg-type",
    'machine.files.raed("/x")': "attr-defined",
    'await machine.files.read("/x")': "misc",
    'machine.run(["x"]).exit_code + 1': "operator",
    'sync.connect(tokn="x")': "call-arg",
    'text: str = machine.files.read("/x")': "assignment",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


def mypy(cache: Path, file: Path) -> subprocess.CompletedProcess[str]:
    """As somebody runs it who has the package installed: from elsewhere, without our configuration."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={cache}", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=cache, check=False)


@pytest.mark.timeout(LIMIT)
def test_they_are_up_to_date() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "sync_types.py"), "--print"]
    made = subprocess.run(script, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    assert STUB.read_text() == made, "services.py has changed: run scripts/sync_types.py"


@pytest.mark.timeout(LIMIT)
def test_mypy_takes_what_is_right_and_finds_what_is_wrong(cache: Path) -> None:
    example = cache / "example.py"
    example.write_text(EXAMPLE)
    done = mypy(cache, example)
    assert (done.returncode, done.stdout[:7]) == (0, "Success"), done.stdout + done.stderr
    wrong = cache / "wrong.py"
    body = "".join(f"    {line}\n" for line in MISTAKES)
    wrong.write_text(
        f"from exec_server import sync\n\nasync def f(machine: sync.Environment) -> None:\n{body}"
    )
    found = mypy(cache, wrong).stdout
    for number, (line, kind) in enumerate(MISTAKES.items(), 4):
        assert any(
            error.startswith(f"wrong.py:{number}: error: ") and error.endswith(f"[{kind}]")
            for error in found.splitlines()
        ), f"{line}\n{found}"


@pytest.mark.timeout(LIMIT)
def test_the_code_behind_them_is_typed_too(cache: Path) -> None:
    """mypy looks at a stub instead of the module beside it, unless it is told to."""
    done = mypy(cache, Path(sync.__file__))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_names_are_there_when_the_program_runs() -> None:
    assert all(hasattr(sync, name) for name in sync.__all__)
    with sync.connect("in-process:") as machine:
        assert isinstance(machine, sync.Environment)
        for twin, protocol in [(machine, services.Environment), (machine.files, services.Files)]:
            for name in vars(protocol):
                member = inspect.getattr_static(protocol, name)
                if not name.startswith("_") and inspect.isfunction(member):
                    assert callable(getattr(twin, name))
