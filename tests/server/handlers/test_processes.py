"""server/handlers/processes.py: starting, limits and lists, over WebSocket and over stdio."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.machine import sleep_forever, stat
from support.processes import MIB, NewPeer, kill_sleeper, process
from support.rpc import PATH, Peer
from support.sandbox import run_in
from support.wait import eventually

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
