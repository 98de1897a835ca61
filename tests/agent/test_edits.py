"""Edits of a model: what is told of them, what confines them, and who may let them."""

from __future__ import annotations

import asyncio
import io
import json
import re
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from exec_server.agent.approvals import Approver, Question
from exec_server.agent.machines import Machines
from exec_server.agent.policy import EditRule, Policy
from exec_server.agent.tools import Toolbox
from exec_server.environments.connect import IN_PROCESS, connect
from exec_server.events.writer import EventWriter
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


# Which machine ---------------------------------------------------------------------------------------------


def two_machines(folder: Path, work: Callable[[Toolbox], Awaitable[None]]) -> None:
    """`near` and `far`: the same machine twice, each in a directory of its own."""

    async def main() -> None:
        for name in ("near", "far"):
            (folder / name).mkdir()
        async with connect(IN_PROCESS) as near, connect(IN_PROCESS) as far:
            cwds = {name: (folder / name).as_uri() for name in ("near", "far")}
            machines = Machines({"near": near, "far": far}, cwds, mode="danger-full-access")
            writer = EventWriter(io.BytesIO())
            writer.thread_started("thread")
            writer.turn_started()
            toolbox = Toolbox(writer, machines, Approver(), thread_id="thread")
            try:
                await work(toolbox)
            finally:
                await toolbox.close()

    asyncio.run(main())


def test_a_patch_is_applied_on_the_machine_it_names(tmp_path: Path) -> None:
    """Whichever way it is called. One that names no machine there is, or two of them, is applied on none."""

    def body(name: str | None, file: str) -> str:
        head = "" if name is None else f"*** Environment ID: {name}\n"
        return f"*** Begin Patch\n{head}*** Add File: {file}\n+x\n*** End Patch"

    def typed(name: str, file: str, **more: str) -> str:
        return json.dumps({"cmd": f"apply_patch <<'EOF'\n{body(name, file)}\nEOF", **more})

    def called(name: str | None, file: str, **more: str) -> str:
        return json.dumps({"input": body(name, file), **more})

    async def work(toolbox: Toolbox) -> None:
        offered = {tool["name"]: tool for tool in toolbox.definitions()}["apply_patch"]
        assert offered["parameters"]["properties"]["environment_id"]["enum"] == ["near", "far"]
        await toolbox.call("apply_patch", called("far", "function"), "1")
        await toolbox.patch(body("far", "custom"))
        await toolbox.call("exec_command", typed("far", "typed"), "2")
        await toolbox.call("exec_command", typed("far", "both", environment_id="far"), "3")
        await toolbox.call("apply_patch", called(None, "argument", environment_id="far"), "4")
        await toolbox.call("apply_patch", called(None, "neither"), "5")
        await toolbox.call("apply_patch", called("near", "near"), "6")
        unknown = "unknown turn environment id `moon`"
        assert await toolbox.call("apply_patch", called("moon", "a"), "7") == unknown
        assert await toolbox.call("apply_patch", called(None, "a", environment_id="moon"), "8") == unknown
        assert await toolbox.call("exec_command", typed("moon", "a"), "9") == unknown
        assert await toolbox.patch(body("moon", "a")) == unknown
        two = "the patch is for environment `near`, and the call for `far`"
        for name, text in (("apply_patch", called), ("exec_command", typed)):
            assert await toolbox.call(name, text("near", "a", environment_id="far"), name) == two

    two_machines(tmp_path, work)
    far = sorted(path.name for path in (tmp_path / "far").iterdir())
    assert far == ["argument", "both", "custom", "function", "typed"]
    assert sorted(path.name for path in (tmp_path / "near").iterdir()) == ["near", "neither"]


# Links -----------------------------------------------------------------------------------------------------


def test_a_rule_is_about_what_is_written(tmp_path: Path) -> None:
    """Links do not lead around it, in either direction."""
    work = tmp_path / "work"
    (work / "deploy").mkdir(parents=True)
    (work / "deploy/x").write_text("a\n")
    (work / "directory").symlink_to("deploy")
    (work / "file").symlink_to("deploy/x")
    (work / "kept").mkdir()
    (work / "alias").symlink_to("kept")
    (work / "src").write_text("a\n")
    rules = Policy(edits=(EditRule("deploy", "forbid", "no"), EditRule("alias", "forbid", "no")))
    update = ["@@", "-a", "+b"]
    edits = [
        ["*** Update File: directory/x", *update],
        ["*** Update File: file", *update],
        ["*** Add File: directory/new/er", "+x"],
        ["*** Delete File: directory/x"],
        ["*** Update File: src", "*** Move to: directory/src", *update],
        ["*** Add File: kept/new", "+x"],
        ["*** Add File: alias/new", "+x"],
    ]
    before = sorted(map(str, work.rglob("*")))
    calls = [patch(*lines, call_id=f"call_{number}") for number, lines in enumerate(edits)]
    done = play(tmp_path, Say(calls), "ok", policy=rules)
    assert set(done.model.outputs().values()) == {"patch rejected: rejected by the policy: no"}
    assert sorted(map(str, work.rglob("*"))) == before
    assert (work / "deploy/x").read_text() == (work / "src").read_text() == "a\n"
    # The link itself is no part of what it leads to.
    assert (
        play(tmp_path, Say([patch("*** Delete File: file")]), "ok", policy=rules)
        .output()
        .startswith("Exit code: 0\n")
    )


