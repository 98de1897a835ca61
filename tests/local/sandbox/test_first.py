"""local/sandbox/first.py: the first process is killed and waited for, whatever was told of its end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from exec_server.local.sandbox import first, mountpoints
from exec_server.local.sandbox.first import FirstProcess
from support.wait import eventually

NEW = ["unshare", "--user", "--map-current-user", "--pid", "--fork"]


def told(text: bytes) -> FirstProcess:
    one = FirstProcess()
    os.write(one.handed, text)
    os.close(one.handed)
    return one


def about(pid: int) -> FirstProcess:
    return told(b'{ "child-pid": %d, "cgroup-name' % pid)


@pytest.fixture(params=["exec sleep 1000", "sleep 1000 & echo up; wait"])
def pid(request: pytest.FixtureRequest) -> Iterator[int]:
    """The first process of a namespace, alone or with a child."""
    script = request.param
    with subprocess.Popen([*NEW, "sh", "-c", f"echo up; {script}"], stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"up\n"
        (number,) = map(int, Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split())
        yield number
        one.kill()
        if mountpoints.is_running(number):
            os.kill(number, signal.SIGKILL)


def test_without_a_word_nobody_ever_was() -> None:
    assert told(b"").end()


def test_half_a_word_is_none() -> None:
    assert told(b'{ "child-').end()


def test_who_is_gone_is_not_waited_for() -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    assert told(b'{ "child-pid": %d }\n{ "exit-code": 0 }\n' % gone.pid).end()


def test_who_is_there_is_killed(pid: int) -> None:
    """Even if it is alone: it may yet start somebody."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert about(pid).end()
    assert not any(mountpoints.is_running(int(child)) for child in children)
    eventually(lambda: not mountpoints.is_running(pid), "it is gone")


def test_at_the_end_everybody_is_killed(pid: int) -> None:
    one = about(pid)
    first.end_all()
    eventually(lambda: not mountpoints.is_running(pid), "it is gone")
    assert one.end(), "a second time nothing is left to do"


def test_who_does_not_end_is_not_waited_for_for_ever(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "PATIENCE", 0.0)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    assert not about(pid).end()


def test_another_of_the_same_number_is_nobody(pid: int) -> None:
    """Neither the first process of another namespace nor one that is the first of none."""
    namespace = os.stat(f"/proc/{pid}/ns/pid").st_ino
    assert told(b'{ "child-pid": %d, "pid-namespace": %d }\n' % (pid, namespace + 1)).end()
    assert mountpoints.is_running(pid)
    with subprocess.Popen(["sleep", "1000"]) as other:
        assert about(other.pid).end()
        assert other.poll() is None
        other.kill()
    assert told(b'{ "child-pid": %d, "pid-namespace": %d }\n' % (pid, namespace)).end()
    eventually(lambda: not mountpoints.is_running(pid), "it is gone")


def test_nothing_stays_open(pid: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    about(pid).end()
    told(b"").close()
    assert len(os.listdir("/proc/self/fd")) == before
