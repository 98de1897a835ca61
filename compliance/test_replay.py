"""The recorded conversations about everything but files, replayed against the server under test."""

from __future__ import annotations

from pathlib import Path

import pytest

from compliance.replay import DEADLINE, Player, cases_of, check

RECORDING = "transcripts.jsonl"
"""The conversations to replay, below `spec` of the shared folder."""

RACY = frozenset({"signal-interrupt-default"})
"""Cases that may be lost to the shell they run, and are then played again. Dash forgets a SIGINT that
comes after `echo rdy` and before it has forked its `sleep`, which a fast server meets now and then: seen
without any server at all, by a script that reads the line and signals the group."""

ATTEMPTS = 5
"""How often such a case is played before it counts as failed."""


@pytest.mark.timeout(2 * DEADLINE)
def test_recorded_conversations(
    server_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No case differs, and every case was played."""
    player = Player(RECORDING, server_command, tmp_path)
    cases = cases_of(player.recording)
    slow = [case["name"] for case in cases if case.get("slow")]

    # A slow case does nothing but wait, so each gets a player of its own next to the one for the rest.
    played = player.play({"fast": ["--fast"], **{name: ["-k", name] for name in slow}})
    results = played["fast"] | {name: played[name][name] for name in slow}
    for name in RACY:
        attempt = 1
        while results[name]["outcome"] == "failed" and attempt < ATTEMPTS:
            attempt += 1
            label = f"attempt-{attempt}-{name}"
            results[name] = player.play({label: ["-k", name]})[label][name]
    check(results, {case["name"] for case in cases}, RECORDING, capsys)
