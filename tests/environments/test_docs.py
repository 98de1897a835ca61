"""What the documentation shows runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.server import RunningServer

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)

SHOWN = "ws://127.0.0.1:36041"
"""The address in the examples."""


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example(number: int, server: RunningServer, tmp_path: Path) -> None:
    code = EXAMPLES[number].replace(SHOWN, server.url).replace("/tmp/example-", f"{tmp_path}/")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5
    assert sum(SHOWN in example for example in EXAMPLES) >= 4
