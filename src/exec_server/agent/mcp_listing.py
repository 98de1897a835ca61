"""What a tool server offers: page by page, without what no model could be told of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from .. import log

if TYPE_CHECKING:
    from mcp import Client

__all__ = ["listed", "usable", "watch"]

MAX_PAGES: Final = 100
"""Most pages of a list that are asked for: a server may have no last one."""


MAX_LISTENS: Final = 1000
"""How often a server is listened to again that has hung up."""

LISTEN_SECONDS: Final = 5.0
"""How long to wait before that."""


async def listed(client: Client, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every tool of a server."""
    tools: list[dict[str, Any]] = []
    cursor: str | None = None
    seen: set[str] = set()
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="refresh")
        tools += (tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in page.tools)
        cursor = page.next_cursor
        if cursor is None:
            return tools
        if cursor in seen:
            break
        seen.add(cursor)
    warn(f"its list of tools has no end; the first {len(tools)} are offered")
    return tools


async def watch(client: Client, changed: Callable[[], None]) -> None:
    """Call `changed` whenever the server says that it has other tools. Cancel it to stop.

    Servers of the newer protocol say so only to those who listen; those of the older one to everybody.
    """
    from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost

    offers = client.server_capabilities.tools
    if offers is None or not offers.list_changed:
        return
    for _ in range(MAX_LISTENS):
        try:
            async with client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    changed()
            return
        except ListenNotSupportedError:
            return
        except SubscriptionLost:
            changed()  # who knows what was said meanwhile
            await asyncio.sleep(LISTEN_SECONDS)
        except Exception as error:
            log.debug("an MCP server does not let itself be listened to", error=str(error))
            return


def usable(tools: list[Any], warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """The tools of a page that can be told of; one that cannot is no reason to lose the others."""
    import mcp_types as types
    from pydantic import ValidationError

    fit: list[dict[str, Any]] = []
    for tool in tools:
        name = tool.get("name") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(name, str) or not name:
            warn("a tool without a name is left out")
            continue
        schema = tool.get("inputSchema", {})
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            warn(f"tool `{name}` is left out: its `inputSchema` is not the schema of an object")
            continue
        properties = schema.get("properties")
        whole = {**schema, "type": "object", "properties": properties if isinstance(properties, dict) else {}}
        tool = {**tool, "inputSchema": whole}
        try:
            types.Tool.model_validate(tool, by_name=False)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            warn(f"tool `{name}` is left out: `{where}`: {first['msg']}")
            continue
        fit.append(tool)
    return fit
