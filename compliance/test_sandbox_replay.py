"""The recorded conversations about sandboxes, replayed against the server under test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from compliance.replay import DEADLINE, Player, cases_of, check

RECORDING = "transcripts-fs.jsonl"
"""The conversations to replay, below `spec` of the shared folder."""

SELECTION = "sandbox."
"""How the names of the cases begin."""


@pytest.fixture
def root_base() -> Iterator[Path]:
    """A folder that no policy treats specially, as it would one below /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="exec-server-replay-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder / "base"
    shutil.rmtree(folder)


@pytest.mark.timeout(2 * DEADLINE)
def test_recorded_conversations_about_sandboxes(
    server_command: list[str], tmp_path: Path, root_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No case differs, every case was played, and none was skipped."""
    player = Player(RECORDING, server_command, tmp_path)
    names = {name for case in cases_of(player.recording) if (name := case["name"]).startswith(SELECTION)}
    options = ["--exact-messages", "--root-base", str(root_base), "-k", SELECTION]
    results = player.play({"sandbox": options})["sandbox"]
    check({name: results[name] for name in names}, names, RECORDING, capsys)
    assert {results[name]["outcome"] for name in names} == {"passed"}
