"""Patches: what the reference understands, in its words, and properties of every edit there can be."""

from __future__ import annotations

import difflib
import posixpath
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.agent.patch import (
    AddFile,
    Chunk,
    DeleteFile,
    Patch,
    PatchError,
    UpdateFile,
    parse,
    patched,
    plan,
)

HEADERS = "Valid hunk headers: '*** Add File: {path}', '*** Delete File: {path}', '*** Update File: {path}'"
LINES = "Every line should start with ' ' (context line), '+' (added line), or '-' (removed line)"


def body(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def resolve(path: str) -> str:
    return posixpath.normpath(posixpath.join("/ws", path))


def test_every_kind_of_hunk() -> None:
    text = body(
        "*** Add File: new.txt",
        "+one",
        "+",
        "*** Delete File: old.txt",
        "*** Update File: a.py",
        "*** Move to: b.py",
        "@@ class A:",
        " kept",
        "-out",
        "+in",
        "",
        "@@",
        "+last",
        "*** End of File",
    )
    assert parse(text) == Patch(
        (
            AddFile("new.txt", "one\n\n"),
            DeleteFile("old.txt"),
            UpdateFile(
                "a.py",
                "b.py",
                (
                    Chunk("class A:", ("kept", "out", ""), (0, "in", 2), False),
                    Chunk(None, (), ("last",), True),
                ),
            ),
        )
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n*** End Patch", "invalid patch: The first line of the patch must be '*** Begin Patch'"),
        ("", "invalid patch: The first line of the patch must be '*** Begin Patch'"),
        (
            "*** Begin Patch\n*** Add File: q\n+x",
            "invalid patch: The last line of the patch must be '*** End Patch'",
        ),
        ("*** Begin Patch", "invalid patch: The last line of the patch must be '*** End Patch'"),
        (
            body("*** Add File: q") + "\nand more",
            "invalid patch: The last line of the patch must be '*** End Patch'",
        ),
        (
            body("*** Frobnicate File: x", "+y"),
            f"invalid hunk at line 2, '*** Frobnicate File: x' is not a valid hunk header. {HEADERS}",
        ),
        (
            body("*** Add File: ", "+y"),
            f"invalid hunk at line 2, '*** Add File:' is not a valid hunk header. {HEADERS}",
        ),
        (
            body("*** Add File: q", "+x", "", "*** Add File: r"),
            f"invalid hunk at line 4, '' is not a valid hunk header. {HEADERS}",
        ),
        (body("*** Update File: a"), "invalid hunk at line 2, Update file hunk for path 'a' is empty"),
        (
            body("*** Update File: a", "*** Move to: b"),
            "invalid hunk at line 2, Update file hunk for path 'a' is empty",
        ),
        (
            body("*** Update File: a", "@@", " one", "xtwo"),
            "invalid hunk at line 5, Expected update hunk to start with a @@ context marker, got: 'xtwo'",
        ),
        (
            body("*** Update File: a", "@@", " x", "+L", "*** End of File", "+foo"),
            "invalid hunk at line 7, Expected update hunk to start with a @@ context marker, got: '+foo'",
        ),
        (body("*** Update File: a", "@@"), "invalid hunk at line 4, Update hunk does not contain any lines"),
        (
            body("*** Update File: a", "@@", "*** End of File"),
            "invalid hunk at line 4, Update hunk does not contain any lines",
        ),
        (
            body("*** Update File: a", "@@ class B:", "@@     def f(self):", "-x"),
            f"invalid hunk at line 4, Unexpected line found in update hunk: '@@     def f(self):'. {LINES}",
        ),
        (
            body("*** Update File: a", "@@", "\t-one"),
            f"invalid hunk at line 4, Unexpected line found in update hunk: '\t-one'. {LINES}",
        ),
        (
            body("*** Environment ID:", "*** Add File: q", "+x"),
            "invalid patch: apply_patch environment_id cannot be empty",
        ),
    ],
)
def test_what_is_no_patch(text: str, message: str) -> None:
    with pytest.raises(PatchError) as caught:
        parse(text)
    assert str(caught.value) == message


