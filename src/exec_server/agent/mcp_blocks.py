"""Blocks of a tool's result that the vendor's client does not know: carried past it as they are.

It refuses a whole result for one block of a kind that is newer than itself. So such a block goes through it
as a text with the block beside it, and is itself again behind it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from typing import Any, Final

__all__ = ["keeping_blocks", "restored"]

ORIGINAL: Final = "exec-server/original"
"""Where the block is while it is a text."""


@asynccontextmanager
async def keeping_blocks(transport: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    """The same transport; every block of a result gets through."""
    async with transport as streams:
        yield _Kept(streams[0]), streams[1]


def restored(block: Any) -> Any:
    """A block as the server sent it."""
    meta = block.get("_meta") if isinstance(block, dict) else None
    return meta[ORIGINAL] if isinstance(meta, dict) and ORIGINAL in meta else block


class _Kept:
    """A stream of messages in which every block is one the client knows."""

    def __init__(self, incoming: Any) -> None:
        self._incoming = incoming

    @property
    def last_context(self) -> Any:
        return getattr(self._incoming, "last_context", None)

    def __aiter__(self) -> _Kept:
        return self

    async def __anext__(self) -> Any:
        return _disguised(await self._incoming.__anext__())

    async def receive(self) -> Any:
        return _disguised(await self._incoming.receive())

    def close(self) -> None:
        self._incoming.close()

    async def aclose(self) -> None:
        await self._incoming.aclose()

    async def __aenter__(self) -> _Kept:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _disguised(item: Any) -> Any:
    result = getattr(getattr(item, "message", None), "result", None)
    content = result.get("content") if isinstance(result, dict) else None
    if isinstance(result, dict) and isinstance(content, list):
        result["content"] = [block if _is_known(block) else _disguise(block) for block in content]
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
