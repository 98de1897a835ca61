"""The stream of the reference, as it comes: run, read, checked, reduced and shown."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path

from compliance.harness import CLOSED_PORT, CONFIG, Codex
from compliance.model import Model, Turn, exec_command
from exec_server.events.check import check
from exec_server.events.full import Full
from exec_server.events.model import Record
from exec_server.events.producer import Producer, Verdict, codex_exec
from exec_server.events.render import Sink, show


def run(
    codex: Codex, turns: list[Turn], workspace: Path, resume: str | None = None
) -> tuple[list[Record], Verdict]:
    """One run of the reference through our own producer."""

    async def play(producer: Producer) -> tuple[list[Record], Verdict]:
        async with producer as running:
            records = [record async for record in running]
            return records, await running.verdict()

    proxies = dict.fromkeys(["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"], CLOSED_PORT)
    own = {"HOME": str(codex.home), "CODEX_HOME": str(codex.home), "NO_PROXY": "127.0.0.1", **proxies}
    with Model(turns) as model:
        (codex.home / "config.toml").write_text(CONFIG.format(base_url=model.base_url))
        producer = codex_exec(
            "play the script",
            program=[str(codex.binary)],
            options=["--skip-git-repo-check", "-s", "danger-full-access"],
            resume=resume,
            cwd=str(workspace),
            env={"PATH": os.environ["PATH"], **own},
        )
        return asyncio.run(play(producer))


def shown(records: list[Record]) -> str:
    file = io.StringIO()
    show(records, Full(), Sink(file, False))
    return file.getvalue()


def test_a_run_and_its_continuation(codex: Codex, workspace: Path) -> None:
    records, verdict = run(codex, [exec_command("echo hi; exit 3"), "It failed."], workspace)
    assert verdict.success, verdict
    assert verdict.answer == "It failed."
    assert [str(violation) for violation in check(records)] == []
    text = shown(records)
    assert "$ echo hi; exit 3\n  exit 3 (" in text
    assert "  │ hi\n" in text
    assert "It failed.\ndone · tokens in 2 out 2" in text
    more, again = run(codex, ["Still there."], workspace, resume=verdict.thread_id)
    assert again.success, again
    assert again.thread_id == verdict.thread_id
    assert [str(violation) for violation in check(more)] == []


def test_a_thread_that_is_not_there(codex: Codex, workspace: Path) -> None:
    records, verdict = run(codex, [], workspace, resume="01a1e071-227a-7741-a702-1f275b07e314")
    assert records == []
    assert not verdict.success
    assert verdict.exit_code == 1
    assert verdict.reason, "what it said on stderr"
