"""`exec-server fs`: files, here or far away."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from exec_server.client.landing import part_name
from support.server import COMMAND, RunningServer

LIMIT = 40


@pytest.fixture(params=["here", "there"])
def where(request: pytest.FixtureRequest, server: RunningServer) -> list[str]:
    return [] if request.param == "here" else ["--url", server.url]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty directory."""
    directory = tmp_path / "place"
    directory.mkdir()
    return directory


def fs(
    where: list[str], command: str, *words: str | Path, **options: object
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [COMMAND, "fs", command, *where, *map(str, words)],
        capture_output=True,
        timeout=LIMIT,
        **options,  # type: ignore[call-overload]
    )


def fine(where: list[str], command: str, *words: str | Path) -> bytes:
    """What it printed; it has to end well and complain about nothing."""
    done = fs(where, command, *words)
    assert (done.returncode, done.stderr) == (0, b"")
    assert isinstance(done.stdout, bytes)
    return done.stdout


def test_ls(where: list[str], place: Path) -> None:
    (place / "dir").mkdir()
    (place / "file").write_bytes(b"12345")
    (place / "link").symlink_to("file")
    os.utime(place / "file", (0, 86400 * 365))
    lines = fine(where, "ls", place).decode().splitlines()
    assert [line.split()[-1] for line in lines] == ["dir", "file", "link"]
    assert lines[0].startswith("d ")
    assert lines[1].split()[:3] == ["-", "5", "1971-01-01"]
    assert lines[2].startswith("-l")
    entries = [json.loads(line) for line in fine(where, "ls", "--json", place).splitlines()]
    assert entries[1] == {
        "name": "file",
        "kind": "file",
        "isSymlink": False,
        "size": 5,
        "modifiedAtMs": 86400 * 365 * 1000,
        "createdAtMs": entries[1]["createdAtMs"],
    }
    assert fine(where, "ls", place / "file").decode().split()[-1] == str(place / "file")
    assert fine(where, "ls", place / "dir") == b""


def test_one_name_is_one_line(where: list[str], place: Path) -> None:
    (place / "two\nlines\r").touch()
    (listed,) = fine(where, "ls", place).split(b"\n")[:-1]
    assert listed.endswith(rb" two\nlines\r")
    assert json.loads(fine(where, "ls", "--json", place))["name"] == "two\nlines\r"


def test_ls_of_nothing_in_particular(place: Path) -> None:
    (place / "here").touch()
    assert fs([], "ls", cwd=place).stdout.split()[-1] == b"here"


def test_cat(where: list[str], place: Path) -> None:
    data = os.urandom(5_000_000)
    (place / "a").write_bytes(data)
    (place / "b").write_bytes(b"end")
    assert fine(where, "cat", place / "a", place / "b") == data + b"end"


def test_a_reader_that_leaves_ends_it_quietly(where: list[str], place: Path) -> None:
    with (place / "large").open("wb") as file:
        file.truncate(50_000_000)
    words = " ".join([COMMAND, "fs", "cat", *where, str(place / "large")])
    done = subprocess.run(
        ["bash", "-c", f"{words} | head -c 5; exit ${{PIPESTATUS[0]}}"], capture_output=True, timeout=LIMIT
    )
    assert (done.stdout, done.stderr, done.returncode) == (bytes(5), b"", 128 + signal.SIGPIPE)


def test_put_and_get(where: list[str], place: Path) -> None:
    data = os.urandom(6_000_000)
    (place / "source").write_bytes(data)
    assert fine(where, "put", place / "source", place / "there") == b""
    (place / "directory").mkdir()
    fine(where, "put", place / "source", place / "directory")
    fine(where, "get", place / "there", place / "back")
    fine(where, "get", place / "there", place / "directory")
    for name in ("there", "directory/source", "back", "directory/there"):
        assert (place / name).read_bytes() == data
    assert not list(place.rglob("*-part"))


