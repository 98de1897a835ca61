"""The interface: what every environment can do, wherever its machine is.

Nothing above this line of the house knows "local or remote". What is here is what callers may use;
how it is done is in client/ (a machine across a connection) and local/ (this machine).
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from msgspec import Struct

from .wire.process import EnvPolicy, ListedProcess, Metadata, SpawnMode, StreamName

if TYPE_CHECKING:
    from .wire.sandbox import SandboxContext

__all__ = [
    "Change",
    "Closed",
    "Collected",
    "Completed",
    "DirectoryEntry",
    "Environment",
    "EnvironmentFacts",
    "Event",
    "ExitStatus",
    "Exited",
    "Failed",
    "FileMetadata",
    "FilePart",
    "FilePath",
    "Files",
    "GlobFound",
    "Headers",
    "Http",
    "HttpAnswer",
    "HttpBody",
    "Output",
    "Process",
    "Processes",
    "Progress",
    "ReadOutput",
    "SearchFound",
    "SearchLine",
    "SearchMatch",
    "Shell",
    "Snapshot",
    "Transferred",
    "WalkEntry",
    "WalkError",
    "Walked",
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
    """A process and what it wrote: `terminal` for a PTY, the other two for pipes.

    `exit_code` is None only in a CommunicateTimeout whose process had not been reported dead yet.
    """

    stdout: bytes
    stderr: bytes
    terminal: bytes
    exit_code: int | None
    dropped_bytes: int = 0
    sandbox_denied: bool = False
    """Whether it failed because its sandbox kept something from it, as far as the server can tell."""

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

    def output(self, *, from_start: bool = False) -> AsyncIterator[Output]:
        """Only the output, until there is no more. Raises if the process was lost.

        Goes on where the last `output`, `communicate` or `collect` stopped. With `from_start`, everything
        comes again that is still kept.
        """

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

    async def wait_exit(self, timeout: float | None = None) -> ExitStatus:
        """The exit of the process itself, although children of it may still run and write."""

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
        argv: Iterable[str],
        *,
        cwd: str | PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        env_policy: EnvPolicy | None = None,
        tty: bool = False,
        stdin: bool = False,
        arg0: str | None = None,
        rows: int | None = None,
        cols: int | None = None,
        process_id: str | None = None,
        sandbox: SandboxContext | None = None,
        spawn: SpawnMode | None = None,
        metadata: Metadata | None = None,
    ) -> Process:
        """Start a command. Without `env` and `env_policy` it inherits the environment of the server.

        `metadata` says for which thread and which call it is; the command finds that among its variables.

        `spawn="prepared"` says that everything is decided already: `env` is all the variables there are, and
        neither `env_policy` nor `sandbox` is given. A server may take only starts of that kind.
        """

    async def run(
        self, argv: Iterable[str], *, data: bytes | None = None, timeout: float | None = None, **options: Any
    ) -> Completed:
        """Start a command with the options of `start`, give it `data` as its input, and wait for its end."""

    async def list(self, *, everybody: bool = False) -> list[ListedProcess]:
        """Every process the server still remembers, of this session or of everybody's."""


# Files -------------------------------------------------------------------------------------------


FilePath = str | PathLike[str]
"""How callers name a file."""


class FileMetadata(Struct, frozen=True, gc=False):
    """What a path is. All three flags are false for a FIFO, a socket or a device."""

    is_directory: bool
    is_file: bool
    is_symlink: bool
    """The path itself is a link; everything else is said of what it leads to."""
    size: int
    created_at_ms: int
    """Milliseconds since 1970; 0 where the machine does not know."""
    modified_at_ms: int


class DirectoryEntry(Struct, frozen=True, gc=False):
    """A name in a directory. Links are what they lead to."""

    name: str
    is_directory: bool
    is_file: bool


class FilePart(Struct, frozen=True, gc=False):
    """A range of a file. `eof`: the file was seen to end in or before it."""

    data: bytes
    eof: bool


class WalkEntry(Struct, frozen=True, gc=False):
    """A file or directory below the one that was walked."""

    path: str
    kind: Literal["file", "directory"]


class WalkError(Struct, frozen=True, gc=False):
    """A path that could not be looked at."""

    path: str
    message: str


class Walked(Struct, frozen=True):
    """A tree, level by level. `truncated`: a limit was reached and there is more."""

    entries: list[WalkEntry]
    errors: list[WalkError]
    truncated: bool


