"""What came of a call of a server's tool, and what a model is told of it. Pure."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import Struct

from ..events.model import Failure, McpResult

__all__ = ["McpOutcome", "lost"]


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


def lost(message: str) -> McpOutcome:
    """No result, for this reason."""
    return McpOutcome(None, Failure(message=message), True)