def test_paths_as_uris(where: list[str], place: Path) -> None:
    (place / "a b").mkdir()
    (place / "100% ü").write_text("x")
    uri = f"file://{place}/a%20b"
    fine(where, "put", place / "100% ü", uri)
    assert fine(where, "ls", uri).decode().endswith(" 100% ü\n")
    (place / "into").mkdir()
    fine(where, "get", f"{uri}/100%25%20%C3%BC", place / "into")
    assert (place / "into" / "100% ü").read_text() == "x"


def test_trees(where: list[str], place: Path) -> None:
    (place / "tree" / "below").mkdir(parents=True)
    (place / "tree" / "below" / "file").write_text("x")
    (place / "tree" / "link").symlink_to("below")
    done = fs(where, "put", place / "tree", place / "there")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"is a directory; use -r" in done.stderr
    done = fs(where, "put", "-r", place / "tree", place / "there")
    assert (done.returncode, done.stderr) == (
        0,
        f"skipped {place}/tree/link: a link to a directory\n".encode(),
    )
    assert b"use -r" in fs(where, "get", place / "there", place / "back").stderr
    fine(where, "get", "-r", place / "there", place / "back")
    assert (place / "back" / "below" / "file").read_text() == "x"


def test_rm(where: list[str], place: Path) -> None:
    (place / "tree" / "below").mkdir(parents=True)
    (place / "file").touch()
    assert b"not empty" in fs(where, "rm", place / "tree").stderr
    fine(where, "rm", "-r", place / "tree", place / "file")
    assert not list(place.iterdir())
    done = fs(where, "rm", place / "file")
    assert (done.returncode, done.stderr) == (
        1,
        f"Error: {place}/file: No such file or directory (os error 2)\n".encode(),
    )
    fine(where, "rm", "-f", place / "file")


def test_a_killed_transfer_is_taken_up(where: list[str], place: Path) -> None:
    with (place / "large").open("wb") as file:
        file.truncate(400_000_000)
    part = Path(part_name(f"{place}/copy", f"{place}/large"))
    with subprocess.Popen(
        [COMMAND, "fs", "get", *where, str(place / "large"), str(place / "copy")]
    ) as process:
        while not part.exists() or part.stat().st_size < 5_000_000:
            assert process.poll() is None
        process.kill()
    have = part.stat().st_size
    assert 5_000_000 <= have < 400_000_000
    os.truncate(place / "large", have + 1_000_000)
    screen = on_terminal("get", *where, str(place / "large"), str(place / "copy"))
    assert f"{have} of them already there".encode() in screen
    assert (place / "copy").stat().st_size == have + 1_000_000
    assert not part.exists()


