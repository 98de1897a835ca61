"""What a scripted model calls for, in a word each."""

from __future__ import annotations

import json
from typing import Any

from support.model_server import Raw, call

__all__ = ["failed", "patch", "plan", "run", "search"]


def run(cmd: str, call_id: str = "call_1", **more: Any) -> dict[str, Any]:
    return call("exec_command", {"cmd": cmd, **more}, call_id)


def patch(*lines: str, call_id: str = "call_1") -> dict[str, Any]:
    return call("apply_patch", {"input": "\n".join(["*** Begin Patch", *lines, "*** End Patch"])}, call_id)


def plan(**steps: str) -> dict[str, Any]:
    listed = [{"step": step.replace("_", " "), "status": status} for step, status in steps.items()]
    return call("update_plan", {"plan": listed}, f"call_{len(steps)}{''.join(steps.values())}")


def failed(code: str, text: str) -> Raw:
    """An answer in which the endpoint reports a failure."""
    event = {"type": "response.failed", "response": {"error": {"code": code, "message": text}}}
    return Raw([f"data: {json.dumps(event)}\n\n"])


def search(number: int, action: Any) -> dict[str, Any]:
    item = {"type": "web_search_call", "id": f"ws_{number}", "status": "completed"}
    return item if action is None else {**item, "action": action}
