"""Processes, in the current dialect: every params and result of `process/*`, and its notifications."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType, ValidationError

from .base64 import encode_bytes
from .params import MAX_U64, U16, U64

__all__ = [
    "AcknowledgeParams",
    "CloseStdinParams",
    "EnvPolicy",
    "ListParams",
    "ListResult",
    "ListedProcess",
    "ManagedNetwork",
    "Metadata",
    "OutputChunk",
    "ProcessParams",
    "PtySize",
    "ReadParams",
    "ReadResult",
    "ResizeParams",
    "SignalParams",
    "SnapshotResult",
    "SpawnMode",
    "StartParams",
    "StartResult",
    "StreamName",
    "TerminateMode",
    "TerminateParams",
    "TerminateResult",
    "WaitParams",
    "WaitResult",
    "WriteParams",
    "WriteResult",
    "WriteStatus",
    "closed_notification",
    "exited_notification",
    "output_prefix",
]

if TYPE_CHECKING:
    from .sandbox import SandboxContext

    AnySandbox = SandboxContext | None
else:
    AnySandbox = Any
    """Decoded by its own table: its errors have words of their own."""

StreamName = Literal["stdout", "stderr", "pty"]
WriteStatus = Literal["accepted", "unknownProcess", "starting", "stdinClosed"]
SpawnMode = Literal["direct", "prepared"]
Awaited = Literal["exited", "closed"]


_HYPHENATED: Final = "-".join(f"[0-9A-Fa-f]{{{length}}}" for length in (8, 4, 4, 4, 12))
_UUID = re.compile(rf"[0-9A-Fa-f]{{32}}|(?:urn:uuid:)?{_HYPHENATED}|\{{{_HYPHENATED}\}}")
"""The spellings peers accept; Python's own UUID takes hyphens anywhere."""


class Params(Struct, rename="camel", omit_defaults=True):
    """Unknown fields are ignored; fields that are None may also be absent."""


class Result(Struct, rename="camel"):
    """Every field is written, null where it has no value."""


class EnvPolicy(Params):
    """What of the server's own environment a child inherits. All five are required."""

    inherit: Literal["all", "core", "none"]
    ignore_default_excludes: bool
    exclude: list[str]
    set: dict[str, str]
    include_only: list[str]


class Metadata(Params):
    """Who asked: two variables in the child's environment."""

    thread_id: str | None = None
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if self.thread_id is not None and not _UUID.fullmatch(self.thread_id):
            raise ValueError("threadId must be a UUID")


class PtySize(Params):
    """Rows and columns of a terminal."""

    rows: U16
    cols: U16


class ShellOfSnapshot(Params):
    name: str
    path: str


class ShellSnapshot(Params):
    """Run the command in the captured state of a login shell. Applied where the server can."""

    scope_id: str
    shell: ShellOfSnapshot


class ManagedNetwork(Params):
    """What a sandbox may know of the network its proxy manages."""

    loopback_ports: list[U16] = []
    allow_local_binding: bool = False


class StartParams(Params):
    """`process/start`."""

    process_id: str
    argv: list[str]
    cwd: str
    env: dict[str, str]
    tty: bool
    pipe_stdin: bool = False
    arg0: str | None = None
    env_policy: EnvPolicy | None = None
    metadata: Metadata | None = None
    shell_snapshot: ShellSnapshot | None = None
    sandbox: AnySandbox = None
    enforce_managed_network: bool = False
    managed_network: ManagedNetwork | None = None
    network_proxy: dict[str, Any] | None = None
    pty_size: PtySize | None = None
    spawn: SpawnMode | None = None

    def __post_init__(self) -> None:
        if self.sandbox is not None:
            from .sandbox import SandboxContext, decode_sandbox  # most processes have none

            if not isinstance(self.sandbox, SandboxContext):
                self.sandbox = decode_sandbox(self.sandbox)


class StartResult(Result):
    process_id: str
    sandbox_type: str = "none"


class ProcessParams(Params):
    """Any method that only names a process."""

    process_id: str


class ReadParams(Params):
    """`process/read`: retained output after a sequence number, waiting for some if there is none."""

    process_id: str
    after_seq: U64 | None = None
    max_bytes: U64 | None = None
    wait_ms: U64 | None = None

    def __post_init__(self) -> None:
        if max(self.after_seq or 0, self.max_bytes or 0, self.wait_ms or 0) > MAX_U64:
            raise ValidationError("invalid number: more than 64 bits")


