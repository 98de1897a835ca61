"""The two tools as a model is told of them: names, what they are for, and their parameters as JSON Schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

__all__ = ["EXEC_COMMAND", "WRITE_STDIN", "exec_command_tool", "write_stdin_tool"]

EXEC_COMMAND: Final = "exec_command"
WRITE_STDIN: Final = "write_stdin"

_EXEC: Final[dict[str, tuple[str, str]]] = {
    "cmd": ("string", "Command for the shell."),
    "workdir": ("string", "Directory to run in; relative to the machine's own. Default: that one."),
    "tty": ("boolean", "Run on a terminal, so that write_stdin can type into it. Default: false."),
    "yield_time_ms": ("integer", "How long to wait for the command before returning. Default: 10000."),
    "max_output_tokens": ("integer", "How much output to return; the middle of more is left out."),
    "shell": ("string", "Shell to use instead of the machine's own."),
    "login": ("boolean", "Whether the shell is a login shell."),
}

_WRITE: Final[dict[str, tuple[str, str]]] = {
    "session_id": ("integer", "The session id that exec_command returned."),
    "chars": (
        "string",
        "What to type. Nothing only looks; \\u0003 alone interrupts, also without a terminal.",
    ),
    "yield_time_ms": ("integer", "How long to wait for output. Default: 250, and at least 5000 to look."),
    "max_output_tokens": ("integer", "How much output to return; the middle of more is left out."),
}

_POLICY: Final[dict[str, tuple[str, str]]] = {
    "sandbox_permissions": ("string", "`require_escalated` asks to run without the sandbox."),
    "justification": ("string", "One sentence for the person who is asked: why it has to run like that."),
}


def exec_command_tool(environments: Sequence[str] = (), *, approvals: bool = False) -> dict[str, Any]:
    """`exec_command`. Machines are offered if there is a choice, approvals if there is somebody to ask."""
    properties = _properties(_EXEC)
    if approvals:
        properties |= _properties(_POLICY)
    if len(environments) > 1:
        properties["environment_id"] = {
            "type": "string",
            "description": f"Machine to run on. Default: {environments[0]}.",
            "enum": list(environments),
        }
    return _tool(
        EXEC_COMMAND,
        "Run a command. Returns its output, and a session id if it is still running when the time is over.",
        properties,
        ["cmd"],
    )


def write_stdin_tool() -> dict[str, Any]:
    """`write_stdin`."""
    return _tool(
        WRITE_STDIN,
        "Type into a running command, or look at what it has printed since.",
        _properties(_WRITE),
        ["session_id"],
    )


def _properties(fields: dict[str, tuple[str, str]]) -> dict[str, Any]:
    return {name: {"type": kind, "description": text} for name, (kind, text) in fields.items()}


def _tool(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": description,
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        },
    }
