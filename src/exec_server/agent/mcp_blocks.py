"""Blocks of a tool's result that the vendor's client does not know: carried past it as they are.

It refuses a whole result for one block of a kind that is newer than itself. So such a block goes through it
as a text with the block beside it, and is itself again behind it. A list of tools it refuses for one of them;
that one does not get to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from typing import Any, Final

from .mcp_listing import usable

__all__ = ["keeping_blocks", "restored"]

ORIGINAL: Final = "exec-server/original"
"""Where the block is while it is a text."""


@asynccontextmanager
async def keeping_blocks(
    transport: AbstractAsyncContextManager[Any], warn: Callable[[str], None]
) -> AsyncIterator[Any]:
    """The same transport; every block of a result gets through, and every tool that can be told of."""
    async with transport as streams:
        yield _Kept(streams[0], warn), streams[1]


def restored(block: Any) -> Any:
    """A block as the server sent it."""
    meta = block.get("_meta") if isinstance(block, dict) else None
    return meta[ORIGINAL] if isinstance(meta, dict) and ORIGINAL in meta else block


class _Kept:
    """A stream of messages in which every block is one the client knows."""

    def __init__(self, incoming: Any, warn: Callable[[str], None]) -> None:
        self._incoming = incoming
        self._warn = warn

    @property
    def last_context(self) -> Any:
        return getattr(self._incoming, "last_context", None)

    def __aiter__(self) -> _Kept:
        return self

    async def __anext__(self) -> Any:
        return _disguised(await self._incoming.__anext__(), self._warn)

    async def receive(self) -> Any:
        return _disguised(await self._incoming.receive(), self._warn)

    def close(self) -> None:
        self._incoming.close()

    async def aclose(self) -> None:
        await self._incoming.aclose()

    async def __aenter__(self) -> _Kept:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _disguised(item: Any, warn: Callable[[str], None]) -> Any:
    result = getattr(getattr(item, "message", None), "result", None)
    if not isinstance(result, dict):
        return item
    content, tools = result.get("content"), result.get("tools")
    if isinstance(content, list):
        result["content"] = [block if _is_known(block) else _disguise(block) for block in content]
    elif isinstance(tools, list):
        result["tools"] = usable(tools, warn)
    return item


def _is_known(block: Any) -> bool:
    from pydantic import ValidationError

    try:
        _blocks().validate_python(block, by_name=False)
    except ValidationError:
        return False
    return True


@cache
def _blocks() -> Any:
    """The kinds of blocks the client knows."""
    import mcp_types as types
    from pydantic import TypeAdapter

    return TypeAdapter(types.ContentBlock)


def _disguise(block: Any) -> dict[str, Any]:
    return {"type": "text", "text": "", "_meta": {ORIGINAL: block}}
