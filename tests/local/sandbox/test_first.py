"""local/sandbox/first.py: the end inside is waited for, whoever it is that bubblewrap has told about."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from exec_server.local.sandbox import first, mountpoints
from exec_server.local.sandbox.first import FirstProcess


def told(text: bytes) -> FirstProcess:
    one = FirstProcess()
    os.write(one.handed, text)
    os.close(one.handed)
    return one


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody with a child."""
    script = "sleep 1000 & echo up; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"up\n"
        yield one
        os.killpg(one.pid, signal.SIGKILL)


def test_without_a_word_nobody_ever_was() -> None:
    assert told(b"").wait(orderly=False)


def test_who_is_gone_is_not_waited_for() -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    assert told(b'{ "child-pid": %d }\n{ "exit-code": 0 }\n' % gone.pid).wait(orderly=False)


@pytest.mark.parametrize("orderly", [True, False])
def test_who_is_there_is_killed(sleeper: subprocess.Popen[bytes], orderly: bool) -> None:
    assert told(b'{ "child-pid": %d }\n' % sleeper.pid).wait(orderly=orderly)
    assert not mountpoints.is_running(sleeper.pid)


def test_who_does_not_end_is_not_waited_for_for_ever(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first, "PATIENCE", 0.0)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    assert not told(b'{ "child-pid": %d }\n' % sleeper.pid).wait(orderly=True)


def test_who_is_alone_is_nobody_to_wait_for() -> None:
    """All others have ended, and the first one does nothing but end, too."""
    with subprocess.Popen(["sleep", "1000"]) as alone:
        assert told(b'{ "child-pid": %d }\n' % alone.pid).wait(orderly=True)
        assert alone.poll() is None
        assert told(b'{ "child-pid": %d }\n' % alone.pid).wait(orderly=False), "it may yet start somebody"
        assert not mountpoints.is_running(alone.pid)


def test_another_of_the_same_number_is_nobody(sleeper: subprocess.Popen[bytes]) -> None:
    namespace = os.stat("/proc/self/ns/pid").st_ino + 1
    facts = b'{ "child-pid": %d, "pid-namespace": %d }\n' % (sleeper.pid, namespace)
    assert told(facts).wait(orderly=False)
    assert mountpoints.is_running(sleeper.pid)


def test_nothing_stays_open(sleeper: subprocess.Popen[bytes]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    told(b'{ "child-pid": %d }\n' % sleeper.pid).wait(orderly=True)
    told(b"").close()
    assert len(os.listdir("/proc/self/fd")) == before
