"""The guardian: kills every process of a server that died without doing so itself.

Runs as a process of its own, started by its file name with nothing but the standard library: it holds
one end of a pipe whose other end only the server has, and when that end closes, however the server
died, it kills what carries the server's tag. It takes off any tag it inherited itself, so that a
server running inside another one's process is cleaned up after, too.

    python -I -S guardian.py FD NONCE SHIFT
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
    # Twice nothing: a child may have been between fork and being visible.
    quiet = 0
    while quiet < 2:
        quiet = 0 if kill_all(nonce, shift) else quiet + 1


def kill_all(nonce: int, shift: int) -> int:
    """One round; how many live processes were found."""
    found = 0
    for name in os.listdir("/proc"):
        if name[0] not in "123456789":
            continue
        pid = int(name)
        try:
            if not _tagged(pid, nonce, shift):
                continue
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if _tagged(pid, nonce, shift) and _alive(pid):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                found += 1
        except OSError:
            pass
        finally:
            os.close(pidfd)
    return found


def _tagged(pid: int, nonce: int, shift: int) -> bool:
    try:
        return resource.prlimit(pid, resource.RLIMIT_RTTIME)[0] >> shift == nonce
    except PermissionError:
        return False


def _alive(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
