"""The tools by which a model uses other agents, as it is told of them, and what it may write into a call."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from .exec import ToolError

__all__ = ["TOOLS", "CloseAgent", "ResumeAgent", "SendInput", "SpawnAgent", "WaitAgent"]


class _Part(Struct, frozen=True, kw_only=True):
    type: str = "text"
    text: str = ""


class _Prompted(Struct, frozen=True, kw_only=True):
    message: str | None = None
    items: list[_Part] | None = None

    def prompt(self) -> str:
        """What is to be said to the agent. ToolError if that is nothing, or not a text."""
        if (self.message is None) == (self.items is None):
            raise ToolError("Provide one of: message or items")
        if self.items is not None and any(part.type != "text" for part in self.items):
            raise ToolError("only items of type `text` can be sent to an agent")
        text = self.message if self.items is None else "\n".join(part.text for part in self.items)
        if not text or not text.strip():
            raise ToolError("Empty message can't be sent to an agent")
        return text


class SpawnAgent(_Prompted, frozen=True, kw_only=True):
    """Arguments of `spawn_agent`."""

    fork_context: bool = False
    model: str | None = None
    reasoning_effort: str | None = None


class SendInput(_Prompted, frozen=True, kw_only=True):
    """Arguments of `send_input`."""

    target: str
    interrupt: bool = False


class WaitAgent(Struct, frozen=True, kw_only=True):
    """Arguments of `wait_agent`."""

    targets: list[str]
    timeout_ms: float | None = None


class CloseAgent(Struct, frozen=True, kw_only=True):
    """Arguments of `close_agent`."""

    target: str


class ResumeAgent(Struct, frozen=True, kw_only=True):
    """Arguments of `resume_agent`."""

    id: str


def _tool(name: str, description: str, required: list[str], **properties: tuple[str, str]) -> dict[str, Any]:
    described: dict[str, Any] = {
        key: {"type": kind, "description": text} for key, (kind, text) in properties.items()
    }
    if "targets" in described:
        described["targets"]["items"] = {"type": "string"}
    parameters = {
        "type": "object",
        "properties": described,
        "required": required,
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "name": name,
        "description": description,
        "strict": False,
        "parameters": parameters,
    }


_TARGET: Final = ("string", "Id of the agent, from spawn_agent.")

TOOLS: Final[dict[str, dict[str, Any]]] = {
    tool["name"]: tool
    for tool in (
        _tool(
            "spawn_agent",
            "Start another agent on a task that can be done beside yours, and go on; returns its id. It works"
            " on the same machines with the same rules. Only when you are asked to delegate, or to work in"
            " parallel.",
            ["message"],
            message=("string", "The task, with all that is needed to do it."),
            fork_context=("boolean", "Whether it knows what was said in this conversation. Default: false."),
            model=("string", "Another model than yours. Default: yours."),
            reasoning_effort=("string", "Another effort than yours. Default: yours."),
        ),
        _tool(
            "send_input",
            "Say something to an agent; it takes it up when it is done with what it is doing.",
            ["target", "message"],
            target=_TARGET,
            message=("string", "What to say."),
            interrupt=("boolean", "Stop what it is doing first. Default: false."),
        ),
        _tool(
            "wait_agent",
            "Wait until one of some agents is done; returns how those are that are, with their answers.",
            ["targets"],
            targets=("array", "Ids of the agents."),
            timeout_ms=("number", "How long to wait: 10000 to 3600000. Default: 30000."),
        ),
        _tool(
            "close_agent",
            "End an agent that is not needed any more; returns how it was. One that is done counts until"
            " then.",
            ["target"],
            target=_TARGET,
        ),
        _tool(
            "resume_agent",
            "Bring back an agent that was closed, with its conversation.",
            ["id"],
            id=_TARGET,
        ),
    )
}
