"""The first dialect, `exec-server.v0`: five messages, no sequence numbers, native paths."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, ValidationError

from .base64 import encode_bytes
from .params import MAX_U64, U64

__all__ = [
    "LegacyExecParams",
    "LegacyExecResult",
    "LegacyWriteParams",
    "LegacyWriteResult",
    "exited_notification",
    "output_notification",
]


class LegacyExecParams(Struct, rename="camel", frozen=True, omit_defaults=True):
    """`command/exec`."""

    process_id: str
    argv: list[str]
    cwd: str
    env: dict[str, str]
    tty: bool
    output_bytes_cap: U64 | None = None
    arg0: str | None = None

    def __post_init__(self) -> None:
        if (self.output_bytes_cap or 0) > MAX_U64:
            raise ValidationError("invalid number: more than 64 bits")


class LegacyExecResult(Struct, rename="camel", frozen=True):
    """All five members are always there."""

    process_id: str
    running: bool = True
    exit_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class LegacyWriteParams(Struct, rename="camel", frozen=True):
    """`command/exec/write`."""

    process_id: str
    chunk: str


class LegacyWriteResult(Struct, rename="camel", frozen=True):
    accepted: Literal[True] = True


def output_notification(encoded_id: bytes, stream: bytes, data: bytes | memoryview) -> bytes:
    """One chunk; a terminal's output counts as stdout."""
    return b'{"method":"command/exec/outputDelta","params":{"processId":%b,"stream":"%b","chunk":"%b"}}' % (
        encoded_id,
        b"stdout" if stream == b"pty" else stream,
        encode_bytes(data),
    )


def exited_notification(encoded_id: bytes, exit_code: int) -> bytes:
    """The last word about a process."""
    return b'{"method":"command/exec/exited","params":{"processId":%b,"exitCode":%d}}' % (
        encoded_id,
        exit_code,
    )
