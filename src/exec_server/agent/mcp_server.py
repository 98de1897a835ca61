"""An environment for any MCP client: its commands, terminals and files as tools.

All clients of one server share one set of commands: the newer protocol has no sessions, so a number that one
request was given must mean the same to the next, wherever it comes from. A machine that was lost for good is
connected to again by the next call.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import Struct

from .. import log
from ..client.errors import ExecServerError
from ..client.recovery import State
from ..version import __version__
from .confinement import Confinement, Mode
from .exec import ExecCommand, ToolError, WriteStdin, arguments
from .file_tools import FileTools
from .mcp_hints import tool_of
from .mcp_stdio import serve_streams
from .patch import PatchError
from .patching import APPLY_PATCH, PatchFailed, apply, prepare, report
from .screen import ScreenUnavailable
from .unified import Settings, UnifiedExec
from .unified_text import Policy, ToolOutput
from .unified_tools import exec_command_tool, write_stdin_tool

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

    from ..environments.environment import Environment

__all__ = ["McpTools", "Opener", "http_app", "mcp_server", "serve_stdio"]

T = TypeVar("T")

Opener = Callable[[], Awaitable["Environment"]]

OUTPUT_POLICY: Final = Policy("tokens", 10_000)
"""What a result may have; who knows which model is at the other end."""

MACHINE: Final = "machine"
"""The one environment's name inside; no client ever sees it."""

INSTRUCTIONS: Final = (
    "Runs commands and touches files on one machine. exec_command returns a session id for what goes on"
    " running; write_stdin types into it or looks again, screen shows what is on its terminal, terminate ends"
    " it. list_commands says what is running."
)

_SESSION: Final = {"session_id": {"type": "integer", "description": "The session id of a running command."}}


def _session_tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "name": name, "description": description, "parameters": parameters}


SESSION_TOOLS: Final = [
    _session_tool(
        "screen", "What is on the terminal of a running command that was started with tty=true.", _SESSION
    ),
    _session_tool("list_commands", "The commands that go on running, with their session ids.", {}),
    _session_tool("terminate", "End a running command and everything it has started.", _SESSION),
]


