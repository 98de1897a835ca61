"""The recorded event streams, byte for byte as the reference wrote them, and what is to be made of them."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from exec_server.events.model import ITEM_KINDS

__all__ = ["EXPECTED", "FOLDER", "GARBAGE", "MANIFEST", "NAMES", "chunks", "stream"]

FOLDER = Path(__file__).parent.parent / "events" / "streams"

EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_bytes())
MANIFEST: dict[str, dict[str, Any]] = json.loads((FOLDER / "manifest.json").read_bytes())["streams"]
NAMES = sorted(EXPECTED)


@cache
def stream(name: str) -> bytes:
    """A recording. The two large ones are kept compressed."""
    packed = FOLDER / f"{name}.jsonl.gz"
    return gzip.decompress(packed.read_bytes()) if packed.exists() else packed.with_suffix("").read_bytes()


def chunks(data: bytes, size: int) -> list[bytes]:
    """The same bytes in pieces."""
    return [data[start : start + size] for start in range(0, len(data), size)]


_FIELDS = sorted({name for kind in ITEM_KINDS.values() for name in kind.__struct_fields__})
_KEYS = st.sampled_from([*_FIELDS, "type", "item", "usage", "thread_id", "line", "ext", "_meta"])
_EVENTS = [f"item.{phase}" for phase in ("started", "updated", "completed")] + [
    "thread.started",
    "turn.started",
    "turn.completed",
    "turn.failed",
    "error",
]
_WORDS = st.sampled_from([*_EVENTS, *ITEM_KINDS, "completed", "failed", "item_0", "Reconnecting... 1/5 (x)"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _WORDS | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_KEYS | st.text(max_size=3), inner, max_size=6)
    ),
    max_leaves=12,
)
_ITEMS = st.builds(
    lambda fields, item_id, kind: {**fields, "id": item_id, "type": kind},
    st.dictionaries(_KEYS, _VALUES | _WORDS),
    st.sampled_from(["item_0", "item_1"]),
    st.sampled_from([*ITEM_KINDS, "dance"]),
)
_WHOLE_ITEMS = st.sampled_from(
    [
        {"type": "agent_message", "text": "m\x1b[2J"},
        {"type": "reasoning", "text": "**r**"},
        {"type": "command_execution", "command": "c", "aggregated_output": "o\x07", "status": "completed"},
        {"type": "file_change", "changes": [{"path": "/p", "kind": "add"}], "status": "odd"},
        {
            "type": "mcp_tool_call",
            "server": "s",
            "tool": "t",
            "status": "failed",
            "result": {"content": [1, {}]},
        },
        {"type": "web_search", "query": "q"},
        {"type": "todo_list", "items": [{"text": "s", "completed": True}]},
        {"type": "error", "message": "w"},
    ]
)

GARBAGE = st.lists(
    st.binary(max_size=60)
    | _VALUES.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(_KEYS, _VALUES | _WORDS, min_size=1).map(lambda value: json.dumps(value).encode())
    | st.builds(
        lambda kind, item, item_id: json.dumps({"type": kind, "item": {"id": item_id, **item}}).encode(),
        st.sampled_from(_EVENTS),
        _ITEMS | _WHOLE_ITEMS,
        st.sampled_from(["item_0", "item_1"]),
    )
    | st.sampled_from(
        [
            b'{"type":"thread.started","thread_id":"t"}',
            b'{"type":"turn.started"}',
            b'{"type":"turn.completed","usage":{"input_tokens":3}}',
            b'{"type":"turn.failed","error":{"message":"f"}}',
            b'{"type":"error","message":"fatal"}',
            b'{"type":"error","message":"Reconnecting... 2/5"}',
        ]
    ),
    max_size=10,
).map(b"\n".join)
"""Streams of everything: bytes, JSON, events that are almost right, and some that are, in any order."""
