"""Holding a command back until its view has been looked at, and its proxies can be reached.

A plan is made of paths, and bubblewrap follows them a few milliseconds later. A sandbox that runs
meanwhile and may write to a directory on the way can put a link there and have something else mounted, or
have it mounted elsewhere. So bubblewrap is told to wait before it starts the command. There must be a mount
at every path the plan has one for, and it must be of the file that was planned, by device and inode; and
what is denied must not have moved meanwhile. Only then may the command begin. In a managed network it is the
relay that says when.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from _thread import start_new_thread
from collections.abc import Callable
from typing import Final

from ... import log
from ..files.kernel import is_mount_root
from ..process import tree
from .links import open_unlinked
from .mountpoints import is_running
from .plan import Bind, EmptyFile, Plan, Tmpfs
from .proxies import Route

__all__ = ["Inspection"]

PATIENCE: Final = 30.0
"""Seconds for bubblewrap to put a view together."""

NEW_NANOSECONDS: Final = 100_000_000
"""What is younger than the plan by less than this may have been made while that was made."""

_PAUSE: Final = 0.0005
_CHILD: Final = re.compile(rb'"child-pid": (\d+)')
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")
_RELAY: Final = os.path.join(os.path.dirname(__file__), "relay.py")


class Inspection:
    """Two pipes: one that tells who is inside, one that makes it wait."""

    def __init__(
        self,
        plan: Plan,
        *,
        look: bool,
        routes: list[Route],
        tag: int | None,
        again: Callable[[], Plan] | None = None,
    ) -> None:
        """`look` at what was mounted; have a relay for `routes`, marked with the tag of the command. `again`
        makes the plan once more."""
        self._look = look
        self._made = time.time_ns()
        # What is covered cannot be seen, but the directory it is in can.
        self._seen = {seen.path: seen for seen in plan.seen if plan.access(seen.path) != "none"}
        self._targets = {step.target for step in plan.steps if isinstance(step, Bind | Tmpfs | EmptyFile)}
        self._covered = _denied_files(plan)
        self._again = again
        self._routes = routes
        self._tag = tag
        self._news, told = os.pipe()
        try:
            waiting, self._go = os.pipe()
        except BaseException:
            os.close(self._news)
            os.close(told)
            raise
        self.handed = [told, waiting]
        self.options = ((b"--info-fd", told), (b"--block-fd", waiting))

    def close(self) -> None:
        """It was not needed."""
        for fd in (self._news, self._go, *self.handed):
            os.close(fd)

    def start(self) -> None:
        """The sandbox is being made, or could not be: see to it in a thread of its own."""
        start_new_thread(self._attend, ())

    def _attend(self) -> None:
        relay = None
        try:
            pid = self._who()
            if pid is not None:
                relay = self._admit(pid)
        finally:
            # From here on nothing waits any more: it was let go, or killed.
            os.close(self._news)
            os.close(self._go)
        if relay is not None:
            try:
                os.waitpid(relay, 0)
            except ChildProcessError:
                pass  # somebody else has reaped it

    def _who(self) -> int | None:
        """The first process inside; None if there never was one."""
        news = b""
        while part := os.read(self._news, 4096):
            news += part
        # It is said in pieces: who is killed in between has let nobody begin.
        told = _CHILD.search(news)
        return None if told is None else int(told[1])

    def _admit(self, pid: int) -> int | None:
        """Let the command begin, or see to it that it never does; the relay, if there is one."""
        try:
            wrong = self._difference(pid)
            if wrong is None and self._routes:
                return self._start_relay(pid)
            if wrong is None:
                os.write(self._go, b"!")
                return None
        except Exception as error:  # letting go of the pipe would let the command begin
            wrong = f"the sandbox cannot be inspected: {error}"
        _refuse(pid, wrong)
        return None

    def _difference(self, pid: int) -> str | None:
        """What is not as planned, in words."""
        deadline = time.monotonic() + PATIENCE
        while self._look and not _is_complete(pid):
            if time.monotonic() > deadline:
                return f"the sandbox was not put together in {PATIENCE:g} seconds"
            time.sleep(_PAUSE)
        if not self._look:
            return None
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            wrong = next((path for path in self._seen if not self._is_there(path, root)), None)
            covers = self._targets - self._seen.keys() - {b"/"}
            wrong = wrong or next((path for path in covers if not self._is_covered(path, root)), None)
        finally:
            os.close(root)
        wrong = wrong or next(iter(self._targets - _mount_points(pid)), None) or self._moved()
        return (
            None if wrong is None else f"{os.fsdecode(wrong)} is not what it was when the sandbox was planned"
        )

    def _is_there(self, path: bytes, root: int) -> bool:
        """Whether a path of the view is the file that was planned, and a mount if it was to be one."""
        seen = self._seen[path]
        try:
            descriptor = open_unlinked(path, root)
        except OSError:
            return False
        try:
            found = os.fstat(descriptor)
            mounted = path not in self._targets or is_mount_root(b"", descriptor) is not False
        finally:
            os.close(descriptor)
        return mounted and (found.st_dev, found.st_ino) == (seen.device, seen.inode)

    def _is_covered(self, path: bytes, root: int) -> bool:
        """Whether something is mounted upon a name, in the directory that was planned."""
        above = os.path.dirname(path)
        seen = self._seen.get(above)
        try:
            descriptor = open_unlinked(above, root)
        except OSError:
            return False
        try:
            found = os.fstat(descriptor)
            if seen is not None and (found.st_dev, found.st_ino) != (seen.device, seen.inode):
                return False
            return is_mount_root(os.path.basename(path), descriptor) is not False
        finally:
            os.close(descriptor)

    def _moved(self) -> bytes | None:
        """What is denied and has another name by now than the one that is covered, or was missed as it moved
        just then. What is new since the plan was made is nobody's secret yet."""
        if self._again is None:
            return None
        for file, (names, born) in _denied_files(self._again()).items():
            if file in self._covered:
                if not names <= self._covered[file][0]:
                    return min(names)
            elif born < self._made - NEW_NANOSECONDS:
                return min(names)
        return None

    def _start_relay(self, pid: int) -> int:
        words = [f"{route.port}={route.host}:{route.host_port}" for route in self._routes]
        argv = [sys.executable, "-I", "-S", "-B", _RELAY, str(pid), "3", *words]
        actions = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
        actions.append((os.POSIX_SPAWN_DUP2, self._go, 3))  # type: ignore[arg-type]  # another kind of action
        with tree.tagged(self._tag):
            return os.posix_spawn(sys.executable, argv, {}, file_actions=actions, setsid=True)


