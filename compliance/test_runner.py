"""Our agent and the reference's on the same threads: what one has begun, the other goes on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from compliance.harness import CLOSED_PORT, CONFIG, Codex
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
            stdin=subprocess.DEVNULL,
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


COMPACT = "model_auto_compact_token_limit=2"
"""What one scripted answer costs: so the history is summed up before every further request of a turn."""


def test_the_reference_goes_on_with_what_we_have_summed_up(codex: Codex, workspace: Path) -> None:
    turns: list[Turn] = [exec_command("echo long-ago"), "SUMMARY: it was long ago", "Done."]
    events, _ = ours(codex, workspace, turns, "-c", COMPACT, "what was there?")
    run = codex.run(["Still here."], subcommand=["resume", events[0]["thread_id"]], prompt="and now?")
    sent = json.dumps(run.requests[0]["input"])
    for text in ("what was there?", "SUMMARY: it was long ago", "Done.", "and now?"):
        assert text in sent
    assert "echo long-ago" not in sent
    assert run.events[-1]["usage"]["input_tokens"] == 4, "what the summary cost is in it"


def test_we_go_on_with_what_the_reference_has_summed_up(codex: Codex, workspace: Path) -> None:
    turns: list[Turn] = [exec_command("echo long-ago"), "SUMMARY: it was long ago", "Done."]
    run = codex.run(turns, subcommand=["-c", COMPACT], prompt="what was there?")
    _, model = ours(codex, workspace, ["Still here."], "--resume", run.thread_id, "and now?")
    sent = json.dumps(model.requests[0]["input"])
    for text in ("what was there?", "SUMMARY: it was long ago", "Done.", "and now?"):
        assert text in sent
    assert "echo long-ago" not in sent


def test_a_prompt_with_something_piped_to_it_is_the_reference_s(codex: Codex, workspace: Path) -> None:
    """Both get the same words and the same pipe; their models are told the same."""
    words = ["exec", "--json", "--skip-git-repo-check", "-s", "danger-full-access", "look"]
    env = {"PATH": os.environ["PATH"], "HOME": str(codex.home), "CODEX_HOME": str(codex.home)}
    proxies = dict.fromkeys(["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"], CLOSED_PORT)
    told = []
    for program in ([str(codex.binary)], [sys.executable, "-m", "exec_server"]):
        with Model(["ok"]) as model:
            (codex.home / "config.toml").write_text(CONFIG.format(base_url=model.base_url))
            subprocess.run(
                [*program, *words],
                cwd=workspace,
                env={**env, **proxies, "NO_PROXY": "127.0.0.1"},
                input="one\ntwo\n",
                capture_output=True,
                text=True,
                timeout=45,
                check=True,
            )
        told.append(model.requests[0]["input"][-1]["content"])
    assert told[0] == told[1] == [{"type": "input_text", "text": "look\n\n<stdin>\none\ntwo\n</stdin>"}]
