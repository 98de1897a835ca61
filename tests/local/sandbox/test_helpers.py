"""Warm helpers: kept while they fit, bounded in number, replaced when they die, gone when idle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.files.lane import ALONE, Abandoned, Turn
from exec_server.local.process.spawn import Launch, SpawnSpec
from exec_server.local.sandbox import helpers
from exec_server.local.sandbox.helper_process import Key
from exec_server.local.sandbox.plan import Identity, MountPoint, Plan
from exec_server.wire.errors import INTERNAL_ERROR, RpcError
from support.pool import Pool
from support.wait import eventually

ONE, OTHER = (Key(Plan(kind="view", network="closed", readable=(name,))) for name in (b"/one", b"/other"))


@pytest.fixture
def pool() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(*arguments: Any, **options: Any) -> Pool:
        made.append(Pool(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.helpers.count == 0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(b"x")
    return tmp_path / "f"


CONTENT = b'{"dataBase64":"eA=="}'


def test_one_helper_serves_all_calls_of_its_plan(pool: Callable[..., Pool], file: Path) -> None:
    one = pool()
    assert [one.read(ONE, file) for _ in range(5)] == [CONTENT] * 5
    assert (one.started, one.helpers.count) == ([ONE.plan], 1)
    again = Key(Plan(kind="view", network="closed", readable=(b"/one",)))
    assert one.read(again, file) == CONTENT
    assert one.helpers.count == 1


def test_another_plan_gets_another_helper(pool: Callable[..., Pool]) -> None:
    one = pool()
    first, second = one.pid(ONE), one.pid(OTHER)
    assert first != second
    assert (one.pid(ONE), one.pid(OTHER), one.started) == (first, second, [ONE.plan, OTHER.plan])


def test_errors_of_a_call_are_no_reason_to_go(pool: Callable[..., Pool], tmp_path: Path) -> None:
    one = pool()
    before = one.pid(ONE)
    with pytest.raises(RpcError, match="No such file") as caught:
        one.read(ONE, tmp_path / "absent")
    assert caught.value.code == -32004
    assert one.pid(ONE) == before


def test_files_that_stand_guard_take_a_helper_for_one_call(pool: Callable[..., Pool], file: Path) -> None:
    """Directories do not (test_guards.py)."""
    one = pool()
    key = Key(Plan(kind="view", network="closed", created=(MountPoint(b"/w/miss", False),)))
    for _ in range(2):
        assert one.read(key, file) == CONTENT
        assert one.helpers.count == 0
    assert len(one.started) == 2


def test_there_are_never_too_many(pool: Callable[..., Pool], file: Path) -> None:
    one = pool(sandbox_helpers=2)
    for name in (b"a", b"b", b"c", b"d", b"a"):
        key = Key(Plan(kind="view", network="closed", readable=(name,)))
        assert one.read(key, file) == CONTENT
        assert one.helpers.count <= 2
    assert len(one.started) == 5  # the first had to leave for the third


def test_who_finds_all_at_work_waits_for_one(pool: Callable[..., Pool], file: Path) -> None:
    one = pool(sandbox_helpers=1)
    busy = one.pid(ONE)
    os.kill(busy, signal.SIGSTOP)
    answers: list[bytes] = []
    threads = [
        threading.Thread(target=lambda key=key: answers.append(one.read(key, file))) for key in (ONE, OTHER)
    ]
    for thread in threads:
        thread.start()
    assert one.helpers.count == 1
    os.kill(busy, signal.SIGCONT)
    for thread in threads:
        thread.join()
    assert answers == [CONTENT] * 2
    assert one.helpers.count == 1


def test_more_callers_and_plans_than_helpers(pool: Callable[..., Pool], file: Path) -> None:
    """They do not drive each other out for every single call."""
    one = pool(sandbox_helpers=2)
    keys = [Key(Plan(kind="view", network="closed", readable=(name,))) for name in (b"a", b"b", b"c")]
    answers: list[bytes] = []

    def ask(key: Key) -> None:
        answers.extend(one.read(key, file) for _ in range(5))

    threads = [threading.Thread(target=ask, args=(keys[number % 3],)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [CONTENT] * 80
    assert one.helpers.count <= 2
    assert len(one.started) <= 40  # about 8 where nothing else runs, and 80 if each call had its own


def test_idle_ones_leave(pool: Callable[..., Pool], file: Path) -> None:
    one = pool(sandbox_helper_idle=0.05)
    one.read(ONE, file)
    eventually(lambda: one.helpers.count == 0, "the helper has left")
    assert one.read(ONE, file) == CONTENT


def test_one_whose_files_are_gone_leaves(
    pool: Callable[..., Pool], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could never be used again, and would keep a disk busy."""
    monkeypatch.setattr(helpers, "VANISHED_SECONDS", 0.05)
    kept, lost = tmp_path / "kept", tmp_path / "lost"
    keys: list[Key] = []
    for folder in (kept, lost):
        folder.mkdir()
        seen = Identity(os.fsencode(folder), folder.stat().st_dev, folder.stat().st_ino, 0)
        keys.append(Key(Plan(kind="view", network="closed", seen=(seen,))))
    one = pool()
    stays, goes = (one.pid(key) for key in keys)
    lost.rmdir()
    eventually(lambda: not os.path.exists(f"/proc/{goes}"), "the helper has left")
    assert one.pid(keys[0]) == stays


