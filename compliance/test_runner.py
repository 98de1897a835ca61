"""Our agent and the reference's on the same threads: what one has begun, the other goes on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from compliance.harness import CONFIG, Codex
from compliance.model import Model, Turn, apply_patch, exec_command


def ours(codex: Codex, workspace: Path, turns: list[Turn], *words: str) -> tuple[list[dict[str, Any]], Model]:
    """`exec-server exec` in the reference's home, with the configuration the reference gets."""
    with Model(turns) as model:
        (codex.home / "config.toml").write_text(CONFIG.format(base_url=model.base_url))
        command = [sys.executable, "-m", "exec_server", "exec", "--json", "-s", "danger-full-access"]
        env = {"PATH": os.environ["PATH"], "HOME": str(codex.home), "CODEX_HOME": str(codex.home)}
        done = subprocess.run(
            [*command, *words],
            cwd=workspace,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if model.failures:
            raise model.failures[0]
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], model


def test_the_reference_goes_on_with_our_thread(codex: Codex, workspace: Path) -> None:
    turns: list[Turn] = [exec_command("echo from-our-agent"), "It said so."]
    events, _ = ours(codex, workspace, turns, "what does it say?")
    thread_id = events[0]["thread_id"]
    run = codex.run(["Still here."], subcommand=["resume", thread_id], prompt="and now?")
    assert run.thread_id == thread_id
    sent = json.dumps(run.requests[0]["input"])
    for text in ("what does it say?", "from-our-agent", "It said so.", "and now?"):
        assert text in sent
    usage = run.events[-1]["usage"]
    assert usage["input_tokens"] == 3, "two answers to ours and one to the reference: a total of the thread"


def test_we_go_on_with_the_reference_s_thread(codex: Codex, workspace: Path) -> None:
    run = codex.run([exec_command("echo from-the-reference"), "It said so."], prompt="what does it say?")
    turns: list[Turn] = [
        apply_patch("*** Begin Patch\n*** Add File: ours.txt\n+ours\n*** End Patch"),
        "Done.",
    ]
    events, model = ours(codex, workspace, turns, "--resume", run.thread_id, "and now?")
    assert events[0]["thread_id"] == run.thread_id
    sent = json.dumps(model.requests[0]["input"])
    for text in ("what does it say?", "from-the-reference", "It said so.", "and now?"):
        assert text in sent
    assert (workspace / "ours.txt").read_text() == "ours\n"
    assert events[-1]["usage"]["input_tokens"] == 4


def test_the_same_script_gives_the_same_stream(codex: Codex, workspace: Path) -> None:
    turns: list[Turn] = [
        exec_command("echo hi; exit 3"),
        apply_patch("*** Begin Patch\n*** Add File: n.txt\n+n\n*** End Patch"),
        apply_patch("*** Begin Patch\n*** Update File: n.txt\n@@\n-nope\n+x\n*** End Patch"),
        "All done.",
    ]
    theirs = codex.run(turns)
    (workspace / "n.txt").unlink()
    events, model = ours(codex, workspace, turns, "play the script")

    def without_warnings(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The reference warns that it does not know the model, which takes the first id."""
        kept = []
        for event in stream:
            item = event.get("item", {})
            if item.get("type") != "error":
                kept.append({**event, "thread_id": "", "item": {**item, "id": ""}})
        return kept

    assert without_warnings(events) == without_warnings(theirs.events)
    for mine, reference in zip(model.results, theirs.results, strict=True):
        assert mine.text.splitlines()[-2:] == reference.text.splitlines()[-2:]
