"""Our patches against the reference's: the same files and patches, the same words and the same result."""

from __future__ import annotations

import asyncio
from pathlib import Path

from compliance.harness import Codex
from compliance.model import Turn, apply_patch
from exec_server.agent.patch import PatchError
from exec_server.agent.patching import PatchFailed, apply, prepare, report
from exec_server.environments.connect import IN_PROCESS, connect
from exec_server.wire.uri import path_to_uri

FILES = {
    "a.txt": b"one\ntwo\nthree\nfour\nfive\n",
    "crlf.txt": b"one\r\ntwo\r\nthree\r\n",
    "mixed.txt": b"one\r\ntwo\nthree\r\nfour\n",
    "end.txt": b"one\ntwo",
    "empty.txt": b"",
    "binary": b"\xff\xfe\nline\n",
    "dashes.txt": "a \u2013 b \u201cq\u201d\nx\n".encode(),
    "code.py": b"class A:\n    def f(self):\n        pass\nclass B:\n    def f(self):\n        pass\n",
    "move.txt": b"m1\nm2\n",
    "there.txt": b"already\n",
    "gone.txt": b"d\n",
    "twice.txt": b"x\ny\nx\ny\n",
    "indent.txt": b"  indented  \nnext\n",
    "dir/inside": b"i\n",
    "loose.py": b"class A:\n    def f(self):\n        x = 1\n        return x\n",
    "loose.md": "one  \ntwo\u00a0\u201cq\u201d\nthree\n".encode(),
    "loose.crlf": b"one\r\n  two\nthree\r\n",
    "append.txt": b"one\ntwo",
    "after.txt": b"one\ntwo",
    "blank.txt": b"one\n",
    "blanks.txt": b"in\n\n\nend\n",
}

PATCHES = [
    [],
    ["*** Frobnicate File: x", "+y"],
    ["*** Update File: a.txt"],
    ["*** Update File: a.txt", "@@", " one", "xtwo"],
    ["*** Update File: a.txt", " one", "-two", "+TWO"],
    ["*** Update File: a.txt", "@@", " nonexistent", "-zzz", "+y"],
    ["*** Update File: a.txt", "@@ def nope", "-one", "+y"],
    ["*** Update File: missing.txt", "@@", "-one", "+y"],
    ["*** Delete File: missing.txt"],
    ["*** Delete File: dir"],
    ["*** Update File: dir", "@@", "-one", "+y"],
    ["*** Add File: there.txt", "+over"],
    ["*** Add File: new.txt"],
    ["*** Add File: n/e/w.txt", "+1", "+", "+2"],
    ["*** Add File: bad.txt", "+1", "noplus"],
    ["*** Update File: crlf.txt", "@@", " one", "-two", "+TWO"],
    ["*** Update File: mixed.txt", "@@", "-three", "+3"],
    ["*** Update File: end.txt", "@@", " one", "+1.5"],
    ["*** Update File: empty.txt", "@@", "+first"],
    ["*** Update File: binary", "@@", "-line", "+LINE"],
    ["*** Update File: dashes.txt", "@@", '-a - b "q"', "+plain"],
    ["*** Update File: code.py", "@@ class B:", "@@     def f(self):", "-        pass"],
    ["*** Update File: code.py", "@@ class B:", "     def f(self):", "-        pass", "+        return 2"],
    ["*** Update File: a.txt", "@@ three", "+appended"],
    ["*** Update File: move.txt", "*** Move to: sub/moved.txt", "@@", "-m1", "+M1"],
    ["*** Update File: twice.txt", "@@", " x", "-y", "+LAST", "*** End of File"],
    ["*** Update File: indent.txt", "@@", "-indented", "+changed"],
    ["*** Update File: a.txt", "@@", "-four", "+FOUR", "@@", "-one", "+ONE"],
    ["*** Update File: a.txt", "@@", "-one", "+1", "*** Update File: a.txt", "@@", "-1", "+I"],
    ["*** Delete File: gone.txt", "*** Update File: missing.txt", "@@", "-one", "+y"],
    ["*** Update File: a.txt", "@@", "-five", "+FIVE", "", ""],
    ["*** Update File: loose.py", "@@", " def f(self):", "-x = 1", "+        x = 2", " return x"],
    ["*** Update File: loose.md", "@@", " one", ' two "q"', "-three", "+THREE"],
    ["*** Update File: loose.crlf", "@@", " one ", "+1.5", " two", "-three", "+3"],
    ["*** Update File: append.txt", "@@", "+three"],
    ["*** Update File: after.txt", "@@ one", "+three"],
    ["*** Update File: blank.txt", "@@", " one", " ", "+x"],
    ["*** Update File: blanks.txt", "@@", "-", "+next", "*** End of File"],
    ["*** Environment ID: local", "*** Add File: named.txt", "+x"],
    ["*** Delete File: gone.txt", "*** Add File: last.txt", "+l", "*** Update File: a.txt", "@@", "-three"],
]


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def populate(root: Path) -> None:
    for name, data in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(data)


async def ours(root: Path, texts: list[str]) -> list[str]:
    said = []
    async with connect(IN_PROCESS) as machine:
        for text in texts:
            try:
                plan = await prepare(text, machine.files, path_to_uri(str(root)))
                await apply(plan, machine.files)
                said.append(report(0, 0, plan.summary))
            except PatchError as error:
                said.append(str(error))
            except PatchFailed as error:
                said.append(report(0, 1, str(error)))
    return said


def test_the_same_words_and_the_same_files(codex: Codex, workspace: Path, tmp_path: Path) -> None:
    texts = ["\n".join(["*** Begin Patch", *lines, "*** End Patch"]) for lines in PATCHES]
    populate(workspace)
    turns: list[Turn] = [*(apply_patch(text) for text in texts), "done"]
    run = codex.run(turns)
    here = tmp_path / "ours"
    here.mkdir()
    populate(here)
    said = asyncio.run(ours(here, texts))
    for text, theirs, mine in zip(texts, run.results, said, strict=True):
        # Typed as a command, what was done has the head of a command's result before it.
        reference = theirs.text.removeprefix("Wall time: 0.0000 seconds\nOutput:\n")
        assert mine.replace(str(here), "ROOT") == reference.replace(str(workspace), "ROOT"), text
    assert tree(here) == tree(workspace)
