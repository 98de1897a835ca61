"""`process/*`: start, read, write, signal, terminate, and what the reference does not have."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from msgspec import UNSET

from ...local.process.environ import child_environment
from ...local.process.output_log import Chunk
from ...local.process.process import ManagedProcess, State
from ...local.process.spawn import SpawnSpec
from ...local.process.table import ON_REQUEST
from ...loop import Loop, Pending, after
from ...wire import base64
from ...wire.errors import internal_error, invalid_params, invalid_request
from ...wire.params import NoParams
from ...wire.process import (
    AcknowledgeParams,
    CloseStdinParams,
    ListedProcess,
    ListParams,
    ListResult,
    OutputChunk,
    ProcessParams,
    ReadParams,
    ReadResult,
    ResizeParams,
    SignalParams,
    SnapshotResult,
    StartParams,
    StartResult,
    TerminateParams,
    TerminateResult,
    WaitParams,
    WaitResult,
    WriteParams,
    WriteResult,
    WriteStatus,
)
from ...wire.uri import ForeignPath, native_path, parse, path_to_uri
from ..connection import Connection
from ..dispatch import Method
from ..session import Session
from ..voice import CurrentVoice

if TYPE_CHECKING:
    from ..server import Server

__all__ = ["METHODS"]

T = TypeVar("T")

MAX_WAIT_SECONDS: Final = 10_000_000.0
"""A wait of months is as good as one without end, and no timer overflows."""

MAX_SCOPE_BYTES: Final = 256
"""Of a shell snapshot's scope id, and of a process id that wants network callbacks."""

_UNSUITABLE: Final = {
    "entry": "invalid sandbox permission path URI: {reason}",
    "cwd": "sandbox cwd URI `{uri}` is not valid on this exec-server host: {reason}",
    "workspace root": "sandbox workspace root URI `{uri}` is not valid on this exec-server host: {reason}",
}

SNAPSHOT_SHELLS: Final = ("bash", "zsh", "sh")


def start(connection: Connection, params: StartParams) -> Pending[StartResult]:
    """Check in the protocol's order, take the id, spawn."""
    session = _session(connection)
    server = connection.server
    earlier = session.processes.get(params.process_id)
    if earlier is not None and earlier.state is State.STARTING:
        # It may fail, and then the id is free: this one was sent after it and is judged after it.
        return after(earlier.started, lambda: start(connection, params))
    _check_network_proxy(params)
    cwd = _native_cwd(params.cwd)
    _check_sandbox(params)
    _check_shell_snapshot(params)
    _check_spawn_mode(params, server.limits.allow_direct, server.limits.allow_prepared)
    if not params.argv:
        raise invalid_params("argv must not be empty")
    size = params.pty_size
    if size is not None and params.tty:
        _check_size(size.rows, size.cols)
    spec = SpawnSpec(
        argv=params.argv,
        cwd=cwd,
        env=child_environment(params.env, params.env_policy, params.metadata, os.environ),
        tty=params.tty,
        pipe_stdin=params.pipe_stdin,
        arg0=params.arg0,
    )
    if size is not None:
        spec.rows, spec.cols = size.rows, size.cols
    if params.sandbox is not None:
        _put_in_sandbox(server, spec, params)
    voice = CurrentVoice(session, server.metrics, params.process_id)
    process = session.processes.start(params.process_id, spec, voice)
    return after(process.started, lambda: _started(connection, process))


def _started(connection: Connection, process: ManagedProcess) -> StartResult:
    try:
        process.started.result()
    except Exception:
        connection.server.metrics.processes_failed_total += 1
        raise
    return StartResult(process.id, "linuxSeccomp" if process.spec.sandboxed else "none")


def _put_in_sandbox(server: Server, spec: SpawnSpec, params: StartParams) -> None:
    from ...local.sandbox import first, mountpoints
    from ...local.sandbox.launch import preparer

    spec.prepare = preparer(cast("Any", params.sandbox), proxy=params.enforce_managed_network)
    spec.sandboxed = True
    server.machine.last_thing(first.end_all)
    server.machine.last_thing(mountpoints.release_all)


def _check_network_proxy(params: StartParams) -> None:
    proxy = params.network_proxy
    if proxy is None:
        return
    if "proxy" not in proxy:
        raise invalid_params("missing field `proxy`")
    timeout = proxy.get("policyDecisionTimeoutMs")
    if timeout == 0:
        raise invalid_params("network policy decision callback timeout must be nonzero")
    if timeout is not None and not 0 < len(params.process_id.encode()) <= MAX_SCOPE_BYTES:
        raise invalid_params("callback-enabled process ID must be non-empty and at most 256 bytes")
    settings = proxy["proxy"]
    if isinstance(settings, dict) and settings.get("enabled") is False:
        raise invalid_params(
            "invalid network proxy config: executor-local network proxy launch requires an enabled proxy"
        )
    raise invalid_params(
        "invalid network proxy config: this executor has no network proxy (networkProxyLaunch is false)"
    )


