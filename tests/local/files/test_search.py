"""Searching contents, by ripgrep and by our own program alike."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.files import search as module
from exec_server.local.files.lane import Abandoned, Turn
from exec_server.local.files.search import search
from exec_server.wire.errors import RpcError
from exec_server.wire.files import SearchParams

CACHE = Path("~/.cache/exec-server").expanduser()
RIPGREP = shutil.which("rg") or next((str(path) for path in CACHE.glob("*/**/codex-path/rg")), None)


@pytest.fixture(params=["builtin", "ripgrep"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "ripgrep" and RIPGREP is None:
        pytest.skip("ripgrep is not installed, nor in the cache of the reference")
    program = RIPGREP if request.param == "ripgrep" else None
    monkeypatch.setattr(module, "find_program", lambda _: program)
    name: str = request.param
    return name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_text("import os\n\ndef hello(name):\n    return name\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "b.txt").write_text("Hello there\nhello.world\nothello\n")
    (tmp_path / ".hidden").write_text("hello\n")
    (tmp_path / "binary").write_bytes(b"hello\0hello")
    (tmp_path / "latin").write_bytes(b"hello \xff\n")
    return tmp_path


def found(root: Path, pattern: str, engine: str, **more: Any) -> list[tuple[str, int]]:
    result = search(os.fsencode(root), SearchParams(path=root.as_uri(), pattern=pattern, **more))
    assert result["engine"] == engine
    base = root.as_uri() + "/"
    return [(match["path"].removeprefix(base), match["lineNumber"]) for match in result["matches"]]


def test_lines(root: Path, engine: str) -> None:
    assert found(root, "hello", engine) == [("a.py", 3), ("latin", 1), ("src/b.txt", 2), ("src/b.txt", 3)]
    assert found(root, "HELLO", engine, ignore_case=True, globs=["*.txt"]) == [
        ("src/b.txt", 1),
        ("src/b.txt", 2),
        ("src/b.txt", 3),
    ]
    assert found(root, "hello", engine, whole_words=True, globs=["!latin"]) == [("a.py", 3), ("src/b.txt", 2)]
    assert found(root, "hello.", engine, fixed_strings=True) == [("src/b.txt", 2)]
    assert (".hidden", 1) in found(root, "hello", engine, hidden=True)
    assert found(root, r"^def \w+\(", engine) == [("a.py", 3)]
    assert found(root, "nowhere to be found", engine) == []
    assert found(root, "hello", engine, globs=["src/*.txt"]) == [("src/b.txt", 2), ("src/b.txt", 3)]


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        (["!vendor"], ["a/build/f", "build/f", "src/deep/f", "src/f", "top.txt"]),
        (["!vendor/"], ["a/build/f", "build/f", "src/deep/f", "src/f", "top.txt"]),
        (["!vendor/**"], ["a/build/f", "build/f", "src/deep/f", "src/f", "top.txt"]),
        (["!build/", "!vendor"], ["src/deep/f", "src/f", "top.txt"]),
        (["!/build", "!vendor"], ["a/build/f", "src/deep/f", "src/f", "top.txt"]),
        (["!top.txt/", "*.txt"], ["top.txt"]),
        (["!*.txt", "top.txt"], ["top.txt"]),
        (["top.txt", "!*.txt"], []),
        (["src"], []),
        (["src/**"], ["src/deep/f", "src/f"]),
        (["src/*"], ["src/f"]),
        (["!src", "src/**"], []),
        (["!deep", "src/**"], ["src/deep/f", "src/f"]),
        (["src/**", "!deep"], ["src/f"]),
        ([".hid"], [".hid"]),
        (["# nothing", ""], ["a/build/f", "build/f", "src/deep/f", "src/f", "top.txt", "vendor/x/f"]),
    ],
)
def test_globs(tmp_path: Path, engine: str, globs: list[str], expected: list[str]) -> None:
    """The last one that fits decides; a directory that is left out takes along what is in it."""
    for name in ("vendor/x/f", "build/f", "a/build/f", "src/f", "src/deep/f", "top.txt", ".hid"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")
    assert found(tmp_path, "x", engine, globs=globs) == [(name, 1) for name in expected]


def test_a_file_that_is_named_is_searched(tmp_path: Path, engine: str) -> None:
    (tmp_path / ".f").write_text("x\n")
    params = SearchParams(path="file:///", pattern="x", globs=["!.f"])
    assert len(search(os.fsencode(tmp_path / ".f"), params)["matches"]) == 1


def test_ignore_files(tmp_path: Path, engine: str) -> None:
    """Each of them by its own name and place; those of git only in a repository, and only up to its top."""
    contents = {
        ".gitignore": "outer\n",
        ".ignore": "by-ignore\n",
        "repo/.gitignore": "*.log\n!keep.log\n/anchored\nbuilt/\n!.shown\nbad[\n# no\nwon\n",
        "repo/.ignore": "!won\n",
        "repo/.git/info/exclude": "excluded\n",
        "repo/sub/.gitignore": "!two.log\n",
    }
    names = ["outer", "by-ignore", "repo/outer", "repo/by-ignore", "repo/one.log", "repo/keep.log"]
    names += ["repo/anchored", "repo/sub/anchored", "repo/built/f", "repo/sub/built", "repo/.shown"]
    names += ["repo/.not", "repo/won", "repo/excluded", "repo/sub/two.log", "repo/sub/three.log"]
    for name, text in {**contents, **dict.fromkeys(names, "x\n")}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shown = ["repo/.shown", "repo/keep.log", "repo/outer", "repo/sub/anchored", "repo/sub/built"]
    shown += ["repo/sub/two.log", "repo/won"]
    assert [name for name, _ in found(tmp_path, "^x$", engine)] == ["outer", *shown]
    below = [name for name, _ in found(tmp_path / "repo" / "sub", "^x$", engine)]
    assert below == ["anchored", "built", "two.log"], "what is above counts, too"
    everything = found(tmp_path, "^x$", engine, no_ignore=True, hidden=True)
    assert sorted(name for name, _ in everything) == sorted(names)
    assert found(tmp_path, "^x$", engine, globs=["*.log"])[0] == ("repo/keep.log", 1)


def test_text(tmp_path: Path, engine: str) -> None:
    """Characters and not bytes, in whatever encoding a file says that it has."""
    (tmp_path / "a").write_text("für\nÜBER\n")
    (tmp_path / "b").write_bytes(b"\xef\xbb\xbffirst\nsecond\n")
    (tmp_path / "c").write_bytes("wide ü\n".encode("utf-16"))
    assert found(tmp_path, "^f.r$", engine) == [("a", 1)]
    assert found(tmp_path, "über", engine, ignore_case=True) == [("a", 2)]
    assert found(tmp_path, "^first", engine) == [("b", 1)]
    assert found(tmp_path, "wide .$", engine) == [("c", 1)]
    assert found(tmp_path, "(?i)FÜR", engine, whole_words=True) == [("a", 1)]
    params = SearchParams(path="file:///", pattern="r")
    assert search(os.fsencode(tmp_path / "a"), params)["matches"][0]["submatches"] == [{"start": 3, "end": 4}]


def test_places(root: Path, engine: str) -> None:
    path = root / "a.py"
    params = SearchParams(path=path.as_uri(), pattern="name", before_context=1, after_context=1)
    result = search(os.fsencode(path), params)
    assert result["matches"] == [
        {
            "path": path.as_uri(),
            "lineNumber": 3,
            "byteOffset": 11,
            "line": "def hello(name):",
            "submatches": [{"start": 10, "end": 14}],
        },
        {
            "path": path.as_uri(),
            "lineNumber": 4,
            "byteOffset": 28,
            "line": "    return name",
            "submatches": [{"start": 11, "end": 15}],
        },
    ]
    assert result["context"] == [{"path": path.as_uri(), "lineNumber": 2, "line": ""}]


def test_names_and_contents_that_are_not_utf8(tmp_path: Path, engine: str) -> None:
    with open(os.fsencode(tmp_path) + b"/n\xff", "wb") as file:
        file.write(b"needle \xfe\n")
    result = search(os.fsencode(tmp_path), SearchParams(path=tmp_path.as_uri(), pattern="needle"))
    assert [(match["path"], match["line"]) for match in result["matches"]] == [
        (tmp_path.as_uri() + "/n%FF", "needle \ufffd")
    ]


def test_limits(tmp_path: Path, engine: str) -> None:
    (tmp_path / "f").write_text("x\n" * 100_000)
    (tmp_path / "long").write_text("y" * 100_000 + "\n")
    params = SearchParams(path=tmp_path.as_uri(), pattern="x", max_results=5)
    result = search(os.fsencode(tmp_path), params)
    assert (len(result["matches"]), result["truncated"]) == (5, True)
    result = search(os.fsencode(tmp_path), SearchParams(path=tmp_path.as_uri(), pattern="y+"))
    assert (len(result["matches"][0]["line"]), result["matches"][0]["lineTruncated"]) == (4096, True)
    assert result["matches"][0]["submatches"] == []


def test_refusals(tmp_path: Path, engine: str) -> None:
    def refused(**more: Any) -> str:
        params = SearchParams(**{"path": tmp_path.as_uri(), "pattern": "x", **more})
        with pytest.raises(RpcError) as caught:
            search(os.fsencode(tmp_path), params)
        assert caught.value.code == -32600
        return caught.value.message

    assert refused(pattern="(").startswith("fs/search cannot search for `(`: ")
    assert refused(max_results=0) == "maxResults must be between 1 and 10000"
    assert refused(before_context=101) == "beforeContext and afterContext must be at most 100"
    for text in ("a\0b", "a\nb", "x" * 200_000):
        assert refused(pattern=text, fixed_strings=True).startswith("fs/search ")
    assert refused(globs=["a\0b"]).startswith("fs/search takes no NUL in globs")
    for glob in ("[", "{a", "a}"):
        assert "fs/search cannot search for `x`: " in refused(globs=["*", glob])
    assert found(tmp_path, "é" * 32_000, engine, fixed_strings=True, globs=["é" * 200] * 100) == []
    with pytest.raises(FileNotFoundError):
        search(os.fsencode(tmp_path / "missing"), SearchParams(path="file:///x", pattern="x"))


def test_a_search_that_never_ends_ends_with_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_program", lambda _: None)

    class Gone(Turn):
        def __init__(self) -> None:
            self.until = time.monotonic() + 0.2

        def check(self) -> None:
            if time.monotonic() > self.until:
                raise Abandoned

    for number in range(50):  # each of them is given up, in time
        (tmp_path / f"f{number}").write_text("a" * 100 + "\n")
    params = SearchParams(path=tmp_path.as_uri(), pattern="(a+)+$b")
    begun = time.monotonic()
    with pytest.raises(Abandoned):
        search(os.fsencode(tmp_path), params, Gone())
    assert time.monotonic() - begun < 10
    monkeypatch.setattr(module, "MAX_SECONDS", 0.3)
    assert search(os.fsencode(tmp_path), params)["truncated"]


@pytest.mark.parametrize("pattern", ["a+b", r"\w+\s\w+", "(a+)+$b"])
def test_a_line_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.setattr(module, "find_program", lambda _: None)
    (tmp_path / "f").write_text("aab b aab\n" + "a" * (100 if "$" in pattern else 2_000_000) + "\naab b\n")
    result = search(os.fsencode(tmp_path), SearchParams(path=tmp_path.as_uri(), pattern=pattern))
    lines = [] if "$" in pattern else [1, 3]
    assert [match["lineNumber"] for match in result["matches"]] == lines
    assert result["truncated"]


def test_one_long_line_does_not_lose_the_others(tmp_path: Path, engine: str) -> None:
    """Longer than is kept, and read in time that grows with its length and not with its square."""
    (tmp_path / "a").write_bytes(b"needle one\n")
    (tmp_path / "b").write_bytes(b"x\n" + 'needle é"'.encode() + b"y" * 40_000_000 + b"needle\nneedle two\n")
    (tmp_path / "c").write_bytes(b"needle \xff" + b"z" * 3_000_000 + b"\n")
    result = search(os.fsencode(tmp_path), SearchParams(path=tmp_path.as_uri(), pattern="needle"))
    found = [
        (match["path"][-1], match["lineNumber"], match["byteOffset"], match.get("lineTruncated", False))
        for match in result["matches"]
    ]
    assert found == [
        ("a", 1, 0, False),
        ("b", 2, 2, True),
        ("b", 3, 40_000_019, False),
        ("c", 1, 0, True),
    ]
    assert result["matches"][1]["line"].startswith('needle é"yyyy')
    assert result["matches"][3]["line"].startswith("needle \ufffdzzz")
    assert all(len(match["line"].encode()) <= 4098 for match in result["matches"])
    assert not result["truncated"]


def test_what_is_no_file_is_refused_at_once(tmp_path: Path, engine: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("x\n")
    with pytest.raises(RpcError, match="neither a file nor a directory"):
        search(os.fsencode(tmp_path / "fifo"), SearchParams(path="file:///x", pattern="x"))
    assert found(tmp_path, "x", engine) == [("file", 1)]
