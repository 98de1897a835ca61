"""The first process inside of a sandbox, with which everybody in it ends.

bubblewrap's own process outside ends as soon as the command has, or when it is killed. Those that the
command has left behind are killed only then: by the end of the first process inside, which the kernel
lets nobody see before all others in its process-id namespace are gone. So that is what has to be waited
for before anything is taken away that protects something from them.

Nothing is left to the first process itself. It has the rights of the command, and while a view is being
put together it does not even end with the one outside: whatever was told of the command's end, it is killed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Final

__all__ = ["FirstProcess", "end_all"]

PATIENCE: Final = 5.0
"""Seconds for processes that were killed to be gone. Only one that hangs in the kernel takes so long."""

_NEWS_BYTES: Final = 4096
_FIRST_PAUSE: Final = 0.0002
_LONGEST_PAUSE: Final = 0.02
_EXITING: Final = 0x4
"""PF_EXITING among the flags of a process: it executes nothing of its own any more."""
_FLAGS, _THREADS = 6, 17
"""Where flags and the number of threads are in /proc/PID/stat, counted from the state."""

_live: set[FirstProcess] = set()
"""Whose end nobody has seen yet."""


class FirstProcess:
    """Who it is, as bubblewrap tells before it lets anything run inside."""

    def __init__(self) -> None:
        self._news, self.handed = os.pipe()
        self.option = (b"--json-status-fd", self.handed)
        os.set_blocking(self._news, False)
        _live.add(self)

    def end(self) -> bool:
        """When bubblewrap has ended, or was killed, see to the end inside; whether it has come."""
        try:
            news = self._read()
        except KeyError:
            return True  # somebody else does, or did
        pid, namespace = (_fact(name, news) for name in ("child-pid", "pid-namespace"))
        return pid is None or _end(pid, namespace)  # without a word nothing ever ran

    def _read(self) -> bytes:
        _live.remove(self)
        try:
            return os.read(self._news, _NEWS_BYTES)
        except BlockingIOError:
            return b""
        finally:
            os.close(self._news)

    def close(self) -> None:
        """Nobody has to be waited for."""
        _live.remove(self)
        os.close(self._news)


def _fact(name: str, news: bytes) -> int | None:
    """A number in an object that may be cut off: bubblewrap writes it in pieces, and may be killed then."""
    found = re.search(rb'"%b": (\d+)' % name.encode(), news.partition(b"\n")[0])
    return None if found is None else int(found[1])


def end_all() -> None:
    """The end of this process: everybody outside has been killed, and nobody is started any more."""
    for left in list(_live):
        left.end()


def _end(pid: int, namespace: int | None) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if _only_ends(pid) or not _is_first(pid, namespace):
            return True  # or it is gone, and another process has got its number
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return _has_ended(pid, pidfd)
    except ProcessLookupError:
        return True
    finally:
        os.close(pidfd)


def _has_ended(pid: int, pidfd: int) -> bool:
    """Wait for that. Taking a view apart may take milliseconds, in which nobody can do anything any more."""
    from select import POLLIN, poll

    waiting = poll()
    waiting.register(pidfd, POLLIN)
    deadline = time.monotonic() + PATIENCE
    pause = _FIRST_PAUSE
    while not (waiting.poll(0) or _only_ends(pid)):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)
    return True


def _only_ends(pid: int) -> bool:
    """Whether a process executes nothing any more, in no thread, and has no children, dead or alive.
    Everybody inside descends from the first one, and who has lost its parent becomes a child of that."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        if not int(words[_FLAGS]) & _EXITING or int(words[_THREADS]) > 1:
            return False
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return not file.read(1)
    except OSError:
        return False  # it is gone, or this kernel does not tell


def _is_first(pid: int, namespace: int | None) -> bool:
    """Whether a process is in this process-id namespace: for as long as that exists nobody but its first one
    can have the number. If that is not known, or hidden by who is inside: whether it is the first of any."""
    try:
        if namespace is not None:
            return os.stat(f"/proc/{pid}/ns/pid").st_ino == namespace
    except OSError:
        pass
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            numbers = next((line.split()[1:] for line in file if line.startswith(b"NSpid:")), [b"", b"1"])
    except OSError:
        return False
    return len(numbers) > 1 and numbers[-1] == b"1"