def test_what_is_overlooked() -> None:
    wanted = Patch((AddFile("a", "x\n"),))
    assert parse("\n  *** Begin Patch  \n  *** Add File: a  \n+x\n  *** End Patch \n") == wanted
    assert parse("*** Begin Patch\r\n*** Add File: a\r\n+x\r\n*** End Patch\r\n") == wanted
    for mark in ("<<EOF", "<<'EOF'", '<<"EOF"'):
        assert parse(f"{mark}\n{body('*** Add File: a', '+x')}\nEOF") == wanted
    named = parse(body("*** Environment ID: build", "*** Add File: a", "+x"))
    assert named == Patch(wanted.hunks, "build")


PYTHON = "class A:\n    def f(self):\n        pass\nclass B:\n    def f(self):\n        pass\n"


@pytest.mark.parametrize(
    ("before", "lines", "after"),
    [
        ("one\ntwo\nthree\n", [" one", "-two", "+TWO"], "one\nTWO\nthree\n"),
        ("one\ntwo", ["@@", " one", "-two", "+TWO"], "one\nTWO\n"),
        ("one\r\ntwo", ["@@", " one", "+1.5"], "one\r\n1.5\r\ntwo\r\n"),
        ("one\r\ntwo\nthree\r\nfour\n", ["@@", "-three", "+3"], "one\r\ntwo\n3\r\nfour\n"),
        ("one\ntwo\r\nthree\r\nfour\r\n", ["@@", "-three", "+3"], "one\ntwo\r\n3\nfour\r\n"),
        ("one\ntwo\rthree\n", ["@@", "-one", "+1"], "1\ntwo\rthree\n"),
        ("", ["@@", "+first"], "first\n"),
        ("one\ntwo\n", ["@@", "+appended"], "one\ntwo\nappended\n"),
        ("one\ntwo\nthree\n", ["@@ one", "+at the end"], "one\ntwo\nthree\nat the end\n"),
        ("one\ntwo\nthree\n", ["@@ one", " two", "+after two"], "one\ntwo\nafter two\nthree\n"),
        (
            PYTHON,
            ["@@ class B:", "     def f(self):", "-        pass", "+        return 2"],
            PYTHON[:-13] + "        return 2\n",
        ),
        ("x\ny\nx\ny\n", ["@@", " x", "-y", "+LAST", "*** End of File"], "x\ny\nx\nLAST\n"),
        ("  indented  \nnext\n", ["@@", "-indented", "+changed"], "changed\nnext\n"),
        ("a \u2013 b \u201cq\u201d\nx\n", ["@@", '-a - b "q"', "+plain"], "plain\nx\n"),
        ("x\nx\nx\n", ["@@", "-x", "+1", "@@", "-x", "+2"], "1\n2\nx\n"),
        ("one\ntwo\n\n\n", ["@@", " two", "-", "-"], "one\ntwo\n"),
        ("one\ntwo\n", ["@@", "-two", "+TWO", ""], "one\nTWO\n"),
        ("x\nx\n", ["@@", "-x", "-x"], ""),
        ("one\ntwo", ["@@", "+three"], "one\ntwo\nthree\n"),
        ("one\ntwo", ["@@ one", "+three"], "one\ntwo\nthree\n"),
        ("one\r\ntwo", ["@@", " two", "+three"], "one\r\ntwo\r\nthree\r\n"),
        (
            PYTHON,
            ["@@", " def f(self):", "-pass", "+        return 1"],
            PYTHON.replace("pass", "return 1", 1),
        ),
        ("one  \ntwo\n", ["@@", " one", "-two", "+2"], "one  \n2\n"),
        ("\u201cq\u201d\u00a0\u2013\nx\n", ["@@", ' "q" -', "-x", "+y"], "\u201cq\u201d\u00a0\u2013\ny\n"),
        ("one\r\n  two\nx\r\n", ["@@", " one ", "+1.5", " two", "-x"], "one\r\n1.5\r\n  two\n"),
        ("one\n", ["@@", " one", " ", "+x"], "one\n\nx\n"),
        ("in\n\nend\n", ["@@", "-", "+next", "*** End of File"], "next\nin\n\nend\n"),
    ],
)
def test_a_file_is_changed_as_the_reference_changes_it(before: str, lines: list[str], after: str) -> None:
    (hunk,) = parse(body("*** Update File: a", *lines)).hunks
    assert isinstance(hunk, UpdateFile)
    assert patched(before, hunk.chunks, "/ws/a") == after


