"""`exec-server render`: on a pipe, on a file, on a terminal, on a hundred megabytes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.server import COMMAND
from support.streams import EXPECTED, stream
from support.wait import PATIENCE

MIB = 1024 * 1024


def render(*words: str, data: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [COMMAND, "render", *words],
        input=data,
        capture_output=True,
        timeout=60,
        env={**os.environ, "NO_COLOR": "", **env},
    )


def test_a_pipe_just_works() -> None:
    done = render(data=stream("command_failure"))
    assert done.returncode == 0
    assert done.stderr == b""
    text = done.stdout.decode()
    assert text.startswith("thread 01a1e072")
    assert "$ echo boom >&2; exit 3\n  exit 3 (" in text, "with the time it took"
    assert "\x1b" not in text


@pytest.mark.parametrize("form", ["minimal", "full", "markdown"])
def test_forms(form: str) -> None:
    long, short = (
        render("--as", form, data=stream("todo_list")),
        render(f"--{form}", data=stream("todo_list")),
    )
    assert long.returncode == short.returncode == 0
    assert long.stdout.splitlines()[0] == short.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("name", "code"),
    [("plain_message", 0), ("fork_only", 0), ("http_400", 1), ("interrupted", 3), ("command_failure", 0)],
)
def test_exit_codes(name: str, code: int) -> None:
    assert render("--minimal", data=stream(name)).returncode == code
    assert render("--summary", data=stream(name)).returncode == code
    assert render("--no-fail", data=stream(name)).returncode == 0


def test_nothing_valid() -> None:
    assert render(data=b"no event\n").returncode == 4
    assert render(data=b"").returncode == 4
    assert render("--no-fail", data=b"").returncode == 0


def test_summary(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(stream("web_search"))
    asked = [
        render("--summary", str(path)),
        render("--summary", "json", str(path)),
        render("--summary=json", str(path)),
        render("--summary", "-", data=stream("web_search")),
        render(str(path), "--summary"),
    ]
    for done in asked:
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(b"\n") == 1
        assert json.loads(done.stdout) == EXPECTED["web_search"]


def test_answer() -> None:
    done = render("--answer", data=stream("several_messages"))
    assert done.stdout.decode() == EXPECTED["several_messages"]["answer"] + "\n"
    assert done.stderr == b""
    split = render("--answer", "--split", data=stream("command_failure"))
    assert split.stdout == b"Both failed.\n"
    assert b"  exit 127\ndone\n" in split.stderr
    assert b"Both failed." not in split.stderr, "the answer is not told twice"
    assert render("--answer", data=stream("interrupted")).stdout == b""


def test_check() -> None:
    assert render("--check", data=stream("todo_list")).stdout == b""
    ours = render("--check", "--ours", data=stream("command_left_running"))
    assert ours.returncode == 1
    assert b"E3: still open: item_0" in ours.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("/no/such/file",), "/no/such/file: No such file or directory"),
        (("/",), "/: Is a directory"),
        (("--split",), "--split goes with --answer"),
        (("--ours",), "--ours goes with --check"),
        (("--check", "--answer"), "choose one of"),
        (("--minimal", "--full"), "choose one form, not full and minimal"),
        (("--as", "live", "--markdown"), "choose one form, not live and markdown"),
        (("--markdown", "--answer"), "have no form; leave out markdown"),
        (("--summary", "--minimal"), "have no form; leave out minimal"),
        (("--summary", "yaml", "/dev/null"), "no form but json is known"),
        (("--output-lines", "many"), "neither a number of lines nor `all`"),
        (("--as", "song"), "song"),
    ],
)
def test_usage(words: tuple[str, ...], text: str) -> None:
    done = render(*words)
    assert done.returncode == 2
    assert text in done.stderr.decode()


@pytest.mark.parametrize("words", [("--summary",), ("--full",), ("--answer",), ("--check", "--ours")])
def test_what_cannot_be_written_is_not_blamed_on_what_is_read(words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(stream("todo_list") + stream("command_left_running"))
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [COMMAND, "render", *words, str(path)], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == ["Error: stdout: No space left on device"]


def test_a_terminal_is_not_read_from() -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run([COMMAND, "render"], stdin=theirs, capture_output=True, timeout=60)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 2
    assert b"pipe `codex exec --json" in done.stderr


def test_lines_come_as_they_happen() -> None:
    process = subprocess.Popen([COMMAND, "render"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    shown = []
    for line in stream("command_failure").splitlines(keepends=True)[:4]:
        process.stdin.write(line)
        process.stdin.flush()
        if b"turn.started" not in line:
            shown.append(process.stdout.readline())
    assert shown[:2] == [b"thread 01a1e072-d8f9-70e3-b669-a678be71e55a\n", b"$ echo boom >&2; exit 3\n"]
    assert shown[2].startswith(b"  exit 3 (")
    process.stdin.close()
    assert process.wait(PATIENCE) == 3, "the stream ended before the turn did"
    process.stdout.close()


def test_the_producer_goes_on_when_nobody_looks() -> None:
    """As in `codex exec --json | exec-server render | head -1`."""
    process = subprocess.Popen(
        [COMMAND, "render"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    lines = stream("todo_list").splitlines(keepends=True)
    process.stdin.write(lines[0])
    process.stdin.flush()
    assert process.stdout.readline().startswith(b"thread")
    process.stdout.close()
    for line in [*lines[1:-1] * 500, lines[-1]]:
        process.stdin.write(line)
    process.stdin.close()
    assert process.wait(PATIENCE) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_a_terminal_that_knows_only_ascii(environment: dict[str, str]) -> None:
    done = render(data=stream("command_success"), **environment)
    assert done.returncode == 0
    assert b"done" in done.stdout


def on_terminal(*words: str, data: bytes, **env: str) -> bytes:
    """What the command draws on a terminal of its own."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, "render", *words],
        stdin=subprocess.PIPE,
        stdout=theirs,
        env={**os.environ, "TERM": "xterm", **env},
    )
    os.close(theirs)
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.close()
    drawn = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:
            break
        drawn += block
    os.close(ours)
    process.wait(PATIENCE)
    return drawn


