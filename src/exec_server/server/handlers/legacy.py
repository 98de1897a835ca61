"""`command/exec*`: the first dialect, on top of the same processes."""

from __future__ import annotations

from typing import Any, Final

from ...local.process import tree
from ...local.process.environ import child_environment
from ...local.process.process import ManagedProcess, State
from ...local.process.spawn import SpawnSpec
from ...loop import Pending, after
from ...wire import base64
from ...wire.errors import internal_error, invalid_params, invalid_request
from ...wire.legacy import LegacyExecParams, LegacyExecResult, LegacyWriteParams, LegacyWriteResult
from ...wire.process import ProcessParams, TerminateResult
from ...wire.uri import uri_to_path
from ..connection import Connection
from ..dispatch import Method
from ..voice import LegacyVoice
from .processes import written

__all__ = ["METHODS"]

MAX_TAGS: Final = 1024
"""Tags a connection remembers before it looks which of them anybody still carries."""


def execute(connection: Connection, params: LegacyExecParams) -> Pending[LegacyExecResult]:
    """Start a process that dies with this connection."""
    session, server = connection.session, connection.server
    if session is None:
        raise invalid_request("session has been resumed by another connection")
    if not server.limits.allow_direct:
        raise invalid_request("direct exec is disabled on this server")
    if not params.argv:
        raise invalid_params("argv must not be empty")
    if params.cwd.startswith("file:"):
        cwd = uri_to_path(params.cwd)
    elif params.cwd.startswith("/"):
        cwd = params.cwd
    else:
        raise invalid_params("cwd must be an absolute path")
    spec = SpawnSpec(
        argv=params.argv,
        cwd=cwd,
        env=child_environment(params.env, None, None, {}),
        tty=params.tty,
        pipe_stdin=False,
        arg0=params.arg0,
    )
    voice = LegacyVoice(session, server.metrics, params.process_id, server.loop)
    process = session.processes.start(params.process_id, spec, voice)

    def end() -> None:
        process.started.then(lambda _: process.terminate())

    if spec.tag is not None:
        _remember_tag(connection, spec.tag)
    connection.on_end.append(end)
    voice.on_exit = lambda: connection.on_end.remove(end)
    return after(process.started, lambda: _started(connection, process, voice))


def _remember_tag(connection: Connection, tag: int) -> None:
    """What background children a process leaves ends with the connection, too."""
    tags = connection.legacy_tags
    tags.add(tag)
    if len(tags) > MAX_TAGS:
        tags &= {tag, *(carried for _, carried in tree.processes())}


def _started(connection: Connection, process: ManagedProcess, voice: LegacyVoice) -> LegacyExecResult:
    try:
        process.started.result()
    except Exception:
        voice.on_exit()
        connection.server.metrics.processes_failed_total += 1
        raise
    return LegacyExecResult(process.id)


def write(connection: Connection, params: LegacyWriteParams) -> Any:
    """Bytes for a terminal, or for any stdin that is open."""
    try:
        data = base64.decode(params.chunk)
    except ValueError as error:
        raise invalid_params(str(error)) from None
    process = _find(connection, params.process_id)
    if process is None:
        raise invalid_request(f"unknown process id {params.process_id}")
    if process.state is State.STARTING:
        return after(process.started, lambda: write(connection, params))
    try:
        status = process.write(data, None)
    except BrokenPipeError as error:
        raise internal_error(str(error)) from None

    def finish() -> LegacyWriteResult:
        if written(status) == "stdinClosed":
            raise invalid_request(f"stdin is closed for process {params.process_id}")
        return LegacyWriteResult()

    return after(status, finish)


def terminate(connection: Connection, params: ProcessParams) -> Any:
    """Kill the whole tree."""
    process = _find(connection, params.process_id)
    if process is None:
        return TerminateResult(running=False)
    if process.state is State.STARTING:
        return after(process.started, lambda: terminate(connection, params))
    if process.state is not State.RUNNING:
        return TerminateResult(running=False)
    return after(process.terminate(), lambda: TerminateResult(running=True))


def _find(connection: Connection, process_id: str) -> ManagedProcess | None:
    return None if connection.session is None else connection.session.processes.get(process_id)


METHODS: Final = {
    "command/exec": Method(LegacyExecParams, execute, "exec", legacy=True),
    "command/exec/write": Method(LegacyWriteParams, write, "exec", legacy=True),
    "command/exec/terminate": Method(ProcessParams, terminate, "exec", control=True, legacy=True),
}
