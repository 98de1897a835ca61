"""Errors as they travel: the codes, and the exception that carries one."""

from __future__ import annotations

from typing import Any, Final

__all__ = [
    "ALREADY_ATTACHED",
    "INTERNAL_ERROR",
    "INVALID_PARAMS",
    "INVALID_REQUEST",
    "METHOD_NOT_FOUND",
    "NOT_FOUND",
    "TRANSPORT_CLOSED",
    "RpcError",
    "internal_error",
    "invalid_params",
    "invalid_request",
    "os_error_text",
]

INVALID_REQUEST: Final = -32600
"""Malformed message, handshake violation, or an unknown or duplicate process or session."""

METHOD_NOT_FOUND: Final = -32601
"""The server has no such method."""

INVALID_PARAMS: Final = -32602
"""Params that cannot be decoded, or that say something impossible."""

INTERNAL_ERROR: Final = -32603
"""The operating system refused: spawn failures, HTTP failures, other OS errors."""

NOT_FOUND: Final = -32004
"""A file-system object does not exist (`fs/*` only)."""

ALREADY_ATTACHED: Final = -32010
"""The session is attached to another connection; worth retrying."""

TRANSPORT_CLOSED: Final = -32000
"""Made by clients: the connection went away before the answer came."""


class RpcError(Exception):
    """An answer that is an error. Raised by whatever does the work, sent by whatever talks."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"


def invalid_request(message: str) -> RpcError:
    """The peer asked for something that cannot be asked now, or of this thing."""
    return RpcError(INVALID_REQUEST, message)


def invalid_params(message: str) -> RpcError:
    """The peer's params are wrong in form or in meaning."""
    return RpcError(INVALID_PARAMS, message)


def internal_error(message: str) -> RpcError:
    """This machine could not do it."""
    return RpcError(INTERNAL_ERROR, message)


def os_error_text(error: OSError) -> str:
    """An operating-system error the way every server of this protocol spells it."""
    return f"{error.strerror or error} (os error {error.errno})"
