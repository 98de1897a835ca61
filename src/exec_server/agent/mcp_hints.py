"""Our tools as clients are told of them: beside how to call them, what each may do, and what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mcp_types import Tool

__all__ = ["tool_of"]

TITLES: Final = {
    "exec_command": "Run a command",
    "write_stdin": "Type into a command",
    "screen": "Look at a terminal",
    "list_commands": "List running commands",
    "terminate": "End a command",
    "apply_patch": "Edit files by a patch",
    "read_file": "Read a file",
    "write_file": "Write a file",
    "list_directory": "List a directory",
    "find_files": "Find files",
    "search_files": "Search in files",
}

_LOOKS: Final = {
    "readOnlyHint": True,
    "destructiveHint": False,
    "idempotentHint": True,
    "openWorldHint": False,
}
_ACTS: Final = {
    "readOnlyHint": False,
    "destructiveHint": True,
    "idempotentHint": False,
    "openWorldHint": True,
}
_EDITS: Final = {**_ACTS, "openWorldHint": False}

HINTS: Final[dict[str, dict[str, bool]]] = {
    # What a command does, nobody knows beforehand: clients that ask their user before such calls should.
    "exec_command": _ACTS,
    "write_stdin": _ACTS,
    "screen": _LOOKS,
    "list_commands": _LOOKS,
    "terminate": _EDITS,
    "apply_patch": _EDITS,
    "read_file": _LOOKS,
    "write_file": {**_EDITS, "idempotentHint": True},
    "list_directory": _LOOKS,
    "find_files": _LOOKS,
    "search_files": _LOOKS,
}
"""The worst that a call may do; a client decides by it whether to ask."""


def _object(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "integer"}
_FLAG: Final = {"type": "boolean"}

_OUTPUT: Final = _object(
    {
        "output": _TEXT,
        "wall_time_seconds": {"type": "number"},
        "exit_code": {**_NUMBER, "description": "Only if it has ended."},
        "session_id": {**_NUMBER, "description": "Only if it goes on running."},
        "chunk_id": _TEXT,
        "original_token_count": _NUMBER,
    },
    *("exit_code", "session_id", "chunk_id", "original_token_count"),
)

_COMMAND: Final = _object(
    {"session_id": _NUMBER, "command": {"type": "array", "items": _TEXT}, "cwd": _TEXT, "tty": _FLAG}
)

OUTPUTS: Final[dict[str, dict[str, Any]]] = {
    "exec_command": _OUTPUT,
    "write_stdin": _OUTPUT,
    "screen": _object(
        {
            "rows": {"type": "array", "items": _TEXT},
            "cursor": {"type": "array", "items": _NUMBER, "description": "Row and column, from 0."},
            "cursor_visible": _FLAG,
            "title": _TEXT,
            "complete": {**_FLAG, "description": "Whether all that was on it before is known."},
        }
    ),
    "list_commands": _object({"commands": {"type": "array", "items": _COMMAND}}),
}
"""The tools that answer with an object, and how that looks."""


def tool_of(definition: dict[str, Any]) -> Tool:
    """A tool that models are told of, as clients are."""
    from mcp_types import Tool, ToolAnnotations

    name = definition["name"]
    return Tool(
        name=name,
        title=TITLES[name],
        description=definition["description"],
        input_schema=definition["parameters"],
        output_schema=OUTPUTS.get(name),
        annotations=ToolAnnotations.model_validate(HINTS[name]),
    )
