"""What type checkers know of the blocking twin. Made by scripts/sync_types.py; do not edit."""

import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from .client.recovery import State
from .environments.connect import CONNECT_TIMEOUT, Target, WrapDialer
from .services import (
    Change,
    Collected,
    Completed,
    DirectoryEntry,
    EnvironmentFacts,
    Event,
    ExitStatus,
    FileMetadata,
    FilePart,
    FilePath,
    GlobFound,
    Headers,
    HttpAnswer,
    Output,
    Progress,
    ReadOutput,
    SearchFound,
    Snapshot,
    Transferred,
    Walked,
)
from .wire.config import ConfigReadResult
from .wire.process import EnvPolicy, ListedProcess, Metadata, SpawnMode
from .wire.sandbox import SandboxContext

__all__ = ["Blocking", "Environment", "Files", "Http", "HttpBody", "Items", "Process", "Processes", "connect"]

T = TypeVar("T")

class Blocking:
    def __init__(self, of: Any) -> None: ...

class Items(Blocking, Iterator[T]):
    def __iter__(self) -> Self: ...
    def __next__(self) -> T: ...
    def close(self) -> None: ...

class HttpBody(Blocking):
    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> builtins.list[tuple[str, str]]: ...
    def __iter__(self) -> Items[bytes]: ...

class Http(Blocking):
    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Headers = (),
        env_headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: float | None = None,
        follow_redirects: bool = True,
    ) -> HttpAnswer: ...
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
    ) -> AbstractContextManager[HttpBody]: ...

class Files(Blocking):
    def read(self, path: FilePath) -> bytes: ...
    def read_range(self, path: FilePath, offset: int, length: int) -> FilePart: ...
    def stream(self, path: FilePath, offset: int = 0) -> Items[bytes]: ...
    def write(self, path: FilePath, data: bytes) -> None: ...
    def write_stream(self, path: FilePath, blocks: Iterable[bytes]) -> int: ...
    def metadata(self, path: FilePath, follow_symlinks: bool = True) -> FileMetadata: ...
    def exists(self, path: FilePath) -> bool: ...
    def list(self, path: FilePath) -> builtins.list[DirectoryEntry]: ...
    def walk(
        self,
        path: FilePath,
        *,
        max_depth: int = 64,
        max_directories: int = 10000,
        max_entries: int = 50000,
        follow_directory_symlinks: bool = False,
        prune_hidden_directories: bool = False,
    ) -> Walked: ...
    def make_directory(self, path: FilePath, recursive: bool = True) -> None: ...
    def remove(self, path: FilePath, recursive: bool = False, force: bool = False) -> None: ...
    def copy(self, source: FilePath, destination: FilePath, recursive: bool = False) -> None: ...
    def move(self, source: FilePath, destination: FilePath, overwrite: bool = False) -> None: ...
    def canonicalize(self, path: FilePath) -> str: ...
    def glob(
        self,
        path: FilePath,
        pattern: str,
        *,
        kind: Literal["file", "directory", "any"] = "file",
        hidden: bool = False,
        follow_symlinks: bool = False,
        max_results: int = 1000,
    ) -> GlobFound: ...
    def search(
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
    ) -> SearchFound: ...
    def watch(self, path: FilePath, recursive: bool = False) -> AbstractContextManager[Items[Change]]: ...
    def upload(
        self, local: FilePath, remote: FilePath, progress: Progress | None = None, *, verify: bool = True
    ) -> Transferred: ...
    def download(
        self, remote: FilePath, local: FilePath, progress: Progress | None = None, *, verify: bool = True
    ) -> Transferred: ...
    def under(self, sandbox: SandboxContext) -> Files: ...

class Process(Blocking):
    @property
    def id(self) -> str: ...
    def events(self) -> Items[Event]: ...
    def output(self, *, from_start: bool = False) -> Items[Output]: ...
    def read(
        self, after_seq: int | None = None, max_bytes: int | None = None, wait: float = 0.0
    ) -> ReadOutput: ...
    def write(self, data: bytes) -> None: ...
    def close_stdin(self) -> None: ...
    def resize(self, rows: int, cols: int) -> None: ...
    def signal(self, name: str) -> None: ...
    def terminate(self, grace: float | None = None) -> int | None: ...
    def wait(self, timeout: float | None = None) -> ExitStatus: ...
    def wait_exit(self, timeout: float | None = None) -> ExitStatus: ...
    def communicate(self, data: bytes | None = None, timeout: float | None = None) -> Completed: ...
    def collect(self, window: float) -> Collected: ...
    def snapshot(self) -> Snapshot: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    @property
    def exit_code(self) -> int | None: ...

class Processes(Blocking):
    def start(
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
    ) -> Process: ...
    def run(
        self,
        argv: Iterable[str],
        *,
        data: bytes | None = None,
        timeout: float | None = None,
        cwd: str | PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        env_policy: EnvPolicy | None = None,
        tty: bool = False,
        arg0: str | None = None,
        rows: int | None = None,
        cols: int | None = None,
        process_id: str | None = None,
        sandbox: SandboxContext | None = None,
        spawn: SpawnMode | None = None,
        metadata: Metadata | None = None,
    ) -> Completed: ...
    def list(self, *, everybody: bool = False) -> builtins.list[ListedProcess]: ...

class Environment(Processes):
    @property
    def is_remote(self) -> bool: ...
    @property
    def info(self) -> EnvironmentFacts: ...
    @property
    def processes(self) -> Processes: ...
    @property
    def files(self) -> Files: ...
    @property
    def http(self) -> Http: ...
    def check(self, timeout: float = 10.0) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    address: str
    def read_config(
        self,
        cwd: str,
        config_paths: Sequence[Sequence[str]],
        requirements_paths: Sequence[Sequence[str]] = (),
    ) -> ConfigReadResult: ...
    session_id: str
    def has(self, capability: str) -> bool: ...
    @property
    def state(self) -> State: ...
    @property
    def connected(self) -> bool: ...
    def fail_fast(self) -> AbstractContextManager[None]: ...
    def call(self, method: str, params: Any, kind: type[T], timeout: float | None = None) -> T: ...

def connect(
    target: Target = None,
    *,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
    ssl: Any = None,
    client_name: str = "exec-server-python",
    connect_timeout: float = CONNECT_TIMEOUT,
    initialize_timeout: float = 10.0,
    resume_session_id: str | None = None,
    binary_output: bool = True,
    dedicated_process: bool = False,
    recovery_timeout: float | None = None,
    wrap_dialer: WrapDialer | None = None,
) -> Environment: ...