def on_terminal(*words: str, code: int = 0) -> bytes:
    """What a person would see."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, "fs", *words], stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "COLUMNS": "200"}
    )
    os.close(slave)
    seen = b""
    try:
        while part := os.read(master, 65536):
            seen += part
    except OSError:
        pass  # the terminal's way to say that it is over
    os.close(master)
    assert process.wait(LIMIT) == code
    return seen


def test_a_terminal_shows_progress(where: list[str], place: Path) -> None:
    (place / "source").write_bytes(bytes(5_000_000))
    screen = on_terminal("put", *where, str(place / "source"), str(place / "there"))
    assert b"put source" in screen
    assert b"5.0/5.0 MB" in screen
    assert b"1 files, 5000000 bytes, SHA-256 compared" in screen


def test_watch(where: list[str], place: Path) -> None:
    words = [COMMAND, "fs", "watch", "-r", *where, str(place)]
    for form in ([], ["--json"]):
        process = subprocess.Popen([*words, *form], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == f"watching {place}\n".encode()
        (place / "file").write_bytes(b"x" * (len(form) + 1))
        line = process.stdout.readline()
        if form:
            assert json.loads(line) == {"paths": [f"{place}/file"], "overflowed": False}
        else:
            assert line == f"{place}/file\n".encode()
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 128 + signal.SIGINT
        assert process.stderr.read() == b""
        process.stdout.close()
        process.stderr.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cat", "/no/such"], b"Error: /no/such: No such file or directory (os error 2)\n"),
        (["cat", "/usr"], b"Error: /usr: path `/usr` is not a file\n"),
        (["get", "/no/such", "/tmp/x"], b"Error: /no/such: No such file or directory (os error 2)\n"),
        (["put", "/no/such", "/tmp/x"], b"Error: [Errno 2] No such file or directory: '/no/such'\n"),
        (
            ["put", "/etc/hostname", "/no/dir/x"],
            b"Error: /no/dir/x: No such file or directory (os error 2)\n",
        ),
        (["ls", "--url", "ws://127.0.0.1:1"], b"Error: failed to connect to exec-server websocket"),
    ],
)
def test_what_cannot_be(words: list[str], message: bytes) -> None:
    done = fs([], words[0], *words[1:])
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert b"Traceback" not in done.stderr


def test_a_bad_path_does_not_stop_the_others(where: list[str], place: Path) -> None:
    for name in ("a", "b"):
        (place / name).write_text(name)
    done = fs(where, "cat", place / "a", place / "none", place / "b")
    assert (done.returncode, done.stdout) == (1, b"ab")
    assert done.stderr == f"Error: {place}/none: No such file or directory (os error 2)\n".encode()
    done = fs(where, "ls", place / "none", place / "b")
    assert (done.returncode, done.stdout.endswith(b"/b\n")) == (1, True)
    done = fs(where, "rm", place / "none", place / "b")
    assert (done.returncode, (place / "b").exists()) == (1, False)


def test_what_is_never_removed(where: list[str], place: Path) -> None:
    (place / "deep").mkdir()
    for path in (
        f"{place}/deep/.",
        f"{place}/deep/..",
        f"{place}/deep/../",
        "/",
        "//",
        ".",
        "..",
        "file:///",
    ):
        done = fs(where, "rm", "-r", path, cwd=place / "deep")
        assert (done.returncode, b"refusing to remove" in done.stderr) == (1, True), path
    assert (place / "deep").is_dir()


def test_standard_input_and_output(where: list[str], place: Path) -> None:
    data = os.urandom(3_000_000)
    done = fs(where, "put", "-", place / "there", input=data)
    assert (done.returncode, done.stderr, (place / "there").read_bytes()) == (0, b"", data)
    assert fine(where, "get", place / "there", "-") == data


def test_what_could_not_be_brought_is_said(where: list[str], place: Path) -> None:
    tree = place / "tree"
    tree.mkdir()
    (tree / "file").write_text("x")
    (tree / "directory link").symlink_to(place)
    done = fs(where, "get", "-r", tree, place / "one")
    assert (done.returncode, done.stderr) == (
        0,
        f"skipped {tree}/directory link: a link to a directory\n".encode(),
    )
    (tree / "dangling").symlink_to("nowhere")
    done = fs(where, "get", "-r", tree, place / "two")
    assert done.returncode == 1
    assert f"skipped {tree}/dangling: a link that leads nowhere\n".encode() in done.stderr
    assert (place / "two" / "file").read_text() == "x"
    assert b"dangling (leads nowhere" in fine(where, "ls", tree)
    assert fs(where, "put", "-r", tree, place / "three").returncode == 1


def test_names_cannot_drive_a_terminal(place: Path) -> None:
    (place / "a\x1b]0;title\x07b").write_text("x")
    screen = on_terminal("ls", str(place))
    assert b"a\\x1b]0;title\\x07b" in screen
    assert b"\x1b]0" not in screen
    screen = on_terminal("cat", f"{place}/\x1b[2Jnone", code=1)
    assert b"\x1b[2J" not in screen
    assert b"a\x1b]0;title\x07b\n" in fine([], "ls", place)
