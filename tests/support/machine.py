"""This machine, as /proc tells it: who runs, who is whose child, who holds what."""

from __future__ import annotations

import os
import secrets
from typing import NamedTuple

from .wait import eventually

__all__ = [
    "Stat",
    "children",
    "descriptors",
    "gone",
    "resident_bytes",
    "running",
    "sleep_forever",
    "stat",
]


class Stat(NamedTuple):
    """The parts of /proc/PID/stat that tests ask for."""

    state: str
    parent: int
    group: int
    session: int
    terminal: int
    foreground: int


def sleep_forever() -> str:
    """An argument for `sleep` that no other process of this machine has."""
    return f"9999.{secrets.randbelow(10**15):015d}1"


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def running(marker: str) -> list[int]:
    """Live processes that have the marker in an argument."""
    found = []
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read()
        except OSError:
            continue
        if marker.encode() in words and pid != os.getpid() and stat(pid).state not in "ZX":
            found.append(pid)
    return found


def gone(marker: str, what: str = "every process") -> None:
    """Wait until nobody with the marker runs."""
    eventually(lambda: not running(marker), f"{what} ending ({marker})")


def stat(pid: int) -> Stat:
    """What the kernel says of a process; state X when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return Stat("X", 0, 0, 0, 0, 0)
    return Stat(words[0].decode(), *map(int, words[1:6]))


def children(pid: int) -> list[int]:
    """Direct children, the dead ones nobody has reaped included."""
    return [other for other in _pids() if stat(other).parent == pid]


def descriptors(pid: int) -> dict[int, str]:
    """Open descriptors and what they are."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
    return found


def resident_bytes(pid: int) -> int:
    """Memory in use."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
