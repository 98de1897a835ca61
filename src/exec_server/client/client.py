"""A machine across a connection: the handshake, the processes started through it, and a clean end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from uuid import uuid4

import msgspec
from msgspec import Raw

from ..services import Completed, Output
from ..transport.channel import Channel, Receiver
from ..wire import binary
from ..wire.handshake import InitializeParams
from ..wire.process import EnvPolicy, ListedProcess, ListResult, PtySize, StartParams, StartResult
from ..wire.uri import path_to_uri
from .errors import ConnectionLost, ExecServerError, ProtocolError, ServerRejected, Unsupported
from .process import RemoteProcess, decode_event
from .rpc import Rpc

if TYPE_CHECKING:
    from .files import RemoteFiles

__all__ = ["Client", "ConnectOptions", "InitializeReply", "connect"]

T = TypeVar("T")

CLEANUP_SECONDS: Final = 5.0
"""How long leaving the context may take for what the server has to do."""

INHERIT_ALL: Final = EnvPolicy(
    inherit="all", ignore_default_excludes=True, exclude=[], set={}, include_only=[]
)
"""The environment of the server, whole."""

Dialer = Callable[[Receiver], Awaitable[Channel]]
"""Opens a channel that delivers to the given receiver."""


class ConnectOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to introduce ourselves. Times are seconds."""

    client_name: str = "exec-server-python"
    initialize_timeout: float = 10.0
    resume_session_id: str | None = None
    binary_output: bool = True
    """Take output as binary frames where the server offers them."""


class InitializeReply(msgspec.Struct, rename="camel"):
    """What a server says of itself. Only the session id is certain."""

    session_id: str
    environment_info: dict[str, Any] | None = None
    binary_output: bool = False