ADD_KEY, KEYCTL = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]
KEYS = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall({KEYCTL}, 1, None)  # a session of its own, which ends with this program
key = libc.syscall({ADD_KEY}, b"user", b"secret-of-the-session", b"x", 1, -3)
assert key > 0, os.strerror(ctypes.get_errno())
assert libc.syscall({KEYCTL}, 5, key, ctypes.c_uint(0x3F000000)) == 0, os.strerror(ctypes.get_errno())
assert "secret-of-the-session" in open("/proc/keys").read()
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import base64
from support.pool import Pool
from exec_server.local.sandbox.helper_process import Key
from exec_server.local.sandbox.plan import Plan
pool = Pool()
read = pool.call(Key(Plan(kind="view", network="closed")), "fs/readFile", path="file:///proc/keys")
print(base64.b64decode(read["dataBase64"]).decode())
pool.close()
"""


def test_keys_of_the_session_are_left_behind() -> None:
    done = subprocess.run([sys.executable, "-c", KEYS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "keyring" in done.stdout
    assert "secret-of-the-session" not in done.stdout


def test_a_dead_one_is_replaced(pool: Callable[..., Pool], file: Path) -> None:
    one = pool()
    os.kill(one.pid(ONE), signal.SIGKILL)
    assert one.read(ONE, file) == CONTENT


def test_what_kills_every_helper_is_an_error(pool: Callable[..., Pool], file: Path) -> None:
    one = pool(lambda _: Launch(["/bin/sh", "-c", "echo no more >&2; kill -9 $$"], {}))
    with pytest.raises(RpcError) as caught:
        one.read(ONE, file)
    assert caught.value.code == INTERNAL_ERROR
    assert caught.value.message == "fs sandbox helper failed with status signal: 9: no more"
    assert (len(one.started), one.helpers.count) == (2, 0)


def test_a_signal_inside_is_a_signal(pool: Callable[..., Pool], file: Path) -> None:
    """bubblewrap tells of it as a shell does."""
    one = pool(lambda _: Launch(["/bin/sh", "-c", "exit 137"], {}))
    with pytest.raises(RpcError, match="fs sandbox helper failed with status signal: 9"):
        one.read(ONE, file)
    assert len(one.started) == 2


def test_one_that_cannot_start_is_not_tried_again(pool: Callable[..., Pool], file: Path) -> None:
    one = pool(lambda _: Launch(["/bin/sh", "-c", "echo bwrap: no >&2; exit 1"], {}))
    with pytest.raises(RpcError) as caught:
        one.read(ONE, file)
    assert caught.value.message == "fs sandbox helper failed with status exit status: 1: bwrap: no"
    assert len(one.started) == 1


def test_what_must_not_be_done_twice_is_not(pool: Callable[..., Pool], file: Path) -> None:
    one = pool()
    busy = one.pid(ONE)
    os.kill(busy, signal.SIGSTOP)
    errors: list[RpcError] = []

    def read() -> None:
        with pytest.raises(RpcError) as caught:
            one.read(ONE, file, repeatable=False)
        errors.append(caught.value)

    thread = threading.Thread(target=read)
    thread.start()
    # It has been asked when something waits to be read on its socket.
    eventually(lambda: _has_request(busy), "the helper has been asked")
    os.kill(busy, signal.SIGKILL)
    thread.join()
    assert "whether the call was done is not known" in errors[0].message
    assert one.started == [ONE.plan]


def _has_request(pid: int) -> bool:
    """Stopped helpers read nothing, so what was sent to one is still in its queue (SIOCINQ)."""
    import fcntl
    import struct
    import termios

    for name in os.listdir(f"/proc/{pid}/fd"):
        if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
            pidfd = os.pidfd_open(pid)
            try:
                socket = _get_descriptor(pidfd, int(name))
                try:
                    waiting = fcntl.ioctl(socket, termios.FIONREAD, bytes(4))
                    return struct.unpack("i", waiting)[0] > 0
                finally:
                    os.close(socket)
            finally:
                os.close(pidfd)
    return False


def _get_descriptor(pidfd: int, number: int) -> int:
    import ctypes

    pidfd_getfd = 438
    found: int = ctypes.CDLL(None, use_errno=True).syscall(pidfd_getfd, pidfd, number, 0)
    assert found >= 0, os.strerror(ctypes.get_errno())
    return found


class Impatient(Turn):
    """Nobody waits from the second look on."""

    def __init__(self) -> None:
        self.looks = 0

    def check(self) -> None:
        self.looks += 1
        if self.looks > 1:
            raise Abandoned


def test_what_nobody_waits_for_is_killed(pool: Callable[..., Pool], file: Path) -> None:
    one = pool()
    busy = one.pid(ONE)
    os.kill(busy, signal.SIGSTOP)
    with pytest.raises(Abandoned):
        one.read(ONE, file, Impatient())
    assert one.helpers.count == 0
    assert not os.path.exists(f"/proc/{busy}")


def test_refusals_of_the_machine_are_handed_on(pool: Callable[..., Pool], file: Path) -> None:
    def refuse(_: SpawnSpec) -> Launch:
        raise RpcError(-32600, "no way")

    one = pool(refuse)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(RpcError, match="no way"):
            one.read(ONE, file)
    assert one.helpers.count == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_come_back_and_are_not_inherited(pool: Callable[..., Pool], file: Path) -> None:
    one = pool()
    params = json.dumps({"handleId": "h", "path": file.as_uri()}).encode()
    answer = one.helpers.call(ONE, "fs/open", params, ALONE, repeatable=True)
    assert answer.descriptor is not None
    with open(answer.descriptor, "rb") as opened:
        assert not os.get_inheritable(opened.fileno())
        assert opened.read() == b"x"
    with pytest.raises(RpcError, match="No such file"):
        one.helpers.call(ONE, "fs/open", b'{"handleId":"h","path":"file:///absent"}', ALONE, repeatable=True)
    assert one.read(ONE, file) == CONTENT


def test_large_answers_and_requests(pool: Callable[..., Pool], tmp_path: Path) -> None:
    one = pool()
    data = os.urandom(3_000_000)
    import base64

    target = tmp_path / "large"
    params = {"path": target.as_uri(), "dataBase64": base64.b64encode(data).decode()}
    one.helpers.call(ONE, "fs/writeFile", json.dumps(params).encode(), ALONE, repeatable=True)
    assert target.read_bytes() == data
    assert base64.b64decode(json.loads(one.read(ONE, target))["dataBase64"]) == data


def test_after_the_end_there_is_nobody(pool: Callable[..., Pool], file: Path) -> None:
    one = pool()
    busy = one.pid(ONE)
    one.helpers.close()
    assert not os.path.exists(f"/proc/{busy}")
    with pytest.raises(RpcError, match="the server is ending"):
        one.read(ONE, file)
