"""The interface: what every environment can do, wherever its machine is.

Nothing above this line of the house knows "local or remote". What is here is what callers may use;
how it is done is in client/ (a machine across a connection) and local/ (this machine).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from msgspec import Struct

from .wire.process import EnvPolicy, ListedProcess, StreamName

__all__ = [
    "Closed",
    "Collected",
    "Completed",
    "Event",
    "ExitStatus",
    "Exited",
    "Failed",
    "Output",
    "Process",
    "Processes",
    "ReadOutput",
    "Snapshot",
]


class Output(Struct, frozen=True, gc=False):
    """Bytes a process wrote."""

    seq: int
    stream: StreamName
    data: bytes


class Exited(Struct, frozen=True, gc=False):
    """The process was reaped. `sandbox_denied` is None where the server does not say."""

    seq: int
    exit_code: int
    sandbox_denied: bool | None


class Closed(Struct, frozen=True, gc=False):
    """No more output will come."""

    seq: int


class Failed(Struct, frozen=True, gc=False):
    """The process was lost: it may or may not still run. Always the last event."""

    message: str


Event = Output | Exited | Closed | Failed


class ExitStatus(Struct, frozen=True):
    """How a process ended. Death by signal N is 128 + N."""

    exit_code: int
    sandbox_denied: bool


class Completed(Struct, frozen=True):
    """A finished process and what it wrote: `terminal` for a PTY, the other two for pipes."""

    stdout: bytes
    stderr: bytes
    terminal: bytes
    exit_code: int
    dropped_bytes: int = 0

    @property
    def truncated(self) -> bool:
        """Whether a limit made some output fall out."""
        return self.dropped_bytes > 0


class Snapshot(Struct, frozen=True):
    """What is known of a process now: its oldest and newest output, and whether it still runs."""

    stdout: bytes
    stderr: bytes
    terminal: bytes
    truncated: bool
    running: bool
    exit_code: int | None


class Collected(Struct, frozen=True):
    """Output of a window of time."""

    data: bytes
    exited: bool
    exit_code: int | None


class ReadOutput(Struct, frozen=True):
    """An answer to `read`: retained output and state."""

    chunks: list[Output]
    next_seq: int
    exited: bool
    exit_code: int | None
    closed: bool
    failure: str | None
    sandbox_denied: bool


class Process(Protocol):
    """A process somewhere. Leaving its context terminates it."""

    @property
    def id(self) -> str: ...

    def events(self) -> AsyncIterator[Event]:
        """Everything that happens, from the first event on, each once and in order."""

    def output(self) -> AsyncIterator[Output]:
        """Only the output, until there is no more. Raises if the process was lost."""

    async def read(
        self, after_seq: int | None = None, max_bytes: int | None = None, wait: float = 0.0
    ) -> ReadOutput:
        """Retained output after a number, without disturbing the iterators."""

    async def write(self, data: bytes) -> None:
        """Write to stdin: applied once, however often the connection breaks."""

    async def close_stdin(self) -> None:
        """Deliver EOF after everything written."""

    async def resize(self, rows: int, cols: int) -> None:
        """Change the size of the terminal."""

    async def signal(self, name: str) -> None:
        """Signal the process group: `interrupt`, or a name such as `SIGUSR1`."""

    async def terminate(self, grace: float | None = None) -> int | None:
        """Kill the whole tree, after `grace` seconds of asking if given; how many were killed, if known."""

    async def wait(self, timeout: float | None = None) -> ExitStatus:
        """The end, when all output is there as well."""

    async def communicate(self, data: bytes | None = None, timeout: float | None = None) -> Completed:
        """Write, close stdin, and gather everything until the end."""

    async def collect(self, window: float) -> Collected:
        """What was written since the last call, waiting for at most `window` seconds or the end."""

    async def snapshot(self) -> Snapshot:
        """Oldest and newest output, joined."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Processes(Protocol):
    """A machine's processes, as far as they are ours."""

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        env_policy: EnvPolicy | None = None,
        tty: bool = False,
        stdin: bool = False,
        arg0: str | None = None,
        rows: int | None = None,
        cols: int | None = None,
        process_id: str | None = None,
    ) -> Process:
        """Start a command. Without `env` and `env_policy` it inherits the environment of the server."""

    async def list(self, *, everybody: bool = False) -> list[ListedProcess]:
        """Every process the server still remembers, of this session or of everybody's."""
