"""Mount points that did not exist: what a view leaves behind on the host, and who takes it away again.

To cover a name that is not there (a `.git` that must not be created), something has to be mounted on it,
and for that an empty file or directory has to exist on the host for as long as the sandbox runs. Two
sandboxes may share one. So each notes in a directory of the account's own, under a lock, what it needs;
who leaves last takes the thing away, if it is still empty. Taking it away earlier would take the mount
away, too, in the view of everybody who still uses it.

A server that is killed leaves its notes. The guardian sweeps them up, and so does the next server.
This file is also a program, for the guardian, and uses nothing but the standard library:

    python -I -S mountpoints.py
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final

__all__ = ["Claim", "claim", "folder", "sweep"]

PATIENCE: Final = 5.0
"""Seconds to wait for killed processes to be gone from a view."""

_LOCK_NAME: Final = "lock"
_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.05

_serial = iter(range(1, 1 << 62))
_live: set[Claim] = set()
"""What this process has noted and not taken back."""
_swept = False


class Claim:
    """The mount points that one sandbox needs. Release it when nobody is inside any more."""

    def __init__(self, notes: dict[bytes, str]) -> None:
        self._notes = notes
        _live.add(self)

    def release(self, *, orderly: bool = False) -> None:
        """Take away what nobody else needs.

        `orderly` says that everybody inside is known to be gone; otherwise it is looked for.
        """
        if self not in _live:
            return
        deadline = time.monotonic() + PATIENCE
        pause = _FIRST_PAUSE
        while True:
            # Looked for without the lock, for which every sandbox of the account may be waiting. Whoever
            # mounts there meanwhile has noted it before.
            mounted = set() if orderly else _mounted(self._notes)
            with _locked() as directory:
                names = os.listdir(directory)
                for path, name in list(self._notes.items()):
                    about = _label(path)
                    others = any(
                        other.startswith(about) and other != name and _is_alive(other) for other in names
                    )
                    if others or path not in mounted:
                        if not others:
                            _take_away(path)
                        _forget(os.path.join(directory, name))
                        del self._notes[path]
            if not self._notes or time.monotonic() > deadline:
                _live.discard(self)
                return  # what is still in use after so long is left to the next sweep
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)


def claim(paths: Iterable[bytes]) -> Claim | None:
    """Note, before a view is put together, which of its mount points come to be by it or are shared.

    One that does not exist will be made; one that exists because of another sandbox must not vanish
    before this one has ended. None when there is no such thing.
    """
    global _swept
    if not _swept:
        sweep()
        _swept = True
    with _locked() as directory:
        noted = {name.partition(".")[0] + "." for name in os.listdir(directory)}
        needed = [path for path in paths if _label(path) in noted or not os.path.lexists(path)]
        if not needed:
            return None
        notes: dict[bytes, str] = {}
        me = _identity(os.getpid())
        for path in needed:
            name = f"{_label(path)}{me}.{next(_serial)}"
            with open(os.path.join(directory, name), "xb") as file:
                file.write(path)
            notes[path] = name
        return Claim(notes)


def release_all() -> None:
    """The end of this process: everything it started has been killed."""
    for left in list(_live):
        left.release()


def sweep() -> bool:
    """Take away what processes that are gone have noted; whether nothing of theirs is left."""
    left = _left_behind()
    if not left:
        return True
    clean = True
    mounted = _mounted(left.values())  # without the lock, as above
    with _locked() as directory:
        needed = {name.partition(".")[0] for name in os.listdir(directory) if _is_alive(name)}
        for name, path in left.items():
            if name.partition(".")[0] not in needed:
                if path in mounted:
                    clean = False
                    continue
                _take_away(path)
            _forget(os.path.join(directory, name))
    return clean


def _left_behind() -> dict[str, bytes]:
    """The notes of processes that are gone, and which path each is about."""
    left: dict[str, bytes] = {}
    with _locked() as directory:
        for name in os.listdir(directory):
            if name != _LOCK_NAME and not _is_alive(name):
                with open(os.path.join(directory, name), "rb") as file:
                    left[name] = file.read()
    return left


# Notes -------------------------------------------------------------------------------------------


def folder() -> str:
    """Where notes are kept: the same for every server of the account, whatever its environment says."""
    uid = os.geteuid()
    for path in _places():
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError:
            continue
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
            raise PermissionError(f"{path} must be a directory that only this account can enter; remove it")
        return path
    raise PermissionError("no place for the notes on mount points: neither /run nor /tmp can be written")


def _places() -> list[str]:
    uid = os.geteuid()
    parents = (f"/run/user/{uid}", "/tmp") if uid else ("/run", "/tmp")  # noqa: S108  # ours alone, or refused
    return [os.path.join(os.path.realpath(parent), f"exec-server-sandbox-{uid}") for parent in parents]


@contextmanager
def _locked() -> Iterator[str]:
    directory = folder()
    fd = os.open(os.path.join(directory, _LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield directory
    finally:
        os.close(fd)


def _label(path: bytes) -> str:
    """What the names of all notes on a path begin with; the path itself is in them."""
    return f"{blake2b(path, digest_size=16).hexdigest()}."


def _forget(note: str) -> None:
    try:
        os.unlink(note)
    except FileNotFoundError:
        pass


def _identity(pid: int) -> str:
    """A process's number and when it started, in clock ticks: numbers are used again."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return f"{pid}.{file.read().rpartition(b')')[2].split()[19].decode()}"


def _is_alive(note: str) -> bool:
    """Whether who wrote a note still runs."""
    try:
        _, pid, started, _ = note.split(".")
        return _identity(int(pid)) == f"{pid}.{started}"
    except (OSError, ValueError):
        return False


# The things themselves ---------------------------------------------------------------------------


def _take_away(path: bytes) -> None:
    """Only what is still empty: somebody may have made use of it."""
    try:
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode):
            os.rmdir(path)
        elif stat.S_ISREG(found.st_mode) and found.st_size == 0:
            os.unlink(path)
    except OSError:
        pass  # gone, in use, or on a disk that is gone: there is nothing better to do


def _mounted(paths: Iterable[bytes]) -> set[bytes]:
    """On which of them anybody sees a mount, in whatever view of the file system."""
    wanted = {path: b" " + _escaped(path) + b" " for path in paths}
    found: set[bytes] = set()
    seen: set[bytes] = set()
    for name in os.listdir("/proc"):
        if name[0] in "123456789":
            try:
                with open(f"/proc/{name}/mountinfo", "rb") as file:
                    mounts = file.read()
            except OSError:
                continue  # it is gone, or was just about to
            if mounts not in seen:
                seen.add(mounts)
                lines = [line.partition(b" - ")[0] for line in mounts.splitlines()]
                found |= {path for path, text in wanted.items() if any(text in line for line in lines)}
    return found


def _escaped(path: bytes) -> bytes:
    """As the kernel writes a path into a table of mounts."""
    for char in (b"\\", b" ", b"\t", b"\n"):
        path = path.replace(char, b"\\%03o" % ord(char))
    return path


def main() -> None:
    """For the guardian: sweep until nothing is in use any more, or for as long as is reasonable."""
    if not any(map(os.path.isdir, _places())):
        return  # nobody here has ever needed any
    deadline = time.monotonic() + PATIENCE
    while not sweep() and time.monotonic() < deadline:
        time.sleep(_LONGEST_PAUSE)


if __name__ == "__main__":
    main()
