"""Mount points that did not exist: what a view leaves behind on the host, and who takes it away again.

To cover a name that is not there (a `.git` that must not be created), something has to be mounted on it,
and for that an empty file or directory has to exist on the host for as long as the sandbox runs. Two
sandboxes may share one. So each notes in a directory of the account's own, under a lock, what it needs,
and makes what is missing; who leaves last takes that thing away, if it is still the same one and empty.
Taking it away earlier would take the mount away, too, in the view of everybody who still uses it.

Nobody believes notes alone: under Landlock a command may be able to write some. What is taken away bears the
time at which we made it, which nobody in a sandbox can give to anything that he could not remove himself.

A server that is killed leaves its notes, and what runs in its sandboxes may have seen to it that it does
not end. A server is alive while it holds the lock of its own file next to the notes, whatever process-id
namespace anybody looks from; and in each of its views a directory of that name lies over the first process.
By that the guardian finds who is left, kills them, and sweeps up the notes; and so does the next server.
This file is also a program, for the guardian, and uses nothing but the standard library:

    python -I -S mountpoints.py
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import re
import signal
import stat
import time
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final, NamedTuple, TypeAlias

__all__ = [
    "Claim",
    "Locked",
    "Turned",
    "badge",
    "claim",
    "folder",
    "hideouts",
    "is_running",
    "release_all",
    "sweep",
]

PATIENCE: Final = 5.0
"""Seconds to wait for killed processes to be gone from a view."""

LOCK_SECONDS: Final = 10.0
"""How long anybody waits for the notes. They are held for a fraction of a millisecond; whoever holds them
for longer has been stopped, or waits for a disk."""

FILE_MODE: Final = 0o444
"""What bubblewrap gives files that it makes, whatever the umask: plans know them by that."""

FOREIGN_PATIENCE: Final = 15.0
"""Seconds that a server in another process-id namespace has been dead for, before what it noted is taken
away: from here nobody sees whether all it has started has ended."""

OUR_TIME: Final = 951_782_400_000_000_000
"""When everything that we make says it was changed, in nanoseconds: a leap day, long before any of it. The
coarsest clock of a file system has this moment."""

_LOCK_NAME: Final = "lock"
_OWNER_END: Final = ".server"
_BADGE_END: Final = ".inside"
_BADGED: Final = re.compile(rb"/([0-9a-f]+-\d+)\.inside(?://deleted)? /proc/1 ")
"""A badge in a table of mounts, with whose it is."""
_NO_VIEW: Final = (errno.EINVAL, errno.ENOENT)
"""The mounts of a process that is just ending."""

_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.05

Made: TypeAlias = tuple[int, int, int]
"""Which thing was made, by device, inode and time of its last change: another one may get the same name, and
even the same inode."""

_serial = iter(range(1, 1 << 62))
_live: set[Claim] = set()
"""What this process has noted and not taken back."""
_here = allocate_lock()
"""Among the threads of this process, who would else wait for each other in the dark."""
_swept = False
_me: tuple[str, int] | None = None
"""What this process is called in notes, and its file there, which it keeps locked for as long as it lives."""
_at_end = False
"""Whether everything that this process has started was killed, and nothing was started since."""
_changes = 0
"""How often anything was noted or taken back by this process."""


class Locked(OSError):
    """The notes cannot be had, and who has them, in words."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class Turned(OSError):
    """A path that had no link in it has got one. Whatever was planned about it does not hold."""

    def __str__(self) -> str:
        return f"{os.fsdecode(self.filename)} is not what it was when the sandbox was planned"


class _Note(NamedTuple):
    path: bytes
    made: Made | None
    """None if nothing was, or if whoever noted it did not live to say."""