class OutputChunk(Result):
    seq: int
    stream: StreamName
    chunk: str


class ReadResult(Result):
    chunks: list[OutputChunk]
    next_seq: int
    exited: bool
    exit_code: int | None
    closed: bool
    failure: str | None = None
    sandbox_denied: bool = False


class WriteParams(Params):
    """`process/write`. Without a write id the write cannot be retried safely, but it is accepted."""

    process_id: str
    chunk: str
    write_id: str | None = None


class WriteResult(Result):
    status: WriteStatus


class SignalParams(Params):
    """`process/signal`: `interrupt`, or any POSIX signal name such as `SIGUSR1`."""

    process_id: str
    signal: str


class TerminateMode(Params):
    """`{"type":"force"}` or `{"type":"graceful","timeoutMs":n}`."""

    type: Literal["force", "graceful"]
    timeout_ms: U64 | None = None

    def __post_init__(self) -> None:
        if self.type == "graceful" and self.timeout_ms is None:
            raise ValidationError("a graceful terminate needs `timeoutMs`")
        if (self.timeout_ms or 0) > MAX_U64:
            raise ValidationError("invalid number: more than 64 bits")


class TerminateParams(Params):
    process_id: str
    mode: TerminateMode | None = None


class TerminateResult(Struct, rename="camel", frozen=True, omit_defaults=True):
    """`running` is whether there was something to kill; `killed` how many processes were."""

    running: bool
    killed: int | UnsetType = UNSET


class CloseStdinParams(Params):
    process_id: str
    write_id: str | None = None


class AcknowledgeParams(Params):
    """`process/acknowledgeOutput`: everything up to this number was received."""

    process_id: str
    seq: U64


class ResizeParams(Params):
    process_id: str
    rows: U64
    cols: U64


class WaitParams(Params):
    process_id: str
    wait_ms: U64 | None = None
    until: Awaited | None = None

    def __post_init__(self) -> None:
        if (self.wait_ms or 0) > MAX_U64:
            raise ValidationError("invalid number: more than 64 bits")


class WaitResult(Result):
    exited: bool
    exit_code: int | None
    closed: bool
    next_seq: int
    timed_out: bool
    failure: str | None
    sandbox_denied: bool


class SnapshotResult(Result):
    """The output kept, head and tail joined per stream, and what fell out between them."""

    stdout: str
    stderr: str
    terminal: str
    truncated: bool
    dropped_bytes: int
    running: bool
    exited: bool
    exit_code: int | None
    closed: bool
    next_seq: int


class ListParams(Params):
    """`process/list`: the session's own processes, or with `all` those of every session."""

    all: bool = False


class ListedProcess(Result):
    process_id: str
    session: str
    """The first characters of the session's id: enough to tell sessions apart, too few to take one over."""
    argv: list[str]
    cwd: str
    tty: bool
    pid: int | None
    state: Literal["starting", "running", "exited", "closed"]
    exit_code: int | None
    next_seq: int
    output_bytes: int
    dropped_bytes: int
    started_at_ms: int


class ListResult(Result):
    processes: list[ListedProcess]


# Notifications are the hot path: put together as bytes, without a JSON encoder. -------------------


def output_prefix(encoded_id: bytes) -> bytes:
    """What every `process/output` of a process starts with; `encoded_id` is its id as JSON."""
    return b'{"method":"process/output","params":{"processId":' + encoded_id + b',"seq":'


def output_notification(
    prefix: bytes, seq: int, stream: bytes, data: bytes | memoryview
) -> tuple[bytes, bytes, bytes]:
    """One chunk of output in three parts, from a prefix made once per process."""
    return b'%b%d,"stream":"%b","chunk":"' % (prefix, seq, stream), encode_bytes(data), b'"}}'


def exited_notification(encoded_id: bytes, seq: int, exit_code: int, sandbox_denied: bool) -> bytes:
    """The child has been reaped."""
    return (
        b'{"method":"process/exited","params":{"processId":%b,"seq":%d,"exitCode":%d,"sandboxDenied":%b}}'
        % (
            encoded_id,
            seq,
            exit_code,
            b"true" if sandbox_denied else b"false",
        )
    )


def closed_notification(encoded_id: bytes, seq: int) -> bytes:
    """No more output will come."""
    return b'{"method":"process/closed","params":{"processId":%b,"seq":%d}}' % (encoded_id, seq)
