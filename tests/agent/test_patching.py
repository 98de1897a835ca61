"""Patches on a real machine's files: all of it, or nothing, whatever happens on the way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.agent.patch import PatchError
from exec_server.agent.patching import PatchFailed, apply, edits, prepare, report
from exec_server.environments.connect import IN_PROCESS, connect
from exec_server.services import Files
from exec_server.wire.uri import path_to_uri


def body(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below a directory: the content of files, None for directories."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


def on(root: Path, work: Callable[[Files, str], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with connect(IN_PROCESS) as machine:
            return await work(machine.files, path_to_uri(str(root)))

    return asyncio.run(main())


async def patch_with(files: Files, cwd: str, text: str) -> str:
    decided = await prepare(text, files, cwd)
    await apply(decided, files)
    return decided.summary


class Failing:
    """Files that do what they are told until the n-th change, which fails: before it is made, or after."""

    CHANGES = ("write", "remove", "make_directory")

    def __init__(self, files: Files, number: int, *, after: bool = False) -> None:
        self._files = files
        self._number = number
        self._after = after
        self.changes = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._files, name)
        if name not in self.CHANGES:
            return real

        async def change(*arguments: Any, **options: Any) -> Any:
            self.changes += 1
            if self.changes != self._number:
                return await real(*arguments, **options)
            if self._after:
                await real(*arguments, **options)
            raise OSError(5, "Input/output error")

        return change


EVERYTHING = body(
    *("*** Add File: deep/er/new.txt", "+new"),
    *("*** Add File: there.txt", "+replaced"),
    *("*** Update File: a.txt", "@@", "-one", "+ONE"),
    *("*** Update File: b.txt", "*** Move to: moved/b.txt", "@@", "-bee", "+BEE"),
    *("*** Delete File: c.txt", "*** Delete File: sub/d.txt"),
)


def populate(root: Path) -> None:
    (root / "sub").mkdir()
    for name, text in {
        "there.txt": "old\n",
        "a.txt": "one\ntwo\n",
        "b.txt": "bee\n",
        "c.txt": "sea\n",
        "sub/d.txt": "dee\n",
    }.items():
        (root / name).write_text(text)
    (root / "b.txt").chmod(0o755)


def test_everything_at_once(tmp_path: Path) -> None:
    populate(tmp_path)
    summary = on(tmp_path, lambda files, cwd: patch_with(files, cwd, EVERYTHING))
    assert summary == (
        "Success. Updated the following files:\nA deep/er/new.txt\nA there.txt\nM a.txt\nM moved/b.txt\n"
        "D c.txt\nD sub/d.txt\n"
    )
    assert tree(tmp_path) == {
        "a.txt": b"ONE\ntwo\n",
        "deep": None,
        "deep/er": None,
        "deep/er/new.txt": b"new\n",
        "moved": None,
        "moved/b.txt": b"BEE\n",
        "sub": None,
        "there.txt": b"replaced\n",
    }
    assert (tmp_path / "moved/b.txt").stat().st_mode & 0o777 == 0o755, "a file that moves keeps its mode"


@pytest.mark.parametrize("after", [False, True])
def test_whatever_fails_everything_is_put_back(tmp_path: Path, after: bool) -> None:
    async def fail_at_each(files: Files, cwd: str) -> int:
        before = tree(tmp_path)
        number = 0
        while True:
            number += 1
            failing: Any = Failing(files, number, after=after)
            said = ""
            try:
                await patch_with(failing, cwd, EVERYTHING)
            except PatchFailed as error:
                said = str(error)
            if failing.changes < number:
                return int(failing.changes)
            assert said.endswith("\nNothing was changed.\n"), said
            assert tree(tmp_path) == before, f"change {number}: {said}"

    populate(tmp_path)
    assert on(tmp_path, fail_at_each) == 10, "three directories, four files written, three removed"


def test_a_move_that_cannot_keep_the_mode_is_still_a_move(tmp_path: Path) -> None:
    class WithoutCopy(Failing):
        def __getattr__(self, name: str) -> Any:
            async def refuse(*_: Any) -> None:
                raise OSError(95, "Operation not supported")

            return refuse if name == "copy" else getattr(self._files, name)

    populate(tmp_path)

    async def work(files: Files, cwd: str) -> None:
        without: Any = WithoutCopy(files, 0)
        await patch_with(without, cwd, EVERYTHING)

    on(tmp_path, work)
    assert (tmp_path / "moved/b.txt").read_text() == "BEE\n"


def test_a_file_that_changes_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    populate(tmp_path)

    async def race(files: Files, cwd: str) -> None:
        decided = await prepare(EVERYTHING, files, cwd)
        (tmp_path / "c.txt").write_text("somebody else's\n")
        before = tree(tmp_path)
        with pytest.raises(PatchFailed, match=r"c\.txt: it has changed meanwhile"):
            await apply(decided, files)
        assert tree(tmp_path) == before

    on(tmp_path, race)


def test_a_cancelled_patch_is_applied_whole(tmp_path: Path) -> None:
    populate(tmp_path)

    async def cancel(files: Files, cwd: str) -> None:
        decided = await prepare(EVERYTHING, files, cwd)
        work = asyncio.ensure_future(apply(decided, files))
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert (tmp_path / "deep/er/new.txt").read_text() == "new\n"
        assert not (tmp_path / "sub/d.txt").exists()

    on(tmp_path, cancel)


def test_what_cannot_be_put_back_is_said(tmp_path: Path) -> None:
    class Stubborn(Failing):
        """Refuses to remove anything: a deletion fails, and so does taking back an addition."""

        def __getattr__(self, name: str) -> Any:
            real = getattr(self._files, name)

            async def refuse(*_: Any, **__: Any) -> None:
                raise OSError(1, "Operation not permitted")

            return refuse if name == "remove" else real

    populate(tmp_path)

    async def work(files: Files, cwd: str) -> None:
        stubborn: Any = Stubborn(files, 0)
        text = body("*** Add File: n.txt", "+n", "*** Delete File: a.txt")
        with pytest.raises(PatchFailed) as caught:
            await patch_with(stubborn, cwd, text)
        assert str(caught.value).startswith(f"Failed to delete file {tmp_path}/a.txt: ")
        assert f"These could not be put back as they were:\n{tmp_path}/n.txt: " in str(caught.value)

    on(tmp_path, work)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["*** Update File: missing", "@@", "-a"],
            "Failed to read file to update {root}/missing: No such file or directory (os error 2)",
        ),
        (
            ["*** Delete File: missing"],
            "Failed to read {root}/missing: No such file or directory (os error 2)",
        ),
        (["*** Delete File: sub"], "Failed to read {root}/sub: path `{root}/sub` is not a file"),
        (
            ["*** Add File: a.txt", "+x", "*** Update File: a.txt", "@@", "-x"],
            "invalid patch: multiple operations target {root}/a.txt",
        ),
        (["*** Add File: a\0b", "+x"], "invalid patch: a path cannot contain NUL: 'a\\x00b'"),
    ],
)
def test_verification(tmp_path: Path, lines: list[str], message: str) -> None:
    populate(tmp_path)
    with pytest.raises(PatchError) as caught:
        on(tmp_path, lambda files, cwd: prepare(body(*lines), files, cwd))
    assert str(caught.value) == "apply_patch verification failed: " + message.format(root=tmp_path)


def test_a_patch_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match=r"\Apatch rejected: empty patch\Z"):
        on(tmp_path, lambda files, cwd: prepare(body(), files, cwd))


@pytest.mark.parametrize("name", ["sub", "a.txt/x", "a.txt/x/y"])
def test_places_where_no_file_can_be(tmp_path: Path, name: str) -> None:
    populate(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(
        PatchFailed, match=f"Failed to write file {tmp_path}/{name}: .*\nNothing was changed.\n"
    ):
        on(tmp_path, lambda files, cwd: patch_with(files, cwd, body(f"*** Add File: {name}", "+x")))
    assert tree(tmp_path) == before


def test_a_link_is_written_through_and_deleted_itself(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x\n")
    (tmp_path / "link").symlink_to("real")
    on(tmp_path, lambda files, cwd: patch_with(files, cwd, body("*** Update File: link", "@@", "-x", "+y")))
    assert (tmp_path / "real").read_text() == "y\n"
    assert (tmp_path / "link").is_symlink()
    on(tmp_path, lambda files, cwd: patch_with(files, cwd, body("*** Delete File: link")))
    assert os.listdir(tmp_path) == ["real"]


def shape(root: Path) -> dict[str, str]:
    """Everything below a directory: where links lead, and what files hold."""
    return {
        str(path.relative_to(root)): f"-> {os.readlink(path)}"
        if path.is_symlink()
        else path.read_text()
        if path.is_file()
        else "/"
        for path in sorted(root.rglob("*"))
    }


def test_what_a_link_leads_to_stays_when_the_link_is_moved(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\n")
    (tmp_path / "a").chmod(0o750)
    (tmp_path / "l").symlink_to("a")
    lines = ["*** Update File: l", "*** Move to: m", "@@", "-one", "+ONE"]
    on(tmp_path, lambda files, cwd: patch_with(files, cwd, body(*lines)))
    assert shape(tmp_path) == {"a": "one\n", "m": "ONE\n"}
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["*** Add File: m", "+new", "*** Add File: m/x", "+k"], "m is a link that leads nowhere"),
        (["*** Add File: m/x", "+k"], "m is a link that leads nowhere"),
        (["*** Add File: new/deep", "+k", "*** Add File: m", "+new"], "m is a link that leads nowhere"),
        (
            ["*** Update File: x/a", "@@", "-one", "+1", "*** Update File: y/a", "@@", "-one", "+2"],
            "are the same file; a patch can have it only once",
        ),
        (["*** Add File: x/new/b", "+1", "*** Add File: y/new/b", "+2"], "are the same file"),
        (["*** Update File: l", "*** Move to: x/a", "@@", "-one", "+1"], "are the same file"),
        (["*** Delete File: x/a", "*** Delete File: l"], "are the same file"),
    ],
)
def test_links_are_no_way_to_change_half_of_it(tmp_path: Path, lines: list[str], said: str) -> None:
    (tmp_path / "m").symlink_to("gone")
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a").write_text("one\n")
    (tmp_path / "y").symlink_to("x")
    (tmp_path / "l").symlink_to("x/a")
    before = shape(tmp_path)
    with pytest.raises(PatchFailed, match=said) as failed:
        on(tmp_path, lambda files, cwd: patch_with(files, cwd, body(*lines)))
    assert str(failed.value).endswith("\nNothing was changed.\n")
    assert shape(tmp_path) == before


def test_a_link_that_was_removed_comes_back_as_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\n")
    (tmp_path / "l").symlink_to("a")
    (tmp_path / "z").write_text("last\n")
    before = shape(tmp_path)
    lines = ["*** Delete File: l", "*** Delete File: z"]

    async def work(files: Files, cwd: str) -> None:
        failing: Any = Failing(files, 2)
        with pytest.raises(PatchFailed, match="Nothing was changed"):
            await patch_with(failing, cwd, body(*lines))
        assert shape(tmp_path) == before
        await patch_with(files, cwd, body(*lines))
        assert shape(tmp_path) == {"a": "one\n"}

    on(tmp_path, work)


def test_what_the_event_stream_shows(tmp_path: Path) -> None:
    populate(tmp_path)
    decided = on(tmp_path, lambda files, cwd: prepare(EVERYTHING, files, cwd))
    shown = [(edit.kind, os.path.relpath(edit.path, tmp_path)) for edit in edits(decided)]
    assert shown == [
        ("update", "a.txt"),
        ("delete", "b.txt"),
        ("delete", "c.txt"),
        ("add", "deep/er/new.txt"),
        ("add", "moved/b.txt"),
        ("delete", "sub/d.txt"),
        ("add", "there.txt"),
    ]


def test_what_the_model_is_told() -> None:
    assert report(0.04, 0, "Success.\n") == "Exit code: 0\nWall time: 0 seconds\nOutput:\nSuccess.\n"
    assert report(1.26, 1, "no\n") == "Exit code: 1\nWall time: 1.3 seconds\nOutput:\nno\n"


NAMES = st.sampled_from(["a", "b", "d/c", "d/e/f", "g"])
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "delete", "update", "move"]), NAMES, NAMES, st.sampled_from(["1", "2"])
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40)
@given(st.dictionaries(NAMES, st.sampled_from(["1\n", "2\n"]), max_size=4), OPERATIONS, st.integers(1, 12))
def test_whole_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory,
    there: dict[str, str],
    operations: list[tuple[str, str, str, str]],
    number: int,
) -> None:
    root = tmp_path_factory.mktemp("whole")
    for name, text in there.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if not (root / name).exists():
            (root / name).write_text(text)
    lines: list[str] = []
    for kind, name, other, line in operations:
        if kind == "add":
            lines += [f"*** Add File: {name}", f"+{line}"]
        elif kind == "delete":
            lines += [f"*** Delete File: {name}"]
        else:
            lines += [f"*** Update File: {name}", *([f"*** Move to: {other}"] if kind == "move" else [])]
            lines += ["@@", f"-{line}", "+new"]

    async def work(files: Files, cwd: str) -> None:
        before = tree(root)
        failing: Any = Failing(files, number)
        try:
            decided = await prepare(body(*lines), failing, cwd)
        except PatchError:
            assert tree(root) == before
            return
        try:
            await apply(decided, failing)
        except PatchFailed:
            assert tree(root) == before
            return
        for change in decided.changes:
            path = Path(change.path)
            assert (path.read_bytes() if path.exists() else None) == change.after

    on(root, work)