@pytest.mark.parametrize("through", ["directory/hook", "file", "made/hook"])
def test_what_is_allowed_outside_the_sandbox_stays_where_it_was_allowed(
    tmp_path: Path, needs_bubblewrap: None, through: str
) -> None:
    """A model can make a link where it may write, and even in the place of what a rule names."""
    work = tmp_path / "work"
    (work / ".git").mkdir(parents=True)
    (work / "scratch").mkdir()
    (work / ".git/config").write_text("a\n")
    link = run(
        "ln -s ../.git scratch/directory; ln -s ../.git/config scratch/file; ln -s .git made", login=False
    )
    rules = Policy(edits=(EditRule("scratch", "allow"), EditRule("made", "allow")))
    path = through if through.startswith("made") else f"scratch/{through}"
    lines = (
        [f"*** Update File: {path}", "@@", "-a", "+b"]
        if through == "file"
        else [f"*** Add File: {path}", "+#!/bin/sh"]
    )
    done = play(
        tmp_path,
        Say([link]),
        Say([patch(*lines, call_id="call_2")]),
        "ok",
        mode="workspace-write",
        policy=rules,
    )
    assert done.output("call_2").startswith("Exit code: 1\n")
    assert done.output("call_2").endswith("\nNothing was changed.\n")
    assert [path.name for path in (work / ".git").iterdir()] == ["config"]
    assert (work / ".git/config").read_text() == "a\n"


def test_a_question_names_what_would_be_written(tmp_path: Path, needs_bubblewrap: None) -> None:
    """And what is shown is what is written, if a link takes its place while somebody thinks."""
    work = tmp_path / "work"
    (work / "real").mkdir(parents=True)
    (work / "docs").mkdir()
    (work / "docs/images").symlink_to("../real")
    (work / "other").mkdir()
    asked: list[str] = []

    async def ask(question: Question) -> bool:
        asked.append(question.what)
        if len(asked) == 2:
            (work / "real/first").unlink()
            (work / "real").rmdir()
            (work / "real").symlink_to("other")
        return True

    edits = [
        patch("*** Add File: docs/images/first", "+x"),
        patch("*** Add File: docs/images/second", "+x", call_id="call_2"),
    ]
    done = play(tmp_path, Say(edits), "ok", mode="read-only", approvals="on-request", ask=ask)
    assert asked == [
        f"add {work}/docs/images/{name} (that is {work}/real/{name})" for name in ("first", "second")
    ]
    assert done.output().startswith("Exit code: 0\n")
    assert done.output("call_2").startswith("Exit code: 1\n")
    assert list((work / "other").iterdir()) == []


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize(
    ("lines", "left"),
    [
        (["*** Update File: a", "@@", "-a", "+b"], {"a": "b\n", "link": "b\n"}),
        (["*** Delete File: a"], {}),
        (["*** Update File: a", "*** Move to: sub/c", "@@", "-a", "+b"], {"sub/c": "b\n"}),
        (["*** Add File: a", "+b"], {"a": "b\n", "link": "b\n"}),
    ],
)
def test_somebody_is_asked_about_every_kind_of_edit(
    tmp_path: Path, needs_bubblewrap: None, answer: bool, lines: list[str], left: dict[str, str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a").write_text("a\n")
    (work / "link").symlink_to("a")
    asked: list[Question] = []

    async def ask(question: Question) -> bool:
        asked.append(question)
        return answer

    done = play(tmp_path, Say([patch(*lines)]), "ok", mode="read-only", approvals="on-request", ask=ask)
    (question,) = asked
    assert question.outside
    assert "could not be put back" not in done.output()
    files = {str(path.relative_to(work)): path.read_text() for path in work.rglob("*") if path.is_file()}
    assert files == (left if answer else {"a": "a\n", "link": "a\n"})


@pytest.mark.parametrize(
    "lines",
    [
        ["*** Update File: a", "@@", "-a", "+b"],
        ["*** Delete File: a"],
        ["*** Delete File: link"],
        ["*** Update File: a", "*** Move to: c", "@@", "-a", "+b"],
    ],
)
def test_what_the_sandbox_refuses_was_never_changed(
    tmp_path: Path, needs_bubblewrap: None, capfd: pytest.CaptureFixture[str], lines: list[str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a").write_text("a\n")
    (work / "link").symlink_to("a")
    told = play(tmp_path, Say([patch(*lines)]), "ok", mode="read-only").output()
    assert told.startswith("Exit code: 1\n")
    assert told.endswith("\nNothing was changed.\n")
    assert "could not be taken back" not in capfd.readouterr().err
    assert (work / "link").read_text() == "a\n"


def test_a_question_that_is_interrupted_changes_nothing(tmp_path: Path) -> None:
    async def ask(_: Question) -> bool:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return True

    rules = Policy(edits=(EditRule(".", "ask"),))
    edit = patch("*** Add File: a", "+x")
    done = play(tmp_path, Say([edit]), "ok", policy=rules, approvals="on-request", ask=ask)
    (change,) = done.items("file_change")
    assert change["status"] == "failed"
    assert not (tmp_path / "work/a").exists()