class Claim:
    """The mount points that one sandbox needs. Release it when nobody is inside any more."""

    def __init__(self) -> None:
        self._notes: dict[bytes, tuple[str, Made | None]] = {}

    def release(self, *, orderly: bool = False) -> bool:
        """Take away what nobody else needs; whether nothing is left to do.

        `orderly` says that everybody inside is known to be gone; otherwise it is looked for. What is in
        use for too long, or cannot be had because of the lock, is left to the end of this process.
        """
        deadline = time.monotonic() + PATIENCE
        pause = _FIRST_PAUSE
        while self._notes:
            # Looked for without the lock, for which every sandbox of the account may be waiting. Whoever
            # mounts there meanwhile has noted it before.
            mounted = set() if orderly else _mounted(self._notes)
            try:
                with _locked() as directory:
                    self._take_back(directory, mounted)
            except Locked:
                return False
            if self._notes:
                if time.monotonic() > deadline:
                    return False
                time.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
        _live.discard(self)
        return True

    def _note(self, directory: str, path: bytes, is_directory: bool | None, shared: Made | None) -> None:
        """With the lock held. Noted first, so that there is never a thing without its note."""
        global _changes
        _changes += 1
        name = f"{_label(path)}{_enlisted(directory)}.{next(_serial)}"
        with open(os.path.join(directory, name), "xb", buffering=0) as file:
            self._notes[path] = (name, shared)
            file.write(path)
            made = (None if is_directory is None else _make(path, is_directory)) or shared
            self._notes[path] = (name, made)
            if made is not None:
                file.write(b"\0%d %d %d" % made)

    def _take_back(self, directory: str, mounted: set[bytes]) -> None:
        """With the lock held."""
        global _changes
        _changes += 1
        names = os.listdir(directory)
        for path, (name, made) in list(self._notes.items()):
            about = _label(path)
            others = any(
                other.startswith(about) and other != name and _is_alive(directory, _owner(other))
                for other in names
            )
            if others or path not in mounted:
                if not others and made is not None:
                    _take_away(path, made)
                _forget(os.path.join(directory, name))
                del self._notes[path]


def claim(points: Mapping[bytes, bool | None], check: Callable[[], None] | None = None) -> Claim | None:
    """Note, before a view is put together, which of its mount points come to be by it or are shared.

    `points` says of each path whether a directory is to be made where there is nothing, or a file; None
    leaves that to whoever mounts. One that exists because of another sandbox must not vanish before this
    one has ended. The answer is None when there is no such thing. `check` raises when nobody waits.
    Locked, Turned or another OSError if it cannot be done: then nothing may be started.
    """
    _sweep_once(check)
    if _are_settled(points):
        return None
    claimed = Claim()
    with _locked(check) as directory:
        noted: dict[str, list[str]] = {}
        for name in os.listdir(directory):
            if _is_note(name):
                noted.setdefault(_about(name), []).append(name)
        try:
            for path, is_directory in points.items():
                others = noted.get(_label(path)[:-1], [])
                if others or not os.path.lexists(path):
                    made = (_read(os.path.join(directory, name)).made for name in others)
                    claimed._note(directory, path, is_directory, next(filter(None, made), None))
        except BaseException:
            claimed._take_back(directory, set())
            raise
        if claimed._notes:
            _live.add(claimed)  # with the lock: at the end of this process none may be forgotten
    return claimed if claimed._notes else None


def release_all() -> None:
    """The end of this process: everything it started has been killed."""
    global _at_end
    _at_end = True
    for left in list(_live):
        left.release()


def _sweep_once(check: Callable[[], None] | None = None) -> None:
    global _swept
    if not _swept:
        sweep(check)
        _swept = True


def sweep(check: Callable[[], None] | None = None) -> bool:
    """Kill what servers that are gone have left in their sandboxes, and take away what they have noted;
    whether nothing of theirs is left."""
    dead, left = _left_behind(check)
    if not dead and not left:
        return True
    clean = not _kill_badged(dead)
    mounted = _mounted(note.path for note in left.values()) if left else set()  # without the lock, as above
    with _locked(check) as directory:
        names = os.listdir(directory)
        needed = {_about(name) for name in names if _is_note(name) and _is_alive(directory, _owner(name))}
        for name, (path, made) in left.items():
            if _about(name) not in needed:
                if path in mounted:
                    clean = False
                    continue
                _take_away(path, made)
            _forget(os.path.join(directory, name))
        if clean:
            for owner in dead:
                _strike_off(directory, owner)
    return clean


