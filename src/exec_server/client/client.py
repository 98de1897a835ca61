"""A machine across a connection: the processes started through it, its files, its HTTP, and a clean end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from msgspec import Raw

from ..services import Completed, Output
from ..wire import binary
from ..wire.process import (
    EnvPolicy,
    ListedProcess,
    ListResult,
    Metadata,
    PtySize,
    ReadResult,
    SpawnMode,
    StartParams,
    StartResult,
)
from ..wire.uri import path_to_uri
from .errors import (
    CommunicateTimeout,
    ConnectionLost,
    ExecServerError,
    ProtocolError,
    Recovering,
    ServerRejected,
    Unsupported,
)
from .handshake import ConnectOptions
from .process import RemoteProcess, check_timeout
from .process_events import ProcessEvents, decode_event
from .recovery import State
from .rpc import Rpc, decoded
from .session import Dialer, Session

if TYPE_CHECKING:
    from ..wire.sandbox import SandboxContext
    from .files import RemoteFiles
    from .http import RemoteHttp

__all__ = ["Client", "ConnectOptions", "Dialer", "State", "connect"]

CLEANUP_SECONDS: Final = 5.0
"""How long leaving the context may take for what the server has to do."""

CATCHING_UP: Final = 256
"""Processes asked at once what was missed; fewer than the calls one connection carries."""

CATCH_UP_BYTES: Final = 512 * 1024
"""Output asked for at once where the server keeps what was not acknowledged, which may be a lot: what has
arrived stays, should the connection break again, and a slow line shows soon that it is alive."""

SMALLEST_PART_BYTES: Final = 8 * 1024
"""What is asked for at once where connections break before more arrives. One chunk always comes."""

MAX_TERMINAL_SIDE: Final = 65535
"""Rows or columns: what the kernel's and the protocol's 16 bits hold."""

INHERIT_ALL: Final = EnvPolicy(
    inherit="all", ignore_default_excludes=True, exclude=[], set={}, include_only=[]
)
"""The environment of the server, whole."""


class Client(Session):
    """A session on a server. Leaving its context ends every process started through it."""

    def __init__(self, options: ConnectOptions) -> None:
        super().__init__(options)
        self._processes: dict[str, RemoteProcess] = {}
        self._doomed: dict[str, None] = {}
        self._ids = count(1)
        self._started = False
        self._part: int | None = None
        """What to ask for at first, if the last attempt to catch up failed."""

    @cached_property
    def files(self) -> RemoteFiles:
        """The files of the machine."""
        from .files import RemoteFiles  # many clients only run commands

        return RemoteFiles(self)

    @cached_property
    def http(self) -> RemoteHttp:
        """HTTP requests made from the machine."""
        from .http import RemoteHttp

        return RemoteHttp(self)

    # Processes -----------------------------------------------------------------------------------

    async def start(
        self,
        argv: Iterable[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
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
    ) -> RemoteProcess:
        """Start a command.

        With `env` alone the process gets exactly that; without it, the environment of the server; with
        both `env_policy` and `env`, what the policy inherits and `env` on top of it. `cwd` is a path or a
        file: URI, by default the server's own directory.

        `spawn="prepared"` says that everything is decided already: `env` is needed then, and is all the
        variables there are; `env_policy` and `sandbox` would leave something to decide. To a server that
        does not tell kinds of starts apart it is a start like any other.

        `metadata` says for which thread and which call it is; the command finds that among its variables.
        """
        if isinstance(argv, str | bytes) or not isinstance(argv, Iterable):
            raise TypeError('argv is a list of words; for a shell, say ["sh", "-c", command]')
        words = list(argv)
        for text in (*words, *(env or {}).keys(), *(env or {}).values()):
            if not isinstance(text, str):
                raise TypeError(f"words and variables are text, not {type(text).__name__}: {text!r}")
        size = None
        if tty and (rows is not None or cols is not None):
            if not self.has("processPtySize"):
                raise Unsupported("this server starts terminals with 24 rows and 80 columns only")
            size = _terminal_size(24 if rows is None else rows, 80 if cols is None else cols)
        if spawn == "prepared":
            if env is None:
                raise ValueError(
                    "a prepared start inherits nothing: say with `env` which variables there are"
                )
            if env_policy is not None or sandbox is not None:
                raise ValueError("a prepared start carries no `env_policy` and no `sandbox`")
        if env is None and env_policy is None:
            env_policy = INHERIT_ALL
        if process_id is None:
            process_id = self._new_id()
        process = RemoteProcess(self, process_id, tty=tty, stdin=stdin)
        params = StartParams(
            process_id=process.id,
            argv=words,
            cwd=self._cwd(cwd),
            env=dict(env or {}),
            tty=tty,
            pipe_stdin=stdin and not tty,
            arg0=arg0,
            env_policy=env_policy,
            pty_size=size,
            sandbox=sandbox,
            spawn=spawn if self.has("processSpawnModes") else None,
            metadata=metadata,
        )
        if self._state is not State.CONNECTED:
            await self._until_connected()
        if process.id in self._processes:
            raise ValueError(
                f"the process id {process.id!r} is already in use: that process has not ended; give another,"
                " or none"
            )
        self._processes[process.id] = process
        self._doomed.pop(process.id, None)
        self._started = True
        try:
            await self.call("process/start", params, StartResult)
        except (asyncio.CancelledError, ConnectionLost):
            # The server may have started it all the same; requests take effect in order.
            self._processes.pop(process.id, None)
            self._doom(process.id)
            raise
        except BaseException:
            self._processes.pop(process.id, None)
            raise
        process.running = True
        return process

    def _doom(self, process_id: str) -> None:
        """Nobody has a handle to this process, which may or may not have been started: end it."""
        self._doomed[process_id] = None
        if self._state is State.CONNECTED:
            self._send_doom(self._rpc, process_id)

    def _send_doom(self, link: Rpc, process_id: str) -> None:
        try:
            answer = link.send("process/terminate", {"processId": process_id})
        except ExecServerError:
            return  # the next connection gets it

        def answered(done: asyncio.Future[Raw]) -> None:
            if not done.cancelled() and not isinstance(done.exception(), ConnectionLost):
                self._doomed.pop(process_id, None)

        answer.add_done_callback(answered)
        self._in_background(answer)

    async def run(
        self, argv: Iterable[str], *, data: bytes | None = None, timeout: float | None = None, **options: Any
    ) -> Completed:
        """Start a command, give it `data` as its input, and wait: `start` and `communicate` in one.

        The time is for both. If it is over, that is so whatever the server says: what may still run is
        ended when it answers.
        """
        check_timeout(timeout)
        deadline = None if timeout is None else self._loop.time() + timeout
        try:
            async with asyncio.timeout_at(deadline) as limit:
                process = await self.start(argv, stdin=data is not None, **options)
        except TimeoutError:
            if timeout is None or not limit.expired():
                raise
            raise CommunicateTimeout(timeout, None) from None
        left = None if deadline is None else max(deadline - self._loop.time(), 0.0)
        try:
            async with process:
                try:
                    return await process.communicate(data, left)
                except CommunicateTimeout:
                    if not process.ended:
                        self._processes.pop(process.id, None)
                        self._doom(process.id)
                        process.fail("the time was over, and the server did not answer")
                    raise
        except CommunicateTimeout as error:
            raise CommunicateTimeout(timeout or 0.0, error.output) from None

    async def list(self, *, everybody: bool = False) -> list[ListedProcess]:
        """Every process the server still remembers, of this session or of everybody's."""
        if not self.has("processList"):
            raise Unsupported("this server cannot list its processes")
        result = await self.call("process/list", {"all": everybody}, ListResult)
        return result.processes

    def forget(self, process: ProcessEvents) -> None:
        """It has ended; its id may be used again."""
        if self._processes.get(process.id) is process:
            del self._processes[process.id]

    def _new_id(self) -> str:
        return f"{next(self._ids)}-{uuid4()}"

    def _cwd(self, cwd: str | os.PathLike[str] | None) -> str:
        if cwd is None:
            return self.info.cwd or "file:///"
        cwd = os.fspath(cwd)
        if not isinstance(cwd, str):
            raise TypeError(f"cwd is text or a path of text, not {type(cwd).__name__}: {cwd!r}")
        if cwd.startswith("file:"):
            return cwd
        if not cwd.startswith("/"):
            raise ValueError(
                f"cwd is an absolute path or a file: URI, not {cwd!r}: whose directory would it be in?"
            )
        return path_to_uri(cwd)

    # From the session ----------------------------------------------------------------------------

    def _notification(self, method: str, params: Raw) -> None:
        event_of = decode_event(method, params)
        if event_of is not None:
            process_id, event = event_of
            process = self._processes.get(process_id)
            if process is not None:
                process.deliver(event.seq, event)  # type: ignore[union-attr]  # never Failed

    def _binary(self, message: bytes | memoryview) -> None:
        if self._silence is not None:
            self._progress()
        frame = binary.decode(message)
        process = self._processes.get(frame.process_id)
        if process is not None:
            process.deliver(frame.seq, Output(frame.seq, frame.stream, bytes(frame.data)))

    def _before_attempt(self) -> None:
        for process in self._processes.values():
            process.expect_recovery()

    async def _catch_up(self, link: Rpc) -> None:
        """Let every process have what it missed. Only a broken connection is an error here."""
        for process_id in list(self._doomed):
            self._send_doom(link, process_id)
        processes = [process for process in self._processes.values() if process.running]
        for process in processes:
            if process.held:
                self._in_background(link.send("process/pauseOutput", {"processId": process.id}))
        held = {process: process.held for process in processes}
        room = asyncio.Semaphore(CATCHING_UP)
        part = self._part or (CATCH_UP_BYTES if self.has("processOutputAcks") else None)
        # Should it break before a part is through, a smaller one gets ahead.
        self._part = CATCH_UP_BYTES if part is None else max(part // 2, SMALLEST_PART_BYTES)
        await asyncio.gather(*(self._catch_up_one(link, process, room, part) for process in processes))
        self._part = None
        for process, was_held in held.items():
            if process.held != was_held and not process.ended:
                # Its reader fell behind, or caught up, while nothing could be told to the server.
                method = "process/pauseOutput" if process.held else "process/resumeOutput"
                self._in_background(link.send(method, {"processId": process.id}))

    async def _catch_up_one(
        self, link: Rpc, process: RemoteProcess, room: asyncio.Semaphore, part: int | None
    ) -> None:
        async with room:
            acknowledges = self.has("processOutputAcks")
            first = part
            try:
                more = True
                while more:
                    after = process.last_seq
                    params = {"processId": process.id, "afterSeq": after, "maxBytes": part, "waitMs": 0}
                    found = decoded("process/read", await link.call("process/read", params), ReadResult)
                    more = process.recover(found, part)
                    self._progress()
                    if part is not None and found.chunks:
                        self._part = first
                        part = min(part * 2, CATCH_UP_BYTES)
                    if acknowledges and not process.ended:
                        told = {"processId": process.id, "seq": process.last_seq}
                        self._in_background(link.send("process/acknowledgeOutput", told))
            except (ServerRejected, ProtocolError, ValueError) as error:
                self._in_background(link.send("process/terminate", {"processId": process.id}))
                process.fail(f"failed to recover process {process.id}: {error}")

    def _session_ended(self, text: str) -> None:
        for process in list(self._processes.values()):
            process.fail(text)

    async def _say_goodbye(self) -> None:
        if self._started:
            try:
                async with asyncio.timeout(CLEANUP_SECONDS):
                    await self._end_processes()
            except (TimeoutError, ServerRejected):
                pass  # the server ends them when the session's time is over

    async def _end_processes(self) -> None:
        while True:
            try:
                if self.has("processTerminateAll"):
                    # Also what processes that have ended left running in the background.
                    await self.call("process/terminateAll", None, dict[str, int])
                await asyncio.gather(*(process.end() for process in list(self._processes.values())))
            except ConnectionLost as error:
                if self._state is not State.RECOVERING or isinstance(error, Recovering):
                    return
            else:
                return


def _terminal_size(rows: int, cols: int) -> PtySize:
    for number in (rows, cols):
        if not 1 <= number <= MAX_TERMINAL_SIDE:
            raise ValueError(f"rows and cols are between 1 and {MAX_TERMINAL_SIDE}, not {number}")
    return PtySize(rows, cols)


async def connect(dial: Dialer, options: ConnectOptions | None = None) -> Client:
    """A client over whatever the dialer opens."""
    client = Client(options or ConnectOptions())
    await client.open(dial)
    return client
