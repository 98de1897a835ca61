"""Streams that replace a file whole: what is written is nobody's until the stream is closed.

The protocol's own streams empty the file when they are opened and write to it in place, so whoever looks
meanwhile, or after a crash, sees a part. With `atomic` the blocks go to a file without a name instead, which
takes the name and everything else of the old one when the stream is closed. A stream that is discarded, or
whose connection ends, leaves the old file as it was and nothing beside it. So does one of which a block was
refused: what it holds is not what somebody meant to write.

What cannot be had that way is written in place as ever, for the reasons that write.py gives: files with
several names, files that another stream writes to, directories that cannot be written to, and so on.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from ...wire.errors import RpcError, invalid_request
from ...wire.files import OpenMode, OpenResult
from .copy import copy_content
from .errors import os_error
from .handles import Handles, open_file
from .lane import ALONE, Turn
from .paths import SEARCH, lossy, opened, real_path
from .write import CANNOT_REPLACE, PINS, SYNC, WRITE, NewFile, make_alike, mode_after_writing, replace_file

__all__ = ["ReplacingHandles"]


class ReplacingHandles(Handles):
    """The open files of a connection, and which of them are to replace another when they are closed."""

    def __init__(self) -> None:
        super().__init__()
        self._replacements: dict[str, _Replacement] = {}

    def open_atomic(self, handle_id: str, path: bytes, turn: Turn = ALONE) -> OpenResult:
        """A stream whose content becomes that of `path` when it is closed."""
        made: _Replacement | None = None

        def opener(path: bytes, mode: OpenMode, _turn: Turn) -> int:
            nonlocal made
            made = _Replacement.of(path)
            return open_file(path, mode) if made is None else os.dup(made.descriptor)

        try:
            result = self.open(handle_id, path, "replace", turn, opener=opener)
        except BaseException:
            if made is not None:
                made.discard()
            raise
        if made is not None:
            with self._lock:
                handle = None if self._ended else self._handles[handle_id]
                if handle is not None:
                    handle.path = made.place  # calls that touch what will be replaced wait for the stream's
                    self._replacements[handle_id] = made
            if handle is None:
                made.discard()
        return result

    def write(self, handle_id: str, offset: int, chunk: str | bytes, turn: Turn = ALONE) -> dict[str, str]:
        """A block. One that is refused leaves a gap, so the stream replaces nothing any more."""
        try:
            return super().write(handle_id, offset, chunk, turn)
        except (OSError, RpcError) as error:
            replacement = self._replacements.get(handle_id)
            if replacement is not None and replacement.failure is None:
                replacement.failure = error
            raise

    def finish(self, handle_id: str, discard: bool, turn: Turn = ALONE) -> dict[str, str]:
        """Close; what was to replace a file does so now, or never with `discard`.

        After a block that failed it never does, and the answer is what was said of that block.
        """
        replacement = self._replacements.pop(handle_id, None)
        try:
            result = self.close(handle_id, turn)
            if replacement is not None and not discard:
                if replacement.failure is not None:
                    raise replacement.failure
                replacement.commit(turn)
        finally:
            if replacement is not None:
                replacement.discard()
        return result

    def end(self) -> None:
        """Close all; nothing is replaced any more."""
        super().end()
        while self._replacements:
            self._replacements.popitem()[1].discard()


ATTEMPTS: Final = 16
"""How often to look again when somebody else replaces the file between two looks."""


class _Replacement:
    """New content on its way to a name."""

    def __init__(self, directory: int, name: bytes, place: bytes, mode: int, path: bytes) -> None:
        self._directory = directory
        self._name = name
        self._path = path
        self.place = place
        """Where the content will be, with every link resolved."""
        self.failure: OSError | RpcError | None = None
        """Why the first block that was refused was."""
        self._new = NewFile(directory, mode)

    @classmethod
    def of(cls, path: bytes) -> _Replacement | None:
        """For a file that is there or can be; None for one that has to be written in place."""
        for _ in range(ATTEMPTS):
            try:
                existing = os.open(path, WRITE)
            except FileNotFoundError:
                if os.path.islink(path):
                    return None  # where it leads to is for the kernel to find
                parent, name = os.path.split(path)
                directory = os.open(parent, SEARCH)
                return cls._at(directory, name, real_path(directory), 0o666, path)
            with opened(existing):
                info = os.fstat(existing)
                if not stat.S_ISREG(info.st_mode):
                    raise invalid_request(f"path `{lossy(path)}` is not a file")
                place = real_path(existing)
                if place is None:
                    return None
                if _is_at(place, info):
                    return cls._in_place_of(existing, info, place, path)
        return None  # others replace it all the time

    @classmethod
    def _in_place_of(
        cls, existing: int, info: os.stat_result, place: bytes, path: bytes
    ) -> _Replacement | None:
        if info.st_nlink != 1 or info in PINS:
            return None
        parent, name = os.path.split(place)
        mode = mode_after_writing(stat.S_IMODE(info.st_mode))
        try:
            made = cls._at(os.open(parent, SEARCH), name, parent, mode & 0o777, path)
        except OSError as error:
            if error.errno in CANNOT_REPLACE or error.errno == errno.ENOENT:
                return None
            raise
        if made is not None and not make_alike(made.descriptor, existing, info, mode):
            made.discard()
            return None
        return made

    @classmethod
    def _at(
        cls, directory: int, name: bytes, parent: bytes | None, mode: int, path: bytes
    ) -> _Replacement | None:
        """Takes the directory's descriptor over, whatever comes of it."""
        try:
            if not name or parent is None:
                os.close(directory)
                return None
            return cls(directory, name, os.path.join(parent, name), mode, path)
        except BaseException:
            os.close(directory)
            raise

    @property
    def descriptor(self) -> int:
        return self._new.descriptor

    def commit(self, turn: Turn) -> None:
        """Take the name, whoever has it by now."""
        if SYNC:
            os.fsync(self.descriptor)
        try:
            if not self._new.take_free_name(self._name):
                self._new.take_name(self._name)
        except OSError as error:
            if error.errno not in CANNOT_REPLACE:
                raise
            self._write_in_place(turn)  # a mount point, or another's file in a sticky directory

    def _write_in_place(self, turn: Turn) -> None:
        with opened(os.open(self._readable(), os.O_RDONLY | os.O_CLOEXEC)) as content:
            size = os.fstat(content).st_size
            replace_file(self._path, lambda into: copy_content(content, into, turn), size, turn=turn)

    def _readable(self) -> bytes:
        """A name under which the content can be read; our descriptor can only write."""
        path = b"/proc/self/fd/%d" % self.descriptor
        if not os.path.exists(path):
            raise os_error(errno.ENOTSUP)
        return path

    def discard(self) -> None:
        """Leave nothing behind; fine after everything."""
        if self._directory >= 0:
            self._new.close()
            os.close(self._directory)
            self._directory = -1


def _is_at(place: bytes, info: os.stat_result) -> bool:
    """Whether the file still has the name it is said to have; one that lost it is said to have another."""
    try:
        return os.path.samestat(os.stat(place, follow_symlinks=False), info)
    except OSError:
        return False
