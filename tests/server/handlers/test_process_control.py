"""server/handlers/processes.py: what is done to a process: written, resized, waited for, signalled, ended."""

from __future__ import annotations

import time
from typing import Any

import pytest

from support.machine import gone, running, sleep_forever, stat
from support.processes import kill_sleeper, process
from support.rpc import Peer, b64
from support.wait import eventually

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
