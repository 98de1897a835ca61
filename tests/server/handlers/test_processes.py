"""server/handlers/processes.py: chapters 4 and 7 of the specification, over WebSocket and over stdio."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.machine import gone, running, sleep_forever, stat
from support.rpc import PATH, Peer, b64, unb64
from support.sandbox import run_in
from support.wait import eventually

NewPeer = Callable[..., Peer]
MIB = 1024 * 1024


def process(process_id: str, **more: Any) -> dict[str, Any]:
    return {"processId": process_id, **more}


def read_to_end(peer: Peer, process_id: str, **more: Any) -> tuple[bytes, dict[str, Any]]:
    """As a client without notifications does: poll until it has closed."""
    output, after = b"", 0
    while True:
        answer = peer.read(process_id, afterSeq=after, waitMs=10_000, **more)
        output += b"".join(unb64(chunk["chunk"]) for chunk in answer["chunks"])
        after = answer["nextSeq"] - 1
        if answer["closed"] and not answer["chunks"]:
            return output, answer


def kill_sleeper(marker: str) -> None:
    """The one that holds the output of its parent."""
    [pid] = eventually(lambda: running(f"sleep\0{marker}"), "the sleeper to be there")
    os.kill(pid, 9)


# Start -------------------------------------------------------------------------------------------


def test_output_exit_and_close(peer: Peer) -> None:
    record = peer.run_shell("echo out; echo err >&2; exit 3")
    assert (record.stdout, record.stderr, record.exit_code) == (b"out\n", b"err\n", 3)
    assert record.sandbox_denied is False


def test_a_terminal(peer: Peer) -> None:
    record = peer.run_shell("echo out; echo err >&2; tty -s; exit $?", tty=True)
    assert (record.terminal, record.exit_code) == (b"out\r\nerr\r\n", 0)


def test_notifications_have_exactly_their_members(peer: Peer) -> None:
    process_id = peer.shell("echo out")
    peer.finished(process_id)
    for message in peer.notifications:
        expected = {
            "process/output": {"processId", "seq", "stream", "chunk"},
            "process/exited": {"processId", "seq", "exitCode", "sandboxDenied"},
            "process/closed": {"processId", "seq"},
        }[message["method"]]
        assert set(message["params"]) == expected
        assert set(message) == {"method", "params"}


@pytest.mark.parametrize("process_id", ["", 'ü " \\ \n \u2028', "x" * 70_000, "process/start", "0"])
def test_an_id_is_any_text(peer: Peer, process_id: str) -> None:
    record = peer.run("echo", "x", processId=process_id)
    assert record.stdout == b"x\n"
    assert peer.read(process_id)["closed"]


@pytest.mark.parametrize("tty", [False, True])
def test_directory(peer: Peer, tmp_path: Path, tty: bool) -> None:
    directory = tmp_path / "a dir %41 ü"
    directory.mkdir()
    uri = "file://" + str(directory).replace("%", "%25").replace(" ", "%20").replace("ü", "%C3%BC")
    record = peer.run("pwd", "-P", cwd=uri, tty=tty)
    assert record.output.strip().decode() == str(directory)
    for spelled in (f"file:{directory}/../x/../a%20dir%20%2541%20%c3%bc/", f"FILE://localhost{uri[7:]}"):
        assert peer.run("pwd", "-P", cwd=spelled).output.strip().decode() == str(directory)


def test_arguments_arrive_as_they_are(peer: Peer) -> None:
    words = ["", " ", "two words", "ü", "'\"\\", "a\nb", "-n", "x" * 100_000]
    record = peer.run("printf", "%s|", *words)
    assert record.stdout.decode() == "".join(f"{word}|" for word in words)


@pytest.mark.parametrize("tty", [False, True])
def test_arg0(peer: Peer, tty: bool) -> None:
    for arg0, seen in (("/other name", b"/other name"), ("", b""), (None, b"cat")):
        record = peer.run("cat", "/proc/self/cmdline", arg0=arg0, tty=tty)
        assert record.output == seen + b"\0/proc/self/cmdline\0"


@pytest.mark.parametrize("tty", [False, True])
def test_the_environment_is_exactly_what_was_given(peer: Peer, tty: bool) -> None:
    env = {"PATH": PATH, "A": "1", "ÜMLAUT": "ü", "EMPTY": ""}
    record = peer.run("env", env=env, tty=tty)
    assert sorted(record.output.decode().split()) == sorted(f"{name}={value}" for name, value in env.items())


def policy(**more: Any) -> dict[str, Any]:
    return {
        "inherit": "all",
        "ignoreDefaultExcludes": False,
        "exclude": [],
        "set": {},
        "includeOnly": [],
        **more,
    }


def environment(peer: Peer, **more: Any) -> dict[str, str]:
    """What a child sees."""
    output = peer.run("/usr/bin/env", "-0", **{"env": {}, **more}).stdout.decode()
    return dict(word.split("=", 1) for word in output.split("\0") if word)


def test_policies(new_peer: NewPeer) -> None:
    peer = new_peer(
        env={
            "MY_API_KEY": "k",
            "SECRETS": "s",
            "a_token": "t",
            "PLAIN": "p",
            "CODEX_TOOL_CALL_ID": "stale",
            "CODEX_THREAD_ID": "old thread",
            "OPENAI_IDENTITY_TOKEN_FILE": "own",
        }
    )
    peer.initialize()
    everything = environment(peer, envPolicy=policy(ignoreDefaultExcludes=True))
    assert everything["MY_API_KEY"] == "k"
    assert everything["PLAIN"] == "p"
    assert everything["CODEX_THREAD_ID"] == "old thread"
    assert everything["PATH"] == os.environ["PATH"]
    assert "CODEX_TOOL_CALL_ID" not in everything
    assert "OPENAI_IDENTITY_TOKEN_FILE" not in everything

    usual = environment(peer, envPolicy=policy())
    assert not {"MY_API_KEY", "SECRETS", "a_token"} & set(usual)
    assert usual["PLAIN"] == "p"

    core = environment(peer, envPolicy=policy(inherit="core"))
    assert "PATH" in core
    assert "PLAIN" not in core

    assert environment(peer, envPolicy=policy(inherit="none")) == {}
    assert environment(peer, envPolicy=policy(inherit="none", set={"A_KEY": "1"}), env={"B": "2"}) == {
        "A_KEY": "1",
        "B": "2",
    }
    assert environment(
        peer, envPolicy=policy(set={"PLAIN2": "x"}, includeOnly=["plain*"], exclude=["PLAIN?"])
    ) == {
        "PLAIN": "p",
        "PLAIN2": "x",
    }
    assert environment(
        peer,
        env={"CODEX_TOOL_CALL_ID": "from env", "CODEX_THREAD_ID": "from env"},
        metadata={"toolCallId": "call", "threadId": "67E5504410B1426F9247BB680E5FE0C8"},
    ) == {"CODEX_TOOL_CALL_ID": "call", "CODEX_THREAD_ID": "67e55044-10b1-426f-9247-bb680e5fe0c8"}
    assert environment(peer, env={"CODEX_THREAD_ID": "mine", "CODEX_TOOL_CALL_ID": "x"}) == {
        "CODEX_THREAD_ID": "mine"
    }
    assert environment(peer, env={"CODEX_THREAD_ID": "mine"}, metadata={}) == {}


@pytest.mark.parametrize("tty", [False, True])
def test_set_up(peer: Peer, tty: bool) -> None:
    record = peer.run_shell("cut -d' ' -f1,4,5,6,7,8 /proc/$$/stat", tty=tty)
    pid, parent, group, session, terminal, foreground = map(int, record.output.split()[:6])
    assert pid == group == session
    assert parent == peer.server_pid
    assert (terminal != 0, foreground == pid) == (tty, tty)


def test_stdin_is_empty_without_a_pipe(peer: Peer) -> None:
    assert peer.run("cat").exit_code == 0
    assert peer.run("readlink", "/proc/self/fd/0").stdout == b"/dev/null\n"


def test_programs_are_looked_for_in_the_path_of_the_child(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "my-tool"
    tool.write_text("#!/bin/sh\necho found\n")
    tool.chmod(0o755)
    where = f"file://{tmp_path}"
    for name, env in (
        ("my-tool", {"PATH": str(tool.parent)}),
        ("my-tool", {"PATH": "bin"}),
        ("./bin/my-tool", {}),
        ("bin/my-tool", {}),
        (str(tool), {}),
    ):
        assert peer.run(name, cwd=where, env=env).stdout == b"found\n"
    assert peer.run("true", env={}).exit_code == 0
    params = peer.start_params(["true"], env={"PATH": ""})
    assert peer.refused("process/start", params) == (-32603, "No such file or directory (os error 2)")


def test_what_cannot_start_says_why_and_frees_its_id(peer: Peer) -> None:
    params = peer.start_params(["/no/such/program"])
    for _ in range(2):
        assert peer.refused("process/start", params) == (-32603, "No such file or directory (os error 2)")
    peer.call("process/start", {**params, "argv": ["true"]})
    assert peer.finished(params["processId"]).exit_code == 0


def test_checks_come_in_the_order_of_the_specification(peer: Peer) -> None:
    taken, drive = peer.start("true"), "file:///C:/x"
    text_of_drive = f"cwd URI `{drive}` is not valid on this exec-server host: "
    text_of_drive += f"'{drive}' is invalid on 'linux'"
    everything_wrong = {
        **peer.start_params([], processId=taken, cwd=drive),
        "networkProxy": {"proxy": {"enabled": True}, "policyDecisionTimeoutMs": 0},
        "sandbox": {"permissions": {"type": "disabled"}, "windowsSandboxLevel": "disabled", "cwd": drive},
        "shellSnapshot": {"scopeId": "", "shell": {"name": "bash", "path": "/bin/bash"}},
    }
    expected = [
        (-32602, None, {"tty": False}),
        (-32602, "network policy decision callback timeout must be nonzero", {"networkProxy": None}),
        (
            -32602,
            text_of_drive,
            {"cwd": "file:///tmp"},
        ),
        (
            -32602,
            f"sandbox {text_of_drive}",
            {"sandbox": None},
        ),
        (-32602, "shell snapshot scope must be non-empty and at most 256 bytes", {"shellSnapshot": None}),
        (-32602, "argv must not be empty", {"argv": ["/no/such"]}),
        (-32600, f"process {taken} already exists", {"processId": "free"}),
        (-32603, "No such file or directory (os error 2)", {}),
    ]
    params: dict[str, Any] = {**everything_wrong, "tty": "no"}
    for code, text, repair in expected:
        got = peer.refused("process/start", params)
        assert got[0] == code
        assert text is None or got[1] == text
        params |= repair
    assert peer.notifications == [] or {n["params"]["processId"] for n in peer.notifications} == {taken}


def test_an_id_is_taken_while_the_process_is_remembered(new_peer: NewPeer) -> None:
    peer = new_peer("--retention", "0.2")
    peer.initialize()
    process_id = peer.start("cat", pipeStdin=True, processId="same")
    again = {**peer.start_params(["true"]), "processId": "same"}
    assert peer.refused("process/start", again) == (-32600, "process same already exists")
    peer.close_stdin(process_id)
    record = peer.finished(process_id)
    assert peer.refused("process/start", again) == (-32600, "process same already exists")
    assert peer.read("same")["closed"]

    def free() -> bool:
        return "result" in peer.answer(peer.request("process/start", again))

    del peer.records["same"]
    eventually(free, "the id becoming free")
    assert record.exit_code == 0
    # A new process begins its own numbers.
    assert peer.finished("same").exit_code == 0


def test_what_is_forgotten_is_unknown(new_peer: NewPeer) -> None:
    peer = new_peer("--retention", "0.05")
    peer.initialize(extensions=True)
    peer.finished(peer.start("true", processId="gone"))
    eventually(lambda: peer.call("process/list", {}) == {"processes": []}, "the process being forgotten")
    assert peer.refused("process/read", process("gone")) == (-32600, "unknown process id gone")
    assert peer.refused("process/wait", process("gone")) == (-32600, "unknown process id gone")
    assert peer.refused("process/snapshot", process("gone")) == (-32600, "unknown process id gone")
    assert peer.refused("process/resize", process("gone", rows=1, cols=1)) == (
        -32600,
        "unknown process id gone",
    )
    assert peer.write("gone", b"x") == "unknownProcess"
    assert peer.close_stdin("gone") == "unknownProcess"
    assert peer.terminate("gone") == {"running": False}
    assert peer.call("process/signal", process("gone", signal="interrupt")) == {}


def test_what_has_exited_but_not_closed_is_not_forgotten(new_peer: NewPeer) -> None:
    peer = new_peer("--retention", "0")
    peer.initialize()
    marker = sleep_forever()
    process_id = peer.shell(f"sleep {marker} & exit 0")
    assert peer.call("process/wait", process(process_id, until="exited"))["exited"]
    quick = peer.start("true")
    peer.finished(quick)
    eventually(lambda: "error" in peer.answer(peer.request("process/read", process(quick))), "retention")
    assert peer.read(process_id)["exited"]
    kill_sleeper(marker)
    peer.finished(process_id)


def test_there_is_no_proxy_to_launch(peer: Peer) -> None:
    asked = [
        ({"proxy": {"enabled": False}}, "executor-local network proxy launch requires an enabled proxy"),
        ({"proxy": {"enabled": True}}, "this executor has no network proxy (networkProxyLaunch is false)"),
    ]
    for proxy, text in asked:
        params = peer.start_params(["true"], networkProxy=proxy)
        assert peer.refused("process/start", params) == (-32602, f"invalid network proxy config: {text}")
    assert peer.info["capabilities"]["networkProxyLaunch"] is False


def test_a_sandbox_that_is_none(peer: Peer) -> None:
    sandbox = {"permissions": {"type": "disabled"}, "windowsSandboxLevel": "disabled"}
    assert run_in(peer, sandbox, "echo", "x").stdout == b"x\n"
    assert peer.run("echo", "x", sandbox=None, enforceManagedNetwork=True, managedNetwork={}).stdout == b"x\n"


@pytest.mark.parametrize(
    ("permissions", "text"),
    [
        ({"type": "external"}, "missing field `network`"),
        ({"type": "managed"}, "missing field `file_system`"),
        ({}, "missing field `type`"),
    ],
)
def test_a_sandbox_that_makes_no_sense_runs_nothing(
    peer: Peer, tmp_path: Path, permissions: dict[str, Any], text: str
) -> None:
    sandbox = {"permissions": permissions, "windowsSandboxLevel": "disabled"}
    params = peer.start_params(["touch", str(tmp_path / "ran")], sandbox=sandbox)
    assert peer.refused("process/start", params) == (-32602, text)
    assert not (tmp_path / "ran").exists()


def test_a_shell_snapshot_is_run_as_it_is(peer: Peer) -> None:
    snapshot = {"scopeId": "s", "shell": {"name": "bash", "path": "/bin/bash"}}
    assert peer.run("/bin/bash", "-lc", "echo x", shellSnapshot=snapshot).stdout.endswith(b"x\n")
    fish = {"scopeId": "s", "shell": {"name": "fish", "path": "/bin/fish"}}
    params = peer.start_params(["/bin/fish", "-lc", "echo"], shellSnapshot=fish)
    text = "shell snapshots are unsupported for shell `fish`"
    assert peer.refused("process/start", params) == (-32602, text)


# Output and numbers ------------------------------------------------------------------------------


def test_numbers_have_no_gaps_however_much_is_said(peer: Peer) -> None:
    script = "for i in $(seq 300); do echo $i; echo $i >&2; done; head -c 3000000 /dev/zero | tr '\\0' x"
    record = peer.run_shell(script)
    assert record.stdout == "".join(f"{n}\n" for n in range(1, 301)).encode() + b"x" * 3_000_000
    assert record.stderr == "".join(f"{n}\n" for n in range(1, 301)).encode()
    assert max(len(data) for _, data in record.chunks.values()) <= 65536
    assert record.seqs == sorted(record.seqs)


def test_bytes_are_bytes(peer: Peer) -> None:
    every = b"".join(bytes([n]) for n in range(256))
    process_id = peer.start("cat", pipeStdin=True)
    peer.write(process_id, every * 100)
    peer.close_stdin(process_id)
    assert peer.finished(process_id).stdout == every * 100


def test_the_exit_does_not_wait_for_background_children(peer: Peer) -> None:
    marker = sleep_forever()
    process_id = peer.shell(
        f"(while [ ! -e /tmp/{marker} ]; do sleep 0.01; done; echo late) & echo early; exit 4"
    )
    record = peer.record(process_id)
    peer.until(lambda: record.exit_code == 4, "the exit")
    assert record.stdout == b"early\n"
    assert not record.closed
    assert peer.terminate(process_id) == {"running": False}
    assert not peer.read(process_id)["closed"]
    path = Path(f"/tmp/{marker}")
    path.touch()
    try:
        peer.finished(process_id)
    finally:
        path.unlink()
    assert record.stdout == b"early\nlate\n"
    assert record.exit_seq is not None
    assert record.exit_seq < max(record.chunks)


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 255", 255),
        ("kill -INT $$", 130),
        ("kill -KILL $$", 137),
        ("kill -SEGV $$", 139),
        ("kill -TERM $$", 143),
    ],
)
def test_exit_codes(peer: Peer, script: str, code: int, tty: bool) -> None:
    assert peer.run_shell(script, tty=tty).exit_code == code


def test_a_process_that_closes_its_output_is_not_closed_before_it_exits(peer: Peer) -> None:
    process_id = peer.shell("exec >&- 2>&-; read line; exit 6", pipeStdin=True)
    answer = peer.call("process/wait", process(process_id, waitMs=30))
    assert (answer["exited"], answer["closed"], answer["timedOut"]) == (False, False, True)
    peer.write(process_id, b"go\n")
    assert peer.finished(process_id).exit_code == 6


def test_a_child_that_lets_go_of_its_terminal_is_not_hung_up_on(peer: Peer) -> None:
    # Many programs close their descriptors on the way out; the terminal must outlive them.
    record = peer.run_shell("echo early; exec <&- >&- 2>&-; sleep 0.2; exit 5", tty=True)
    assert (record.terminal, record.exit_code) == (b"early\r\n", 5)
    script = "exec <&- >&- 2>&-; sleep 0.1; echo late > /dev/tty; head -c 200000 /dev/zero > /dev/tty; exit 6"
    record = peer.run_shell(script, tty=True)
    assert record.exit_code == 6
    assert record.terminal == b"late\r\n" + bytes(200_000)


# Read --------------------------------------------------------------------------------------------


def test_reading_all_at_once(peer: Peer) -> None:
    process_id = peer.shell("echo one; sleep 0.05; echo two >&2; exit 9")
    record = peer.finished(process_id)
    answer = peer.read(process_id)
    assert set(answer) == {
        "chunks",
        "nextSeq",
        "exited",
        "exitCode",
        "closed",
        "failure",
        "sandboxDenied",
    }
    assert [(c["seq"], (c["stream"], unb64(c["chunk"]))) for c in answer["chunks"]] == sorted(
        record.chunks.items()
    )
    assert answer["nextSeq"] == len(record.seqs) + 1
    assert (answer["exited"], answer["exitCode"], answer["closed"]) == (True, 9, True)
    assert (answer["failure"], answer["sandboxDenied"]) == (None, False)


def chatty(peer: Peer, chunks: int = 4) -> tuple[str, list[int]]:
    """A process that has written some chunks of ten bytes and waits."""
    process_id = peer.shell("while read line; do printf %s $line; done", pipeStdin=True)
    seqs = []
    for number in range(chunks):
        peer.write(process_id, b"%010d\n" % number)
        record = peer.saw(process_id, b"%010d" % number)
        seqs = sorted(record.chunks)
    assert len(seqs) == chunks
    return process_id, seqs


def test_budgets(peer: Peer) -> None:
    process_id, seqs = chatty(peer)
    assert seqs == [1, 2, 3, 4]

    def read(**more: Any) -> tuple[list[int], int]:
        answer = peer.read(process_id, **more)
        return [chunk["seq"] for chunk in answer["chunks"]], answer["nextSeq"]

    assert read() == ([1, 2, 3, 4], 5)
    assert read(afterSeq=0, maxBytes=None, waitMs=0) == ([1, 2, 3, 4], 5)
    assert read(maxBytes=0) == ([1], 2)  # one is always given
    assert read(maxBytes=1) == ([1], 2)
    assert read(maxBytes=10) == ([1], 2)
    assert read(maxBytes=19) == ([1], 2)
    assert read(maxBytes=20) == ([1, 2], 3)
    assert read(maxBytes=10**18) == ([1, 2, 3, 4], 5)
    assert read(afterSeq=2, maxBytes=10) == ([3], 4)
    assert read(afterSeq=3) == ([4], 5)
    assert read(afterSeq=4) == ([], 5)
    assert read(afterSeq=2**64 - 1) == ([], 5)
    assert read(afterSeq=4, maxBytes=5) == ([], 5)
    peer.close_stdin(process_id)
    peer.finished(process_id)
    assert read(afterSeq=4) == ([], 7)


def test_a_poller_gets_everything(peer: Peer) -> None:
    process_id = peer.shell("for i in $(seq 200); do echo line $i; done; sleep 0.05; echo last; exit 2")
    output, answer = read_to_end(peer, process_id, maxBytes=100)
    assert output.startswith(b"line 1\nline 2\n")
    assert output.endswith(b"line 200\nlast\n")
    assert answer["exitCode"] == 2


def test_a_long_poll_ends_with_output(peer: Peer) -> None:
    process_id = peer.start("cat", pipeStdin=True)
    poll = peer.request("process/read", process(process_id, waitMs=60_000))
    peer.write(process_id, b"hello")
    answer = peer.result(poll)
    assert b"".join(unb64(chunk["chunk"]) for chunk in answer["chunks"]) == b"hello"
    assert answer["exited"] is False


def test_a_long_poll_ends_with_the_exit_and_with_the_close(peer: Peer) -> None:
    marker = sleep_forever()
    process_id = peer.shell(f"sleep {marker} & read line; exit 3", pipeStdin=True)
    poll = peer.request("process/read", process(process_id, waitMs=60_000))
    peer.write(process_id, b"\n")
    answer = peer.result(poll)
    assert (answer["exited"], answer["exitCode"], answer["closed"]) == (True, 3, False)
    assert answer["nextSeq"] == 2
    # The exit has been seen; the next poll waits for what comes after it.
    poll = peer.request("process/read", process(process_id, afterSeq=1, waitMs=60_000))
    peer.call("process/wait", process(process_id, waitMs=20))
    assert not peer.answers[poll]
    kill_sleeper(marker)
    assert peer.result(poll)["closed"]
    # A closed process never waits.
    assert peer.read(process_id, afterSeq=100, waitMs=60_000)["closed"]


def test_a_long_poll_ends_with_its_time(peer: Peer) -> None:
    process_id = peer.start("cat", pipeStdin=True)
    began = time.monotonic()
    answer = peer.read(process_id, waitMs=50)
    assert time.monotonic() - began >= 0.045  # uvloop rounds to milliseconds
    assert (answer["chunks"], answer["nextSeq"], answer["exited"]) == ([], 1, False)


def test_a_poll_may_wait_for_ever(peer: Peer) -> None:
    process_id = peer.start("cat", pipeStdin=True)
    polls = [
        peer.request("process/read", process(process_id, waitMs=2**64 - 1)),
        peer.request("process/wait", process(process_id, waitMs=2**64 - 1)),
        peer.request("process/wait", process(process_id)),
    ]
    peer.close_stdin(process_id)
    for poll in polls:
        assert peer.result(poll)["exited"]


def test_reading_does_not_disturb_what_is_notified(peer: Peer) -> None:
    process_id = peer.shell("seq 1000")
    while not peer.read(process_id, waitMs=1000)["closed"]:
        pass
    assert peer.finished(process_id).stdout == "".join(f"{n}\n" for n in range(1, 1001)).encode()


# Retention ---------------------------------------------------------------------------------------


def test_the_newest_output_is_kept(peer: Peer) -> None:
    process_id = peer.shell("head -c 5000000 /dev/zero; printf end")
    record = peer.finished(process_id)
    assert len(record.stdout) == 5_000_003
    answer = peer.read(process_id)
    kept = b"".join(unb64(chunk["chunk"]) for chunk in answer["chunks"])
    assert MIB - 65536 <= len(kept) <= MIB
    assert kept.endswith(b"end")
    seqs = [chunk["seq"] for chunk in answer["chunks"]]
    assert seqs == sorted(set(record.chunks))[-len(seqs) :]


def test_how_much_is_kept_can_be_chosen(new_peer: NewPeer) -> None:
    peer = new_peer("--retain-output", "100")
    peer.initialize()
    assert peer.info["limits"]["retainedOutputBytes"] == 100
    process_id = peer.shell("for i in 0 1 2 3 4 5 6 7 8 9; do printf 0123456789abcdefghi$i; sleep 0.02; done")
    peer.finished(process_id)
    kept = b"".join(unb64(chunk["chunk"]) for chunk in peer.read(process_id)["chunks"])
    assert 0 < len(kept) <= 100
    assert kept.endswith(b"0123456789abcdefghi9")


# Snapshot ----------------------------------------------------------------------------------------


def test_a_snapshot_of_little(peer: Peer) -> None:
    process_id = peer.shell("echo out; echo err >&2; exit 1")
    peer.finished(process_id)
    assert peer.call("process/snapshot", process(process_id)) == {
        "stdout": b64(b"out\n"),
        "stderr": b64(b"err\n"),
        "terminal": "",
        "truncated": False,
        "droppedBytes": 0,
        "running": False,
        "exited": True,
        "exitCode": 1,
        "closed": True,
        "nextSeq": len(peer.record(process_id).seqs) + 1,
    }


def test_a_snapshot_of_much_has_its_beginning_and_its_end(peer: Peer) -> None:
    process_id = peer.shell("seq 1 600000")
    whole = peer.finished(process_id).stdout
    snapshot = peer.call("process/snapshot", process(process_id))
    shown = unb64(snapshot["stdout"])
    assert snapshot["truncated"] is True
    assert len(shown) + snapshot["droppedBytes"] == len(whole)
    assert whole.startswith(shown[:65536])
    assert whole.endswith(shown[65536:])
    assert len(shown) <= MIB + 65536


def test_a_snapshot_of_a_terminal_that_runs(peer: Peer) -> None:
    process_id = peer.shell("echo ready; sleep 60", tty=True)
    peer.saw(process_id, b"ready")
    snapshot = peer.call("process/snapshot", process(process_id))
    assert unb64(snapshot["terminal"]) == b"ready\r\n"
    assert (snapshot["stdout"], snapshot["stderr"]) == ("", "")
    assert (snapshot["running"], snapshot["exited"], snapshot["exitCode"]) == (True, False, None)


# Write -------------------------------------------------------------------------------------------


def test_writing(peer: Peer) -> None:
    process_id = peer.start("cat", pipeStdin=True)
    for data in (b"one ", b"", b"two ", b"three"):
        assert peer.write(process_id, data, writeId=f"id {data!r}") == "accepted"
    assert peer.write(process_id, b" without id") == "accepted"
    assert peer.close_stdin(process_id) == "accepted"
    assert peer.finished(process_id).stdout == b"one two three without id"


def test_a_write_is_applied_once(peer: Peer) -> None:
    process_id = peer.start("cat", pipeStdin=True)
    for data in (b"first", b"first", b"other bytes"):
        assert peer.write(process_id, data, writeId="same") == "accepted"
    assert peer.write(process_id, b" second", writeId="another") == "accepted"
    other = peer.start("cat", pipeStdin=True)
    assert peer.write(other, b"ids are of a process", writeId="same") == "accepted"
    for one in (process_id, other):
        peer.close_stdin(one)
    assert peer.finished(process_id).stdout == b"first second"
    assert peer.finished(other).stdout == b"ids are of a process"


def test_pipelined_writes_keep_their_order(peer: Peer) -> None:
    process_id = peer.start("cat", pipeStdin=True)
    requests = [
        {"id": f"w{n}", "method": "process/write", "params": process(process_id, chunk=b64(b"%d," % n))}
        for n in range(2000)
    ]
    peer.send_many([*requests, {"id": "c", "method": "process/closeStdin", "params": process(process_id)}])
    assert peer.finished(process_id).stdout == b"".join(b"%d," % n for n in range(2000))
    assert peer.result("c") == {"status": "accepted"}
    assert all(peer.result(f"w{n}") == {"status": "accepted"} for n in range(2000))


def test_a_child_that_does_not_read_delays_only_its_own_writes(peer: Peer) -> None:
    stuck = peer.start("sleep", sleep_forever(), pipeStdin=True)
    blocked = [
        peer.request("process/write", process(stuck, chunk=b64(bytes(100_000)), writeId=str(n)))
        for n in range(140)
    ]
    assert peer.run("echo", "still here").stdout == b"still here\n"
    answered = [one for one in blocked if peer.answers[one]]
    assert 128 <= len(answered) < 140
    # A retry of a write that waits is not another write, and is answered with the first.
    again = peer.request("process/write", process(stuck, chunk=b64(bytes(100_000)), writeId="139"))
    peer.terminate(stuck)
    assert all(peer.result(one) == {"status": "accepted"} for one in answered)
    refused = [peer.answer(one)["error"] for one in [*blocked[len(answered) :], again]]
    assert {(error["code"], error["message"]) for error in refused} == {
        (-32603, "failed to write to process stdin")
    }


def test_where_there_is_no_stdin(peer: Peer) -> None:
    process_id = peer.start("sleep", sleep_forever())
    assert peer.write(process_id, b"x") == "stdinClosed"
    assert peer.close_stdin(process_id) == "stdinClosed"
    assert peer.write("unknown", b"x", writeId="w") == "unknownProcess"
    assert peer.close_stdin("unknown") == "unknownProcess"


def test_a_child_that_closed_its_stdin_or_exited_takes_writes_and_ignores_them(peer: Peer) -> None:
    process_id = peer.shell("exec <&-; echo closed; sleep 60", pipeStdin=True)
    peer.saw(process_id, b"closed")
    assert peer.write(process_id, b"into the void") == "accepted"
    assert peer.write(process_id, b"again") == "accepted"
    done = peer.start("true", pipeStdin=True)
    peer.finished(done)
    assert peer.write(done, b"too late", writeId="w") == "accepted"
    assert peer.write(done, b"too late", writeId="w") == "accepted"
    assert peer.close_stdin(done) == "stdinClosed"


def test_a_terminated_child_takes_no_more_writes(peer: Peer) -> None:
    process_id = peer.start("cat", pipeStdin=True)
    assert peer.write(process_id, b"x", writeId="early") == "accepted"
    peer.terminate(process_id)
    params = process(process_id, chunk=b64(b"x"), writeId="late")
    assert peer.refused("process/write", params) == (-32603, "failed to write to process stdin")
    assert peer.write(process_id, b"x", writeId="early") == "accepted"
    peer.finished(process_id)


def test_close_stdin(peer: Peer) -> None:
    process_id = peer.start("cat", pipeStdin=True)
    peer.write(process_id, b"data", writeId="w")
    assert peer.call("process/closeStdin", process(process_id, writeId="c")) == {"status": "accepted"}
    assert peer.close_stdin(process_id) == "stdinClosed"
    assert peer.write(process_id, b"more") == "stdinClosed"
    assert peer.write(process_id, b"data", writeId="w") == "accepted"
    assert peer.finished(process_id).stdout == b"data"
    empty = (-32602, "writeId must not be empty")
    assert peer.refused("process/closeStdin", process("x", writeId="")) == empty
    assert peer.refused("process/write", process("x", chunk="", writeId="")) == empty
    terminal = peer.start("cat", tty=True)
    text = f"process {terminal} is attached to a terminal"
    assert peer.refused("process/closeStdin", process(terminal)) == (-32600, text)


def test_eof_comes_after_everything_that_was_accepted(peer: Peer) -> None:
    process_id = peer.shell("sleep 0.1; wc -c", pipeStdin=True)
    size = 3_000_000
    peer.send_many(
        [
            {"id": "w", "method": "process/write", "params": process(process_id, chunk=b64(bytes(size)))},
            {"id": "c", "method": "process/closeStdin", "params": process(process_id)},
        ]
    )
    assert int(peer.finished(process_id).stdout) == size


def test_a_terminal_takes_keys(peer: Peer) -> None:
    process_id = peer.start("cat", tty=True)
    peer.write(process_id, b"hello\n")
    peer.saw(process_id, b"hello\r\nhello\r\n")  # the echo, and what cat says
    peer.write(process_id, b"\x04")
    assert peer.finished(process_id).exit_code == 0
    interrupted = peer.shell("echo ready; exec sleep 60", tty=True)
    peer.saw(interrupted, b"ready")
    peer.write(interrupted, b"\x03")
    assert peer.finished(interrupted).exit_code == 130


# Size --------------------------------------------------------------------------------------------


def test_the_size_of_a_terminal(peer: Peer) -> None:
    assert peer.run("stty", "size", tty=True).terminal == b"24 80\r\n"
    assert peer.run("stty", "size", tty=True, ptySize={"rows": 50, "cols": 132}).terminal == b"50 132\r\n"
    assert peer.run("stty", "size", tty=True, ptySize=None).terminal == b"24 80\r\n"
    assert peer.run("echo", "x", ptySize={"rows": 0, "cols": 0}).stdout == b"x\n"  # no terminal, no size
    bad = (-32602, "rows and cols must be between 1 and 65535")
    params = peer.start_params(["true"], tty=True, ptySize={"rows": 0, "cols": 80})
    assert peer.refused("process/start", params) == bad
    too_large = peer.start_params(["true"], tty=True, ptySize={"rows": 65536, "cols": 80})
    assert peer.refused("process/start", too_large)[0] == -32602


def test_resizing(peer: Peer) -> None:
    script = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.01; done"
    process_id = peer.shell(script, tty=True)
    peer.saw(process_id, b"ready")
    assert peer.call("process/resize", process(process_id, rows=33, cols=65535)) == {}
    peer.saw(process_id, b"33 65535")
    bad = (-32602, "rows and cols must be between 1 and 65535")
    for size in (
        {"rows": 0, "cols": 1},
        {"rows": 1, "cols": 0},
        {"rows": 65536, "cols": 1},
        {"rows": 1, "cols": 2**63},
    ):
        assert peer.refused("process/resize", process(process_id, **size)) == bad
    pipes = peer.start("cat", pipeStdin=True)
    text = f"process {pipes} is not attached to a terminal"
    assert peer.refused("process/resize", process(pipes, rows=1, cols=1)) == (-32600, text)
    unknown = (-32600, "unknown process id nobody")
    assert peer.refused("process/resize", process("nobody", rows=1, cols=1)) == unknown
    done = peer.start("true", tty=True)
    peer.finished(done)
    assert peer.call("process/resize", process(done, rows=1, cols=1)) == {}


# Wait --------------------------------------------------------------------------------------------


def test_waiting(peer: Peer) -> None:
    marker = sleep_forever()
    process_id = peer.shell(f"sleep {marker} & echo x; read line; exit 7", pipeStdin=True)
    peer.saw(process_id, b"x")
    assert peer.call("process/wait", process(process_id, waitMs=0)) == {
        "exited": False,
        "exitCode": None,
        "closed": False,
        "nextSeq": 2,
        "timedOut": True,
        "failure": None,
        "sandboxDenied": False,
    }
    for_exit = peer.request("process/wait", process(process_id, until="exited"))
    for_close = peer.request("process/wait", process(process_id, until=None))
    peer.write(process_id, b"\n")
    answer = peer.result(for_exit)
    assert (answer["exited"], answer["exitCode"], answer["closed"], answer["timedOut"]) == (
        True,
        7,
        False,
        False,
    )
    assert not peer.answers[for_close]
    timed = peer.call("process/wait", process(process_id, waitMs=10, until="closed"))
    assert (timed["exited"], timed["timedOut"]) == (True, True)
    kill_sleeper(marker)
    answer = peer.result(for_close)
    assert (answer["closed"], answer["timedOut"], answer["nextSeq"]) == (True, False, 4)


# Signals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tty", [False, True])
def test_interrupt(peer: Peer, tty: bool) -> None:
    process_id = peer.shell("echo ready; exec sleep 60", tty=tty)
    peer.saw(process_id, b"ready")
    assert peer.call("process/signal", process(process_id, signal="interrupt")) == {}
    assert peer.finished(process_id).exit_code == 130


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGHUP", "SIGQUIT", "SIGTERM", "SIGALRM", "SIGRTMIN"])
def test_signals_by_name(peer: Peer, name: str) -> None:
    # The kernel's word for it, not the shell's.
    process_id = peer.shell(
        f"trap 'echo got it; exit 0' {name.removeprefix('SIG')}; echo ready; while :; do sleep 0.01; done"
    )
    peer.saw(process_id, b"ready")
    peer.call("process/signal", process(process_id, signal=name))
    record = peer.finished(process_id)
    assert record.stdout == b"ready\ngot it\n"


def test_stop_and_continue(peer: Peer) -> None:
    process_id = peer.shell("echo $$; while :; do sleep 0.01; done")
    pid = int(peer.saw(process_id, b"\n").stdout)
    peer.call("process/signal", process(process_id, signal="SIGSTOP"))
    eventually(lambda: stat(pid).state == "T", "the process to stop")
    assert not peer.read(process_id)["exited"]
    peer.call("process/signal", process(process_id, signal="SIGCONT"))
    eventually(lambda: stat(pid).state != "T", "the process to go on")
    peer.call("process/signal", process(process_id, signal="SIGKILL"))
    assert peer.finished(process_id).exit_code == 137


def test_a_signal_reaches_the_whole_group(peer: Peer) -> None:
    marker = sleep_forever()
    process_id = peer.shell(f"sleep {marker} & sleep {marker} & echo ready; wait; wait")
    peer.saw(process_id, b"ready")
    eventually(lambda: len(running(f"sleep\0{marker}")) == 2, "both")
    peer.call("process/signal", process(process_id, signal="SIGTERM"))
    gone(marker)
    peer.finished(process_id)


@pytest.mark.parametrize(
    "name", ["", "INT", "sigint", "SIGNOTHING", "SIG_IGN", "SIG_BLOCK", "2", "kill", "SIGNALS", "Signals"]
)
def test_what_is_no_signal(peer: Peer, name: str) -> None:
    code, text = peer.refused("process/signal", process("whatever", signal=name))
    assert code == -32602
    assert text.startswith(f"unknown variant `{name}`, expected `interrupt`")


def test_a_signal_to_nobody(peer: Peer) -> None:
    assert peer.call("process/signal", process("unknown", signal="interrupt")) == {}
    done = peer.start("true")
    peer.finished(done)
    assert peer.call("process/signal", process(done, signal="SIGKILL")) == {}


# Terminate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, {"type": "force"}, {"type": "graceful", "timeoutMs": 0}, "absent"])
@pytest.mark.parametrize("tty", [False, True])
def test_force(peer: Peer, tty: bool, mode: Any) -> None:
    process_id = peer.shell("trap '' TERM INT HUP; echo ready; while :; do sleep 0.01; done", tty=tty)
    peer.saw(process_id, b"ready")
    answer = peer.terminate(process_id, **({} if mode == "absent" else {"mode": mode}))
    assert answer["running"] is True
    assert ("killed" in answer) == (isinstance(mode, dict))
    assert peer.finished(process_id).exit_code == 137
    assert peer.terminate(process_id) == {"running": False}


def test_terminate_of_nobody(peer: Peer) -> None:
    assert peer.terminate("unknown") == {"running": False}
    assert peer.terminate("unknown", mode={"type": "graceful", "timeoutMs": 5}) == {"running": False}


def test_force_does_not_wait_for_whoever_holds_the_output(peer: Peer) -> None:
    # Somebody of another account could not be killed; the close must come anyway.
    process_id = peer.shell("echo ready; exec sleep 60")
    peer.saw(process_id, b"ready")
    peer.terminate(process_id)
    assert peer.finished(process_id).exit_code == 137


def test_graceful_lets_it_say_goodbye(peer: Peer) -> None:
    script = "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.01; done"
    process_id = peer.shell(script)
    peer.saw(process_id, b"ready")
    answer = peer.terminate(process_id, mode={"type": "graceful", "timeoutMs": 60_000})
    assert answer == {"running": True}
    record = peer.finished(process_id)
    assert record.exit_code == 5
    assert b"bye\n" in record.stdout


def test_graceful_ends_in_force(peer: Peer) -> None:
    marker = sleep_forever()
    process_id = peer.shell(f"trap '' TERM; setsid sleep {marker} & echo ready; while :; do sleep 0.01; done")
    peer.saw(process_id, b"ready")
    began = time.monotonic()
    peer.terminate(process_id, mode={"type": "graceful", "timeoutMs": 100})
    assert peer.finished(process_id).exit_code == 137
    assert time.monotonic() - began >= 0.1
    gone(marker)


def test_a_later_force_takes_effect_at_once(peer: Peer) -> None:
    process_id = peer.shell("trap '' TERM; echo ready; while :; do sleep 0.01; done")
    peer.saw(process_id, b"ready")
    assert peer.terminate(process_id, mode={"type": "graceful", "timeoutMs": 2**64 - 1})["running"]
    assert peer.terminate(process_id)["running"]
    assert peer.finished(process_id).exit_code == 137


# Limits, spawn modes, lists, life ----------------------------------------------------------------


def test_how_many_processes(new_peer: NewPeer) -> None:
    peer = new_peer("--max-processes", "2")
    peer.initialize()
    assert peer.info["limits"]["maxProcesses"] == 2
    first, second = peer.start("cat", pipeStdin=True), peer.start("cat", pipeStdin=True)
    params = peer.start_params(["true"])
    assert peer.refused("process/start", params) == (-32600, "process limit reached (2)")
    peer.close_stdin(first)
    peer.finished(first)
    assert peer.run("true").exit_code == 0
    peer.terminate(second)


def test_limits_are_announced(peer: Peer) -> None:
    limits = dict(peer.info["limits"])
    assert limits.pop("detachTtlMs") in (5_000, 30_000)  # the listening server of these tests has 5 s
    assert limits == {"maxProcesses": None, "retainedOutputBytes": MIB, "shutdownGraceMs": 0}


def test_prepared_starts_carry_nothing_to_prepare(peer: Peer) -> None:
    assert peer.run("echo", "x", spawn="prepared").stdout == b"x\n"
    assert peer.run("echo", "x", spawn="direct").stdout == b"x\n"
    assert peer.run("echo", "x", spawn=None).stdout == b"x\n"
    sandbox = {"permissions": {"type": "disabled"}, "windowsSandboxLevel": "disabled"}
    snapshot = {"scopeId": "s", "shell": {"name": "bash", "path": "/bin/bash"}}
    for name, value in (
        ("envPolicy", policy()),
        ("sandbox", sandbox),
        ("shellSnapshot", snapshot),
        ("managedNetwork", {}),
        ("enforceManagedNetwork", True),
    ):
        params = peer.start_params(["true"], spawn="prepared", **{name: value})
        assert peer.refused("process/start", params) == (-32602, f"prepared start must not carry {name}")
    fine = peer.start_params(
        ["true"], spawn="prepared", envPolicy=None, enforceManagedNetwork=False, arg0="x"
    )
    peer.call("process/start", fine)
    assert peer.refused("process/start", peer.start_params(["true"], spawn="other"))[0] == -32602


@pytest.mark.parametrize(("flag", "kind"), [("--no-direct", "direct"), ("--no-prepared", "prepared")])
def test_a_kind_of_start_can_be_disabled(new_peer: NewPeer, flag: str, kind: str) -> None:
    peer = new_peer(flag)
    peer.initialize()
    params = peer.start_params(["true"], spawn=kind)
    assert peer.refused("process/start", params) == (-32600, f"{kind} exec is disabled on this server")
    other = {"direct": "prepared", "prepared": "direct"}[kind]
    assert peer.run("true", spawn=other).exit_code == 0


def test_list(new_peer: NewPeer) -> None:
    peer = new_peer()
    peer.initialize(extensions=True)
    assert peer.call("process/list", {}) == {"processes": []}
    assert peer.call("process/list") == {"processes": []}
    before = time.time() * 1000
    process_id = peer.shell("printf 12345; read line; exit 3", pipeStdin=True)
    peer.saw(process_id, b"12345")
    entry = peer.state(process_id)
    pid, started = entry.pop("pid"), entry.pop("startedAtMs")
    assert stat(pid).parent == peer.server_pid
    assert before - 1 <= started <= time.time() * 1000
    assert entry == {
        "processId": process_id,
        "session": peer.session_id[: len(entry["session"])],
        "argv": ["/bin/bash", "-c", "printf 12345; read line; exit 3"],
        "cwd": "file:///tmp",
        "tty": False,
        "state": "running",
        "exitCode": None,
        "nextSeq": 2,
        "outputBytes": 5,
        "droppedBytes": 0,
    }
    peer.write(process_id, b"\n")
    peer.finished(process_id)
    entry = peer.state(process_id)
    assert (entry["state"], entry["exitCode"], entry["pid"], entry["nextSeq"]) == ("closed", 3, None, 4)
    terminal = peer.start("cat", tty=True)
    assert [one["processId"] for one in peer.call("process/list", {})["processes"]] == [process_id, terminal]
    assert peer.state(terminal)["tty"] is True


def test_clients_that_did_not_ask_see_no_names_the_reference_does_not_have(peer: Peer) -> None:
    for name in ("process/list", "process/kill", "process/spawn", "process/status", "process/"):
        text = f"exec-server stub does not implement `{name}` yet"
        assert peer.refused(name, {}) == (-32601, text)


def test_life_is_told_to_those_who_asked(new_peer: NewPeer) -> None:
    peer = new_peer()
    peer.initialize(lifecycleEvents=True)
    process_id = peer.start("true")
    peer.finished(process_id)
    [started] = [message for message in peer.notifications if message["method"] == "process/started"]
    assert started["params"]["processId"] == process_id
    assert isinstance(started["params"]["pid"], int)
    assert peer.notifications[0] is started
    assert peer.refused("process/start", peer.start_params(["/no/such"]))[0] == -32603
    peer.call("environment/status")
    assert len([message for message in peer.notifications if message["method"] == "process/started"]) == 1


def test_capabilities_are_announced(peer: Peer) -> None:
    flags = peer.info["capabilities"]
    for name in (
        "processCloseStdin",
        "processResize",
        "processPtySize",
        "processWait",
        "processSnapshot",
        "processTerminateModes",
        "processSpawnModes",
        "processLifecycleEvents",
        "processSignals",
        "processList",
        "processFlowControl",
        "binaryOutput",
    ):
        assert flags[name] is True, name


# Flow control ------------------------------------------------------------------------------------


def test_output_of_one_process_can_be_held(new_peer: NewPeer) -> None:
    peer = new_peer()
    peer.initialize(extensions=True)
    process_id = peer.shell("read line; head -c 5000000 /dev/zero; exit 0", pipeStdin=True)
    assert peer.call("process/pauseOutput", process(process_id)) == {}
    peer.write(process_id, b"go\n")
    assert peer.run("echo", "others go on").stdout == b"others go on\n"
    timed = peer.call("process/wait", process(process_id, waitMs=50))
    assert timed["timedOut"]
    assert peer.record(process_id).output == b""
    assert peer.call("process/resumeOutput", process(process_id)) == {}
    assert len(peer.finished(process_id).stdout) == 5_000_000
    assert peer.call("process/pauseOutput", process("unknown")) == {}


# Binary output -----------------------------------------------------------------------------------


def test_output_without_base64(connect: NewPeer) -> None:
    peer = connect()
    assert peer.initialize(binaryOutput=True)["binaryOutput"] is True
    every = bytes(range(256))
    process_id = peer.start("cat", pipeStdin=True, processId="ü")
    peer.write(process_id, every * 2000)
    peer.close_stdin(process_id)
    record = peer.finished(process_id)
    assert record.stdout == every * 2000
    assert record.binary == len(record.chunks)
    terminal = peer.run("echo", "x", tty=True)
    assert (terminal.terminal, terminal.binary) == (b"x\r\n", 1)
    errors = peer.run_shell("echo x >&2")
    assert (errors.stderr, errors.binary) == (b"x\n", 1)
    # An id too long for the frame is told as JSON.
    long = peer.run("echo", "x", processId="y" * 65_536)
    assert (long.stdout, long.binary) == (b"x\n", 0)
    assert peer.run("echo", "x", processId="y" * 65_535).binary == 1


def test_lines_carry_no_binary(start_stdio: NewPeer) -> None:
    peer = start_stdio()
    assert "binaryOutput" not in peer.initialize(binaryOutput=True)
    assert peer.run("echo", "x").stdout == b"x\n"


def test_who_does_not_ask_gets_text(connect: NewPeer) -> None:
    peer = connect()
    assert "binaryOutput" not in peer.initialize(binaryOutput=False)
    assert peer.run("echo", "x").binary == 0


def test_answers_are_json_without_escapes(start_stdio: NewPeer) -> None:
    peer = start_stdio()
    peer.initialize()
    peer.run("true", processId="ü")
    raw = json.dumps(peer.received[-1], ensure_ascii=False)
    assert "ü" in raw


def test_list_of_every_session(connect: NewPeer, start_server: Callable[..., Any]) -> None:
    server = start_server()
    mine, other = connect(server), connect(server)
    for peer in (mine, other):
        peer.initialize(extensions=True)
    first, second = mine.start("true"), other.start("true", processId="of another")
    assert [one["processId"] for one in mine.call("process/list", {})["processes"]] == [first]
    listed = mine.call("process/list", {"all": True})["processes"]
    assert [one["processId"] for one in listed] == [first, second]
    # Enough to tell sessions apart, too little to resume one.
    assert all(0 < len(one["session"]) <= 8 for one in listed)
    assert other.session_id.startswith(listed[1]["session"])
