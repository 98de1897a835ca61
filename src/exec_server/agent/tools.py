"""The tools of a turn: what a model is offered, and what happens when it calls one.

Whatever a model writes gets an answer it can act on: an unknown tool, arguments that are no JSON, a patch
that does not fit. Nothing it does with a tool ends the turn.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..client.errors import ExecServerError, ServerRejected
from ..environments.manager import DISABLED_TEXT
from ..events.model import CommandExecution, FileChange, McpToolCall, TodoList, TodoStep
from ..wire.errors import RpcError
from ..wire.uri import ForeignPath
from .approvals import ApprovalMode, Ask, Policy, words
from .confinement import Confinement, Mode, shown
from .exec import (
    Declined,
    DirectExec,
    ExecCommand,
    ExecRequest,
    PreparedExec,
    ToolError,
    WriteStdin,
    arguments,
    directory,
)
from .patch import PatchError
from .patching import APPLY_PATCH, PatchFailed, TypedPatch, apply, edits, prepare, report, typed_patch
from .unified import SandboxDenied, UnifiedExec
from .unified_events import ExecCommandBegin, ExecCommandEnd, ExecEvent, as_item
from .unified_text import DEFAULT_MODEL_POLICY, truncate
from .unified_tools import exec_command_tool, write_stdin_tool

if TYPE_CHECKING:
    from ..environments.environment import Environment
    from ..events.writer import EventWriter
    from .mcp_client import McpServers

__all__ = ["ToolOutput", "Toolbox"]

ToolOutput = str | list[dict[str, Any]]
"""What a model is told: a text, or parts of which some are images."""

MAX_ARGUMENT_CHARACTERS: Final = 16 * 1024 * 1024
"""Longest arguments that are looked at."""

MAX_IMAGE_BYTES: Final = 20 * 1024 * 1024
"""Largest image that is sent; what providers take is of that order."""

_IMAGES: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)

_NEVER: Final = (
    "approval policy is never; reject command - you cannot ask for escalated permissions if the approval"
    " policy is never"
)

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

VIEW_IMAGE: Final[dict[str, Any]] = {
    "type": "function",
    "name": "view_image",
    "description": "Look at an image file of the machine.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "Path of the file."}},
        "required": ["path"],
        "additionalProperties": False,
    },
}


class _Step(Struct, frozen=True, kw_only=True):
    step: str
    status: Literal["pending", "in_progress", "completed"]


class _Plan(Struct, frozen=True, kw_only=True):
    plan: list[_Step]
    explanation: str | None = None


class _Image(Struct, frozen=True, kw_only=True):
    path: str
    environment_id: str | None = None


class _Input(Struct, frozen=True, kw_only=True):
    input: str


class Toolbox:
    """The tools of one thread. `machines` and `cwds` are looked up with every call: a step changes them."""

    def __init__(
        self,
        writer: EventWriter,
        machines: Mapping[str, Environment],
        cwds: Mapping[str, str],
        *,
        thread_id: str,
        mode: Mode = "read-only",
        writable: Sequence[str] = (),
        network: bool = False,
        approvals: ApprovalMode = "never",
        policy: Policy | None = None,
        ask: Ask | None = None,
        servers: McpServers | None = None,
    ) -> None:
        self._writer = writer
        self._machines = machines
        self._cwds = cwds
        self._mode: Mode = mode
        self._writable = writable
        self._network = network
        self._approvals = approvals
        self._policy = policy or Policy()
        self._ask = ask
        self._asking = asyncio.Lock()
        self._servers = servers
        self._commands: dict[str, str] = {}
        """Item ids of the commands that were announced, by the call that started them."""
        self._requests: dict[int, DirectExec] = {}
        self.unified = UnifiedExec(
            machines,
            "",
            emit=self._command_event,
            prepare=self._prepare,
            thread_id=thread_id,
            session_id=thread_id,
        )

    def definitions(self) -> list[dict[str, Any]]:
        """Every tool as the model is told of it."""
        return [
            exec_command_tool(list(self._machines), approvals=self._approvals != "never"),
            write_stdin_tool(),
            APPLY_PATCH,
            UPDATE_PLAN,
            VIEW_IMAGE,
            *(offered for _, _, offered in (self._servers.tools.values() if self._servers else ())),
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
            return await self._patch(TypedPatch(text, None), None)
        except ToolError as error:
            return str(error)

    async def _call(self, name: str, text: str, call_id: str) -> ToolOutput:
        if name == "exec_command":
            return await self._exec(arguments(text, ExecCommand), call_id)
        if name == "write_stdin":
            return (await self.unified.write_stdin(arguments(text, WriteStdin))).text()
        if name == "apply_patch":
            return await self._patch(TypedPatch(arguments(text, _Input).input, None), None)
        if name == "update_plan":
            return self._plan(arguments(text, _Plan))
        if name == "view_image":
            return await self._view(arguments(text, _Image))
        if self._servers is not None and name in self._servers.tools:
            return await self._mcp(name, text)
        return f"unsupported call: {name}"

    # Commands --------------------------------------------------------------------------------------

    async def _exec(self, call: ExecCommand, call_id: str) -> ToolOutput:
        name = call.environment_id or self._primary()
        machine = self._machine(name)
        try:
            typed = typed_patch(call.cmd)
        except PatchError as error:
            raise ToolError(str(error)) from None
        if typed is not None:
            began = time.monotonic()
            done = await self._patch(typed, call)
            if not isinstance(done, str) or not done.startswith("Exit code: 0"):
                return done
            return f"Wall time: {time.monotonic() - began:.4f} seconds\nOutput:\n{done}"
        placed = replace(call, environment_id=name, workdir=self._place(call.workdir, name, machine))
        try:
            return (await self.unified.exec_command(placed, call_id)).text(DEFAULT_MODEL_POLICY)
        except SandboxDenied as denied:
            self._show_denied(placed, denied)
            raise
        finally:
            self._requests.pop(id(placed), None)

    def _place(self, path: str | None, name: str, machine: Environment) -> str:
        """A directory of a call, relative to that of the thread, as a URI."""
        cwd = self._cwds.get(name) or machine.info.cwd or "file:///"
        if not path:
            return cwd
        try:
            return directory(path, _At(machine, cwd))  # type: ignore[arg-type]  # it asks for `info.cwd` alone
        except Exception as error:
            raise ToolError(f"exec_command failed: workdir {path!r}: {error}") from None

    async def _prepare(self, request: DirectExec, call: ExecCommand) -> ExecRequest:
        self._requests[id(call)] = request
        script = words(request.argv)
        decided = self._policy.decide(script)
        wants_out = call.sandbox_permissions not in (None, "use_default")
        if decided is not None and decided[0] == "forbid":
            reason = f": {decided[1]}" if decided[1] else ""
            raise Declined(f"rejected by the policy{reason}")
        name = call.environment_id or self._primary()
        confinement = self._confinement(name, self._machine(name))
        if decided is not None and decided[0] == "ask":
            await self._approve(script, decided[1] or call.justification or "")
        elif wants_out and self._mode != "danger-full-access":
            if decided is None:
                if self._approvals == "never":
                    raise Declined(_NEVER)
                await self._approve(script, call.justification or "")
            return PreparedExec(**msgspec.structs.asdict(request), sandbox=None)
        return confinement.confined(request)

    async def _approve(self, script: str, why: str) -> None:
        """Ask; Declined if nobody says yes. One question at a time, and no window runs out meanwhile."""
        if self._approvals == "never" or self._ask is None:
            raise Declined("it needs approval, and the approval policy is never")
        with self.unified.paused():
            async with self._asking:
                approved = await self._ask(script, why)
        if not approved:
            raise Declined("rejected by user")

    def _command_event(self, event: ExecEvent) -> None:
        if isinstance(event, ExecCommandBegin):
            self._commands[event.call_id] = self._writer.started(as_item(event))
        elif isinstance(event, ExecCommandEnd):
            item_id = self._commands.pop(event.call_id, None)
            if item_id is not None:
                self._writer.completed(as_item(event), item_id)

    def _show_denied(self, call: ExecCommand, denied: SandboxDenied) -> None:
        """What the sandbox stopped at once has no events of its own, and is shown all the same."""
        request = self._requests.get(id(call))
        begin = ExecCommandBegin(
            call_id="", process_id=0, command=request.argv if request else [call.cmd], cwd=""
        )
        item = as_item(begin)
        item_id = self._writer.started(item)
        code = denied.result.exit_code if denied.result.exit_code != 0 else None
        self._writer.completed(
            CommandExecution(
                command=item.command,
                aggregated_output=denied.result.collected,
                exit_code=code,
                status="failed",
            ),
            item_id,
        )

    # Files -----------------------------------------------------------------------------------------

    async def _patch(self, patch: TypedPatch, call: ExecCommand | None) -> ToolOutput:
        name = (call.environment_id if call is not None else None) or self._primary()
        machine = self._machine(name)
        cwd = self._place(call.workdir if call is not None else None, name, machine)
        if patch.directory:
            cwd = directory(patch.directory, _At(machine, cwd))  # type: ignore[arg-type]  # see above
        files = self._confinement(name, machine).files(machine)
        began = time.monotonic()
        try:
            plan = await prepare(patch.text, files, cwd)
        except PatchError as error:
            return str(error)
        changes = edits(plan)
        item_id = self._writer.started(FileChange(changes=changes, status="in_progress"))
        status = "failed"
        try:
            await apply(plan, files)
            status = "completed"
        except PatchFailed as error:
            return report(time.monotonic() - began, 1, str(error))
        except asyncio.CancelledError:
            status = "completed"  # a patch that is not whole is a PatchFailed, also when it is cancelled
            raise
        finally:
            self._writer.completed(FileChange(changes=changes, status=status), item_id)
        return report(time.monotonic() - began, 0, plan.summary)

    async def _view(self, call: _Image) -> ToolOutput:
        name = call.environment_id or self._primary()
        machine = self._machine(name)
        place = self._place(call.path, name, machine)
        path = shown(place)
        files = self._confinement(name, machine).files(machine)
        try:
            found = await files.metadata(place)
            if not found.is_file:
                return f"image path `{path}` is not a file"
            if found.size > MAX_IMAGE_BYTES:
                return f"image at `{path}` has {found.size} bytes; at most {MAX_IMAGE_BYTES} can be looked at"
            data = await files.read(place)
        except (ExecServerError, OSError, RpcError, ValueError) as error:
            said = error.message if isinstance(error, ServerRejected) else str(error)
            return f"unable to locate image at `{path}`: {said}"
        kind = _kind_of_image(data)
        if kind is None:
            return f"unable to process image at `{path}`: not a PNG, JPEG, GIF or WebP image"
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        return [{"type": "input_image", "image_url": url, "detail": "high"}]

    # The rest --------------------------------------------------------------------------------------

    def _plan(self, call: _Plan) -> ToolOutput:
        steps = tuple(TodoStep(text=one.step, completed=one.status == "completed") for one in call.plan)
        self._writer.todo(TodoList(items=steps))
        return "Plan updated"

    async def _mcp(self, name: str, text: str) -> ToolOutput:
        servers = self._servers
        if servers is None:
            return f"unsupported call: {name}"
        server, tool, _ = servers.tools[name]
        try:
            given = msgspec.json.decode(text) if text.strip() else {}
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ToolError(f"failed to parse function arguments: {error}") from None
        begun = McpToolCall(server=server, tool=tool, arguments=given, status="in_progress")
        item_id = self._writer.started(begun)
        try:
            outcome = await servers.call(server, tool, given)
        except BaseException:
            self._writer.completed(replace(begun, status="failed"), item_id)
            raise
        status = "failed" if outcome.failed else "completed"
        self._writer.completed(
            replace(begun, result=outcome.result, error=outcome.error, status=status), item_id
        )
        output = outcome.for_model()
        if isinstance(output, str):
            return truncate(output, DEFAULT_MODEL_POLICY.budget, DEFAULT_MODEL_POLICY.unit)
        return output

    def _primary(self) -> str:
        return next(iter(self._machines), "")

    def _machine(self, name: str) -> Environment:
        machine = self._machines.get(name)
        if machine is not None:
            return machine
        if not self._machines:
            raise ToolError(DISABLED_TEXT)
        raise ToolError(f"unknown turn environment id `{name}`")

    def _confinement(self, name: str, machine: Environment) -> Confinement:
        cwd = self._cwds.get(name) or machine.info.cwd or "file:///"
        return Confinement(self._mode, cwd, writable=self._writable, network=self._network)


class _At:
    """A machine as if it were in another directory."""

    def __init__(self, machine: Environment, cwd: str) -> None:
        self.info = replace(machine.info, cwd=cwd)


def _kind_of_image(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in _IMAGES if data.startswith(start)), None)