def test_on_a_terminal() -> None:
    live = on_terminal(data=stream("command_binary_output"))
    assert b"\x1b[?25l" in live, "a live view hides the cursor"
    assert b"\x1b[?25h" in live, "and gives it back"
    assert b"done" in live
    coloured = on_terminal("--full", data=stream("command_binary_output"), NO_COLOR="")
    assert b"\x1b[32m" in coloured
    assert b"\x1b[31mred" not in coloured, "the command's own colour is not passed on"
    assert b"\x1b" not in on_terminal("--full", data=stream("command_binary_output"), NO_COLOR="1")
    assert b"\x1b" not in on_terminal(data=stream("command_binary_output"), TERM="dumb", NO_COLOR="1")
    assert b"\x1b[1m" in render("--colour", "always", data=stream("command_failure")).stdout


def test_an_answer_for_people_and_for_programs() -> None:
    evil = "a\x1b]0;owned\x07\x1b[2Jb"
    item = {"id": "item_0", "type": "agent_message", "text": evil}
    events = [{"type": "turn.started"}, {"type": "item.completed", "item": item}, {"type": "turn.completed"}]
    data = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    assert on_terminal("--answer", data=data) == b"ab\r\n"
    assert render("--answer", data=data).stdout.decode() == evil + "\n", "a program gets what the model wrote"
    assert b"\x1b" not in on_terminal("--check", data=data.replace(b"item_0", b"\\u001b[2J"))


def test_the_first_interrupt_is_for_the_producer_and_the_second_for_us() -> None:
    """As when Ctrl-C is pressed in a pipeline: the last lines of the producer are still shown."""
    process = subprocess.Popen(
        [COMMAND, "render", "--minimal"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lines = stream("interrupted").splitlines(keepends=True)
    process.stdin.write(lines[0])
    process.stdin.flush()
    assert process.stdout.readline().startswith(b"thread")
    process.send_signal(signal.SIGINT)
    process.stdin.write(lines[1] + lines[2])
    process.stdin.flush()
    assert process.stdout.readline().startswith(b"$ echo up")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert errors == b""


# A hundred megabytes ---------------------------------------------------------------------------------------

MEASURED = """
import sys
from exec_server.cli import main
sys.argv[0] = "exec-server"
try:
    main()
finally:
    with open("/proc/self/status") as status:
        peak = next(line for line in status if line.startswith("VmHWM"))
    print("peak", peak.split()[1], file=sys.stderr)
"""


def peak_kib(*words: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, "render", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split("peak ")[1])


def write_run(path: Path, commands: int, output: int) -> None:
    """A run of many commands, most with little output and every tenth with much."""
    with path.open("w") as file:

        def put(**event: object) -> None:
            file.write(json.dumps(event, separators=(",", ":")) + "\n")

        put(type="thread.started", thread_id="t")
        put(type="turn.started")
        for number in range(commands):
            item = {"id": f"item_{number}", "type": "command_execution", "command": "make"}
            text = "a line of output\n" * (output // 17 if number % 10 == 0 else 10)
            put(
                type="item.started",
                item={**item, "aggregated_output": "", "exit_code": None, "status": "in_progress"},
            )
            put(
                type="item.completed",
                item={**item, "aggregated_output": text, "exit_code": 0, "status": "completed"},
            )
        put(type="item.completed", item={"id": "item_last", "type": "agent_message", "text": "done"})
        put(type="turn.completed", usage={"input_tokens": 1})


@pytest.mark.parametrize(("form", "commands"), [("--full", 960), ("--minimal", 240), ("--summary", 240)])
def test_a_long_run_in_constant_memory(tmp_path: Path, form: str, commands: int) -> None:
    """A hundred megabytes in the form that shows most, a quarter of it in those that read the same way."""
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    write_run(small, 20, MIB)
    write_run(large, commands, MIB)
    assert large.stat().st_size > commands * MIB // 10
    base, peak = peak_kib(form, str(small)), peak_kib(form, str(large))
    # Shown by `pytest -s`: the measured peaks.
    print(  # noqa: T201
        f"{form}: {base} KiB for {small.stat().st_size} bytes, {peak} KiB for {large.stat().st_size}"
    )
    assert peak < base + 8 * 1024
