"""local/process/guardian.py: on its own, as the program it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from exec_server.local.process import guardian, tree
from exec_server.local.process.tree import SESSION_SHIFT, TagSpace
from support.machine import sleep_forever


def sleeper(tag: int) -> subprocess.Popen[bytes]:
    with tree.tagged(tag):
        return subprocess.Popen(["sleep", sleep_forever()])


def test_waits_for_the_end_of_the_pipe_and_kills_what_carries_the_tag() -> None:
    space, other = TagSpace(), TagSpace()
    ours = [sleeper(space.open_session().new()) for _ in range(3)]
    theirs = sleeper(other.open_session().new())
    read, write = os.pipe()
    command = [sys.executable, "-I", "-S", guardian.__file__, str(read), str(space.nonce), str(SESSION_SHIFT)]
    process = subprocess.Popen(command, pass_fds=[read])
    os.close(read)
    try:
        os.write(write, b"still here")
        assert [one.poll() for one in ours] == [None] * 3
        os.close(write)
        assert process.wait(20) == 0
        assert [one.wait(20) for one in ours] == [-signal.SIGKILL] * 3
        assert theirs.poll() is None
    finally:
        theirs.kill()
        theirs.wait()


def test_a_round_tells_whether_anybody_new_was_there() -> None:
    space = TagSpace()
    known: set[int] = set()
    assert not guardian.kill_all(space.nonce, SESSION_SHIFT, known)
    process = sleeper(space.open_session().new())
    assert guardian.kill_all(space.nonce, SESSION_SHIFT, known)
    assert known == {process.pid}
    assert not guardian.kill_all(space.nonce, SESSION_SHIFT, known), "a corpse is nobody new"
    assert process.wait(20) == -signal.SIGKILL


def test_a_second_lap_of_tags_leaves_out_who_is_still_there() -> None:
    tags = TagSpace().open_session()
    first = tags.new()
    process = sleeper(first)
    try:
        tags._next = (1 << 18) - 1  # as after 262,143 starts
        fresh = [tags.new() for _ in range(3)]
        assert first not in fresh
        assert len(set(fresh)) == 3
    finally:
        process.kill()
        process.wait()
