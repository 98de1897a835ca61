"""Tool servers that a model may use, over stdio or HTTP, through the vendor's own client.

A server that does not start is left out, with a warning; one that is `required` keeps the run from beginning.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct

from .. import log
from ..client.errors import ExecServerError
from ..events.model import McpResult
from .mcp_blocks import keeping_blocks, restored
from .mcp_http import http_client
from .mcp_listing import listed, watch
from .mcp_outcome import McpOutcome, lost
from .mcp_process import ServerProcess

if TYPE_CHECKING:
    from mcp import Client

__all__ = ["ApprovalNeed", "McpServer", "McpServers", "McpTool", "RequiredServerDown"]

ApprovalNeed = Literal["auto", "prompt", "approve"]
"""Whether a call needs approval: by what the tool says of itself, always, or never. The reference's words."""

STARTUP_SECONDS: Final = 30.0
TOOL_SECONDS: Final = 120.0

STOP_SECONDS: Final = 5.0
"""How long a server gets to end by itself, and how long to be ended."""

MAX_NAME: Final = 64
"""Longest name of a tool that models take."""

MAX_INSTRUCTIONS: Final = 16 * 1024
"""Most characters of what a server says of how to use it."""

MAX_SHOWN: Final = 1000
"""Most of what is no argument that the model is shown again."""

PROTOCOL_KEYS: Final = "io.modelcontextprotocol/"

_UNFIT: Final = re.compile(r"[^A-Za-z0-9_-]")


class RequiredServerDown(ExecServerError):
    """A tool server that the run cannot do without did not start."""


class McpServer(Struct, frozen=True, kw_only=True):
    """How to get at a server: a command to start, or the URL of one that runs."""

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = {}
    startup_seconds: float = STARTUP_SECONDS
    tool_seconds: float = TOOL_SECONDS
    required: bool = False
    approval: ApprovalNeed = "auto"
    """Whether calls of its tools need approval; `tool_approvals` says otherwise for some, by their names."""
    tool_approvals: Mapping[str, ApprovalNeed] = {}
    enabled_tools: tuple[str, ...] | None = None
    """The only tools of it that are offered; None are all."""
    disabled_tools: tuple[str, ...] = ()
    """Tools of it that are not offered, also if they are enabled."""

    def offers(self, tool: str) -> bool:
        """Whether a tool of it is one for the model."""
        enabled = self.enabled_tools is None or tool in self.enabled_tools
        return enabled and tool not in self.disabled_tools


class McpTool(Struct, frozen=True):
    """A tool of a server."""

    server: str
    name: str
    offered: dict[str, Any]
    """How models are told of it."""
    needs_approval: bool