def _is_complete(pid: int) -> bool:
    """The last thing that changes is what is the root; in the new one the devices are private."""
    try:
        return os.lstat(f"/proc/{pid}/root/dev").st_dev != os.lstat("/dev").st_dev
    except FileNotFoundError:
        if not is_running(pid):
            raise ProcessLookupError("it has ended") from None
        return False


def _mount_points(pid: int) -> set[bytes]:
    """Where something is mounted in the view of a process."""
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        places = [line.split(b" ", 5)[4] for line in file]
    return {_ESCAPE.sub(lambda code: bytes([int(code[1], 8)]), place) for place in places}


def _denied_files(plan: Plan) -> dict[tuple[int, int], tuple[set[bytes], int]]:
    """What a plan covers because it is denied: which files, by which names, and since when they are there."""
    found: dict[tuple[int, int], tuple[set[bytes], int]] = {}
    for seen in plan.seen:
        if seen.inode and plan.access(seen.path) == "none":
            found.setdefault((seen.device, seen.inode), (set(), seen.born))[0].add(seen.path)
    return found


def _refuse(pid: int, reason: str) -> None:
    try:
        with open(f"/proc/{pid}/fd/2", "wb", buffering=0) as errors:
            errors.write(f"error building bubblewrap command: Fatal error: {reason}\n".encode())
    except OSError:
        pass  # it is gone, or nobody listens
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    log.warning("a command was not started in its sandbox", reason=reason)
