"""The conversation with a helper, where the other end does not do as it should."""

from __future__ import annotations

import os

import pytest

from exec_server.local.files.lane import ALONE
from exec_server.local.process.spawn import Spawned
from exec_server.local.sandbox import helper_process
from exec_server.local.sandbox.helper import HEADER, HERE, RESULT
from exec_server.local.sandbox.helper_process import HelperDied, HelperProcess, Key, socket_pair
from exec_server.local.sandbox.plan import Plan

PLAN = Plan(kind="plain", network="open")


@pytest.fixture
def mute() -> int:
    """Somebody who is there and never says a word."""
    return os.posix_spawn("/bin/sleep", ["sleep", "60"], {})


def talking_to(pid: int) -> tuple[HelperProcess, int]:
    ours, theirs = socket_pair()
    spawned = Spawned(pid, os.pidfd_open(pid), None, [])
    return HelperProcess(Key(PLAN), ours, spawned, guarded=False), theirs


def test_one_that_never_starts_is_given_up(mute: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "START_SECONDS", 0.05)
    helper, theirs = talking_to(mute)
    with pytest.raises(HelperDied):
        helper.call("fs/readFile", b"{}", ALONE)
    os.close(theirs)
    assert helper.end(kill=True).startswith("signal: 9")


def test_one_that_has_started_may_take_its_time(mute: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "START_SECONDS", 0.0)
    helper, theirs = talking_to(mute)
    os.write(theirs, HEADER.pack(0, HERE) + HEADER.pack(2, RESULT) + b"{}")
    assert helper.call("fs/readFile", b"{}", ALONE).result == b"{}"
    os.close(theirs)
    helper.end(kill=True)


def test_one_that_begins_with_anything_else_is_not_believed(mute: int) -> None:
    helper, theirs = talking_to(mute)
    os.write(theirs, HEADER.pack(2, RESULT) + b"{}")
    with pytest.raises(HelperDied):
        helper.call("fs/readFile", b"{}", ALONE)
    os.close(theirs)
    helper.end(kill=True)
