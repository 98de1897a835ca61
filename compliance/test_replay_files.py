"""The recorded conversations about files and capability discovery, replayed against the server under test.

Error texts are compared too, and the case of an unprivileged server is played as one when root runs this.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from compliance.replay import DEADLINE, Player, cases_of, check
from compliance.server import UNDER_TEST
from support.unprivileged import reachable_command

RECORDING = "transcripts-fs.jsonl"
"""The conversations to replay, below `spec` of the shared folder."""

NOT_YET = "sandbox."
"""Cases whose name begins like this are left to the tests of the sandbox."""


@pytest.fixture
def root_base() -> Iterator[Path]:
    """A folder that everybody can reach, and that no sandbox treats specially as it would one below /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="exec-server-replay-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder / "base"
    shutil.rmtree(folder)


@pytest.mark.timeout(2 * DEADLINE)
def test_recorded_conversations_about_files(
    server_command: list[str], tmp_path: Path, root_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No case differs, and every case was played."""
    plays_all = os.getuid() == 0 and UNDER_TEST not in os.environ
    player = Player(RECORDING, reachable_command() if plays_all else server_command, tmp_path)
    names = {name for case in cases_of(player.recording) if not (name := case["name"]).startswith(NOT_YET)}
    options = ["--exact-messages", "--root-base", str(root_base), "--skip", NOT_YET]
    played = player.play({"files": options})["files"]
    results = {name: result for name, result in played.items() if not name.startswith(NOT_YET)}
    check(results, names, RECORDING, capsys)
    if plays_all:
        skipped = [result for result in results.values() if result["outcome"] == "skipped"]
        assert not skipped, f"root can play every case: {skipped}"