def _native_cwd(text: str) -> str:
    uri = parse(text)
    try:
        return native_path(uri)
    except ForeignPath as error:
        raise invalid_params(f"cwd URI `{uri}` is not valid on this exec-server host: {error}") from None


def _check_sandbox(params: StartParams) -> None:
    """Whether it is about this kind of machine at all; all else is found out when it is made."""
    context = params.sandbox
    if context is None:
        return
    from ...local.sandbox.entries import Unsuitable
    from ...local.sandbox.launch import check_context

    try:
        check_context(context)
    except Unsuitable as error:
        raise invalid_params(_UNSUITABLE[error.part].format(uri=error.uri, reason=error)) from None


def _check_shell_snapshot(params: StartParams) -> None:
    """Checked where it would apply; running the login shell as given means the same."""
    snapshot = params.shell_snapshot
    if snapshot is None:
        return
    if not 0 < len(snapshot.scope_id.encode()) <= MAX_SCOPE_BYTES:
        raise invalid_params("shell snapshot scope must be non-empty and at most 256 bytes")
    argv, shell = params.argv, snapshot.shell
    applies = len(argv) >= 3 and argv[0] == shell.path and argv[1] == "-lc"
    if applies and shell.name not in SNAPSHOT_SHELLS:
        raise invalid_params(f"shell snapshots are unsupported for shell `{shell.name}`")


def _check_spawn_mode(params: StartParams, allow_direct: bool, allow_prepared: bool) -> None:
    if params.spawn != "prepared":
        if not allow_direct:
            raise invalid_request("direct exec is disabled on this server")
        return
    if not allow_prepared:
        raise invalid_request("prepared exec is disabled on this server")
    for name, value in (
        ("envPolicy", params.env_policy),
        ("sandbox", params.sandbox),
        ("shellSnapshot", params.shell_snapshot),
        ("networkProxy", params.network_proxy),
        ("managedNetwork", params.managed_network),
        ("enforceManagedNetwork", params.enforce_managed_network or None),
    ):
        if value is not None:
            raise invalid_params(f"prepared start must not carry {name}")


def _check_size(rows: int, cols: int) -> None:
    if not (1 <= rows <= 65535 and 1 <= cols <= 65535):
        raise invalid_params("rows and cols must be between 1 and 65535")


# Reading -----------------------------------------------------------------------------------------


def read(connection: Connection, params: ReadParams) -> ReadResult | Pending[ReadResult]:
    """Retained output; waits for some if there is none and the client wants to."""
    process = _require(connection, params.process_id)
    if process.state is State.STARTING:
        return _once_started(process, lambda: read(connection, params))
    after_seq = params.after_seq or 0

    def attempt(last: bool) -> ReadResult | None:
        record = process.log
        chunks, next_seq = record.read(after_seq, params.max_bytes)
        ready = chunks or record.closed or (record.exited and after_seq < next_seq - 1)
        if not (ready or last):
            return None
        return ReadResult(
            chunks=[_chunk(chunk) for chunk in chunks],
            next_seq=next_seq,
            exited=record.exited,
            exit_code=record.exit_code,
            closed=record.closed,
            failure=process.failure,
            sandbox_denied=process.denied(connection.extensions),
        )

    return _long_poll(connection.server.loop, process, (params.wait_ms or 0) / 1000, attempt)


def _chunk(chunk: Chunk) -> OutputChunk:
    return OutputChunk(chunk.seq, chunk.stream, base64.encode(chunk.data))


def wait(connection: Connection, params: WaitParams) -> WaitResult | Pending[WaitResult]:
    """The end of a process, or of the time given."""
    process = _require(connection, params.process_id)
    if process.state is State.STARTING:
        return _once_started(process, lambda: wait(connection, params))
    for_exit = params.until == "exited"

    def attempt(last: bool) -> WaitResult | None:
        record = process.log
        reached = record.closed or (for_exit and record.exited)
        if not (reached or last):
            return None
        return WaitResult(
            exited=record.exited,
            exit_code=record.exit_code,
            closed=record.closed,
            next_seq=record.next_seq,
            timed_out=not reached,
            failure=process.failure,
            sandbox_denied=process.denied(connection.extensions),
        )

    seconds = MAX_WAIT_SECONDS if params.wait_ms is None else params.wait_ms / 1000
    return _long_poll(connection.server.loop, process, seconds, attempt)


