"""server/handlers/processes.py: what comes out of a process, how it is numbered, kept and read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from support.machine import sleep_forever
from support.processes import MIB, NewPeer, kill_sleeper, process, read_to_end
from support.rpc import Peer, b64, unb64

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
