"""The tools of a turn: what a model is offered, and what happens when it calls one.

Whatever a model writes gets an answer it can act on: an unknown tool, arguments that are no JSON, a patch
that does not fit. Nothing it does with a tool ends the turn.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct

from ..client.errors import ExecServerError, ServerRejected
from ..events.model import TodoList, TodoStep
from ..wire.errors import RpcError
from ..wire.uri import ForeignPath
from .commands import Commands
from .edits import Edits
from .exec import ExecCommand, ToolError, WriteStdin, arguments
from .images import VIEW_IMAGE, ViewImage, view
from .mcp_calls import McpCalls
from .patch import PatchError
from .patching import apply_patch_tool
from .typed import TypedPatch, typed_patch
from .unified_tools import exec_command_tool, write_stdin_tool

if TYPE_CHECKING:
    from ..events.writer import EventWriter
    from .approvals import Approver
    from .machines import Machines
    from .mcp_client import McpServers
    from .subagents import Subagents

__all__ = ["ToolOutput", "Toolbox"]

ToolOutput = str | list[dict[str, Any]]
"""What a model is told: a text, or parts of which some are images."""

MAX_ARGUMENT_CHARACTERS: Final = 16 * 1024 * 1024
"""Longest arguments that are looked at."""

UPDATE_PLAN: Final[dict[str, Any]] = {
    "type": "function",
    "name": "update_plan",
    "description": "Set or change the plan: every step, and which are done. At most one is in progress.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "explanation": {"type": "string"},
            "plan": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "step": {"type": "string"},
                        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                    },
                    "required": ["step", "status"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["plan"],
        "additionalProperties": False,
    },
}


class _Step(Struct, frozen=True, kw_only=True):
    step: str
    status: Literal["pending", "in_progress", "completed"]


class _Plan(Struct, frozen=True, kw_only=True):
    plan: list[_Step]
    explanation: str | None = None


class _Input(Struct, frozen=True, kw_only=True):
    input: str
    environment_id: str | None = None


class Toolbox:
    """The tools of one turn of a thread. `close` ends what they have started."""

    def __init__(
        self,
        writer: EventWriter,
        machines: Machines,
        approver: Approver,
        *,
        thread_id: str,
        servers: McpServers | None = None,
        subagents: Subagents | None = None,
    ) -> None:
        self._writer = writer
        self._machines = machines
        self._approver = approver
        self._commands = Commands(writer, machines, approver, thread_id=thread_id)
        self._edits = Edits(writer, machines, approver)
        self._mcp = McpCalls(writer, servers, approver, machines.mode)
        self._subagents = subagents

    async def close(self) -> None:
        """End every command of the turn."""
        await self._commands.close()

    def definitions(self) -> list[dict[str, Any]]:
        """Every tool as the model is told of it."""
        return [
            exec_command_tool(list(self._machines.ready), approvals=self._approver.mode != "never"),
            write_stdin_tool(),
            apply_patch_tool(list(self._machines.ready)),
            UPDATE_PLAN,
            VIEW_IMAGE,
            *(self._subagents.definitions() if self._subagents is not None else ()),
            *self._mcp.definitions(),
        ]

    async def call(self, name: str, text: str, call_id: str) -> ToolOutput:
        """Do what the model asks for; the answer is for the model, also if it did not work."""
        try:
            if len(text) > MAX_ARGUMENT_CHARACTERS:
                raise ToolError(
                    f"the arguments of {name} are longer than {MAX_ARGUMENT_CHARACTERS} characters"
                )
            return await self._call(name, text, call_id)
        except ToolError as error:
            return str(error)
        except (ExecServerError, OSError, RpcError, ForeignPath) as error:
            return f"{name} failed: {error.message if isinstance(error, ServerRejected) else error}"

    async def patch(self, text: str) -> ToolOutput:
        """A patch that came without arguments around it, as some models write it."""
        try:
            return await self._edits.patch(TypedPatch(text, None))
        except ToolError as error:
            return str(error)

    async def _call(self, name: str, text: str, call_id: str) -> ToolOutput:
        if name == "exec_command":
            return await self._exec(arguments(text, ExecCommand), call_id)
        if name == "write_stdin":
            return await self._commands.write(arguments(text, WriteStdin))
        if name == "apply_patch":
            call = arguments(text, _Input)
            return await self._edits.patch(TypedPatch(call.input, None), call.environment_id)
        if name == "update_plan":
            return self._plan(arguments(text, _Plan))
        if name == "view_image":
            return await view(arguments(text, ViewImage), self._machines)
        if self._subagents is not None and name in self._subagents:
            return await self._subagents.call(name, text)
        if name in self._mcp:
            return await self._mcp.call(name, text)
        return f"unsupported call: {name}"

    async def _exec(self, call: ExecCommand, call_id: str) -> ToolOutput:
        """A command; or a patch, if it is one that was typed as a command."""
        self._machines.find(call.environment_id or self._machines.primary)
        try:
            typed = typed_patch(call.cmd)
        except PatchError as error:
            raise ToolError(str(error)) from None
        if typed is None:
            return await self._commands.run(call, call_id)
        began = time.monotonic()
        done = await self._edits.patch(typed, call.environment_id, call.workdir)
        if not done.startswith("Exit code: 0"):
            return done
        return f"Wall time: {time.monotonic() - began:.4f} seconds\nOutput:\n{done}"

    def _plan(self, call: _Plan) -> ToolOutput:
        steps = tuple(TodoStep(text=one.step, completed=one.status == "completed") for one in call.plan)
        self._writer.todo(TodoList(items=steps))
        return "Plan updated"