class GlobFound(Struct, frozen=True):
    """Paths that fit a pattern, sorted. `truncated`: there are more."""

    paths: list[str]
    truncated: bool


class SearchMatch(Struct, frozen=True):
    """A line that matches. `spans` are byte ranges within the line."""

    path: str
    line_number: int
    line: str
    byte_offset: int
    spans: list[tuple[int, int]]
    line_truncated: bool = False


class SearchLine(Struct, frozen=True):
    """A line near one that matches."""

    path: str
    line_number: int
    line: str


class SearchFound(Struct, frozen=True):
    """Matching lines by path and number, and the lines around them. `truncated`: there are more."""

    matches: list[SearchMatch]
    context: list[SearchLine]
    truncated: bool


class Change(Struct, frozen=True):
    """Paths that changed in a short time. `overflowed`: too much happened, look again at everything."""

    paths: list[str]
    overflowed: bool = False


class Transferred(Struct, frozen=True):
    """What an upload or a download did. `skipped` says what was left out, and why."""

    files: int
    directories: int
    bytes: int
    resumed_bytes: int
    """Of `bytes`, what an earlier, broken transfer had already brought over."""
    verified: Literal["digest", "reread", "no"]
    """How what arrived was compared: SHA-256 on both sides, reading it back, or not at all."""
    skipped: list[tuple[str, str]]


Progress = Callable[[int, int, str], None]
"""Called with the bytes done, the bytes there are in all, and the path at hand."""


class Files(Protocol):
    """A machine's files.

    A path is a native path (a string, or what `os.fspath` makes one of), absolute or relative to the server's
    own directory, or a `file:` URI. Paths in results are native strings, with surrogate escapes where a name
    is not UTF-8. What the machine refuses is an OSError of the usual kind (FileNotFoundError, and so on). A
    connection that breaks meanwhile is a ConnectionError.
    """

    async def read(self, path: FilePath) -> bytes:
        """All of a file. For one that does not fit into memory use `stream`."""

    async def read_range(self, path: FilePath, offset: int, length: int) -> FilePart:
        """Up to `length` bytes from `offset` on; fewer only at the end of the file."""

    def stream(self, path: FilePath, offset: int = 0) -> AsyncIterator[bytes]:
        """A file of any size, block by block, in constant memory.

        The file stays the one that was opened even if it is replaced meanwhile. To stop early, leave the
        loop and call `aclose`, or just drop the iterator.
        """

    async def write(self, path: FilePath, data: bytes) -> None:
        """Make a file have this content, creating it if need be."""

    async def write_stream(self, path: FilePath, blocks: AsyncIterable[bytes] | Iterable[bytes]) -> int:
        """Write what comes, in constant memory, and return how many bytes it was.

        Where the server can, the file has its old content until all of the new one is there. Elsewhere it
        is emptied first and grows in place: whoever reads it meanwhile sees a part of it.
        """

    async def metadata(self, path: FilePath, follow_symlinks: bool = True) -> FileMetadata:
        """What a path is. With `follow_symlinks=False` a link anywhere in the path is an error."""

    async def exists(self, path: FilePath) -> bool:
        """Whether there is something, at the end of all links."""

    async def list(self, path: FilePath) -> list[DirectoryEntry]:
        """The names in a directory, sorted. Servers other than ours leave out links that lead nowhere."""

    async def walk(
        self,
        path: FilePath,
        *,
        max_depth: int = 64,
        max_directories: int = 10_000,
        max_entries: int = 50_000,
        follow_directory_symlinks: bool = False,
        prune_hidden_directories: bool = False,
    ) -> Walked:
        """The tree below a directory, level by level. Links are left out, or entered if asked to."""

    async def make_directory(self, path: FilePath, recursive: bool = True) -> None:
        """Make a directory; `recursive` makes its parents too and does not mind if it is there."""

    async def remove(self, path: FilePath, recursive: bool = False, force: bool = False) -> None:
        """Remove a file, a link or an empty directory; with `recursive` a whole tree.

        `force` does not mind if there is nothing.
        """

    async def copy(self, source: FilePath, destination: FilePath, recursive: bool = False) -> None:
        """Copy on that machine. A directory needs `recursive` and is merged into an existing one."""

    async def move(self, source: FilePath, destination: FilePath, overwrite: bool = False) -> None:
        """Rename; what has the new name already is replaced only if told to."""

    async def canonicalize(self, path: FilePath) -> str:
        """The path with every link resolved; it must exist."""

    async def glob(
        self,
        path: FilePath,
        pattern: str,
        *,
        kind: Literal["file", "directory", "any"] = "file",
        hidden: bool = False,
        follow_symlinks: bool = False,
        max_results: int = 1000,
    ) -> GlobFound:
        """Paths below a directory that fit a pattern such as `src/**/*.{py,pyi}`."""

    async def search(
        self,
        path: FilePath,
        pattern: str,
        *,
        fixed_strings: bool = False,
        ignore_case: bool = False,
        whole_words: bool = False,
        globs: Sequence[str] = (),
        hidden: bool = False,
        no_ignore: bool = False,
        before_context: int = 0,
        after_context: int = 0,
        max_results: int = 1000,
    ) -> SearchFound:
        """Lines that match a regular expression, in a file or in all files below a directory."""

    def watch(
        self, path: FilePath, recursive: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        """`async with files.watch(path) as changes: async for change in changes: ...`

        The path need not exist. Changes made after the context was entered are reported; the watch goes
        with the context.
        """

    async def upload(
        self, local: FilePath, remote: FilePath, progress: Progress | None = None, *, verify: bool = True
    ) -> Transferred:
        """Bring a file or a tree of this machine there, as `remote`.

        A large file arrives as a part beside `remote` and gets its name when it is whole; one that broke is
        taken up where it ended. What arrived is compared unless `verify` is false.
        """

    async def download(
        self, remote: FilePath, local: FilePath, progress: Progress | None = None, *, verify: bool = True
    ) -> Transferred:
        """The other way round, with the same promises."""


# HTTP --------------------------------------------------------------------------------------------

Headers = Mapping[str, str] | Sequence[tuple[str, str]]
"""Headers to send: pairs where their order, or a name that comes twice, matters."""


class HttpAnswer(Struct, frozen=True):
    """What an HTTP server said, whatever the status. Header names are in lower case."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        """The first header of that name."""
        return next((value for key, value in self.headers if key == name.lower()), None)


class HttpBody(Protocol):
    """An answer whose body is still coming. Iterate over it once, inside its context."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> list[tuple[str, str]]: ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...


class Http(Protocol):
    """HTTP requests made from a machine: they see its network, its proxies, its DNS.

    `env_headers` names variables of that machine's environment by header: the value is put in there and
    never comes here. Every status is an answer; only a request without an answer is an error.
    """

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Headers = (),
        env_headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: float | None = None,
        follow_redirects: bool = True,
    ) -> HttpAnswer:
        """One request and its whole answer. `timeout` covers both."""

    def stream(
        self,
        method: str,
        url: str,
        *,
        headers: Headers = (),
        env_headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: float | None = None,
        follow_redirects: bool = True,
    ) -> AbstractAsyncContextManager[HttpBody]:
        """`async with http.stream("GET", url) as answer: async for block in answer: ...`"""