@pytest.mark.parametrize(
    ("before", "lines", "message"),
    [
        ("one\n", ["@@", " gone", "-zzz", "+y"], "Failed to find expected lines in /ws/a:\ngone\nzzz"),
        ("one\n", ["@@ def nope", "-one", "+y"], "Failed to find context 'def nope' in /ws/a"),
        (
            "one\nfour\n",
            ["@@", "-four", "+4", "@@", "-one", "+1"],
            "Failed to find expected lines in /ws/a:\none",
        ),
        (
            "end\nmid\nend\n\n",
            ["@@", "-end", "+E", "*** End of File"],
            "Failed to find expected lines in /ws/a:\nend",
        ),
        (
            "one\n",
            ["@@", "-one", "+1", "@@", "-one", "+2", "*** End of File"],
            "Failed to find expected lines in /ws/a:\none",
        ),
        ("one\n", ["@@", "-one", "+1", "", ""], "Failed to find expected lines in /ws/a:\none\n\n"),
        ("one\ntwo\n", ["@@ -1,2 +1,2 @@", "-two", "+2"], "Failed to find context '-1,2 +1,2 @@' in /ws/a"),
    ],
)
def test_what_is_not_found(before: str, lines: list[str], message: str) -> None:
    (hunk,) = parse(body("*** Update File: a", *lines)).hunks
    assert isinstance(hunk, UpdateFile)
    with pytest.raises(PatchError) as caught:
        patched(before, hunk.chunks, "/ws/a")
    assert str(caught.value) == message


def test_a_plan() -> None:
    patch = parse(
        body(
            *("*** Delete File: gone", "*** Add File: new", "+n"),
            *("*** Update File: old", "*** Move to: sub/moved", "@@", "-a", "+b"),
            *("*** Update File: /abs", "@@", "-a", "+c"),
        )
    )
    decided = plan(patch, resolve, {"/ws/gone": b"g", "/ws/old": b"a\n", "/abs": b"a\n"})
    assert [(change.kind, change.path, change.after) for change in decided.changes] == [
        ("delete", "/ws/gone", None),
        ("add", "/ws/new", b"n\n"),
        ("add", "/ws/sub/moved", b"b\n"),
        ("delete", "/ws/old", None),
        ("update", "/abs", b"c\n"),
    ]
    assert decided.summary == ("Success. Updated the following files:\nA new\nM sub/moved\nM /abs\nD gone\n")


def test_a_file_moved_to_where_it_is_stays() -> None:
    """The reference writes it and then removes it."""
    patch = parse(body("*** Update File: a", "*** Move to: ./a", "@@", "-a", "+b"))
    (change,) = plan(patch, resolve, {"/ws/a": b"a\n"}).changes
    assert (change.kind, change.path, change.after) == ("update", "/ws/a", b"b\n")


@pytest.mark.parametrize(
    "lines",
    [
        ["*** Add File: a", "+q", "*** Delete File: ./a"],
        ["*** Update File: b", "*** Move to: a", "@@", "-x", "*** Add File: a", "+x"],
        [
            "*** Update File: b",
            "*** Move to: a",
            "@@",
            "-x",
            "*** Update File: c",
            "*** Move to: a",
            "@@",
            "-x",
        ],
    ],
)
def test_one_file_is_touched_once(lines: list[str]) -> None:
    with pytest.raises(PatchError, match="invalid patch: multiple operations target /ws/a"):
        plan(parse(body(*lines)), resolve, {"/ws/b": b"x\n", "/ws/c": b"x\n", "/ws/a": b"x\n"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe\n", "invalid utf-8 sequence of 1 bytes from index 0"),
        (b"ab\xe2\x82", "incomplete utf-8 byte sequence from index 2"),
    ],
)
def test_what_is_no_text(data: bytes, message: str) -> None:
    patch = parse(body("*** Update File: a", "@@", "-a", "+b"))
    with pytest.raises(PatchError) as caught:
        plan(patch, resolve, {"/ws/a": data})
    assert str(caught.value) == f"Failed to read file to update /ws/a: {message}"