class McpServers:
    """The servers of a run. Use it as a context; inside, `tools` is what they offer."""

    def __init__(self, servers: list[McpServer]) -> None:
        self._servers = servers
        self._running: dict[str, _Running] = {}
        self.tools: dict[str, McpTool] = {}
        """By the name a model calls it."""
        self.warnings: list[str] = []

    async def __aenter__(self) -> McpServers:
        started = [_Running(server) for server in self._servers]
        outcomes = await asyncio.gather(*(one.start() for one in started), return_exceptions=True)
        try:
            for one, outcome in zip(started, outcomes, strict=True):
                self._admit(one, outcome)
        except BaseException:
            await asyncio.gather(*(one.stop() for one in started))
            raise
        self._offer()
        return self

    def _admit(self, one: _Running, outcome: Any) -> None:
        name = one.server.name
        if not isinstance(outcome, BaseException):
            self._running[name] = one
            return
        if not isinstance(outcome, Exception):
            raise outcome
        reason = _reason(outcome)
        if one.server.required:
            raise RequiredServerDown(f"required MCP server `{name}` failed to start: {reason}")
        self._warn(f"MCP server `{name}` failed to start: {reason}")

    def _offer(self) -> None:
        """Make `tools` what the servers have now."""
        self.tools.clear()
        for name, one in self._running.items():
            for tool in filter(lambda tool: one.server.offers(tool["name"]), one.tools):
                own = tool["name"]
                called = _UNFIT.sub("_", f"mcp__{name}__{own}")[:MAX_NAME]
                if called in self.tools:
                    self._warn(f"MCP tool `{own}` of `{name}` is left out: `{called}` is taken")
                    continue
                offered = {
                    "type": "function",
                    "name": called,
                    "description": tool.get("description") or "",
                    "strict": False,
                    "parameters": tool["inputSchema"],
                }
                self.tools[called] = McpTool(name, own, offered, _needs_approval(one.server, tool))
            for warning in one.warnings:
                self._warn(f"MCP server `{name}`: {warning}")

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    @property
    def instructions(self) -> dict[str, str]:
        """What servers whose tools are offered say of how to use them, by their names."""
        heard = {tool.server for tool in self.tools.values()}
        said = {name: one.instructions for name, one in self._running.items() if name in heard}
        return {name: text for name, text in said.items() if text}

    async def refresh(self) -> list[str]:
        """Ask again those that have said that they have other tools now; what is new to warn of."""
        known = len(self.warnings)
        changed = [one for one in self._running.values() if one.is_changed]
        if changed:
            await asyncio.gather(*(one.list_again() for one in changed))
            self._offer()
        return self.warnings[known:]

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(one.stop() for one in self._running.values()))

    async def call(self, server: str, tool: str, arguments: Any) -> McpOutcome:
        """Call a tool. Nothing is raised for what the server does: that is part of the outcome."""
        return await self._running[server].call(tool, arguments)


def _needs_approval(server: McpServer, tool: Mapping[str, Any]) -> bool:
    """What the configuration says; `auto` goes by what the tool says of itself, and silence is no comfort."""
    said = server.tool_approvals.get(tool["name"], server.approval)
    if said != "auto":
        return said == "prompt"
    hints = tool.get("annotations")
    hints = hints if isinstance(hints, Mapping) else {}
    if hints.get("destructiveHint") is True:
        return True
    if hints.get("readOnlyHint") is True:
        return False
    return hints.get("destructiveHint") is not False or hints.get("openWorldHint") is not False


