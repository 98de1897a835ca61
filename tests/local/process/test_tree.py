"""local/process/tree.py: whole trees, however far their members ran."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from exec_server.local.process import tree
from exec_server.local.process.tree import SESSION_SHIFT, TagSpace
from support.machine import gone, running, sleep_forever, stat
from support.rpc import Peer
from support.server import COMMAND, RunningServer
from support.wait import eventually

# Tags --------------------------------------------------------------------------------------------


def test_every_process_has_a_tag_of_its_own() -> None:
    one, other = TagSpace(), TagSpace()
    first, second, foreign = one.open_session(), one.open_session(), other.open_session()
    tags = [session.new() for session in (first, second, foreign) for _ in range(1000)]
    assert len(set(tags)) == 3000
    assert all(0 < tag < 2**63 for tag in tags)
    assert all(first.contains(tag) for tag in tags[:1000])
    assert not any(first.contains(tag) for tag in tags[1000:])
    assert all(one.contains(tag) for tag in tags[:2000])
    assert not any(one.contains(tag) for tag in tags[2000:])
    assert {tag >> SESSION_SHIFT for tag in tags} == {one.nonce, other.nonce}
    assert not one.contains(-1)


def test_sessions_can_be_opened_without_end_but_not_all_at_once() -> None:
    space = TagSpace()
    for _ in range(40_000):
        space.open_session().release()
    kept = [space.open_session() for _ in range(1 << 14)]
    with pytest.raises(RuntimeError):
        space.open_session()
    kept[77].release()
    again = space.open_session()
    assert again.contains(kept[77].new())


def test_we_never_kill_ourselves() -> None:
    assert tree.kill_tagged(lambda tag: False) == 0
    with tree.tagged(TagSpace().open_session().new()):
        own = dict(tree.processes())[os.getpid()]
        assert own > 0
        assert tree.kill_tagged(own.__eq__) == 0


# Trees -------------------------------------------------------------------------------------------

FORCE = {"type": "force"}


def killed(peer: Peer, process_id: str) -> int:
    answer = peer.terminate(process_id, mode=FORCE)
    assert answer["running"] is True
    assert isinstance(answer["killed"], int)
    return answer["killed"]


TREES = {
    "children": ("sleep {m} & sleep {m} & wait", 2),
    "in a session of their own": ("setsid sleep {m} & setsid sleep {m} & wait", 2),
    "daemons": (
        "(setsid bash -c 'sleep {m} & sleep {m} & exit 0' & ) ; (setsid sleep {m} &) ; exec sleep {m}",
        4,
    ),
    "in a group of their own": ("set -m; sleep {m} & bash -c 'set -m; sleep {m} & wait' & wait", 2),
    "ignoring everything": ("for i in 1 2 3; do (trap '' TERM INT HUP QUIT; exec sleep {m}) & done; wait", 3),
    "stopped": ("bash -c 'kill -STOP $$; exec sleep {m}' & setsid sleep {m} & wait", 1),
    "without descriptors": ("setsid sleep {m} <&- >&- 2>&- & wait", 1),
    "in an environment of their own": ("env -i /bin/bash -c 'exec setsid sleep {m}' & wait", 1),
    "fifty": ("for i in $(seq 50); do setsid sleep {m} & done; wait", 50),
    "a chain": ("d=$1; bash -c 'setsid bash -c \"setsid sleep {m} & sleep {m} & wait\" & wait' & wait", 2),
}


@pytest.mark.parametrize("tty", [False, True], ids=["pipes", "terminal"])
@pytest.mark.parametrize("kind", TREES)
def test_terminate_takes_the_whole_tree(ws: Peer, kind: str, tty: bool) -> None:
    script, sleepers = TREES[kind]
    marker = sleep_forever()
    process_id = ws.shell(script.format(m=marker), tty=tty)
    eventually(lambda: len(running(f"sleep\0{marker}")) == sleepers, "everybody to be there")
    assert killed(ws, process_id) >= sleepers
    # When the answer is there, they are gone, or as good as.
    gone(marker)
    assert ws.finished(process_id).exit_code == 137


def test_the_answer_counts_exactly(ws: Peer) -> None:
    marker = sleep_forever()
    process_id = ws.shell(f"setsid sleep {marker} & sleep {marker} & echo ready; exec sleep {marker}")
    ws.saw(process_id, b"ready")
    eventually(lambda: len(running(f"sleep\0{marker}")) == 3, "three sleepers")
    assert killed(ws, process_id) == 3
    gone(marker)


def test_a_runaway_that_is_somebody_else_all_the_time_is_caught(ws: Peer) -> None:
    marker = sleep_forever()
    code = (
        "import os, time\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    if os.fork(): os._exit(0)\n"
        "    os.setsid()\n"
        "    time.sleep(0.005)\n"
    )
    # The first one stays, so that there is something to terminate.
    script = f"'{sys.executable}' -c \"$0\" {marker} & sleep {marker}"
    process_id = ws.start("/bin/bash", "-c", script, code)
    ws.saw(process_id, b"ready")
    killed(ws, process_id)
    gone(marker, "the runaway")


def test_a_tree_that_grows_while_it_is_killed(ws: Peer) -> None:
    marker = sleep_forever()
    script = f"echo ready; while :; do setsid sleep {marker} & sleep 0.002; done"
    process_id = ws.shell(script)
    ws.saw(process_id, b"ready")
    eventually(lambda: len(running(f"sleep\0{marker}")) > 5, "some to be there")
    killed(ws, process_id)
    gone(marker)


def test_other_processes_of_the_session_are_left_alone(ws: Peer) -> None:
    mine, other = sleep_forever(), sleep_forever()
    first = ws.shell(f"setsid sleep {mine} & wait")
    second = ws.shell(f"setsid sleep {other} & wait")
    eventually(lambda: len(running(f"sleep\0{mine}") + running(f"sleep\0{other}")) == 2, "both")
    killed(ws, first)
    gone(mine)
    assert len(running(f"sleep\0{other}")) == 1
    killed(ws, second)
    gone(other)


def test_background_children_of_a_process_that_exited_are_left_alone_until_the_session_ends(
    start_server: Callable[..., RunningServer], connect: Callable[..., Peer]
) -> None:
    server = start_server("--detach-ttl", "0.05")
    peer = connect(server)
    peer.initialize()
    marker = sleep_forever()
    process_id = peer.shell(f"setsid sleep {marker} >/dev/null 2>&1 & exit 0")
    assert peer.finished(process_id).exit_code == 0
    assert peer.terminate(process_id) == {"running": False}
    eventually(lambda: len(running(f"sleep\0{marker}")) == 1, "the one in the background being left alone")
    peer.drop()
    gone(marker)


def test_the_count_is_for_those_who_asked(peer: Peer) -> None:
    process_id = peer.start("sleep", sleep_forever())
    assert peer.terminate(process_id) == {"running": True}


def test_a_second_terminate_joins_the_first(ws: Peer) -> None:
    marker = sleep_forever()
    process_id = ws.shell(f"for i in $(seq 20); do setsid sleep {marker} & done; wait")
    eventually(lambda: len(running(f"sleep\0{marker}")) == 20, "everybody")
    ids = [ws.request("process/terminate", {"processId": process_id, "mode": FORCE}) for _ in range(3)]
    assert ws.result(ids[0])["killed"] >= 20
    gone(marker)
    ws.finished(process_id)


def test_nobody_is_left_unreaped(ws: Peer) -> None:
    ids = [ws.start("true") for _ in range(30)]
    for process_id in ids:
        ws.finished(process_id)
    zombies = [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if stat(pid).parent == ws.server_pid and stat(pid).state == "Z"
    ]
    assert zombies == []


# When descriptors run short ----------------------------------------------------------------------

FEW = ("bash", "-c", 'ulimit -n 64; exec "$0" "$@" 2>/dev/null', COMMAND)
"""A server that may have 64 descriptors, and cannot get more. It has reason to complain."""


def use_up(server: RunningServer, stack: ExitStack) -> None:
    """Connect until the server can open nothing any more."""
    host, port = server.url.removeprefix("ws://").split(":")
    for _ in range(80):
        stack.enter_context(socket.create_connection((host, int(port))))
    eventually(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) >= 64, "the last descriptor being taken")


def test_a_tree_larger_than_the_limit_on_descriptors(
    start_server: Callable[..., RunningServer], connect: Callable[..., Peer]
) -> None:
    peer = connect(start_server(command=FEW))
    peer.initialize()
    marker = sleep_forever()
    script = f"for i in $(seq 100); do setsid sleep {marker} & done; wait"
    process_id = peer.shell(script)
    eventually(lambda: len(running(f"sleep\0{marker}")) == 100, "everybody to be there")
    assert killed(peer, process_id) == 101
    gone(marker)


def test_a_tree_is_killed_when_nothing_can_be_opened(
    start_server: Callable[..., RunningServer], connect: Callable[..., Peer]
) -> None:
    server = start_server("--detach-ttl", "0.2", command=FEW)
    peer, other = connect(server), connect(server)
    marker, others = sleep_forever(), sleep_forever()
    peer.initialize()
    other.initialize()
    process_id = peer.shell(f"(setsid sleep {marker} &); exec sleep {marker}")
    other.shell(f"(setsid sleep {others} &); exec sleep {others}")
    eventually(lambda: len(running(f"sleep\0{marker}") + running(f"sleep\0{others}")) == 4, "all of them")
    with ExitStack() as stack:
        use_up(server, stack)
        assert killed(peer, process_id) == 2
        gone(marker)
        other.drop()  # and what a session leaves behind
        use_up(server, stack)
        gone(others)
    assert server.end() == 0


def test_one_descriptor_is_enough_and_none_is_said() -> None:
    code = """
import os, resource, sys
from exec_server.local.process import descriptors, tree
tag = tree.TagSpace().open_session().new()
with tree.tagged(tag):
    for _ in range(3):
        os.posix_spawn("/bin/sleep", ["sleep", sys.argv[1]], {}, setsid=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
full = []
try:
    while True:
        full.append(os.open("/", os.O_RDONLY))
except OSError:
    pass
try:
    tree.kill_tagged(tag.__eq__)
except OSError as error:
    print(error.strerror)
os.close(full.pop())
print(tree.kill_tagged(tag.__eq__))
for _ in range(3):
    os.wait()
os.close(full.pop())
descriptors.keep_spare()
print(tree.kill_tagged(tag.__eq__), tree.kill_tagged(lambda tag: False))
"""
    marker = sleep_forever()
    done = subprocess.run([sys.executable, "-c", code, marker], capture_output=True, text=True, check=True)
    said, *counts = done.stdout.splitlines()
    assert said == "not every process could be looked at: Too many open files"
    assert counts == ["3", "0 0"]
    gone(marker)