# Properties ------------------------------------------------------------------------------------------------

LINE = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=6)
FILE = st.lists(st.one_of(LINE, st.sampled_from(["a", "b", "", "  b", "c"])), max_size=12)


def diff(before: list[str], after: list[str]) -> list[str]:
    """One chunk with the whole file as its context: whatever is in that, it fits in one place only."""
    return ["@@", *(line[0] + line[2:] for line in difflib.ndiff(before, after) if line[0] in "+- ")]


@settings(max_examples=50)
@given(FILE, FILE)
def test_any_edit_can_be_said(before: list[str], after: list[str]) -> None:
    if not before:
        return
    (hunk,) = parse(body("*** Update File: f", *diff(before, after))).hunks
    assert isinstance(hunk, UpdateFile)
    text = "".join(line + "\n" for line in before)
    assert patched(text, hunk.chunks, "f") == "".join(line + "\n" for line in after)


@settings(max_examples=50)
@given(FILE, st.data())
def test_lines_that_are_not_named_keep_every_byte(lines: list[str], data: st.DataObject) -> None:
    ends = data.draw(
        st.lists(st.sampled_from(["\n", "\r\n"]), min_size=len(lines) + 1, max_size=len(lines) + 1)
    )
    unique = [f"{number}:{line}" for number, line in enumerate([*lines, "x"])]
    place = data.draw(st.integers(0, len(unique) - 1))
    text = "".join(line + end for line, end in zip(unique, ends, strict=True))
    changed = patched(text, [Chunk(None, (unique[place],), ("new",), False)], "f")
    expected = [line + end for line, end in zip(unique, ends, strict=True)]
    expected[place] = "new" + ends[0]
    assert changed == "".join(expected)


LOOSELY = {"'": "\u2019", '"': "\u201c", "-": "\u2013", " ": "\u00a0"}
"""What a model writes, and what may stand in the file in its place."""


@st.composite
def remembered(draw: st.DrawFn) -> tuple[str, str]:
    """A line as a model writes it, and as it is in the file."""
    written = draw(st.text("ab'\"- ", max_size=6))
    there = "".join(draw(st.sampled_from([char, LOOSELY.get(char, char)])) for char in written)
    space = st.sampled_from(["", " ", "\t", "  "])
    return draw(space) + written + draw(space), draw(space) + there + draw(space)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(" -+"), remembered()), min_size=1, max_size=8),
    st.lists(st.sampled_from(["\n", "\r\n"]), min_size=8, max_size=8),
)
def test_lines_that_are_kept_keep_every_byte(
    lines: list[tuple[str, tuple[str, str]]], ends: list[str]
) -> None:
    """However loosely the model remembers them."""
    there = [(sign, line + end) for (sign, (_, line)), end in zip(lines, ends, strict=False) if sign != "+"]
    (hunk,) = parse(body("*** Update File: f", "@@", *(sign + line for sign, (line, _) in lines))).hunks
    assert isinstance(hunk, UpdateFile)
    changed = patched("".join(line for _, line in there), hunk.chunks, "f")
    ending = "\r\n" if there and there[0][1].endswith("\r\n") else "\n"
    expected = [
        written + ending if sign == "+" else line + end
        for (sign, (written, line)), end in zip(lines, ends, strict=False)
        if sign != "-"
    ]
    assert changed == "".join(expected)


@settings(max_examples=50)
@given(FILE)
def test_a_file_is_added_as_written(lines: list[str]) -> None:
    patch = parse(body("*** Add File: f", *("+" + line for line in lines)))
    assert patch.hunks == (AddFile("f", "".join(line + "\n" for line in lines)),)


@settings(max_examples=50)
@given(st.text(), FILE)
def test_anything_is_a_patch_or_an_error(text: str, lines: list[str]) -> None:
    for garbage in (text, body(text), body("*** Update File: a", "@@", text, *lines)):
        with suppress(PatchError):
            patch = parse(garbage)
            plan(patch, resolve, {resolve(hunk.path): b"a\nb\n" for hunk in patch.hunks})
