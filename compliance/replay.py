"""The player of recorded conversations, and where the recordings are.

Both live next to the checkout, not in it. Where they are missing a test says so: an error where runs count
(CI), a skip with its reason elsewhere.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from compliance.programs import Program

__all__ = ["DEADLINE", "Player", "Results", "cases_of", "check"]

SHARED = "EXEC_SERVER_SHARED"
"""Environment variable: the shared folder, when it is not next to the checkout."""

DEADLINE = 120.0
"""Seconds for one player. Two cases sit out a 30 s expiry; the rest together take about fifteen."""

REMARK = 300
"""Characters shown of why a case was skipped or failed; a failing test shows all of the latter."""

Json = dict[str, Any]
"""A JSON object."""

Results = dict[str, Json]
"""What came of each case, by its name: `outcome`, and as `detail` why."""


class Player:
    """Plays the cases of one recording against one server command."""

    def __init__(self, recording: str, server_command: Sequence[str], folder: Path) -> None:
        shared = _find_shared(recording)
        self.recording = shared / "spec" / recording
        self._folder = folder
        self._command = [
            sys.executable,
            str(shared / "tools/replay.py"),
            "--cmd",
            shlex.join(server_command),
        ]

    def play(self, selections: Mapping[str, Sequence[str]]) -> dict[str, Results]:
        """Run one player per selection (its options), all at once; the cases of each."""
        with ExitStack() as stack:
            players = {}
            for name, selection in selections.items():
                players[name] = Program(
                    [*self._command, *selection, "--json", str(self._report(name)), str(self.recording)],
                    name=f"replay-{name}",
                    folder=self._folder,
                    cwd=self._folder,
                    environment={"HOME": str(self._folder), "REPLAY_TMP": str(self._folder)},
                )
                stack.callback(players[name].stop)
            for player in players.values():
                player.wait(DEADLINE)
        played = {}
        for name, player in players.items():
            report = self._report(name)
            assert report.is_file(), f"no report\n{player.report()}"
            played[name] = {result["name"]: result for result in json.loads(report.read_text())["cases"]}
        return played

    def _report(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def cases_of(recording: Path) -> list[Json]:
    """The recorded cases, in order."""
    return [json.loads(line) for line in recording.read_text().splitlines()]


def check(results: Results, names: set[str], title: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Say what came of the cases, whatever pytest hides; fail unless all of `names` were played and none
    differed."""
    outcomes = [result["outcome"] for result in results.values()]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
    remarks = [f"  {r['outcome']} {r['name']}: {r['detail']}" for r in results.values() if r["detail"]]
    with capsys.disabled():
        print("", f"replay of {title}: {counts}", *(remark[:REMARK] for remark in remarks), sep="\n")
    assert results.keys() == names
    failed = [remark for remark in remarks if remark.startswith("  failed ")]
    assert outcomes.count("failed") == 0, "\n".join(failed)


def _find_shared(recording: str) -> Path:
    """The shared folder; ends the test if the player or the recording is not in it."""
    chosen = os.environ.get(SHARED)
    shared = Path(chosen) if chosen else Path(__file__).resolve().parents[2] / "shared"
    wanted = (shared / "tools/replay.py", shared / "spec" / recording)
    missing = [path for path in wanted if not path.is_file()]
    if missing:
        reason = (
            f"not run: replay of the recorded conversations ({recording}), because "
            f"{' and '.join(map(str, missing))} is not there; {SHARED} names another folder"
        )
        if chosen or os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return shared.resolve()
