"""Whole trees of processes: marked when they are born, found and killed however far they ran.

A child inherits its resource limits, and so does everything it starts, whether it forks twice, calls
`setsid` or moves to another group. The soft limit on uninterrupted real-time CPU (RLIMIT_RTTIME, in
microseconds) does nothing to ordinary processes, so its number is used as a tag: each server picks a
part of the number, each session and each process adds its own.

Killing goes through pidfds (open, look at the tag again, signal), so a reused pid is never hit. What
escapes: a process that changes this limit on purpose, and one that became another user's (it is found,
but cannot be signalled without privilege). Other systems have no such tag: there only the process
group is killed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from . import descriptors

__all__ = [
    "SESSION_SHIFT",
    "SUPPORTED",
    "SessionTags",
    "TagSpace",
    "first_child",
    "kill_tagged",
    "knows_children",
    "processes",
    "tagged",
]

SUPPORTED: Final = sys.platform == "linux" and hasattr(os, "pidfd_open")
"""Whether this system can tag and find whole trees."""

_PROCESS_BITS: Final = 18
SESSION_SHIFT: Final = 32
"""What is left of a tag above this many bits is the part of the server."""
_SESSION_BITS: Final = SESSION_SHIFT - _PROCESS_BITS
_MAX_ROUNDS: Final = 200
"""Rounds of look-and-kill before giving up on a tree that forks faster than it can be killed."""

if sys.platform == "linux":
    import resource

    _RTTIME = resource.RLIMIT_RTTIME

    def _current() -> tuple[int, int]:
        """This process's own limit, to restore after a spawn."""
        return resource.getrlimit(_RTTIME)

    def _set_current(limit: tuple[int, int]) -> None:
        """Set this process's own limit, for the next child to inherit."""
        resource.setrlimit(_RTTIME, limit)

    def _tag_of(pid: int) -> int:
        """The tag a process carries; OSError when it is gone."""
        try:
            return resource.prlimit(pid, _RTTIME)[0]
        except PermissionError:
            # Another user's process: its limits can be read, though not through the system call.
            with descriptors.afford(lambda: open(f"/proc/{pid}/limits", "rb")) as limits:
                for line in limits:
                    if line.startswith(b"Max realtime timeout"):
                        word = line.split()[3]
                        return int(word) if word.isdigit() else -1
            return -1

else:

    def _current() -> tuple[int, int]:
        return (-1, -1)

    def _set_current(limit: tuple[int, int]) -> None:
        del limit

    def _tag_of(pid: int) -> int:
        del pid
        return -1


_tagging = allocate_lock()
"""Limits belong to the whole process, so only one thread at a time may borrow them."""


@contextmanager
def tagged(tag: int | None) -> Iterator[None]:
    """What is spawned inside carries the tag; with None, none of ours."""
    with _tagging:
        if tag is None:
            yield
            return
        before = _current()
        try:
            _set_current((tag, before[1]))
        except (OSError, ValueError):
            yield  # the hard limit is lower than any tag: there is only the process group to kill
            return
        try:
            yield
        finally:
            _set_current(before)


class TagSpace:
    """The tags of one server: a random part nobody else on this machine is using."""

    def __init__(self) -> None:
        self._next_session = 0
        self._sessions: set[int] = set()
        self.nonce = _unused_nonce()

    def open_session(self) -> SessionTags:
        """Tags for the processes of one more session."""
        for _ in range(1 << _SESSION_BITS):
            number = self._next_session
            self._next_session = (number + 1) % (1 << _SESSION_BITS)
            if number not in self._sessions:
                self._sessions.add(number)
                return SessionTags(self, number)
        raise RuntimeError(f"more than {1 << _SESSION_BITS} sessions with processes at once")

    def close_session(self, number: int) -> None:
        self._sessions.discard(number)

    def contains(self, tag: int) -> bool:
        """Whether a tag is one of this server's."""
        return tag >> (SESSION_SHIFT) == self.nonce


