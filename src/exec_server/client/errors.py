"""What can go wrong at the client, by who was wrong."""

from __future__ import annotations

import errno as codes
import os
import re
from typing import Final

from ..services import Completed, FilePath
from ..wire.errors import NOT_FOUND

__all__ = [
    "CommunicateTimeout",
    "ConnectionLost",
    "ExecServerError",
    "HttpFailed",
    "OutputLost",
    "ProcessFailed",
    "ProtocolError",
    "Recovering",
    "RemoteFileError",
    "RemoteFileExists",
    "RemoteFileNotFound",
    "RemoteIsADirectory",
    "RemoteNotADirectory",
    "RemotePermissionDenied",
    "ServerRejected",
    "SessionLost",
    "StdinCloseUnsupported",
    "StdinClosed",
    "TooManyCalls",
    "TransferFailed",
    "Unsupported",
    "file_error",
]


class ExecServerError(Exception):
    """Everything this library raises on its own account."""


class ServerRejected(ExecServerError):
    """The server answered with an error: our request was wrong, or its machine could not do it."""

    def __init__(self, method: str, code: int, message: str) -> None:
        super().__init__(f"exec-server rejected request ({code}): {message}")
        self.method = method
        self.code = code
        self.message = message


class ConnectionLost(ExecServerError, ConnectionError):
    """The connection ended before the answer came; whether the request took effect is unknown.

    An OSError as well, with the number of a broken pipe, for those who only think of files. It is no
    BrokenPipeError: programs take that for the end of their own output, and leave without a word.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = codes.EPIPE


class Recovering(ConnectionLost):
    """The connection is being made again, and the caller did not want to wait for it. Nothing was sent."""


class ServerEnded(ConnectionLost):
    """A server that was started for this connection ended before it answered."""


class SessionLost(ConnectionLost):
    """The session is gone for good, with its processes. `slept` is how long this machine slept meanwhile.

    A new connection gives a new session; what was started in this one has been ended by the server, or is
    when its time is over.
    """

    def __init__(self, message: str, slept: float = 0.0) -> None:
        super().__init__(message)
        self.slept = slept


class ProtocolError(ExecServerError):
    """The server said something no server of this protocol says."""


class TooManyCalls(ExecServerError):
    """The caller has more calls in flight than one connection carries."""


class ProcessFailed(ExecServerError):
    """The process was lost: the connection broke for good, or the server gave it up."""


class OutputLost(ExecServerError):
    """Output fell out before it was read. `after_seq` is the last number that was read."""

    def __init__(self, process_id: str, after_seq: int) -> None:
        super().__init__(
            f"output of process {process_id!r} after number {after_seq} is no longer retained;"
            " read sooner, or use a server with more --retain-output"
        )
        self.after_seq = after_seq


class StdinClosed(ExecServerError):
    """The process has no stdin that could be written to (any more)."""


class Unsupported(ExecServerError):
    """The server does not have this; its capabilities say so."""


class StdinCloseUnsupported(Unsupported):
    """The server cannot close a pipe's stdin; nothing was written."""


class CommunicateTimeout(ExecServerError, TimeoutError):
    """The time was over; the process was terminated. `output` is what it wrote until then, None if nobody
    knows of its start."""

    def __init__(self, seconds: float, output: Completed | None) -> None:
        if output is None:
            super().__init__(f"the server did not say within {seconds:g}s that the process was started")
        else:
            super().__init__(f"the process did not finish within {seconds:g}s and was terminated")
        self.output = output


class TransferFailed(ExecServerError):
    """What arrived is not what was sent, and trying again from the start did not help."""


class HttpFailed(ServerRejected):
    """An HTTP request that got no answer, or whose body broke off. A status of 500 is an answer."""

    def __str__(self) -> str:
        return self.message


class RemoteFileError(ServerRejected, OSError):
    """A file operation the other machine refused. `errno` is its own, where it named one."""

    def __init__(self, method: str, code: int, message: str, path: str) -> None:
        ServerRejected.__init__(self, method, code, message)
        found = _OS_ERROR.search(message)
        number = int(found[1]) if found else codes.ENOENT if code == NOT_FOUND else codes.EINVAL
        text = message[: found.start()] if found else message
        OSError.__init__(self, number, text, path)

    def __str__(self) -> str:
        return f"{self.filename}: {self.message}"


class RemoteFileNotFound(RemoteFileError, FileNotFoundError):
    """There is nothing of that name, or no directory on the way to it."""


class RemotePermissionDenied(RemoteFileError, PermissionError):
    """The user the server runs as may not do that."""


class RemoteFileExists(RemoteFileError, FileExistsError):
    """There is something of that name already."""


class RemoteIsADirectory(RemoteFileError, IsADirectoryError):
    """A directory where a file is needed."""


class RemoteNotADirectory(RemoteFileError, NotADirectoryError):
    """A file where a directory is needed, perhaps on the way to the path."""


_OS_ERROR: Final = re.compile(r" \(os error (\d+)\)\Z")

_BY_NUMBER: Final[dict[int, type[RemoteFileError]]] = {
    codes.ENOENT: RemoteFileNotFound,
    codes.EACCES: RemotePermissionDenied,
    codes.EPERM: RemotePermissionDenied,
    codes.EEXIST: RemoteFileExists,
    codes.EISDIR: RemoteIsADirectory,
    codes.ENOTDIR: RemoteNotADirectory,
}


def file_error(error: ServerRejected, path: FilePath) -> RemoteFileError:
    """A refused `fs/*` call as the OSError it is."""
    found = _OS_ERROR.search(error.message)
    kind: type[RemoteFileError] = RemoteFileError
    if found:
        kind = _BY_NUMBER.get(int(found[1]), RemoteFileError)
    elif error.code == NOT_FOUND and not error.message.startswith("unknown file handle"):
        kind = RemoteFileNotFound
    return kind(error.method, error.code, error.message, os.fspath(path))
