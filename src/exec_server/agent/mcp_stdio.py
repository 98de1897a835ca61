"""MCP on stdin and stdout, with an answer to every line.

The official transport drops lines it cannot read, and whoever sent one waits for ever. Here a line that is no
JSON is answered as JSON-RPC asks for, and one that only has half a character in it is taken as it is meant.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from .exec import without_surrogates

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

__all__ = ["serve_streams"]

INVALID_REQUEST: Final = -32600


async def serve_streams(server: Server[Any]) -> None:
    """Serve whoever is at the other end of stdin and stdout, until stdin ends."""
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (incoming, outgoing):
        heard: Any = _Heard(incoming, outgoing)
        await server.run(heard, outgoing, server.create_initialization_options())


def _is_nameless(item: Any) -> bool:
    """Whether a request was taken for a notification, because its id is none (null, 1.5, true).

    Whoever sent it waits for an answer. Every notification of the protocol says so in its name.
    """
    method = getattr(item.message, "method", None)
    if not isinstance(method, str) or getattr(item.message, "id", None) is not None:
        return False
    return not method.startswith("notifications/")


class _Heard:
    """The messages that come in, without those that are none: these are answered here."""

    def __init__(self, incoming: Any, outgoing: Any) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    @property
    def last_context(self) -> Any:
        return self._incoming.last_context

    def __aiter__(self) -> _Heard:
        return self

    async def __anext__(self) -> Any:
        while True:
            item = await self._incoming.__anext__()
            if not isinstance(item, Exception):
                if not _is_nameless(item):
                    return item
                await self._refuse(None, INVALID_REQUEST, "Invalid request: an id is a string or an integer")
                continue
            message = await self._understand(item)
            if message is not None:
                return message

    async def receive(self) -> Any:
        import anyio

        try:
            return await self.__anext__()
        except StopAsyncIteration:
            raise anyio.EndOfStream from None

    async def aclose(self) -> None:
        await self._incoming.aclose()

    async def __aenter__(self) -> _Heard:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _understand(self, error: Exception) -> Any:
        """The message a line was meant to be; if it is none, that is said to whoever sent it."""
        import mcp_types as types
        from mcp.shared.message import SessionMessage
        from pydantic import ValidationError

        if not isinstance(error, ValidationError):
            return None
        first = error.errors(include_url=False)[0]
        if first["type"] != "json_invalid":
            value = first["input"]
        else:
            try:
                value = without_surrogates(json.loads(first["input"]))
                return SessionMessage(types.jsonrpc_message_adapter.validate_python(value, by_name=False))
            except ValidationError:
                pass  # JSON it is, but not a message
            except (ValueError, RecursionError) as problem:
                await self._refuse(None, types.PARSE_ERROR, f"Parse error: {problem}")
                return None
        number = value.get("id") if isinstance(value, dict) else None
        known = number if isinstance(number, str | int) and not isinstance(number, bool) else None
        await self._refuse(known, INVALID_REQUEST, "Invalid request: not a JSON-RPC message")
        return None

    async def _refuse(self, number: str | int | None, code: int, text: str) -> None:
        import anyio
        import mcp_types as types
        from mcp.shared.message import SessionMessage

        answer = types.JSONRPCError(jsonrpc="2.0", id=number, error=types.ErrorData(code=code, message=text))
        try:
            await self._outgoing.send(SessionMessage(answer))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass  # nobody is there to be told
