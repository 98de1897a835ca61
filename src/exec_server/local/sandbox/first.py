"""The first process inside of a sandbox, with which everybody in it ends.

bubblewrap's own process outside ends as soon as the command has, or when it is killed. Those that the
command has left behind are killed only then: by the end of the first process inside, which the kernel
lets nobody see before all others in its process-id namespace are gone. So that is what has to be waited
for before anything is taken away that protects something from them. (While a view is being put together
the first process does not even end with the one outside: then it has to be killed.)
"""

from __future__ import annotations

import os
import signal
from typing import Final

__all__ = ["FirstProcess"]

PATIENCE: Final = 5.0
"""Seconds for processes that were killed to be gone. Only one that hangs in the kernel takes so long."""

_NEWS_BYTES: Final = 4096


class FirstProcess:
    """Who it is, as bubblewrap tells before it lets anything run inside."""

    def __init__(self) -> None:
        self._news, self.handed = os.pipe()
        self.option = (b"--json-status-fd", self.handed)
        os.set_blocking(self._news, False)

    def wait(self, *, orderly: bool) -> bool:
        """When bubblewrap has ended, see to the end inside; whether it has come. To be called once.

        `orderly`: bubblewrap has seen the end of the command, and was not killed before.
        """
        news = self._read()
        if not news:
            return True  # nothing ever ran
        from msgspec.json import decode

        facts = decode(news.partition(b"\n")[0])
        return _has_ended(int(facts["child-pid"]), facts.get("pid-namespace"), orderly)

    def _read(self) -> bytes:
        try:
            return os.read(self._news, _NEWS_BYTES)
        except BlockingIOError:
            return b""
        finally:
            self.close()

    def close(self) -> None:
        """Nobody has to be waited for."""
        os.close(self._news)


def _has_ended(pid: int, namespace: int | None, orderly: bool) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if namespace is not None and _namespace_of(pid) not in (None, namespace):
            return True  # another process has got its number
        if orderly and _is_alone(pid):
            return True  # and starts nobody any more; taking its view apart may take milliseconds
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        from select import POLLIN, poll

        waiting = poll()
        waiting.register(pidfd, POLLIN)
        return bool(waiting.poll(PATIENCE * 1000))
    except ProcessLookupError:
        return True
    finally:
        os.close(pidfd)


def _is_alone(pid: int) -> bool:
    """Whether a process has no children, dead or alive. Everybody inside descends from the first one, and
    who has lost its parent becomes the first one's child."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return not file.read(1)
    except OSError:
        return False  # it is gone, or this kernel does not tell


def _namespace_of(pid: int) -> int | None:
    """By number; None if nobody can tell."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None
