"""A tool server with every kind of answer, good and bad; run as a program, on stdio."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import mcp_types as types
from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

NAMES = ("echo", "structured", "picture", "empty", "fail", "boom", "slow", "die")

HINTS = {
    "structured": types.ToolAnnotations(read_only_hint=True),
    "picture": types.ToolAnnotations(destructive_hint=False, open_world_hint=False),
    "empty": types.ToolAnnotations(read_only_hint=True, destructive_hint=True),
}
"""What some tools say of themselves."""


def text(said: str) -> types.TextContent:
    return types.TextContent(type="text", text=said)


async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
    schema = {"type": "object", "properties": {}}
    tools = [types.Tool(name=name, input_schema=schema, annotations=HINTS.get(name)) for name in NAMES]
    return types.ListToolsResult(tools=tools)


async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    if params.name == "boom":
        raise MCPError(code=-32000, message="kaboom", data={"why": "test"})
    if params.name == "slow":
        await asyncio.sleep(600)
    if params.name == "die":
        os._exit(1)
    if params.name == "structured":
        found: dict[str, Any] = {"matches": 3, "nested": {"ok": True}}
        result = types.CallToolResult(content=[text("3 matches")], structured_content=found)
        return result.model_copy(update={"meta": {"trace": "t-1"}})
    if params.name == "picture":
        image = types.ImageContent(type="image", data="aGk=", mime_type="image/png")
        return types.CallToolResult(content=[text("look"), image])
    if params.name == "empty":
        return types.CallToolResult(content=[])
    if params.name == "fail":
        return types.CallToolResult(content=[text("tool says no")], is_error=True)
    return types.CallToolResult(content=[text("echo: " + json.dumps(params.arguments, sort_keys=True))])


async def main() -> None:
    server: Server[Any] = Server("docs", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
