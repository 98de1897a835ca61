"""The file of a thread: read whatever there is of it, append to it so that a crash costs at most one line.

A line is written by one call, whole, with its newline. If the machine stops in between, the last line is
torn; a reader skips it, and whoever opens the file to write repairs it first. Only the one who holds the
file's lock writes or repairs, so that nobody takes a line in the making for a torn one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

from msgspec import Struct

from .. import log
from ..client.errors import ExecServerError
from .record import SESSION_META, BadRecord, Record, SessionMeta

__all__ = ["Loaded", "RolloutError", "RolloutWriter", "ThreadBusy", "read_meta", "read_rollout", "timestamp"]

MAX_META_BYTES: Final = 16 * 1024 * 1024
"""Longest first line that a listing reads; instructions are in it, and are not that long."""

UNSUPPORTED: Final = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK))
"""What file systems answer that have no links, or no locks."""

REPAIR_BYTES: Final = 64 * 1024
"""What is read at once, from the end of a file, to find its last newline."""

OWN_MEMBERS: Final = frozenset(("ordinal", "payload", "timestamp", "type"))
"""Members of a record that nobody but the writer gives."""

Clock = Callable[[], float]


class RolloutError(ExecServerError):
    """A file that is no rollout, or not one that can be gone on with."""


class ThreadBusy(RolloutError):
    """Somebody else is writing this thread."""


class Loaded(Struct):
    """What is in a file. `records` are all lines but those that could not be read, which are counted."""

    path: str
    meta: SessionMeta
    records: list[Record]
    skipped: int
    """Lines in between that are not records. A torn last line is not among them."""
    end: int
    """Where the last record ends, in bytes."""
    ends: list[int]
    """The same of every record, without its newline."""


def timestamp(seconds: float) -> str:
    """A time as records have it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_rollout(path: str) -> Loaded:
    """Everything in the file. Changes nothing, and may be called while somebody writes."""
    with _open_to_read(path) as file:
        data = file.read()
    records: list[Record] = []
    ends: list[int] = []
    position = 0
    skipped = 0
    meta: SessionMeta | None = None
    end = len(data)
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        position += len(line) + 1
        if not line.strip():
            continue
        try:
            record = Record.decode(line)
            if record.type == SESSION_META and meta is None:
                meta = SessionMeta(record.payload)
        except BadRecord as error:
            if number == len(lines):
                end -= len(line)
                log.info("torn last line is left out", path=path, bytes=len(line))
            else:
                skipped += 1
                log.warning("line is skipped", path=path, line=number, error=str(error))
            continue
        records.append(record)
        ends.append(position - 1)
    if meta is None:
        raise RolloutError(f"{path} is not the record of a thread: it has no `session_meta`")
    return Loaded(path, meta, records, skipped, end, ends)


