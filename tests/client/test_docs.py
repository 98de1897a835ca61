"""What docs/client.md shows runs as it stands, and says what it says there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.server import RunningServer

PAGE = Path(__file__).parents[2] / "docs" / "client.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)

SHOWN = "ws://127.0.0.1:36041"
"""The address in the examples."""

PRINTED = [
    re.escape("0 b'12\\n' b''\nthe process did not finish within 0.5s and was terminated b'so far\\n'\n"),
    re.escape("b'> '\nb'got one\\n> '\n0 b'got two\\n> '\n"),
    r"3\n\d\n1000 587895\nprocess '.*' did not end within 0.2s\n143\n",
    "No such file or directory.*\ncwd is an absolute path or a file: URI, not 'relative'.*\n",
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example(number: int, server: RunningServer, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXAMPLES[number].replace(SHOWN, server.url)],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(PRINTED[number], done.stdout), done.stdout


def test_every_example_has_its_result() -> None:
    assert len(EXAMPLES) == len(PRINTED)
