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
from ..events.model import Failure, McpResult
from .mcp_blocks import keeping_blocks, restored
from .mcp_process import ServerProcess

if TYPE_CHECKING:
    from mcp import Client

__all__ = ["ApprovalNeed", "McpOutcome", "McpServer", "McpServers", "McpTool", "RequiredServerDown"]

ApprovalNeed = Literal["auto", "prompt", "approve"]
"""Whether a call needs approval: by what the tool says of itself, always, or never. The reference's words."""

STARTUP_SECONDS: Final = 30.0
TOOL_SECONDS: Final = 120.0

STOP_SECONDS: Final = 5.0
"""How long a server gets to end by itself, and how long to be ended."""

MAX_NAME: Final = 64
"""Longest name of a tool that models take."""

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


class McpTool(Struct, frozen=True):
    """A tool of a server."""

    server: str
    name: str
    offered: dict[str, Any]
    """How models are told of it."""
    needs_approval: bool


class McpOutcome(Struct, frozen=True):
    """What came of a call: a result that may itself be a failure, or no result at all."""

    result: McpResult | None
    error: Failure | None
    failed: bool

    def for_model(self) -> str | list[dict[str, Any]]:
        """The same as a tool's output: text, or parts where there is an image among them."""
        if self.error is not None:
            return f"err: {self.error.message}"
        if self.result is None:
            return ""
        if self.result.structured_content is not None:
            import msgspec

            return msgspec.json.encode(self.result.structured_content).decode()
        parts = [_part(block) for block in self.result.content]
        if self.failed and not any(part.get("text", "x").strip() for part in parts):
            return "err: the tool failed, and did not say why"
        if any(part["type"] == "input_image" for part in parts):
            return parts
        return "\n".join(part["text"] for part in parts)


def _part(block: Any) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "input_text", "text": block["text"]}
    if kind == "image" and isinstance(block.get("data"), str):
        url = f"data:{block.get('mimeType', 'image/png')};base64,{block['data']}"
        return {"type": "input_image", "image_url": url}
    if kind == "resource" and isinstance(block.get("resource"), dict):
        resource = block["resource"]
        return {"type": "input_text", "text": str(resource.get("text") or resource.get("uri"))}
    if kind == "resource_link":
        return {"type": "input_text", "text": str(block.get("uri"))}
    if kind == "audio":
        return {"type": "input_text", "text": "<audio content omitted>"}
    return {"type": "input_text", "text": json.dumps(block, ensure_ascii=False)}


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
        return self

    def _admit(self, one: _Running, outcome: Any) -> None:
        name = one.server.name
        if isinstance(outcome, BaseException):
            if not isinstance(outcome, Exception):
                raise outcome
            reason = _reason(outcome)
            if one.server.required:
                raise RequiredServerDown(f"required MCP server `{name}` failed to start: {reason}")
            self.warnings.append(f"MCP server `{name}` failed to start: {reason}")
            return
        self._running[name] = one
        for tool in outcome:
            own = tool["name"]
            called = _UNFIT.sub("_", f"mcp__{name}__{own}")[:MAX_NAME]
            if called in self.tools:
                self.warnings.append(f"MCP tool `{own}` of `{name}` is left out: `{called}` is taken")
                continue
            offered = {
                "type": "function",
                "name": called,
                "description": tool.get("description") or "",
                "strict": False,
                "parameters": tool.get("inputSchema") or {"type": "object", "properties": {}},
            }
            self.tools[called] = McpTool(name, own, offered, _needs_approval(one.server, tool))

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
        self._client: Client | None = None
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lost: str | None = None
        self._process = (
            ServerProcess(server.command, server.args, server.env, server.cwd) if server.command else None
        )

    async def start(self) -> list[dict[str, Any]]:
        ready: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(ready))
        try:
            async with asyncio.timeout(self.server.startup_seconds):
                return await asyncio.shield(ready)
        except TimeoutError:
            await self.stop()
            raise TimeoutError(f"no answer within {self.server.startup_seconds:g} s") from None

    async def _run(self, ready: asyncio.Future[list[dict[str, Any]]]) -> None:
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(_client(self.server, self._process, stack))
                listed = await client.list_tools()
                tools = [
                    tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in listed.tools
                ]
                self._client = client
                ready.set_result(tools)
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
            self._lost = self._lost or "Transport closed"
            if not ready.done():
                ready.cancel()

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
        client = self._client
        if client is None:
            return _lost(where + "Transport closed")
        seconds = self.server.tool_seconds
        try:
            async with asyncio.timeout(seconds):
                result = await client.call_tool(tool, arguments if isinstance(arguments, dict) else {})
        except TimeoutError:
            return _lost(f"{where}timed out awaiting tools/call after {seconds:g}s")
        except Exception as error:  # whatever a server or its client does must not end the turn
            return _lost(where + _said(error))
        value = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        content = tuple(restored(block) for block in value.get("content") or ())
        told = McpResult(
            content=content, meta=_own(value.get("_meta")), structured_content=value.get("structuredContent")
        )
        return McpOutcome(told, None, bool(value.get("isError")))


def _own(meta: Any) -> Any:
    """What the server itself put there, without what the protocol stamps on every answer."""
    if not isinstance(meta, dict):
        return meta
    return {key: value for key, value in meta.items() if not key.startswith(PROTOCOL_KEYS)} or None


def _lost(message: str) -> McpOutcome:
    return McpOutcome(None, Failure(message=message), True)


def _said(error: Exception) -> str:
    code = getattr(error, "code", None)
    message = getattr(error, "message", None) or str(error) or type(error).__name__
    if not isinstance(code, int) or message == "Connection closed":
        return "Transport closed" if "closed" in message.lower() else message
    data = getattr(error, "data", None)
    detail = f"({json.dumps(data, separators=(',', ':'))})" if data is not None else ""
    return f"Mcp error: {code}: {message}{detail}"


def _client(server: McpServer, process: ServerProcess | None, stack: AsyncExitStack) -> Client:
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    if server.url is not None:
        import httpx2

        timeout = httpx2.Timeout(30, read=server.tool_seconds)
        http = httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout)
        stack.push_async_callback(http.aclose)
        return Client(keeping_blocks(streamable_http_client(server.url, http_client=http)))
    if process is None:
        raise ValueError("neither a command nor a URL")
    return Client(keeping_blocks(process.connected()))


def _reason(error: BaseException) -> str:
    """The innermost of what was raised together: task groups wrap everything."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