def _open_to_read(path: str) -> BinaryIO:
    """A file, if it is one: a pipe of that name would keep us waiting for somebody to write into it."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115  # it is returned
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise RolloutError(f"{path} is not a file")
    return file


def read_meta(path: str) -> SessionMeta | None:
    """The first record, without reading the rest; None if the file does not begin with one."""
    with _open_to_read(path) as file:
        line = file.readline(MAX_META_BYTES)
    try:
        record = Record.decode(line.rstrip(b"\n"))
        return SessionMeta(record.payload) if record.type == SESSION_META else None
    except BadRecord:
        return None


class RolloutWriter:
    """The one who appends to a file. Holds its lock until closed. Threads may share one, processes not."""

    def __init__(self, fd: int, path: str, next_ordinal: int | None, clock: Clock) -> None:
        self._fd = fd
        self._next = next_ordinal
        self._clock = clock
        self._pid = os.getpid()
        self._appending = threading.Lock()
        self.path = path

    @classmethod
    def create(
        cls,
        path: str,
        meta: SessionMeta,
        records: Sequence[Record] = (),
        *,
        first_ordinal: int = 0,
        clock: Clock = time.time,
    ) -> RolloutWriter:
        """A new file that begins with `meta` and, numbered anew, these records: all of it or nothing.

        Written under another name first: a file that is there has its first record.
        """
        os.makedirs(os.path.dirname(path), exist_ok=True)
        draft = f"{path}.{os.getpid()}.new"
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd, path)
            ordinal = first_ordinal if meta.paginated else None
            first = {"timestamp": timestamp(clock()), "type": SESSION_META, "payload": dict(meta.payload)}
            lines = []
            for record in (Record(first), *records):
                lines.append(record.numbered(ordinal).line + b"\n")
                ordinal = None if ordinal is None else ordinal + 1
            _write_whole(fd, b"".join(lines))
            os.fsync(fd)
            _take_name(draft, path)
        except BaseException:
            os.close(fd)
            raise
        finally:
            if os.path.lexists(draft):
                os.unlink(draft)
        _sync_directory(os.path.dirname(path))
        return cls(fd, path, ordinal, clock)

    @classmethod
    def open(cls, path: str, clock: Clock = time.time) -> tuple[RolloutWriter, Loaded]:
        """Go on with a file: what is in it, and a writer behind its last whole line."""
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise RolloutError(f"{path} is not a file")
            _lock(fd, path)
            _repair(fd, path)
            loaded = read_rollout(path)
        except BaseException:
            os.close(fd)
            raise
        ordinal = None
        if loaded.meta.paginated:
            ordinal = max(
                (record.ordinal for record in loaded.records if record.ordinal is not None), default=-1
            )
            ordinal += 1
        return cls(fd, path, ordinal, clock), loaded

    @property
    def size(self) -> int:
        """Bytes in the file."""
        self._check_usable()
        return os.fstat(self._fd).st_size

    @property
    def next_ordinal(self) -> int | None:
        """The number of the next record; None in a thread that does not count."""
        return self._next

    def append(self, kind: str, payload: Mapping[str, Any], **more: Any) -> Record:
        """Write one record. When this returns, the operating system has it.

        BadRecord, and nothing written, for what could not be read back as it is.
        """
        if not isinstance(kind, str) or not kind:
            raise BadRecord(f"the type of a record is a word, not {kind!r}")
        if kind == SESSION_META:
            raise BadRecord(f"`{SESSION_META}` is the first record of a thread, which is written already")
        if not isinstance(payload, Mapping):
            raise BadRecord(f"the payload of a record is an object, not {type(payload).__name__}")
        if taken := OWN_MEMBERS & more.keys():
            raise BadRecord(f"`{'`, `'.join(sorted(taken))}` cannot be given: every record has its own")
        self._check_usable()
        with self._appending:
            self._check_usable()
            value: dict[str, Any] = {"timestamp": timestamp(self._clock())}
            if self._next is not None:
                value["ordinal"] = self._next
            record = Record({**value, "type": kind, "payload": payload, **more})
            _write_whole(self._fd, record.line + b"\n")
            if self._next is not None:
                self._next += 1
        return record

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise RolloutError(
                f"{self.path} is being written by process {self._pid}, which forked this one;"
                " only one may go on with a thread"
            )
        if self._fd < 0:
            raise RolloutError(f"{self.path} is closed here; resume the thread to go on with it")

    def sync(self) -> None:
        """Make sure that what was written survives a power cut, too."""
        self._check_usable()
        os.fsync(self._fd)

    def close(self) -> None:
        """Let go of the file. May be called more than once."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _lock(fd: int, path: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ThreadBusy(
            f"{path} is being written by somebody else; only one may go on with a thread"
        ) from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        log.info("no locks on this file system; nobody watches over two writers", path=path)


def _take_name(draft: str, path: str) -> None:
    """Give a finished draft its name. A link, unlike a rename, never replaces a file that is there."""
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        os.rename(draft, path)


def _write_whole(fd: int, data: bytes) -> None:
    """All of it, or (if the disk is full, say) nothing: a part would spoil the next line as well."""
    start = os.fstat(fd).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        os.ftruncate(fd, start)
        raise


def _repair(fd: int, path: str) -> None:
    """End the file with a whole line: add the newline if only that is missing, else drop what is torn."""
    end = position = os.fstat(fd).st_size
    blocks: list[bytes] = []
    while position > 0 and (not blocks or b"\n" not in blocks[-1]):
        step = min(position, REPAIR_BYTES)
        position -= step
        blocks.append(os.pread(fd, step, position))
    torn = b"".join(reversed(blocks)).rpartition(b"\n")[2]
    if not torn:
        return
    try:
        Record.decode(torn)
    except BadRecord:
        log.warning("torn last line is dropped", path=path, bytes=len(torn))
        os.ftruncate(fd, end - len(torn))
    else:
        _write_whole(fd, b"\n")


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
