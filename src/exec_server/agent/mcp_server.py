"""An environment for any MCP client: its commands, terminals and files as tools.

All clients of one server share one set of commands: the newer protocol has no sessions, so a number that one
request was given must mean the same to the next, wherever it comes from. A machine that was lost for good is
connected to again by the next call.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from .. import log
from ..client.errors import ExecServerError
from ..client.recovery import State
from ..version import __version__
from .confinement import Confinement, Mode
from .exec import ExecCommand, ToolError, WriteStdin, arguments
from .file_tools import FileTools
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

Opener = Callable[[], Awaitable["Environment"]]

OUTPUT_POLICY: Final = Policy("tokens", 10_000)
"""What a result may have; who knows which model is at the other end."""

MACHINE: Final = "machine"
"""The one environment's name inside; no client ever sees it."""

INSTRUCTIONS: Final = (
    "Runs commands and touches files on one machine. exec_command returns a session id for what goes on"
    " running; write_stdin types into it or looks again, screen shows what is on its terminal."
)

SCREEN: Final[dict[str, Any]] = {
    "type": "function",
    "name": "screen",
    "description": "What is on the terminal of a running command that was started with tty=true.",
    "parameters": {
        "type": "object",
        "properties": {
            "session_id": {"type": "integer", "description": "The session id that exec_command returned."}
        },
        "required": ["session_id"],
        "additionalProperties": False,
    },
}


class _Screen(Struct, frozen=True, kw_only=True):
    session_id: int


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
            SCREEN,
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
            call = arguments(text, ExecCommand)
            return _said(await self._unified.exec_command(call, f"mcp-{secrets.token_hex(8)}"))
        if name == "write_stdin":
            return _said(await self._unified.write_stdin(arguments(text, WriteStdin)))
        if name == "screen":
            return self._look(arguments(text, _Screen).session_id)
        if name == "apply_patch":
            return await _patch(arguments(text, _ApplyPatch).input, environment, confinement), None
        files = FileTools(confinement.files(environment))
        if name not in files:
            raise ToolError(f"there is no tool `{name}`")
        return await files.call(name, text), None

    def _look(self, number: int) -> tuple[str, dict[str, Any]]:
        try:
            view = self._unified.screen(number)
        except ScreenUnavailable as error:
            raise ToolError(f"screen failed: {error}") from None
        except ToolError as error:
            raise ToolError(str(error).replace("write_stdin failed", "screen failed")) from None
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

    offered = [
        types.Tool(name=tool["name"], description=tool["description"], input_schema=tool["parameters"])
        for tool in tools.definitions()
    ]
    names = {tool.name for tool in offered}

    async def list_tools(_: Any, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=offered)

    async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in names:
            raise MCPError(code=types.INVALID_PARAMS, message=f"Unknown tool: {params.name}")
        try:
            text, structured = await tools.call(params.name, msgspec.json.encode(params.arguments or {}))
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
    from mcp.server.stdio import stdio_server

    server = mcp_server(tools, name)
    async with tools, stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


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
    return app if token is None else _Guarded(app, token)


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