def _left_behind(check: Callable[[], None] | None) -> tuple[set[str], dict[str, _Note]]:
    """Servers that are gone, and their notes."""
    with _locked(check) as directory:
        names = [name for name in os.listdir(directory) if name != _LOCK_NAME]
        dead = {owner for owner in set(map(_owner, names)) if not _is_alive(directory, owner)}
        notes = [name for name in names if _is_note(name) and _owner(name) in dead]
        return dead, {name: _read(os.path.join(directory, name)) for name in notes}


def _are_settled(points: Mapping[bytes, bool | None]) -> bool:
    """Whether all of them are there, and not because of any sandbox: then nothing has to be noted.

    Without the lock. Somebody's thing has a note for longer than it exists, so what is the same before
    and after a look at the notes, and has none, is nobody's.
    """
    changes = _changes
    try:
        before = [os.lstat(path) for path in points]
        noted = {_about(name) for name in os.listdir(folder())}
        after = [os.lstat(path) for path in points]
    except (FileNotFoundError, NotADirectoryError):
        return False
    same = all(map(_is_unchanged, before, after)) and changes == _changes
    return same and not any(_label(path)[:-1] in noted for path in points)


def _is_unchanged(one: os.stat_result, other: os.stat_result) -> bool:
    return os.path.samestat(one, other) and one.st_ctime_ns == other.st_ctime_ns


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


def hideouts(access: Callable[[bytes], str]) -> list[bytes]:
    """Where notes are or could be one day, as far as a sandbox has access: nobody inside may see them, or
    make such a place himself, which the next server would use. What is missing is made, to be covered."""
    found: list[bytes] = []
    for path in _places():
        name = os.fsencode(path)
        allowed = access(name)
        if allowed != "none":
            try:
                if allowed == "write":
                    os.mkdir(path, 0o700)
            except OSError:
                pass  # it is there, or nobody of this account can make it
            if os.path.isdir(path) and not os.path.islink(path):
                found.append(name)
    return found


def _places() -> list[str]:
    uid = os.geteuid()
    parents = (f"/run/user/{uid}", "/tmp") if uid else ("/run", "/tmp")  # noqa: S108  # ours alone, or refused
    return [os.path.join(os.path.realpath(parent), f"exec-server-sandboxes-{uid}") for parent in parents]


@contextmanager
def _locked(check: Callable[[], None] | None = None) -> Iterator[str]:
    """The folder, for whoever holds the lock. Locked if it cannot be had for too long."""
    directory = folder()
    path = os.path.join(directory, _LOCK_NAME)
    deadline = time.monotonic() + LOCK_SECONDS
    while not _here.acquire(timeout=_LONGEST_PAUSE):
        _still_wait(deadline, path, None, check)
    try:
        # For writing alone: somebody in a sandbox who can see it could lock it for ever, but for its mode.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o200)
        try:
            _lock(fd, path, deadline, check)
            try:
                yield directory
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough where a child has it, too
        finally:
            os.close(fd)
    finally:
        _here.release()


def _lock(fd: int, path: str, deadline: float, check: Callable[[], None] | None) -> None:
    pause = _FIRST_PAUSE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            _still_wait(deadline, path, fd, check)
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)


def _still_wait(deadline: float, path: str, fd: int | None, check: Callable[[], None] | None) -> None:
    if time.monotonic() > deadline:
        who = "another thread of this server" if fd is None else _holder(fd)
        raise Locked(
            errno.EWOULDBLOCK,
            f"the notes on mount points have been locked for {LOCK_SECONDS:g} seconds by {who}; "
            "it has to go on or to end",
            path,
        )
    if check is not None:
        check()


def _holder(fd: int) -> str:
    """Who has a file locked, in words. The kernel lists device numbers in another way than stat does."""
    inode = b":%d " % os.fstat(fd).st_ino
    try:
        with open("/proc/locks", "rb") as file:
            pids = [int(line.split()[4]) for line in file if b"FLOCK" in line and inode in line]
        with open(f"/proc/{pids[0]}/comm") as file:
            return f"process {pids[0]} ({file.read().strip()})"
    except (OSError, IndexError, ValueError):
        return "another process of this account"


def _label(path: bytes) -> str:
    """What the names of all notes on a path begin with; the path itself is in them."""
    return f"{blake2b(path, digest_size=16).hexdigest()}."


def _is_note(name: str) -> bool:
    return name != _LOCK_NAME and not name.endswith((_OWNER_END, _BADGE_END))