class _Running:
    """One server, in a task of its own: its connection must be closed by the task that opened it."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.tools: list[dict[str, Any]] = []
        self.instructions = ""
        self.warnings: list[str] = []
        self.is_changed = False
        """Whether it has said that it has other tools now."""
        self._client: Client | None = None
        self._session_lost = False
        self._beginning_again = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._process = (
            ServerProcess(server.command, server.args, server.env, server.cwd) if server.command else None
        )

    async def start(self) -> None:
        self._stopping = asyncio.Event()
        self._session_lost = False
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(ready))
        try:
            async with asyncio.timeout(self.server.startup_seconds):
                await asyncio.shield(ready)
        except TimeoutError:
            await self.stop()
            raise TimeoutError(f"no answer within {self.server.startup_seconds:g} s") from None

    async def _run(self, ready: asyncio.Future[None]) -> None:
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(self._connection(stack))
                self.tools = await listed(client, self.warnings.append)
                self.instructions = (client.instructions or "")[:MAX_INSTRUCTIONS]
                self._client = client
                watching = asyncio.create_task(watch(client, self._change))
                stack.push_async_callback(_ended, watching)
                ready.set_result(None)
                await self._stopping.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            ended = self._process.how_it_ended() if self._process is not None else None
            reason = ended or _reason(error)
            if not ready.done():
                ready.set_exception(RuntimeError(reason))
            elif not self._stopping.is_set():
                log.warning("MCP server is lost", server=self.server.name, error=reason)
        finally:
            self._client = None
            if not ready.done():
                ready.cancel()

    def _connection(self, stack: AsyncExitStack) -> Client:
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        server = self.server
        transport: Any
        if server.url is not None:
            http = http_client(server.headers, server.tool_seconds, self._lose_session)
            stack.push_async_callback(http.aclose)
            transport = streamable_http_client(server.url, http_client=http)
        elif self._process is not None:
            transport = self._process.connected()
        else:
            raise ValueError("neither a command nor a URL")
        return Client(keeping_blocks(transport, self.warnings.append), message_handler=self._heard)

    def _lose_session(self) -> None:
        self._session_lost = True

    async def _heard(self, message: Any) -> None:
        import mcp_types as types

        if isinstance(message, types.ToolListChangedNotification):
            self._change()

    def _change(self) -> None:
        self.is_changed = True

    async def list_again(self) -> None:
        """Learn which tools it has now; if that does not work, they are those it had."""
        self.is_changed = False
        client = self._client
        if client is None:
            return
        try:
            async with asyncio.timeout(self.server.startup_seconds):
                self.tools = await listed(client, self.warnings.append)
        except Exception as error:  # whatever a server or its client does must not end the turn
            self.warnings.append(f"its tools could not be listed again: {_reason(error)}")

    async def stop(self) -> None:
        self._stopping.set()
        if self._task is None:
            return
        if self._client is None:
            self._task.cancel()  # it has not come to where it listens for the end
        done, _ = await asyncio.wait([self._task], timeout=STOP_SECONDS)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=STOP_SECONDS)

    async def call(self, tool: str, arguments: Any) -> McpOutcome:
        where = f"tool call error: tool call failed for `{self.server.name}/{tool}`\n\nCaused by:\n    "
        if arguments is not None and not isinstance(arguments, dict):
            got = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
            return lost(f"{where}MCP tool arguments must be a JSON object, got {got[:MAX_SHOWN]}")
        seconds = self.server.tool_seconds
        try:
            async with asyncio.timeout(seconds):
                result = await self._call(tool, arguments or {})
        except TimeoutError:
            return lost(f"{where}timed out awaiting tools/call after {seconds:g}s")
        except Exception as error:  # whatever a server or its client does must not end the turn
            return lost(where + _said(error))
        value = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        content = tuple(restored(block) for block in value.get("content") or ())
        told = McpResult(
            content=content, meta=_own(value.get("_meta")), structured_content=value.get("structuredContent")
        )
        return McpOutcome(told, None, bool(value.get("isError")))

    async def _call(self, tool: str, arguments: dict[str, Any]) -> Any:
        if self._client is None:
            raise ConnectionError("Transport closed")
        try:
            return await self._client.call_tool(tool, arguments)
        except Exception:
            if not self._session_lost:
                raise
        # The server has forgotten us, and so has done nothing: the protocol wants us to introduce ourselves
        # again. Calls beside this one may be doing that already.
        async with self._beginning_again:
            if self._session_lost:
                await self.stop()
                await self.start()
        if self._client is None:
            raise ConnectionError("Transport closed")
        return await self._client.call_tool(tool, arguments)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _own(meta: Any) -> Any:
    """What the server itself put there, without what the protocol stamps on every answer."""
    if not isinstance(meta, dict):
        return meta
    return {key: value for key, value in meta.items() if not key.startswith(PROTOCOL_KEYS)} or None


def _said(error: Exception) -> str:
    code = getattr(error, "code", None)
    message = getattr(error, "message", None) or _reason(error)
    if not isinstance(code, int) or message == "Connection closed":
        return "Transport closed" if "closed" in message.lower() else message
    data = getattr(error, "data", None)
    detail = f"({json.dumps(data, separators=(',', ':'))})" if data is not None else ""
    return f"Mcp error: {code}: {message}{detail}"


def _reason(error: BaseException) -> str:
    """The innermost of what was raised together: task groups wrap everything."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]  # as a text it has many lines, and links
        return f"it answered what is none: `{'.'.join(map(str, first['loc']))}`: {first['msg']}"
    return str(error) or type(error).__name__