class Client:
    """A session on a server. Leaving its context ends every process started through it."""

    def __init__(self, options: ConnectOptions) -> None:
        self._options = options
        self._rpc = Rpc(self._notified, self._binary, self._lost)
        self._processes: dict[str, RemoteProcess] = {}
        self._ids = count(1)
        self._capabilities: dict[str, bool] = {}
        self._after_close: list[Callable[[], Awaitable[None]]] = []
        self._background: set[asyncio.Future[Any]] = set()
        self._listeners: dict[str, tuple[Callable[[Raw], None], Callable[[str], None]]] = {}
        self._started = False
        self.session_id = ""
        self.info: dict[str, Any] = {}
        """`environment/info` of the server."""

    # The connection ------------------------------------------------------------------------------

    async def open(self, dial: Dialer) -> None:
        """Connect and shake hands."""
        self._rpc.use(await dial(self._rpc))
        options = self._options
        params = InitializeParams(
            options.client_name,
            options.resume_session_id,
            lifecycle_events=None,
            extensions=True,
            binary_output=options.binary_output or None,
        )
        try:
            async with asyncio.timeout(options.initialize_timeout):
                reply = await self.call("initialize", params, InitializeReply)
                self._rpc.notify("initialized", {})
                info = reply.environment_info
                if info is None:
                    info = await self._ask_info()
        except TimeoutError:
            self._rpc.close()
            raise TimeoutError(
                "timed out waiting for exec-server initialize handshake after"
                f" {options.initialize_timeout:g}s"
            ) from None
        except BaseException:
            self._rpc.close()
            raise
        if options.resume_session_id not in (None, reply.session_id):
            self._rpc.close()
            raise ProtocolError(f"exec-server initialized an unexpected session {reply.session_id}")
        self.session_id = reply.session_id
        self.info = info
        capabilities = info.get("capabilities")
        self._capabilities = capabilities if isinstance(capabilities, dict) else {}

    async def _ask_info(self) -> dict[str, Any]:
        """Older servers do not send it along, and the oldest do not have it."""
        try:
            return await self.call("environment/info", None, dict[str, Any])
        except ServerRejected:
            return {}

    def has(self, capability: str) -> bool:
        """Whether the server announces a capability."""
        return self._capabilities.get(capability) is True

    @property
    def connected(self) -> bool:
        return not self._rpc.closed

    async def call(self, method: str, params: Any, kind: type[T], timeout: float | None = None) -> T:
        """Any method of the protocol, its result decoded as `kind`."""
        raw = await self._rpc.call(method, params, timeout)
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the answer to `{method}` is not what it should be: {error}") from None

    def tell(self, method: str, params: Any) -> None:
        """A call whose answer nobody waits for."""
        try:
            future = self._rpc.send(method, params)
        except ExecServerError:
            return
        self._background.add(future)
        future.add_done_callback(self._told)

    def _told(self, future: asyncio.Future[Any]) -> None:
        self._background.discard(future)
        if not future.cancelled():
            future.exception()

    def on_close(self, call: Callable[[], Awaitable[None]]) -> None:
        """Do this after the connection is closed, e.g. stop a server started for it."""
        self._after_close.append(call)

    def listen(self, method: str, receive: Callable[[Raw], None], lost: Callable[[str], None]) -> None:
        """Give the params of every notification of a method to `receive`, and the end to `lost`."""
        self._listeners[method] = (receive, lost)

    @cached_property
    def files(self) -> RemoteFiles:
        """The files of the machine."""
        from .files import RemoteFiles  # many clients only run commands

        return RemoteFiles(self)

    # Processes -----------------------------------------------------------------------------------

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
    ) -> RemoteProcess:
        """Start a command.

        With `env` alone the process gets exactly that; without it, the environment of the server; with
        both `env_policy` and `env`, what the policy inherits and `env` on top of it. `cwd` is a path or a
        file: URI, by default the server's own directory.
        """
        if isinstance(argv, str):
            raise TypeError('argv is a list of words; for a shell, say ["sh", "-c", command]')
        for text in (*argv, *(env or {}).keys(), *(env or {}).values()):
            if not isinstance(text, str):
                raise TypeError(f"words and variables are text, not {type(text).__name__}: {text!r}")
        size = None
        if tty and (rows is not None or cols is not None):
            if not self.has("processPtySize"):
                raise Unsupported("this server starts terminals with 24 rows and 80 columns only")
            size = PtySize(rows or 24, cols or 80)
        if env is None and env_policy is None:
            env_policy = INHERIT_ALL
        process = RemoteProcess(self, process_id or self._new_id(), tty=tty, stdin=stdin)
        params = StartParams(
            process_id=process.id,
            argv=list(argv),
            cwd=self._cwd(cwd),
            env=dict(env or {}),
            tty=tty,
            pipe_stdin=stdin and not tty,
            arg0=arg0,
            env_policy=env_policy,
            pty_size=size,
        )
        if process.id in self._processes:
            raise ValueError(f"session already registered for process {process.id}")
        self._processes[process.id] = process
        self._started = True
        try:
            await self.call("process/start", params, StartResult)
        except asyncio.CancelledError:
            # The server may have started it all the same; requests take effect in order.
            self._processes.pop(process.id, None)
            self.tell("process/terminate", {"processId": process.id})
            raise
        except BaseException:
            self._processes.pop(process.id, None)
            raise
        return process

    async def run(
        self, argv: Sequence[str], *, data: bytes | None = None, timeout: float | None = None, **options: Any
    ) -> Completed:
        """Start a command, give it `data` as its input, and wait: `start` and `communicate` in one."""
        async with await self.start(argv, stdin=data is not None, **options) as process:
            return await process.communicate(data, timeout)

    async def list(self, *, everybody: bool = False) -> list[ListedProcess]:
        """Every process the server still remembers, of this session or of everybody's."""
        if not self.has("processList"):
            raise Unsupported("this server cannot list its processes")
        result = await self.call("process/list", {"all": everybody}, ListResult)
        return result.processes

    def forget(self, process: RemoteProcess) -> None:
        """It has ended; its id may be used again."""
        if self._processes.get(process.id) is process:
            del self._processes[process.id]

    def _new_id(self) -> str:
        return f"{next(self._ids)}-{uuid4()}"

    def _cwd(self, cwd: str | None) -> str:
        if cwd is None:
            known = self.info.get("cwd")
            return known if isinstance(known, str) else "file:///"
        if cwd.startswith("file:"):
            return cwd
        if not cwd.startswith("/"):
            raise ValueError(
                f"cwd is an absolute path or a file: URI, not {cwd!r}: whose directory would it be in?"
            )
        return path_to_uri(cwd)

    # From the connection -------------------------------------------------------------------------

    def _notified(self, method: str, params: Raw) -> None:
        try:
            listener = self._listeners.get(method)
            if listener is not None:
                listener[0](params)
            decoded = decode_event(method, params)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"bad `{method}` notification: {error}") from None
        if decoded is not None:
            process_id, event = decoded
            process = self._processes.get(process_id)
            if process is not None:
                process.deliver(event.seq, event)  # type: ignore[union-attr]  # never Failed

    def _binary(self, message: bytes) -> None:
        frame = binary.decode(message)
        process = self._processes.get(frame.process_id)
        if process is not None:
            process.deliver(frame.seq, Output(frame.seq, frame.stream, bytes(frame.data)))

    def _lost(self, reason: str) -> None:
        text = f"exec-server transport disconnected: {reason}"
        for process in list(self._processes.values()):
            process.fail(text)
        for _, lost in list(self._listeners.values()):
            lost(text)

    # The end -------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End every process started here, then the connection. May be called more than once."""
        if not self._rpc.closed and self._started:
            try:
                async with asyncio.timeout(CLEANUP_SECONDS):
                    if self.has("processTerminateAll"):
                        # Also what processes that have ended left running in the background.
                        await self.call("process/terminateAll", None, dict[str, int])
                    await asyncio.gather(*(process.end() for process in list(self._processes.values())))
            except (TimeoutError, ConnectionLost, ServerRejected):
                pass
        self._rpc.close()
        calls, self._after_close = self._after_close, []
        for call in calls:
            await call()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def connect(dial: Dialer, options: ConnectOptions | None = None) -> Client:
    """A client over whatever the dialer opens."""
    client = Client(options or ConnectOptions())
    await client.open(dial)
    return client