def _about(name: str) -> str:
    """Which path a note is about, as a label without its dot."""
    return name.partition(".")[0]


def _owner(name: str) -> str:
    """Who has written a note, or whose file this is."""
    words = name.split(".")
    return words[1] if _is_note(name) and len(words) == 3 else words[0]


def _read(note: str) -> _Note:
    try:
        with open(note, "rb") as file:
            path, _, made = file.read().partition(b"\0")
        numbers = [int(number) for number in made.split()]
    except (OSError, ValueError):
        return _Note(b"", None)  # none of ours
    if _label(path)[:-1] != _about(os.path.basename(note)):
        return _Note(b"", None)
    return _Note(path, (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else None)


def _forget(note: str) -> None:
    try:
        os.unlink(note)
    except OSError:
        pass  # gone, or none of ours


def _state(pid: int) -> list[bytes]:
    """What the kernel says of a process, from its state on."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended: one that was not reaped does nothing more."""
    try:
        return _state(pid)[0] not in (b"Z", b"X")
    except OSError:
        return False


# Servers -----------------------------------------------------------------------------------------


def badge() -> bytes:
    """An empty directory by which everybody in the sandboxes of this process can be known, if it lies over
    the first process there: nobody inside can take a mount away."""
    global _at_end
    _at_end = False
    _sweep_once()
    found = _my_badge()
    if found is None:
        with _locked() as directory:
            _enlisted(directory)
        found = _my_badge()
        if found is None:
            raise FileNotFoundError(
                errno.ENOENT, "the notes on mount points vanish as they are made", folder()
            )
    return os.fsencode(found)


def _my_badge() -> str | None:
    """None if nobody has made it yet, or somebody has taken it away."""
    if _me is None:
        return None
    path = os.path.join(folder(), _me[0] + _BADGE_END)
    return path if os.path.isdir(path) else None


def _enlisted(directory: str) -> str:
    """With the lock held: what this process is called in notes."""
    global _me
    if _me is not None and _is_file(os.path.join(directory, _me[0] + _OWNER_END), _me[1]):
        name = _me[0]
    else:
        name = f"{os.urandom(8).hex()}-{_process_namespace()}"
        path = os.path.join(directory, name + _OWNER_END)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o200)
        fcntl.flock(fd, fcntl.LOCK_EX)
        _me = (name, fd)
        atexit.register(_resign, directory, name, os.getpid())
    try:
        os.mkdir(os.path.join(directory, name + _BADGE_END), 0o555)
    except FileExistsError:
        pass
    return name


