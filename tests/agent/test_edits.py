"""Edits of a model: what is told of them, what confines them, and who may let them."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest

from exec_server.agent.approvals import Question
from exec_server.agent.policy import EditRule, Policy
from support.agent import play
from support.calls import patch, run
from support.model_server import (
    Say,
)


def test_a_rename_is_told_as_two_changes(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "old.txt").write_text("a\n")
    edit = patch("*** Update File: old.txt", "*** Move to: new.txt", "@@", "-a", "+b")
    (change,) = play(tmp_path, Say([edit]), "ok").items("file_change")
    assert change["changes"] == [
        {"path": f"{work}/new.txt", "kind": "add"},
        {"path": f"{work}/old.txt", "kind": "delete"},
    ]
    assert (work / "new.txt").read_text() == "b\n"


def test_a_patch_of_its_own_kind_of_call(tmp_path: Path) -> None:
    text = "*** Begin Patch\n*** Add File: n.txt\n+n\n*** End Patch"
    item = {
        "type": "custom_tool_call",
        "id": "ct_1",
        "call_id": "call_1",
        "name": "apply_patch",
        "input": text,
    }
    other = {**item, "id": "ct_2", "call_id": "call_2", "name": "dance"}
    done = play(tmp_path, Say([item, other]), "ok")
    assert (tmp_path / "work/n.txt").read_text() == "n\n"
    assert done.output().startswith("Exit code: 0\n")
    assert done.output("call_2") == "unsupported custom tool call: dance"


def test_a_patch_in_a_directory_that_is_not_there(tmp_path: Path) -> None:
    typed = "cd sub && apply_patch <<'EOF'\n*** Begin Patch\n*** Add File: a\n+x\n*** End Patch\nEOF"
    done = play(tmp_path, Say([run(typed)]), "ok")
    assert done.output() == "exec_command failed: cd: sub: No such file or directory"
    assert list((tmp_path / "work").iterdir()) == []
    assert done.items("file_change") == []
    (tmp_path / "work/sub").mkdir()
    play(tmp_path, Say([run(typed)]), "ok")
    assert (tmp_path / "work/sub/a").read_text() == "x\n"


def test_a_sandbox_confines_patches_too(tmp_path: Path, needs_bubblewrap: None) -> None:
    outside = tmp_path / "outside"
    edits = [patch("*** Add File: in", "+x"), patch(f"*** Add File: {outside}", "+x", call_id="call_2")]
    # The folder of this test is below /tmp, which a workspace may write; so the workspace is all there is.
    done = play(tmp_path, Say(edits), "ok", mode="read-only")
    assert [item["status"] for item in done.items("file_change")] == ["failed", "failed"]
    assert not outside.exists()
    assert not (tmp_path / "work/in").exists()


def test_a_workspace_can_be_written_and_nothing_else(tmp_path: Path, needs_bubblewrap: None) -> None:
    outside = Path("/var/tmp") / f"exec-server-{uuid.uuid4().hex}"
    calls = [
        patch("*** Add File: in", "+x"),
        patch(f"*** Add File: {outside}", "+x", call_id="call_2"),
        run(f"echo y > by-command; touch {outside}", "call_3", login=False),
    ]
    try:
        done = play(tmp_path, Say(calls), "ok", mode="workspace-write")
        assert not outside.exists()
    finally:
        outside.unlink(missing_ok=True)
    assert [item["status"] for item in done.items("file_change")] == ["completed", "failed"]
    told = done.output("call_2")
    assert re.match(r"Exit code: 1\nWall time: [\d.]+ seconds\nOutput:\n", told)
    assert f"\nFailed to write file {outside}: " in told
    assert (tmp_path / "work/in").read_text() == "x\n"
    assert (tmp_path / "work/by-command").read_text() == "y\n"


# Approvals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [True, False])
def test_what_the_sandbox_does_not_let_somebody_may(
    tmp_path: Path, needs_bubblewrap: None, answer: bool
) -> None:
    asked: list[Question] = []

    async def ask(question: Question) -> bool:
        asked.append(question)
        return answer

    edit = patch("*** Add File: a", "+x")
    done = play(tmp_path, Say([edit]), "ok", mode="read-only", approvals="on-request", ask=ask)
    work = tmp_path / "work"
    (question,) = asked
    assert (question.kind, question.what, question.outside) == ("edit", f"add {work}/a", True)
    assert question.why.startswith(f"Failed to write file {work}/a: ")
    assert (work / "a").exists() == answer
    (change,) = done.items("file_change")
    assert change["status"] == ("completed" if answer else "failed")
    if not answer:
        assert done.output() == "patch rejected: rejected by user"


def test_what_is_not_possible_is_not_asked_about(tmp_path: Path) -> None:
    async def ask(_: Question) -> bool:
        raise AssertionError("nobody can make a directory of a file")

    work = tmp_path / "work"
    work.mkdir()
    (work / "blocked").write_text("")
    edit = patch("*** Add File: blocked/new", "+x")
    done = play(tmp_path, Say([edit]), "ok", approvals="on-request", ask=ask)
    assert done.output().startswith("Exit code: 1\n")


def test_rules_about_edits(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    async def ask(question: Question) -> bool:
        asked.append((question.what, question.why))
        return True

    rules = (EditRule("keys", "forbid", "nobody's business"), EditRule("docs", "ask", "people read it"))
    edits = [
        patch("*** Add File: keys/a", "+x"),
        patch("*** Add File: docs/b", "+x", call_id="call_2"),
        patch("*** Add File: c", "+x", call_id="call_3"),
    ]
    done = play(tmp_path, Say(edits), "ok", policy=Policy(edits=rules), approvals="on-request", ask=ask)
    work = tmp_path / "work"
    assert done.output() == "patch rejected: rejected by the policy: nobody's business"
    assert asked == [(f"add {work}/docs/b", "people read it")]
    assert [(work / name).exists() for name in ("keys/a", "docs/b", "c")] == [False, True, True]
    assert [item["status"] for item in done.items("file_change")] == ["failed", "completed", "completed"]
    silent = play(tmp_path, Say([patch("*** Delete File: docs/b")]), "ok", policy=Policy(edits=rules))
    assert silent.output() == "patch rejected: it needs approval, and the approval policy is never"


def test_a_rule_that_lets_an_edit_out(tmp_path: Path, needs_bubblewrap: None) -> None:
    rules = Policy(edits=(EditRule("a", "allow"),))
    edits = [patch("*** Add File: a", "+x"), patch("*** Add File: b", "+x", call_id="call_2")]
    done = play(tmp_path, Say(edits), "ok", mode="read-only", policy=rules)
    assert [item["status"] for item in done.items("file_change")] == ["completed", "failed"]


def test_extras_of_an_edit(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "old").write_text("a\n")
    edit = patch("*** Update File: old", "*** Move to: new", "@@", "-a", "+b")
    done = play(tmp_path, Say([edit, patch("*** Delete File: gone", call_id="call_2")]), "ok", ext=True)
    ended = [event for event in done.events if event.get("item", {}).get("type") == "file_change"][-1]
    by_path = {change["path"]: change for change in ended["ext"]["changes"]}
    assert by_path[f"{work}/old"]["move_path"] == f"{work}/new"
    assert by_path[f"{work}/new"]["diff"].endswith("+b\n")
    assert by_path[f"{work}/old"]["diff"].endswith("-a\n")