def _once_started(process: ManagedProcess, ask: Callable[[], T | Pending[T]]) -> Pending[T]:
    """Ask when there is somebody to ask, unless nobody wants to know any more."""
    wanted = True

    def forget() -> None:
        nonlocal wanted
        wanted = False

    pending: Pending[T] = after(process.started, lambda: ask() if wanted else Pending())
    pending.on_cancel = forget
    return pending


def _long_poll(
    loop: Loop, process: ManagedProcess, seconds: float, attempt: Callable[[bool], T | None]
) -> T | Pending[T]:
    """Try now, at every change of the process, and for the last time when the time is over."""
    result = attempt(seconds <= 0)
    if result is not None:
        return result
    pending: Pending[T] = Pending()
    changed = process.changed()

    def again(_: Pending[None]) -> None:
        nonlocal changed
        result = attempt(False)
        if result is not None:
            finish(result)
        else:
            changed = process.changed()
            changed.then(again)

    def finish(result: T) -> None:
        stop()
        pending.resolve(result)

    def stop() -> None:
        timer.cancel()
        changed.cancel()

    timer = loop.call_later(min(seconds, MAX_WAIT_SECONDS), lambda: finish(cast("T", attempt(True))))
    changed.then(again)
    pending.on_cancel = stop
    return pending


def snapshot(connection: Connection, params: ProcessParams) -> SnapshotResult | Pending[SnapshotResult]:
    """All that is kept, joined."""
    process = _require(connection, params.process_id)
    if process.state is State.STARTING:
        return after(process.started, lambda: snapshot(connection, params))
    record = process.log
    return SnapshotResult(
        stdout=base64.encode(record.joined("stdout")),
        stderr=base64.encode(record.joined("stderr")),
        terminal=base64.encode(record.joined("pty")),
        truncated=record.dropped_bytes > 0,
        dropped_bytes=record.dropped_bytes,
        running=not record.exited,
        exited=record.exited,
        exit_code=record.exit_code,
        closed=record.closed,
        next_seq=record.next_seq,
    )


def pause_output(connection: Connection, params: ProcessParams) -> Any:
    """The client cannot take more of this one process; the others go on."""
    process = _session(connection).processes.get(params.process_id)
    if process is not None:
        process.hold_output(ON_REQUEST)
    return {}


def resume_output(connection: Connection, params: ProcessParams) -> Any:
    """It can again."""
    process = _session(connection).processes.get(params.process_id)
    if process is not None:
        process.release_output(ON_REQUEST)
    return {}


def acknowledge_output(connection: Connection, params: AcknowledgeParams) -> Any:
    """The client has received everything up to that number."""
    processes = _session(connection).processes
    process = processes.get(params.process_id)
    if process is not None:
        processes.acknowledge(process, min(params.seq, process.log.next_seq))
    return {}


def list_processes(connection: Connection, params: ListParams) -> ListResult:
    """Every process that is still remembered, of this session or of all."""
    own = _session(connection)
    sessions = connection.server.sessions.all() if params.all else [own]
    return ListResult([_listed(session, process) for session in sessions for process in session.processes])


def _listed(session: Session, process: ManagedProcess) -> ListedProcess:
    record = process.log
    return ListedProcess(
        process_id=process.id,
        session=session.id[:8],
        argv=process.spec.argv,
        cwd=path_to_uri(process.spec.cwd),
        tty=process.spec.tty,
        pid=process.pid if process.state is State.RUNNING else None,
        state=cast("Any", process.state.value),
        exit_code=record.exit_code,
        next_seq=record.next_seq,
        output_bytes=record.total_bytes,
        dropped_bytes=record.dropped_bytes,
        started_at_ms=int(process.started_at * 1000),
    )


# Writing -----------------------------------------------------------------------------------------


def write(connection: Connection, params: WriteParams) -> Any:
    """Bytes for stdin, each write id once."""
    try:
        data = base64.decode(params.chunk)
    except ValueError as error:
        raise invalid_params(str(error)) from None
    _check_write_id(params.write_id)
    process = _session(connection).processes.get(params.process_id)
    if process is None:
        return WriteResult("unknownProcess")
    if process.state is State.STARTING:
        return after(process.started, lambda: write(connection, params))
    try:
        status = process.write(data, params.write_id)
    except BrokenPipeError as error:
        raise internal_error(str(error)) from None
    return after(status, lambda: WriteResult(written(status)))


def written(status: Pending[WriteStatus]) -> WriteStatus:
    """What became of a write that may have had to wait."""
    try:
        return status.result()
    except BrokenPipeError as error:
        raise internal_error(str(error)) from None


