"""Calls of tool servers: whether each may be made, and how they are told in the event stream."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from ..events.model import McpToolCall
from .approvals import Approver, Question, forbid
from .exec import Declined, ToolError
from .mcp_client import McpServers
from .mcp_outcome import lost
from .unified_text import DEFAULT_MODEL_POLICY, truncate

if TYPE_CHECKING:
    from ..events.writer import EventWriter
    from .confinement import Mode

__all__ = ["McpCalls"]

NEVER: Final = "MCP tool call requires approval, but approval policy is never"
"""The reference's words."""

MAX_SHOWN: Final = 500
"""Most characters of the arguments that somebody is shown who is asked."""


class McpCalls:
    """What a model's calls of MCP tools do."""

    def __init__(
        self, writer: EventWriter, servers: McpServers | None, approver: Approver, mode: Mode
    ) -> None:
        self._writer = writer
        self._servers = servers
        self._approver = approver
        self._mode = mode

    def definitions(self) -> list[dict[str, Any]]:
        """Every tool as the model is told of it."""
        return [tool.offered for tool in self._servers.tools.values()] if self._servers is not None else []

    def __contains__(self, name: str) -> bool:
        return self._servers is not None and name in self._servers.tools

    async def call(self, name: str, text: str) -> str | list[dict[str, Any]]:
        """Call a tool; what the model is told, also if it did not work or was refused."""
        if self._servers is None:
            raise ToolError(f"unsupported call: {name}")
        tool = self._servers.tools[name]
        try:
            given = msgspec.json.decode(text) if text.strip() else {}
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ToolError(f"failed to parse function arguments: {error}") from None
        begun = McpToolCall(server=tool.server, tool=tool.name, arguments=given, status="in_progress")
        item_id = self._writer.started(begun)
        try:
            try:
                await self._decide(tool.server, tool.name, given, needs_approval=tool.needs_approval)
                outcome = await self._servers.call(tool.server, tool.name, given)
            except Declined as refusal:
                outcome = lost(str(refusal))
        except BaseException:
            self._writer.completed(replace(begun, status="failed"), item_id)
            raise
        status = "failed" if outcome.failed else "completed"
        self._writer.completed(
            replace(begun, result=outcome.result, error=outcome.error, status=status), item_id
        )
        output = outcome.for_model()
        if isinstance(output, str):
            return truncate(output, DEFAULT_MODEL_POLICY.budget, DEFAULT_MODEL_POLICY.unit)
        return output

    async def _decide(self, server: str, tool: str, given: Any, *, needs_approval: bool) -> None:
        """A rule decides; else the server's configuration and what the tool says of itself."""
        decided = self._approver.policy.decide_tool(server, tool)
        forbid(decided)
        if decided is not None:
            asks, why = decided[0] == "ask", decided[1]
        else:
            # With every restriction lifted and nobody to ask, whoever started it has answered already.
            trusted = self._mode == "danger-full-access" and self._approver.mode == "never"
            asks, why = needs_approval and not trusted, ""
        if not asks:
            return
        if not self._approver.can_ask:
            raise Declined(NEVER)
        what = f"{server}/{tool} {json.dumps(given)[:MAX_SHOWN]}"
        try:
            await self._approver.approve(Question(kind="tool", what=what, why=why))
        except Declined:
            raise Declined("user rejected MCP tool call") from None
