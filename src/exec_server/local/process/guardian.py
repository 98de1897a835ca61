"""The guardian: kills every process of a server that died without doing so itself.

Runs as a process of its own, started by its file name with nothing but the standard library: it holds
one end of a pipe whose other end only the server has, and when that end closes, however the server
died, it kills what carries the server's tag. It takes off any tag it inherited itself, so that a
server running inside another one's process is cleaned up after, too.

    python -I -S guardian.py FD NONCE SHIFT [SWEEPER]

A SWEEPER is a program to become when that is done: it clears up what sandboxes have left on disk.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

__all__ = ["main"]


def main(pipe: int, nonce: int, shift: int) -> None:
    """Wait for the server to go, then kill what it left."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(ignored, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    resource.setrlimit(resource.RLIMIT_RTTIME, (hard, hard))
    os.chdir("/")
    while os.read(pipe, 64):
        pass
    # Twice nobody new: a child may have been between its parent's fork and being visible.
    known: set[int] = set()
    quiet = 0
    while quiet < 2:
        quiet = 0 if kill_all(nonce, shift, known) else quiet + 1


def kill_all(nonce: int, shift: int, known: set[int]) -> bool:
    """One round; whether anybody new was found, alive or (by now) dead."""
    before = len(known)
    for name in os.listdir("/proc"):
        if name[0] not in "123456789" or int(name) in known:
            continue
        pid = int(name)
        try:
            if not _tagged(pid, nonce, shift):
                continue
            known.add(pid)
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if _tagged(pid, nonce, shift):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            pass  # it is gone, or became another user's
        finally:
            os.close(pidfd)
    return len(known) > before


def _tagged(pid: int, nonce: int, shift: int) -> bool:
    try:
        return resource.prlimit(pid, resource.RLIMIT_RTTIME)[0] >> shift == nonce
    except PermissionError:
        return False


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
    for sweeper in sys.argv[4:]:
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", sweeper])  # noqa: S606  # our own file
