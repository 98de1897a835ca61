"""The reference's client drives the server under test, and the model at its other end sees what it should.

Commands that must wait for something wait for a file, and so do the turns of the model: nothing here
depends on how fast the machine is.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from compliance.harness import Codex
from compliance.model import Model, Turn, exec_command, write_stdin
from compliance.programs import is_running, wait_until
from compliance.proxy import Message, Proxy, Rule, Verdict, cut_at, first_reply_to, nth_message
from compliance.server import Server

FLOOD_LINES = 262_144
"""Lines of eight bytes: 2 MiB, twice what the server retains and what the client keeps."""

SESSION_EXPIRY = 30.0
"""Seconds a server keeps a session, and its processes, after the connection is gone."""


def session_of(model: Model) -> int:
    """The session of the command that the model started first and that still runs."""
    session = model.results[0].session_id
    assert session is not None, f"the command does not run: {model.results[0].text}"
    return session


def typing(chars: str, *, once: Path, yield_time_ms: int = 10_000) -> Turn:
    """A turn that types into the running command as soon as the file `once` exists."""

    def turn(model: Model) -> Turn:
        wait_until(once.exists, f"the command to create {once.name}")
        return write_stdin(session_of(model), chars, yield_time_ms=yield_time_ms)

    return turn


def until(name: str) -> str:
    """Shell: wait for a file in the workspace."""
    return f"until [ -e {name} ]; do sleep 0.02; done"


def touching_when_started(workspace: Path) -> Rule:
    """Let a command that waits for the file `started` go on once its start was answered.

    Output may come before that answer, and a start whose answer is lost is not repeated: a connection cut
    so early is another story than a cut in the middle of the output.
    """
    answered = first_reply_to("process/start")

    def rule(message: Message) -> Verdict:
        if answered(message):
            (workspace / "started").touch()
        return Verdict.PASS

    return rule


def bytes_printed(proxy: Proxy) -> bytes:
    """The output of the only command, from the notifications that passed, by number and without gaps."""
    events = [m for m in proxy.messages if m.method in ("process/output", "process/exited", "process/closed")]
    events.sort(key=lambda message: message.params["seq"])
    assert [event.params["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1].method == "process/closed"
    return b"".join(base64.b64decode(e.params["chunk"]) for e in events if e.method == "process/output")


def test_success(codex: Codex, server: Server, workspace: Path) -> None:
    run = codex.run([exec_command("pwd; echo to-stderr >&2"), "all done"], url=server.url)

    (result,) = run.results
    assert result.exit_code == 0
    assert result.session_id is None
    assert sorted(result.output.splitlines()) == sorted([str(workspace), "to-stderr"])
    (item,) = run.items("command_execution")
    assert (item["status"], item["exit_code"], item["aggregated_output"]) == ("completed", 0, result.output)
    assert [message["text"] for message in run.items("agent_message")] == ["all done"]


def test_failure(codex: Codex, server: Server) -> None:
    run = codex.run([exec_command("echo went wrong >&2; exit 7"), "done"], url=server.url)

    (result,) = run.results
    assert (result.exit_code, result.output) == (7, "went wrong\n")
    (item,) = run.items("command_execution")
    assert (item["status"], item["exit_code"], item["aggregated_output"]) == ("failed", 7, "went wrong\n")


def test_a_command_that_cannot_start(codex: Codex, server: Server) -> None:
    """The model is told why, and can go on."""
    turns: list[Turn] = [
        exec_command("echo never", workdir="not-there"),
        exec_command("echo still here"),
        "done",
    ]
    run = codex.run(turns, url=server.url)

    refused, after = run.results
    assert refused.text.startswith("exec_command failed")
    assert "No such file or directory" in refused.text
    assert (after.exit_code, after.output) == (0, "still here\n")


def test_environment_of_a_command(codex: Codex, server: Server) -> None:
    """The server's own variables, the client's on top, and the two that tell whose command it is."""
    names = ["HOME", "CODEX_CI", "CODEX_TOOL_CALL_ID", "CODEX_THREAD_ID"]
    show = "; ".join(f'echo "{name}=${name}"' for name in names)
    run = codex.run([exec_command(show), "done"], url=server.url)

    assert dict(line.split("=", 1) for line in run.output.splitlines()) == {
        "HOME": str(codex.home.parent / "server-home"),
        "CODEX_CI": "1",
        "CODEX_TOOL_CALL_ID": "call_0_0",
        "CODEX_THREAD_ID": run.thread_id,
    }


def test_terminal(codex: Codex, server: Server, workspace: Path) -> None:
    """With `tty` there is a terminal on all three descriptors, and what is typed arrives."""
    cmd = (
        "test -t 0 && test -t 1 && test -t 2 && echo is-a-terminal; stty size; touch ready;"
        ' IFS= read -r line; echo "got:$line"'
    )
    turns: list[Turn] = [
        exec_command(cmd, tty=True, yield_time_ms=250),
        typing("hello\n", once=workspace / "ready"),
        "done",
    ]
    run = codex.run(turns, url=server.url)

    assert run.results[-1].exit_code == 0
    lines = run.output.split("\r\n")
    assert lines[:2] == ["is-a-terminal", "24 80"]
    assert "got:hello" in lines


def test_no_terminal(codex: Codex, server: Server) -> None:
    """Without `tty` there is none, and standard input is at its end."""
    cmd = "for fd in 0 1 2; do test -t $fd && echo terminal $fd; done; cat; echo end"
    run = codex.run([exec_command(cmd), "done"], url=server.url)

    assert (run.results[0].exit_code, run.output) == (0, "end\n")


@pytest.mark.parametrize(
    ("cmd", "exit_code", "last_words"),
    [
        pytest.param(
            "trap 'echo caught; exit 42' INT; touch ready; while :; do sleep 0.02; done",
            42,
            "caught\n",
            id="trapped",
        ),
        pytest.param("touch ready; exec sleep 300", 130, "", id="untrapped"),
    ],
)
def test_interrupt(
    codex: Codex, server: Server, workspace: Path, cmd: str, exit_code: int, last_words: str
) -> None:
    """Control-C for a command without a terminal is a signal, not a byte."""
    turns: list[Turn] = [
        exec_command(cmd, yield_time_ms=250),
        typing("\x03", once=workspace / "ready"),
        "done",
    ]
    with Proxy(server.url) as proxy:
        run = codex.run(turns, url=proxy.url)

    assert (run.results[1].exit_code, run.output) == (exit_code, last_words)
    (signal,) = proxy.sent("process/signal")
    assert signal.params["signal"] == "interrupt"
    assert (proxy.reply_to(signal) or {})["result"] == {}
    assert not proxy.sent("process/write")


@pytest.mark.timeout(120)
def test_background_process(codex: Codex, server: Server, workspace: Path) -> None:
    """It runs on while the model does other things, is looked at later, and goes when the client goes."""
    cmd = (
        f"sleep 300 & echo $! > child; echo $$ > shell; touch ready; echo first; {until('go')};"
        " echo second; wait"
    )
    pids: list[int] = []

    def look_later(model: Model) -> Turn:
        wait_until((workspace / "ready").exists, "the command to be ready")
        pids.extend(int((workspace / name).read_text()) for name in ("child", "shell"))
        assert all(is_running(pid) for pid in pids)
        (workspace / "go").touch()
        return write_stdin(session_of(model), yield_time_ms=5_000)

    turns: list[Turn] = [
        exec_command(cmd, yield_time_ms=250),
        exec_command("echo other work"),
        look_later,
        "done",
    ]
    with Proxy(server.url) as proxy:
        run = codex.run(turns, url=proxy.url)
        process_id = proxy.sent("process/start")[0].params["processId"]
        ends = [m for m in proxy.sent("process/terminate") if m.params["processId"] == process_id]
        # The client sends this and hangs up. On a busy machine the reference may see both at once and drop
        # the request; then the processes go with their session. Once answered, they must go right away.
        reply = proxy.reply_to(ends[0])
        patience = SESSION_EXPIRY + 10.0 if reply is None else 5.0
        wait_until(lambda: not any(map(is_running, pids)), "the command's processes to go", patience)

    started, other, later = run.results
    assert started.session_id is not None
    assert started.session_id == later.session_id
    assert (other.exit_code, other.output) == (0, "other work\n")
    assert started.output + later.output == "first\nsecond\n"
    assert reply is None or reply["result"]["running"] is True


def test_two_megabytes_of_output(codex: Codex, server: Server) -> None:
    """Every byte crosses the wire once and in order; the client keeps both ends and counts the rest."""
    printed = "".join(f"{number:07}\n" for number in range(FLOOD_LINES))
    turns: list[Turn] = [exec_command(f"seq -f %07.0f 0 {FLOOD_LINES - 1}", yield_time_ms=30_000), "done"]
    with Proxy(server.url) as proxy:
        run = codex.run(turns, url=proxy.url)

    assert bytes_printed(proxy) == printed.encode()
    (result,) = run.results
    assert result.exit_code == 0
    assert f"Original token count: {len(printed) // 4}\n" in result.text
    assert result.output.endswith(printed[-4_000:])
    assert printed[:4_000] in result.output
    (item,) = run.items("command_execution")
    kept = 2**19
    omission = f"\n... {len(printed) - 2 * kept} bytes omitted ...\n"
    assert item["aggregated_output"] == printed[:kept] + omission + printed[-kept:]


def test_parallel_calls(codex: Codex, server: Server) -> None:
    """Each of three commands ends only when all three have begun."""
    names = ["one", "two", "three"]
    meet = "; ".join(until(name) for name in names)
    calls = [exec_command(f"touch {name}; {meet}; echo {name}", yield_time_ms=30_000) for name in names]
    run = codex.run([calls, "done"], url=server.url)

    assert [(result.exit_code, result.output) for result in run.results] == [(0, f"{n}\n") for n in names]


@pytest.mark.parametrize("verdict", [Verdict.CUT_BEFORE, Verdict.CUT_AFTER], ids=["undelivered", "delivered"])
def test_reconnect_in_the_middle_of_output(
    codex: Codex, server: Server, workspace: Path, verdict: Verdict
) -> None:
    """Printed before the cut, while the client is away, and as it comes back: nothing lost or doubled.

    The first chunk of output is the moment of the cut. With CUT_BEFORE the server has sent it but the
    client never got it; with CUT_AFTER the client has it and must not get it again.
    """
    cmd = (
        f"{until('started')}; seq -f 'before %g' 100; {until('cut')}; seq -f 'away %g' 100; touch away;"
        f" {until('back')}; seq -f 'after %g' 100; exit 3"
    )
    cut = cut_at(nth_message("s2c", "process/output"), verdict)
    tell_started = touching_when_started(workspace)

    def rule(message: Message) -> Verdict:
        tell_started(message)
        answer = cut(message)
        if answer is not Verdict.PASS:
            (workspace / "cut").touch()
        if message.connection > 1 and message.method == "initialized":
            (workspace / "back").touch()
        return answer

    with Proxy(server.url, rule, may_reconnect=(workspace / "away").exists) as proxy:
        run = codex.run([exec_command(cmd, yield_time_ms=30_000), "done"], url=proxy.url)

    expected = [f"{when} {number}" for when in ("before", "away", "after") for number in range(1, 101)]
    (result,) = run.results
    assert result.output.splitlines() == expected
    assert result.exit_code == 3
    (item,) = run.items("command_execution")
    assert item["aggregated_output"] == result.output
    assert proxy.cuts == 1
    first, *again = proxy.sent("initialize")
    session = (proxy.reply_to(first) or {})["result"]["sessionId"]
    assert {message.params["resumeSessionId"] for message in again} == {session}
    assert proxy.sent("process/read")[0].params["afterSeq"] == (0 if verdict is Verdict.CUT_BEFORE else 1)


def test_reconnect_in_the_middle_of_a_flood(codex: Codex, server: Server, workspace: Path) -> None:
    """The same while the command prints as fast as it can, without waiting for anybody."""
    printed = "".join(f"{number}\n" for number in range(1, 100_001))
    cmd = f"{until('started')}; seq 100000"
    cut = cut_at(nth_message("s2c", "process/output", 4), Verdict.CUT_BEFORE)
    tell_started = touching_when_started(workspace)

    def rule(message: Message) -> Verdict:
        tell_started(message)
        return cut(message)

    with Proxy(server.url, rule) as proxy:
        run = codex.run([exec_command(cmd, yield_time_ms=30_000), "done"], url=proxy.url)

    (item,) = run.items("command_execution")
    assert (item["exit_code"], item["status"]) == (0, "completed")
    assert item["aggregated_output"] == printed
    assert proxy.cuts == 1


@pytest.mark.parametrize("lost", ["reply", "request"])
def test_a_repeated_write_is_applied_once(codex: Codex, server: Server, workspace: Path, lost: str) -> None:
    """The client cannot know whether its write arrived, repeats it, and the program sees it once."""
    moment = first_reply_to("process/write") if lost == "reply" else nth_message("c2s", "process/write")
    cmd = (
        "stty -echo; touch ready; while IFS= read -r line; do"
        ' echo "$line" >> seen; echo "got:$line"; [ "$line" = end ] && exit 0; done'
    )
    turns: list[Turn] = [
        exec_command(cmd, tty=True, yield_time_ms=250),
        typing("hello\n", once=workspace / "ready", yield_time_ms=250),
        typing("end\n", once=workspace / "seen"),
        "done",
    ]
    with Proxy(server.url, cut_at(moment, Verdict.CUT_BEFORE)) as proxy:
        run = codex.run(turns, url=proxy.url)

    assert proxy.cuts == 1
    assert [m.params["writeId"] for m in proxy.sent("process/write")] == ["1", "1", "2"]
    assert (workspace / "seen").read_text() == "hello\nend\n"
    assert run.output == "got:hello\r\ngot:end\r\n"
    assert run.results[-1].exit_code == 0


def test_stdio_program_in_environments_toml(codex: Codex, server_command: list[str], workspace: Path) -> None:
    """The client starts the server itself and talks to it through pipes; both end together."""
    program, *args = [*server_command, "--listen", "stdio"]
    # A TOML basic string and a JSON string are written alike.
    environments = f"""
        default = "box"
        include_local = false
        [[environments]]
        id = "box"
        program = {json.dumps(program)}
        args = {json.dumps(args)}
    """

    def say_done(_model: Model) -> Turn:
        wait_until((workspace / "ready").exists, "the command to be ready")
        return "done"

    turns: list[Turn] = [
        exec_command("echo out; echo err >&2; exit 5"),
        exec_command("sleep 300 & echo $! > child; touch ready; wait", yield_time_ms=250),
        say_done,
    ]
    run = codex.run(turns, environments=environments)

    finished, running = run.results
    assert finished.exit_code == 5
    assert sorted(finished.output.splitlines()) == ["err", "out"]
    assert running.session_id is not None
    assert not is_running(int((workspace / "child").read_text()))
    assert run.left_running == []
