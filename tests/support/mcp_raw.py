"""A tool server on stdio, written by hand, that does what no package would; its argument says what."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

Json = dict[str, Any]


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def tool(name: str, **more: Any) -> Json:
    return {"name": name, "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}, **more}


UNFIT = [
    tool("null", inputSchema=None),
    tool("text", inputSchema={"type": "string"}),
    tool("", description="nameless"),
    {"description": 5},
    tool("described", description=5),
    tool("none", inputSchema={"properties": None}),
    {"name": "bare"},
]


def page(what: str, cursor: str | None, tools: list[Json]) -> Json:
    number = int(cursor or 0)
    if what == "pages":
        return {"tools": [tool(f"p{number}")], **({"nextCursor": str(number + 1)} if number < 5 else {})}
    if what == "endless":
        return {"tools": [tool(f"p{number}")], "nextCursor": str(number + 1)}
    if what == "circle":
        return {"tools": [tool(f"p{number}")], "nextCursor": str((number + 1) % 3)}
    return {"tools": [*tools, *UNFIT] if what == "unfit" else tools}


def main(what: str) -> None:
    tools = [tool("echo")]
    for line in sys.stdin:
        asked = json.loads(line)
        number, params = asked.get("id"), asked.get("params") or {}
        if number is None:
            continue
        if asked["method"] == "initialize":
            about = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {"listChanged": True}}}
            told = {**about, "serverInfo": {"name": "raw", "version": "1"}, "instructions": "Use me well."}
            say(id=number, result=told if what != "odd" else {**told, "serverInfo": 5})
        elif asked["method"] == "tools/list":
            say(id=number, result=page(what, params.get("cursor"), tools))
        elif asked["method"] == "tools/call":
            if what == "changing":
                tools[:] = [tool("later")]
                say(method="notifications/tools/list_changed")
            given = {"given": params.get("arguments"), "word": os.environ.get("WORD")}
            say(id=number, result={"content": [{"type": "text", "text": json.dumps(given)}]})
        else:
            say(id=number, error={"code": -32601, "message": "no"})


if __name__ == "__main__":
    main(sys.argv[1])
