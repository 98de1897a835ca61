"""local/sandbox/mounts.py: which mounts there are, and that a change is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from exec_server.local.sandbox.mounts import mounts, summary

ROOT = b"27 1 254:0 / / rw,relatime%b - ext4 /dev/vda rw\n"
HOME = b"28 27 254:1 / /home/a\\040- rw - ext4 /dev/vdb rw\n"


def test_tables() -> None:
    private = summary(ROOT % b"" + HOME)
    assert not private.spread
    for mark in (b" shared:1", b" master:7", b" unbindable shared:12 propagate_from:2"):
        assert summary(ROOT % mark + HOME).spread
    assert not summary(ROOT % b" unbindable").spread
    assert summary(ROOT.replace(b"254:0 / /", b"254:0 / /shared:1") % b"").spread is False
    # The same under other numbers; another order, option, place or source is something else.
    assert summary((ROOT % b"" + HOME).replace(b"27 ", b"99 ")) == private
    others = [ROOT % b"", HOME + ROOT % b"", (ROOT % b"" + HOME).replace(b"a\\040- rw", b"a\\040- ro")]
    others += [ROOT % b"" + HOME.replace(b"vdb", b"vdc"), ROOT % b"" + HOME.replace(b"/home", b"/srv")]
    assert private.digest not in {summary(table).digest for table in others}
    assert len({summary(table).digest for table in others}) == len(others)


def test_this_machine() -> None:
    assert mounts() == mounts() == summary(Path("/proc/self/mountinfo").read_bytes())


CHANGES = """
import ctypes, sys, time
from exec_server.local.sandbox import mounts

libc = ctypes.CDLL(None, use_errno=True)

def mount(kind, flags, target=sys.argv[1].encode()):
    assert libc.mount(kind, target, kind, ctypes.c_ulong(flags), None) == 0, ctypes.get_errno()

def now():
    return mounts.mounts()

seen = [now()]
mount(b"tmpfs", 0)
seen.append(now())
mount(None, 4096 | 32 | 1)  # bind, remount, read-only
seen.append(now())
assert libc.umount2(sys.argv[1].encode(), 0) == 0
seen.append(now())
assert [seen.index(one) for one in seen] == [0, 1, 2, 0], seen
assert not any(one.spread for one in seen)
mount(None, 1 << 20, b"/")  # shared, of which nobody is told
deadline = time.monotonic() + 30
while not now().spread:
    assert time.monotonic() < deadline
    time.sleep(0.05)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_changes_are_noticed(tmp_path: Path) -> None:
    """In a mount namespace of its own: this machine's mounts stay as they are."""
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", CHANGES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
