"""What docs/threads.md and docs/environments-toml.md show runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from exec_server.environments.config import parse
from support.server import server_environment

DOCS = Path(__file__).parents[2] / "docs"


def examples(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


PYTHON = [*examples("threads.md", "python"), *examples("environments-toml.md", "python")]


def test_there_are_examples() -> None:
    assert len(PYTHON) == 3


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_an_example(number: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PYTHON[number]],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=tmp_path,
        env=server_environment(CODEX_HOME=str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr


def test_the_file_is_one() -> None:
    (text,) = examples("environments-toml.md", "toml")
    found = parse(text, "/home/me/.codex/environments.toml")
    assert found.default == "devbox"
    assert found.ids() == ["local", "devbox", "build-farm", "workstation", "ssh-dev"]
