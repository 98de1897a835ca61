"""Files as tools, on a real machine: answers that fit, and errors that say what to do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from exec_server.agent.exec import ToolError
from exec_server.agent.file_tools import MAX_READ_BYTES, FileTools
from exec_server.environments.connect import IN_PROCESS, connect


def use(name: str, **arguments: Any) -> str:
    async def main() -> str:
        async with connect(IN_PROCESS) as machine:
            return await FileTools(machine.files).call(name, json.dumps(arguments))

    return asyncio.run(main())


def test_reading_a_part(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("".join(f"line {number}\r\n" for number in range(1, 11)))
    assert use("read_file", path=str(path), line=9) == "line 9\nline 10\n"
    assert use("read_file", path=str(path), line=9, limit=2) == "line 9\nline 10\n", "nothing follows"
    assert (
        use("read_file", path=str(path), line=2, limit=2)
        == "line 2\nline 3\n[more follows; continue with line 4]"
    )
    assert use("read_file", path=str(path), line=99) == "[the file has only 10 lines]"
    path.write_text("no end")
    assert use("read_file", path=str(path)) == "no end"
    path.write_text("\n")
    assert use("read_file", path=str(path)) == "\n"
    path.write_text("")
    assert use("read_file", path=str(path)) == "[the file is empty]"


def test_reading_what_is_large(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("x" * 99 + "\n" + ("y" * 99 + "\n") * 10_000)
    text = use("read_file", path=str(path), limit=100_000)
    assert len(text) < MAX_READ_BYTES + 1000
    assert "[more follows; continue with line " in text


def test_reading_a_long_line(tmp_path: Path) -> None:
    """How much of it is left is counted right, and can be read."""
    path = tmp_path / "f"
    path.write_text("first\n" + "é" * 2000 + "x" * 2_998_000 + "\r\nlast")
    text = use("read_file", path=str(path))
    note = "… [2998000 more characters; continue with line 2, column 2001]"
    assert text == "first\n" + "é" * 2000 + note + "\nlast"
    text = use("read_file", path=str(path), line=2, column=2001, limit=1)
    note = "… [2932464 more characters; continue with line 2, column 67537]"
    assert text == "x" * 65_536 + note + "\n[more follows; continue with line 3]"
    assert use("read_file", path=str(path), line=2, column=2_999_999) == "xx\nlast"
    text = use("read_file", path=str(path), line=2, column=3_000_001)
    assert text == "[line 2 has only 3000000 characters]\nlast"


def test_reading_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\x7fELF\0\0")
    with pytest.raises(ToolError, match="not a text file"):
        use("read_file", path=str(tmp_path / "f"))
    (tmp_path / "f").write_bytes(b"caf\xe9\n")
    assert use("read_file", path=str(tmp_path / "f")) == "caf\ufffd\n"


def test_writing_and_listing(tmp_path: Path) -> None:
    assert use("list_directory", path=str(tmp_path)) == "[the directory is empty]"
    use("write_file", path=str(tmp_path / "a/b/c.txt"), content="é")
    assert (tmp_path / "a/b/c.txt").read_bytes() == "é".encode()
    assert use("list_directory", path=str(tmp_path)) == "a/"
    with pytest.raises(ToolError, match=r"write_file failed: .*/a: "):
        use("write_file", path=str(tmp_path / "a"), content="x")
    for number in range(1005):
        (tmp_path / f"a/{number:04}").touch()
    assert use("list_directory", path=str(tmp_path / "a")).endswith("\n[6 more]")


def test_finding_and_searching(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\nTwo (\n")
    (tmp_path / "b.txt").write_text("two\n")
    assert use("find_files", path=str(tmp_path), pattern="*.py") == f"{tmp_path}/a.py"
    assert use("find_files", path=str(tmp_path), pattern="*.rs") == "[nothing fits]"
    for pattern, sign in (("**/[", "["), ("*.{rs,c", "{"), ("[ab]*.{rs", "{")):
        found = use("find_files", path=str(tmp_path), pattern=pattern)
        assert found == f"[nothing fits; `{sign}` is not closed, so it stands for itself]"
    assert (
        use("search_files", path=str(tmp_path), pattern="t.o", ignore_case=True, glob="*.py")
        == f"{tmp_path}/a.py:2: Two ("
    )
    assert (
        use("search_files", path=str(tmp_path), pattern="Two (", literal=True) == f"{tmp_path}/a.py:2: Two ("
    )
    assert use("search_files", path=str(tmp_path), pattern="three") == "[nothing matches]"
    assert use("search_files", path=str(tmp_path), pattern=".", limit=1).endswith("[there are more]")
    with pytest.raises(ToolError, match="search_files failed: "):
        use("search_files", path=str(tmp_path), pattern="(")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"read_file failed: .*/nope: No such file or directory"):
        use("read_file", path=str(tmp_path / "nope"))
    with pytest.raises(ToolError, match="failed to parse function arguments"):
        use("read_file")
