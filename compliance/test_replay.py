"""The recorded conversations, replayed against the server under test.

The recordings and their player live next to the checkout, not in it. Where they are missing this test says
so: an error where runs count (CI), a skip with its reason elsewhere.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from compliance.programs import Program

SHARED = "EXEC_SERVER_SHARED"
"""Environment variable: the shared folder, when it is not next to the checkout."""

TRANSCRIPTS = "transcripts.jsonl"
"""The conversations to replay, below `spec` of the shared folder."""

REMARK = 300
"""Characters shown of why a case was skipped or failed; a failing test shows all of the latter."""

RACY = frozenset({"signal-interrupt-default"})
"""Cases that may be lost to the shell they run, and are then played again. Dash forgets a SIGINT that
comes after `echo rdy` and before it has forked its `sleep`, which a fast server meets now and then: seen
without any server at all, by a script that reads the line and signals the group."""

ATTEMPTS = 5
"""How often such a case is played before it counts as failed."""

DEADLINE = 120.0
"""Seconds for one player. Two cases sit out a 30 s expiry; the rest together take about fifteen."""


def find_shared() -> Path:
    """The shared folder; ends the test if the player or the recordings are not in it."""
    chosen = os.environ.get(SHARED)
    shared = Path(chosen) if chosen else Path(__file__).resolve().parents[2] / "shared"
    missing = [
        path for path in (shared / "tools/replay.py", shared / "spec" / TRANSCRIPTS) if not path.is_file()
    ]
    if missing:
        reason = (
            f"not run: replay of the recorded conversations ({TRANSCRIPTS}), because "
            f"{' and '.join(map(str, missing))} is not there; {SHARED} names another folder"
        )
        if chosen or os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return shared.resolve()


@pytest.mark.timeout(2 * DEADLINE)
def test_recorded_conversations(
    server_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No case differs, and every case was played."""
    shared = find_shared()
    transcripts = shared / "spec" / TRANSCRIPTS
    cases = [json.loads(line) for line in transcripts.read_text().splitlines()]
    slow = [case["name"] for case in cases if case.get("slow")]

    replay = [sys.executable, str(shared / "tools/replay.py"), "--cmd", shlex.join(server_command)]

    def play(selections: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
        """Run one player per selection, all at once; the cases of each, by name."""
        with ExitStack() as stack:
            players = {}
            for name, selection in selections.items():
                report = tmp_path / f"{name}.json"
                players[name] = Program(
                    [*replay, *selection, "--json", str(report), str(transcripts)],
                    name=f"replay-{name}",
                    folder=tmp_path,
                    cwd=tmp_path,
                    environment={"HOME": str(tmp_path), "REPLAY_TMP": str(tmp_path)},
                )
                stack.callback(players[name].stop)
            for player in players.values():
                player.wait(DEADLINE)
        played = {}
        for name, player in players.items():
            report = tmp_path / f"{name}.json"
            assert report.is_file(), f"no report\n{player.report()}"
            played[name] = {result["name"]: result for result in json.loads(report.read_text())["cases"]}
        return played

    # A slow case does nothing but wait, so each gets a player of its own next to the one for the rest.
    played = play({"fast": ["--fast"], **{name: ["-k", name] for name in slow}})
    results = played["fast"] | {name: played[name][name] for name in slow}
    for name in RACY:
        attempt = 1
        while results[name]["outcome"] == "failed" and attempt < ATTEMPTS:
            attempt += 1
            label = f"attempt-{attempt}-{name}"
            results[name] = play({label: ["-k", name]})[label][name]

    outcomes = [result["outcome"] for result in results.values()]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
    remarks = [f"  {r['outcome']} {r['name']}: {r['detail']}" for r in results.values() if r["detail"]]
    with capsys.disabled():
        print("", f"replay of {TRANSCRIPTS}: {counts}", *(remark[:REMARK] for remark in remarks), sep="\n")
    assert results.keys() == {case["name"] for case in cases}
    failed = [remark for remark in remarks if remark.startswith("  failed ")]
    assert outcomes.count("failed") == 0, "\n".join(failed)