class _Session(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    session_id: int


class _Nothing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _ApplyPatch(Struct, frozen=True, kw_only=True):
    input: str


class _Machine(Mapping[str, Any]):
    """The environment under its one name, as UnifiedExec looks it up; connected to anew when it was lost."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._environment: Environment | None = None
        self._opening = asyncio.Lock()

    async def get_open(self) -> Environment:
        async with self._opening:
            known = self._environment
            if known is not None and known.state not in (State.FAILED, State.CLOSED):
                return known
            if known is not None:
                log.warning("the environment was lost; connecting again", environment=known.address)
                await known.close()
            self._environment = await self._opener()
            return self._environment

    async def close(self) -> None:
        if self._environment is not None:
            await self._environment.close()

    def __getitem__(self, name: str) -> Environment:
        if name != MACHINE or self._environment is None:
            raise KeyError(name)
        return self._environment

    def __iter__(self) -> Iterator[str]:
        return iter([MACHINE])

    def __len__(self) -> int:
        return 1


class McpTools:
    """The tools, apart from the protocol. Use it as a context: leaving it ends every command."""

    def __init__(self, opener: Opener, mode: Mode = "danger-full-access", *, network: bool = False) -> None:
        self._machine = _Machine(opener)
        self._mode: Mode = mode
        self._network = network
        self._ending: list[asyncio.Future[bool]] = []
        self._unified = UnifiedExec(
            self._machine,
            MACHINE,
            prepare=self._prepare,
            # A client that cannot see a terminal asks for its screen, so programs may paint.
            settings=Settings(tty_term="linux"),
        )

    async def __aenter__(self) -> McpTools:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._unified.close()
        await self._machine.close()

    async def open(self) -> None:
        """Connect to the machine, unless that is done; raises why it cannot be reached."""
        await self._machine.get_open()

    def definitions(self) -> list[dict[str, Any]]:
        """Every tool as models are told of it."""
        return [
            exec_command_tool(),
            write_stdin_tool(),
            *SESSION_TOOLS,
            APPLY_PATCH,
            *FileTools.definitions(),
        ]

    async def call(self, name: str, text: bytes) -> tuple[str, dict[str, Any] | None]:
        """What a tool answers, and the same as an object if it has one. ToolError says what went wrong."""
        try:
            environment = await self._machine.get_open()
        except (ExecServerError, OSError) as error:
            raise ToolError(f"the machine cannot be reached: {error}") from None
        confinement = self._confinement(environment)
        if name == "exec_command":
            return _said(await self._run(arguments(text, ExecCommand)))
        if name == "write_stdin":
            return _said(await self._unified.write_stdin(arguments(text, WriteStdin)))
        if name == "screen":
            return self._look(arguments(text, _Session).session_id)
        if name == "list_commands":
            arguments(text, _Nothing)
            return self._list()
        if name == "terminate":
            return await self._terminate(arguments(text, _Session).session_id), None
        if name == "apply_patch":
            return await _patch(arguments(text, _ApplyPatch).input, environment, confinement), None
        files = FileTools(confinement.files(environment))
        if name not in files:
            raise ToolError(f"there is no tool `{name}`")
        return await files.call(name, text), None

    async def _run(self, call: ExecCommand) -> ToolOutput:
        """Start a command. One whose caller goes away before it learns the session id is ended: nobody
        could ever talk to it."""
        call_id = f"mcp-{secrets.token_hex(8)}"
        try:
            return await self._unified.exec_command(call, call_id)
        except BaseException:
            for running in self._unified.running():
                if running.call_id == call_id:
                    self._ending = [task for task in self._ending if not task.done()]
                    self._ending.append(asyncio.ensure_future(self._unified.terminate(running.number)))
            raise

    def _list(self) -> tuple[str, dict[str, Any]]:
        running = self._unified.running()
        lines = [f"{one.number}  {'tty  ' if one.tty else ''}{one.command[-1]}" for one in running]
        commands = [
            {"session_id": one.number, "command": one.command, "cwd": one.cwd, "tty": one.tty}
            for one in running
        ]
        return "\n".join(lines) or "no command is running", {"commands": commands}

    async def _terminate(self, number: int) -> str:
        if all(one.number != number for one in self._unified.running()):
            raise ToolError(f"terminate failed: Unknown process id {number}")
        if not await self._unified.terminate(number):
            raise ToolError(f"terminate failed: process {number} could not be ended; see the server's log")
        return f"ended {number}"

    def _look(self, number: int) -> tuple[str, dict[str, Any]]:
        try:
            view = self._unified.screen(number)
        except ScreenUnavailable as error:
            raise ToolError(f"screen failed: {error}") from None
        row, column = view.cursor
        where = f"cursor: row {row + 1}, column {column + 1}"
        title = f"title: {view.title}\n" if view.title else ""
        note = "" if view.complete else "[some of what was on it before is not known]\n"
        return f"{title}{where}\n{note}{view.text}", msgspec.to_builtins(view)

    def _confinement(self, environment: Environment) -> Confinement:
        return Confinement(self._mode, environment.info.cwd or "file:///", network=self._network)

    async def _prepare(self, request: Any, call: ExecCommand) -> Any:
        return await self._confinement(self._machine[MACHINE]).prepare(request, call)


def _said(output: ToolOutput) -> tuple[str, dict[str, Any]]:
    return output.text(OUTPUT_POLICY), output.structured(OUTPUT_POLICY)


async def _patch(text: str, environment: Environment, confinement: Confinement) -> str:
    began = time.monotonic()
    files = confinement.files(environment)
    try:
        plan = await prepare(text, files, environment.info.cwd or "file:///")
        await apply(plan, files)
    except PatchError as error:
        raise ToolError(str(error)) from None
    except PatchFailed as error:
        raise ToolError(report(time.monotonic() - began, 1, str(error))) from None
    return report(time.monotonic() - began, 0, plan.summary)


# The protocol ------------------------------------------------------------------------------------


def mcp_server(tools: McpTools, name: str) -> Server[Any]:
    """The tools as an MCP server; `name` says which machine it is."""
    import mcp_types as types
    from mcp import MCPError
    from mcp.server.lowlevel import Server

    offered = [tool_of(definition) for definition in tools.definitions()]
    names = {tool.name for tool in offered}

    async def list_tools(_: Any, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=offered)

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in names:
            raise MCPError(code=types.INVALID_PARAMS, message=f"Unknown tool: {params.name}")
        call = tools.call(params.name, msgspec.json.encode(params.arguments or {}))
        try:
            text, structured = await _while_connected(call, _gone(context.request))
        except ToolError as error:
            return types.CallToolResult(
                content=[types.TextContent(type="text", text=str(error))], is_error=True
            )
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=text)], structured_content=structured
        )

    return Server(
        "exec-server",
        version=__version__,
        title=f"exec-server: {name}",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def serve_stdio(tools: McpTools, name: str) -> None:
    """Serve whoever is at the other end of stdin and stdout, until stdin ends."""
    server = mcp_server(tools, name)
    async with tools:
        await serve_streams(server)


def http_app(
    tools: McpTools, name: str, host: str, token: str | None, ready: Callable[[], None] = lambda: None
) -> Any:
    """An ASGI application that serves `/mcp`. With a token, only those who send it as a bearer token.

    `ready` is called when requests will be answered; every command ends with the application.
    """
    from mcp.server.transport_security import TransportSecuritySettings

    server = mcp_server(tools, name)
    # A page in a browser is kept out by its Origin on loopback, and by the token anywhere else.
    security = None if token is None else TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(host=host, transport_security=security)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(asgi: Any) -> AsyncIterator[Any]:
        async with tools, inner(asgi) as state:
            ready()
            yield state

    app.router.lifespan_context = lifespan
    watched = _Watched(app)
    return watched if token is None else _Guarded(watched, token)


GONE: Final = "exec_server.gone"
"""Where a request's scope says that its client has gone."""


class _Watched:
    """An ASGI application whose requests know when their client goes away.

    The older protocol lets a call go on without its client, in case that comes back for the answer. Here
    it could not: answers are not kept.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gone = scope[GONE] = asyncio.Event()

        async def watched() -> Any:
            message = await receive()
            if message["type"] == "http.disconnect":
                gone.set()
            return message

        await self._app(scope, watched, send)


def _gone(request: Any) -> asyncio.Event | None:
    found = getattr(request, "scope", {}).get(GONE)
    return found if isinstance(found, asyncio.Event) else None


async def _while_connected(call: Coroutine[Any, Any, T], gone: asyncio.Event | None) -> T:
    """What a call gives; it is cancelled when its client goes away."""
    if gone is None:
        return await call
    work = asyncio.ensure_future(call)
    leaving = asyncio.ensure_future(gone.wait())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ToolError("the client has gone")
        return work.result()
    finally:
        work.cancel()
        leaving.cancel()


class _Guarded:
    """An ASGI application for those who know the token."""

    def __init__(self, app: Any, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not self._is_allowed(scope["headers"]):
            headers = [(b"www-authenticate", b"Bearer"), (b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b"a bearer token is needed\n"})
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, headers: list[tuple[bytes, bytes]]) -> bool:
        import hmac

        given = next((value for key, value in headers if key == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)