def _is_file(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


def _process_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _is_alive(directory: str, owner: str) -> bool:
    """With the lock held: whether a server runs, or may have left somebody whom nobody sees from here."""
    if _me is not None and owner == _me[0]:
        return True
    try:
        fd = os.open(os.path.join(directory, owner + _OWNER_END), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return owner.partition("-")[2] != str(_process_namespace()) and not _is_long_dead(fd)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _is_long_dead(fd: int) -> bool:
    """Whoever sees first that a server is dead writes something into its file. A clock that was set back
    counts as time that has gone by."""
    found = os.fstat(fd)
    if not found.st_size:
        os.write(fd, b"!")
        return False
    return abs(time.time() - found.st_mtime) > FOREIGN_PATIENCE


def _resign(directory: str, owner: str, pid: int) -> None:
    """The end of this process. If not everything it started has been killed, its name is still needed."""
    if _at_end and not _live and pid == os.getpid():
        _strike_off(directory, owner)


def _strike_off(directory: str, owner: str) -> None:
    """A server is gone, and nothing is left of it."""
    path = os.path.join(directory, owner)
    try:
        os.rmdir(path + _BADGE_END)
    except OSError:
        pass
    try:
        os.unlink(path + _OWNER_END)
    except OSError:
        pass


def _kill_badged(dead: set[str]) -> bool:
    """Kill everybody in the sandboxes of servers that are gone; whether there was anybody. Who has lost his
    file, to somebody who clears up, may yet live."""
    directory = folder()
    owners = {owner for owner in dead if os.path.exists(os.path.join(directory, owner + _OWNER_END))}
    found = False
    for name in os.listdir("/proc") if owners else ():
        if name[0] not in "123456789":
            continue
        try:
            pidfd = os.pidfd_open(int(name))
        except OSError:
            continue
        try:
            with open(f"/proc/{name}/mountinfo", "rb") as file:
                worn = _BADGED.search(file.read())
            if worn is not None and worn[1].decode() in owners:
                found = True
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            pass  # it is gone, or none of ours
        finally:
            os.close(pidfd)
    return found


# The things themselves ---------------------------------------------------------------------------


@contextmanager
def _parent(path: bytes) -> Iterator[int]:
    """The directory a path is in. Turned if there is a link on the way: no plan has any."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    above = os.path.dirname(path)
    fd = os.open(b"/", flags)
    try:
        for name in filter(None, above.split(b"/")):
            try:
                below = os.open(name, flags, dir_fd=fd)
            except NotADirectoryError as error:
                raise Turned(error.errno, error.strerror, above) from None
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def _make(path: bytes, is_directory: bool) -> Made | None:
    """Make what is to be mounted upon. None if something is there, or cannot be: whoever mounts will tell."""
    name = os.path.basename(path)
    try:
        with _parent(path) as parent:
            if is_directory:
                os.mkdir(name, 0o755, dir_fd=parent)
                os.utime(name, ns=(OUR_TIME, OUR_TIME), dir_fd=parent, follow_symlinks=False)
            else:
                fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, dir_fd=parent)
                os.utime(fd, ns=(OUR_TIME, OUR_TIME))
                os.fchmod(fd, FILE_MODE)
                os.close(fd)
            return _which(os.lstat(name, dir_fd=parent))
    except Turned:
        raise
    except OSError:
        return None


def _which(found: os.stat_result) -> Made:
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _take_away(path: bytes, made: Made | None) -> None:
    """Only what we made, and only while it is empty: somebody may have made use of it."""
    name = os.path.basename(path)
    try:
        with _parent(path) as parent:
            try:
                _remove(name, parent, made)
            except PermissionError:
                with _opened_up(parent):
                    _remove(name, parent, made)
    except OSError:
        pass  # gone, in use, or on a disk that is gone: there is nothing better to do


def _remove(name: bytes, parent: int, made: Made | None) -> None:
    found = os.lstat(name, dir_fd=parent)
    if found.st_mtime_ns != OUR_TIME or (made is not None and _which(found) != made):
        return
    if stat.S_ISDIR(found.st_mode):
        os.rmdir(name, dir_fd=parent)
    elif stat.S_ISREG(found.st_mode) and found.st_size == 0:
        os.unlink(name, dir_fd=parent)


@contextmanager
def _opened_up(directory: int) -> Iterator[None]:
    """A command may have changed the mode of its own directory, so that not even we can remove from it."""
    mode = stat.S_IMODE(os.fstat(directory).st_mode)
    place = f"/proc/self/fd/{directory}"
    os.chmod(place, mode | stat.S_IWUSR | stat.S_IXUSR)
    try:
        yield
    finally:
        os.chmod(place, mode)


def _mounted(paths: Iterable[bytes]) -> set[bytes]:
    """On which of them anybody sees a mount, in whatever view of the file system; in doubt on all.

    The first process of a sandbox is there for as long as any of them, and so is found even if all others
    are born and gone between two looks. While it is ending its view cannot be seen, and it has yet to kill
    the others: that is the doubt.
    """
    wanted = {path: b" " + _escaped(path) + b" " for path in paths}
    found: set[bytes] = set()
    seen: set[bytes] = set()
    for name in os.listdir("/proc"):
        if name[0] in "123456789":
            try:
                with open(f"/proc/{name}/mountinfo", "rb") as file:
                    mounts = file.read()
            except OSError as error:
                if error.errno in _NO_VIEW and is_running(int(name)):
                    return set(wanted)
                continue  # it is gone, or none of ours
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
    quiet = 0
    try:
        # Twice: who has died may not have let go of its lock the first time.
        while quiet < 2 and time.monotonic() < deadline:
            quiet = quiet + 1 if sweep() else 0
            time.sleep(_LONGEST_PAUSE)
    except Locked:
        pass  # there is nobody to tell; the next server tries again


if __name__ == "__main__":
    main()
