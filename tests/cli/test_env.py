"""`exec-server env`, and `run --env`: machines by their names."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.server import COMMAND, RunningServer, server_environment

LIMIT = 40

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def home(tmp_path: Path, server: RunningServer) -> Path:
    """A configuration with one environment of each kind, and one that cannot be reached."""
    (tmp_path / "environments.toml").write_text(
        f"""
        default = "box"
        [[environments]]
        id = "far"
        url = "{server.url}"
        [[environments]]
        id = "box"
        program = "{COMMAND}"
        args = ["--listen", "stdio"]
        cwd = "/usr"
        env = {{ GIVEN = "a b" }}
        [[environments]]
        id = "gone"
        url = "ws://127.0.0.1:1"
        """
    )
    return tmp_path


def variables(home: Path, **more: str) -> dict[str, str]:
    return server_environment(CODEX_HOME=str(home), **more)


@pytest.fixture
def command(home: Path) -> Command:
    def run(*words: str, env: dict[str, str] | None = None, **options: object) -> object:
        where = variables(home, **(env or {}))
        return subprocess.run(
            [COMMAND, *words], capture_output=True, text=True, timeout=LIMIT, env=where, **options
        )  # type: ignore[call-overload]

    return run  # type: ignore[return-value]  # subprocess.run's overloads cannot be told apart here


def test_the_list(command: Command, home: Path, server: RunningServer) -> None:
    done = command("env", "list")
    assert done.stdout.splitlines() == [
        "  local  this machine",
        f"  far    {server.url}",
        f"* box    {COMMAND} --listen stdio",
        "  gone   ws://127.0.0.1:1",
    ]
    assert done.stderr == f"({home}/environments.toml)\n"
    entries = [json.loads(line) for line in command("env", "list", "--json").stdout.splitlines()]
    assert [entry["id"] for entry in entries] == ["local", "far", "box", "gone"]
    assert [entry["default"] for entry in entries] == [False, False, True, False]


def test_the_list_of_a_variable(command: Command, home: Path) -> None:
    (home / "environments.toml").unlink()
    done = command("env", "list", env={"CODEX_EXEC_SERVER_URL": "ws://127.0.0.1:5\x1b[31m"})
    assert done.stdout == "* remote  ws://127.0.0.1:5\\x1b[31m\n"
    done = command("env", "list", env={"CODEX_EXEC_SERVER_URL": "none"})
    assert (done.stdout, done.returncode) == ("no environment may be used (CODEX_EXEC_SERVER_URL)\n", 0)


def test_a_file_that_is_wrong(command: Command, home: Path) -> None:
    (home / "environments.toml").write_text("[[environments]]\nid = 'a b'\nprogram = 'x'\n")
    in_it = (["run", "--env", "x", "--", "true"], ["env", "shell", "x"])
    for words in (["env", "list"], ["env", "check"], *in_it):
        done = command(*words)
        assert done.returncode == 1
        assert done.stderr == (
            "Error: exec-server protocol error: environment id `a b` must contain only ASCII letters,"
            " numbers, '-' or '_'\n"
        )


def test_check_says_of_each_whether_it_works(command: Command) -> None:
    done = command("env", "check")
    assert done.returncode == 1
    said = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert [said[name].split()[0] for name in ("local", "far", "box", "gone")] == ["ok", "ok", "ok", "FAIL"]
    assert "failed to connect to exec-server websocket `ws://127.0.0.1:1`" in said["gone"]
    done = command("env", "check", "--json", "far", "box", "far")
    assert done.returncode == 0
    entries = {entry["id"]: entry for entry in map(json.loads, done.stdout.splitlines())}
    assert entries.keys() == {"far", "box"}
    assert entries["box"]["cwd"] == "file:///usr"
    assert entries["far"]["ok"]


def test_a_name_that_nobody_has(command: Command, home: Path) -> None:
    for words in (["env", "check", "nope"], ["env", "shell", "nope"], ["run", "--env", "nope", "--", "true"]):
        done = command(*words)
        assert done.returncode == 1
        assert done.stderr == (
            f"Error: unknown environment id `nope`; there are: local, far, box, gone"
            f" ({home}/environments.toml)\n"
        )


@pytest.mark.parametrize("name", ["local", "far", "box"])
def test_run_in_an_environment(command: Command, name: str) -> None:
    script = "cat; echo $A; exit 7"
    done = command("run", "--env", name, "--setenv", "A=b", "--", "sh", "-c", script, input="in\n")
    assert (done.stdout, done.stderr, done.returncode) == ("in\nb\n", "", 7)


def test_the_environment_of_the_command_is_the_servers(command: Command) -> None:
    assert command("run", "--env", "box", "--", "sh", "-c", "pwd; echo $GIVEN").stdout == "/usr\na b\n"


def test_a_name_wins_over_a_variable_but_not_over_an_option(command: Command) -> None:
    url = {"EXEC_SERVER_URL": "ws://127.0.0.1:1"}
    assert command("run", "--env", "box", "--", "echo", "hi", env=url).stdout == "hi\n"
    done = command("run", "--env", "box", "--url", "ws://127.0.0.1:1", "--", "true")
    assert done.returncode == 2
    assert "--env and --url both name a machine" in done.stderr


@pytest.mark.parametrize("name", ["local", "far", "box"])
def test_files_of_an_environment(command: Command, name: str, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("content")
    place = tmp_path / "place"
    place.mkdir()
    for words, out in [
        (("put", str(tmp_path / "source"), str(place)), ""),
        (("cat", str(place / "source")), "content"),
        (("get", str(place / "source"), str(tmp_path / "back")), ""),
        (("rm", str(place / "source")), ""),
        (("ls", str(place)), ""),
    ]:
        done = command("fs", words[0], "--env", name, *words[1:])
        assert (done.stdout, done.stderr, done.returncode) == (out, "", 0), words
    assert (tmp_path / "back").read_text() == "content"
    # Without a path it is the directory of that machine's server.
    if name == "box":
        assert command("fs", "ls", "--env", name).stdout == command("fs", "ls", "/usr").stdout


def test_processes_of_an_environment(command: Command) -> None:
    done = command("ps", "--env", "far")
    assert (done.stdout.split()[:2], done.stderr, done.returncode) == (["SESSION", "ID"], "", 0)
    done = command("ps")
    assert (done.stdout, done.returncode) == ("", 2)
    assert "Name a server with --url, or an environment with --env" in done.stderr


@pytest.mark.parametrize(
    "words", [("ps",), ("fs", "ls"), ("fs", "cat", "/etc/hostname"), ("fs", "rm", "/no")]
)
def test_one_machine_at_a_time(command: Command, words: tuple[str, ...], server: RunningServer) -> None:
    done = command(*words, "--env", "box", "--url", server.url)
    assert (done.stdout, done.returncode) == ("", 2)
    assert "--env and --url both name a machine; give one of them" in done.stderr
    done = command(*words, "--env", "mars", env={"EXEC_SERVER_URL": server.url})
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr.startswith("Error: unknown environment id `mars`; there are: local, far, box, gone")


def test_an_environment_that_cannot_be_reached(command: Command) -> None:
    done = command("run", "--env", "gone", "--", "true")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: failed to connect to exec-server websocket `ws://127.0.0.1:1`")


def test_a_shell_of_an_environment(command: Command) -> None:
    done = command("env", "shell", "box", input="echo $GIVEN; exit 5\n")
    assert done.stdout.endswith("a b\n")
    assert done.returncode == 5


def test_a_line_tells_those_who_wait(home: Path) -> None:
    """The server starts when the test has seen the line, so it is there for as long as it takes."""
    go = home / "go"
    script = f"until test -e '{go}'; do sleep 0.02; done; exec '{COMMAND}' --listen stdio"
    (home / "environments.toml").write_text(
        f"[[environments]]\nid = 'slow'\nprogram = 'sh'\nargs = ['-c', {json.dumps(script)}]\n"
    )
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, "run", "--env", "slow", "--", "echo", "done"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
        env=variables(home),
    )
    os.close(slave)
    seen = b""
    while "starting environment `slow` … ".encode() not in seen:
        seen += os.read(master, 4096)
    go.touch()
    out, _ = process.communicate(timeout=LIMIT)
    assert (out, process.returncode) == (b"done\n", 0)
    try:
        while part := os.read(master, 4096):
            seen += part
    except OSError:
        pass  # the terminal is gone with the last who had it open
    assert seen.endswith(b"\r\x1b[K"), "and it is wiped away"
    os.close(master)


def test_help_knows_the_command(command: Command) -> None:
    assert "  env " in command("help").stdout
    assert command("env", "--help").returncode == 0


def test_one_that_cannot_be_checked_hides_no_other(command: Command, home: Path) -> None:
    (home / "environments.toml").write_text(
        f"""
        [[environments]]
        id = "bad"
        url = "ws://127.0.0.1:99999"
        [[environments]]
        id = "good"
        program = "{COMMAND}"
        args = ["--listen", "stdio"]
        """
    )
    done = command("env", "check")
    assert done.returncode == 1
    assert "ok    good" in done.stdout
    assert "FAIL  bad" in done.stdout
    assert "Port out of range" in done.stdout
    assert "Traceback" not in done.stderr


def test_checking_nothing_says_so(home: Path) -> None:
    (home / "environments.toml").unlink()
    done = subprocess.run(
        [COMMAND, "env", "check"],
        env=variables(home, CODEX_EXEC_SERVER_URL="none"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("no environment may be used (CODEX_EXEC_SERVER_URL)\n", 1)


def test_a_relative_directory_is_nobodys(command: Command, server: RunningServer) -> None:
    for words in (
        ("run", "--env", "far", "--cwd", "rel", "--", "true"),
        ("run", "--url", server.url, "--cwd", "", "--", "true"),
        ("env", "shell", "far", "--cwd", "rel"),
    ):
        done = command(*words)
        assert "Error: Invalid value for --cwd: '" in done.stderr
        assert "is not absolute: whose directory would it be in?" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.returncode == 2


def test_passwords_are_not_shown(command: Command, home: Path) -> None:
    (home / "environments.toml").write_text(
        '[[environments]]\nid = "a"\nurl = "ws://me:s3cret@127.0.0.1:1/x"\n'
        '[[environments]]\nid = "b"\nurl = "wss://me:s3cret@127.0.0.1:1"\n'
    )
    for words in (
        ("env", "list", "--json"),
        ("env", "check", "a", "b"),
        ("run", "--url", "ws://me:s3cret@127.0.0.1:1", "--", "true"),
        ("run", "--url", "http://me:s3cret@127.0.0.1:1", "--", "true"),
    ):
        done = command(*words)
        assert "s3cret" not in done.stdout + done.stderr
        assert "//me:***@127.0.0.1:1" in done.stdout + done.stderr
    (home / "environments.toml").write_text(
        '[[environments]]\nid = "a"\nurl = "http://me:s3cret@127.0.0.1:1/x"\n'
    )
    assert "`http://me:***@127.0.0.1:1/x`" in command("env", "list").stderr


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_this_machine(command: Command, name: str) -> None:
    for words in (
        ("run", "--env", name, "--", "echo", "here"),
        ("env", "shell", name),
        ("ps", "--env", name),
    ):
        done = command(*words)
        assert (done.stdout, done.returncode) == ("", 1)
        assert "environment id cannot be empty" in done.stderr


def test_help_cuts_no_sentence(command: Command) -> None:
    assert "..." not in command("env", "--help").stdout.replace("[ARGS]...", "")