# The machine -------------------------------------------------------------------------------------


class Shell(Struct, frozen=True):
    """The shell that commands are written for."""

    name: str
    path: str


class EnvironmentFacts(Struct, frozen=True, rename="camel", kw_only=True):
    """What a machine says of itself. Directories are `file:` URIs; what it does not say is None or empty."""

    shell: Shell | None = None
    cwd: str | None = None
    """Where commands start unless told otherwise."""
    user_home_dir: str | None = None
    temporary_directories: list[str] = []
    temp_dir: str | None = None
    platform_os: str | None = None
    executor_version: str | None = None
    provider_id: str | None = None
    """Two servers with the same one run on the same machine for the same account."""
    prepend_path_dirs: list[str] = []
    capabilities: dict[str, Any] = {}
    limits: dict[str, Any] = {}

    def has(self, capability: str) -> bool:
        """Whether a capability is announced. One that is missing is not there."""
        return self.capabilities.get(capability) is True


class Environment(Protocol):
    """A machine: this one, or one across a socket, a pipe or a relay. Nobody above can tell which.

    Leaving its context, or `close`, ends every process that was started through it.
    """

    @property
    def is_remote(self) -> bool:
        """Whether paths and commands may mean something else than they do here."""

    @property
    def info(self) -> EnvironmentFacts:
        """What the machine said of itself when it was reached."""

    @property
    def processes(self) -> Processes: ...

    @property
    def files(self) -> Files: ...

    @property
    def http(self) -> Http: ...

    async def check(self, timeout: float = 10.0) -> None:
        """Ask whether it is there; raises what is wrong. Never repairs anything."""

    async def close(self) -> None:
        """End every process started here, then the connection. May be called more than once."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