def close_stdin(connection: Connection, params: CloseStdinParams) -> Any:
    """EOF for a pipe."""
    _check_write_id(params.write_id)
    process = _session(connection).processes.get(params.process_id)
    if process is None:
        return WriteResult("unknownProcess")
    if process.state is State.STARTING:
        return after(process.started, lambda: close_stdin(connection, params))
    if process.spec.tty:
        raise invalid_request(f"process {params.process_id} is attached to a terminal")
    return WriteResult(process.close_stdin())


def _check_write_id(write_id: str | None) -> None:
    if write_id == "":
        raise invalid_params("writeId must not be empty")


def resize(connection: Connection, params: ResizeParams) -> Any:
    """A new size for the terminal."""
    _check_size(params.rows, params.cols)
    process = _require(connection, params.process_id)
    if process.state is State.STARTING:
        return after(process.started, lambda: resize(connection, params))
    if not process.spec.tty:
        raise invalid_request(f"process {params.process_id} is not attached to a terminal")
    process.resize(params.rows, params.cols)
    return {}


# Signals -----------------------------------------------------------------------------------------


def send_signal(connection: Connection, params: SignalParams) -> Any:
    """To the whole process group. Not an error when there is nobody to hear it."""
    number = _signal_number(params.signal)
    process = _session(connection).processes.get(params.process_id)
    if process is None:
        return {}
    if process.state is State.STARTING:
        return after(process.started, lambda: send_signal(connection, params))
    try:
        process.signal(number)
    except OSError as error:
        raise internal_error(f"failed to signal process: {error.strerror} (os error {error.errno})") from None
    return {}


def _signal_number(name: str) -> int:
    if name == "interrupt":
        return signal.SIGINT
    if name.startswith("SIG") and not name.startswith("SIG_"):
        number = getattr(signal, name, None)
        if isinstance(number, signal.Signals):
            return number
    raise invalid_params(
        f"unknown variant `{name}`, expected `interrupt` or the name of a signal such as `SIGUSR1`"
    )


def terminate(connection: Connection, params: TerminateParams) -> Any:
    """The whole tree, at once or after asking."""
    process = _session(connection).processes.get(params.process_id)
    if process is None:
        return TerminateResult(running=False)
    if process.state is State.STARTING:
        return after(process.started, lambda: terminate(connection, params))
    mode = params.mode
    if process.state is not State.RUNNING:
        if mode is None:
            return TerminateResult(running=False)
        # Who asks in so many words also wants what the process has left behind.
        left = process.kill_tree()
        return after(left, lambda: TerminateResult(False, left.result()))
    if mode is not None and mode.type == "graceful" and mode.timeout_ms:
        process.terminate_gracefully(min(mode.timeout_ms / 1000, MAX_WAIT_SECONDS))
        return TerminateResult(running=True)
    killed = process.terminate()
    # Clients of the reference compare this answer member by member: only those that know it get a count.
    counted = mode is not None or connection.extensions
    return after(killed, lambda: TerminateResult(True, killed.result() if counted else UNSET))


def terminate_all(connection: Connection, params: NoParams) -> Any:
    """Everything this session ever started, whoever has exited since."""
    del params
    killed = _session(connection).processes.terminate_all()
    return after(killed, lambda: {"killed": killed.result()})


# Whose -------------------------------------------------------------------------------------------


def _session(connection: Connection) -> Session:
    session = connection.session
    if session is None:
        raise invalid_request("session has been resumed by another connection")
    return session


def _require(connection: Connection, process_id: str) -> ManagedProcess:
    process = _session(connection).processes.get(process_id)
    if process is None:
        raise invalid_request(f"unknown process id {process_id}")
    return process


METHODS: Final = {
    "process/start": Method(StartParams, start, "exec"),
    "process/read": Method(ReadParams, read, "exec", long_poll=True, takes_turn=True),
    "process/write": Method(WriteParams, write, "exec"),
    "process/signal": Method(SignalParams, send_signal, "exec", control=True),
    "process/terminate": Method(TerminateParams, terminate, "exec", control=True),
    "process/closeStdin": Method(CloseStdinParams, close_stdin, "exec"),
    "process/resize": Method(ResizeParams, resize, "exec"),
    "process/wait": Method(WaitParams, wait, "exec", long_poll=True),
    "process/snapshot": Method(ProcessParams, snapshot, "exec"),
    "process/terminateAll": Method(NoParams, terminate_all, "exec", control=True),
    "process/pauseOutput": Method(ProcessParams, pause_output, "exec", control=True),
    "process/resumeOutput": Method(ProcessParams, resume_output, "exec", control=True),
    "process/acknowledgeOutput": Method(AcknowledgeParams, acknowledge_output, "exec", control=True),
    "process/list": Method(ListParams, list_processes, "exec", extension=True, without_params=True),
}