class SessionTags:
    """The tags of one session, and which of them are in use."""

    def __init__(self, space: TagSpace, number: int) -> None:
        self._space = space
        self._number = number
        self._prefix = space.nonce << _SESSION_BITS | number
        self._next = 0
        self._taken: set[int] = set()

    def new(self) -> int:
        """A tag for one more process: one that nobody of this session carries."""
        while True:
            self._next = (self._next + 1) % (1 << _PROCESS_BITS)
            if self._next == 0:
                # A lap is over. Who still lives from earlier ones keeps its tag to itself.
                self._taken = {tag for _, tag in processes() if self.contains(tag)}
            tag = self._prefix << _PROCESS_BITS | self._next
            if tag not in self._taken:
                return tag

    def contains(self, tag: int) -> bool:
        """Whether a tag belongs to any process this session ever started."""
        return tag >> _PROCESS_BITS == self._prefix

    def release(self) -> None:
        """The session is gone; its number may be used again."""
        self._space.close_session(self._number)


def _unused_nonce() -> int:
    while True:
        nonce = 1 << 30 | int.from_bytes(os.urandom(4)) >> 2
        shift = SESSION_SHIFT
        if not any(tag >> shift == nonce for _, tag in processes()):
            return nonce


def processes() -> Iterator[tuple[int, int]]:
    """Every process of this machine that can be seen, with the tag it carries (-1 for none)."""
    for pid in _pids():
        try:
            yield pid, _tag_of(pid)
        except (OSError, ValueError):
            continue  # it ended meanwhile


def _pids() -> list[int]:
    if not SUPPORTED:
        return []
    return [int(name) for name in descriptors.afford(os.listdir, "/proc") if name[0] in "123456789"]


def knows_children() -> bool:
    """Whether this kernel lists the children of a process."""
    return os.path.exists("/proc/thread-self/children")


def first_child(pid: int) -> int | None:
    """The oldest child of a process's first thread; None if there is none, or it cannot be known."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as children:
            words = children.read(32).split()
    except OSError:
        return None
    return int(words[0]) if words else None


def kill_tagged(matches: Callable[[int], bool], sig: int = signal.SIGKILL) -> int:
    """Signal every live process whose tag matches, and those they start meanwhile; how many there were.

    The first time everybody is found before anybody is signalled: the death of one (the leader of a
    terminal's session, say) may take others along, and they count too.

    OSError when descriptors ran out, so that there may be some nobody has looked at. One is enough, however
    large the tree is.
    """
    known = {os.getpid()}  # this very process carries a tag for a moment while it spawns
    killed = 0
    missed: OSError | None = None
    try:
        for turn in range(_MAX_ROUNDS):
            fresh: list[int] = []
            before = len(known)
            for pid in _pids():
                if pid in known:
                    continue
                try:
                    if not matches(_tag_of(pid)):
                        continue
                    known.add(pid)
                    if turn:
                        killed += _send(pid, matches, sig)
                    elif _send(pid, matches, 0):
                        fresh.append(pid)
                except (OSError, ValueError) as error:
                    missed = _shortage(error) or missed
            for pid in fresh:
                try:
                    _send(pid, matches, sig)
                    killed += 1
                except OSError as error:
                    missed = _shortage(error) or missed
            # One that is somebody else by now shows as a new corpse: there is more to find.
            if len(known) == before:
                break
    except OSError as error:
        missed = error
    finally:
        descriptors.keep_spare()
    if missed is not None:
        raise OSError(missed.errno, f"not every process could be looked at: {missed.strerror}") from missed
    return killed


def _shortage(error: Exception) -> OSError | None:
    """The error, if it is about descriptors; any other means that the process ended meanwhile."""
    return error if isinstance(error, OSError) and error.errno in descriptors.EXHAUSTED else None


def _send(pid: int, matches: Callable[[int], bool], sig: int) -> bool:
    """Whether the signal was sent: the process, held by a pidfd, still is the one meant, and no corpse."""
    pidfd = descriptors.afford(os.pidfd_open, pid)
    try:
        if not matches(_tag_of(pid)) or _is_dead(pidfd):
            return False
        signal.pidfd_send_signal(pidfd, sig)
    except PermissionError:
        return False  # it became another user's
    finally:
        os.close(pidfd)
    return True


def _is_dead(pidfd: int) -> bool:
    """Ended, and waiting only for its parent to notice."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
