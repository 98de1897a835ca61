"""What can go wrong at the client, by who was wrong."""

from __future__ import annotations

from ..services import Completed

__all__ = [
    "CommunicateTimeout",
    "ConnectionLost",
    "ExecServerError",
    "OutputLost",
    "ProcessFailed",
    "ProtocolError",
    "ServerRejected",
    "StdinCloseUnsupported",
    "StdinClosed",
    "TooManyCalls",
    "Unsupported",
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


class ConnectionLost(ExecServerError):
    """The connection ended before the answer came; whether the request took effect is unknown."""


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
    """The time was over; the process was terminated. `output` is what it wrote until then."""

    def __init__(self, seconds: float, output: Completed | None) -> None:
        super().__init__(f"the process did not finish within {seconds:g}s and was terminated")
        self.output = output
