"""The commands of a thread: whether each may run, and how they are told in the event stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import asdict, replace

from ..events.model import CommandExecution
from .approvals import Approver, Question, forbid
from .confinement import shown
from .exec import Declined, DirectExec, ExecCommand, ExecRequest, PreparedExec, WriteStdin, without_surrogates
from .policy import words
from .unified import UnifiedExec
from .unified_events import ExecCommandBegin, ExecCommandEnd, ExecCommandOutputDelta, ExecEvent, as_item
from .unified_start import SandboxDenied
from .unified_text import DEFAULT_MODEL_POLICY

if TYPE_CHECKING:
    from ..events.writer import EventWriter
    from .machines import Machines

__all__ = ["Commands"]

NEVER: Final = (
    "approval policy is never; reject command - you cannot ask for escalated permissions if the approval"
    " policy is never"
)

MAX_SHOWN_BYTES: Final = 128 * 1024
"""Most output that is kept to show a command that still runs: more than the stream has room for."""


class Commands:
    """What `exec_command` and `write_stdin` do. `close` ends every command."""

    def __init__(
        self, writer: EventWriter, machines: Machines, approver: Approver, *, thread_id: str
    ) -> None:
        self._writer = writer
        self._machines = machines
        self._approver = approver
        self._items: dict[str, str] = {}
        """Item ids of the commands that were announced, by the call that started them."""
        self._printed: dict[str, bytearray] = {}
        self._requests: dict[int, DirectExec] = {}
        self._calls: dict[str, ExecCommand] = {}
        self.unified = UnifiedExec(
            machines.ready,
            "",
            emit=self._happened,
            prepare=self._prepare,
            thread_id=thread_id,
            session_id=thread_id,
        )

    async def close(self) -> None:
        """End every command, and wait until that has been told."""
        await self.unified.close()

    async def run(self, call: ExecCommand, call_id: str) -> str:
        """Start a command, in the directory of the thread; what the model is told."""
        name = call.environment_id or self._machines.primary
        self._machines.find(name)
        placed = replace(call, environment_id=name, workdir=self._machines.place(call.workdir, name))
        self._calls[call_id] = placed
        try:
            return (await self.unified.exec_command(placed, call_id)).text(DEFAULT_MODEL_POLICY)
        except SandboxDenied as denied:
            self._show_denied(placed, denied)
            raise
        finally:
            self._requests.pop(id(placed), None)
            self._calls.pop(call_id, None)

    async def write(self, call: WriteStdin) -> str:
        """Type into one, or look at it."""
        return (await self.unified.write_stdin(call)).text()

    # Deciding --------------------------------------------------------------------------------------

    async def _prepare(self, request: DirectExec, call: ExecCommand) -> ExecRequest:
        self._requests[id(call)] = request
        script = words(request.argv)
        decided = self._approver.policy.decide(script)
        forbid(decided)
        wants_out = call.sandbox_permissions not in (None, "use_default")
        confinement = self._machines.confinement(call.environment_id or self._machines.primary)
        why = call.justification or ""
        if decided is not None and decided[0] == "ask":
            await self._approve(Question(kind="command", what=script, why=decided[1] or why))
        elif wants_out and self._machines.mode != "danger-full-access":
            if decided is None:
                if self._approver.mode == "never":
                    raise Declined(NEVER)
                await self._approve(Question(kind="command", what=script, why=why, outside=True))
            return PreparedExec(**asdict(request), sandbox=None)
        return confinement.confined(request)

    async def _approve(self, question: Question) -> None:
        """No window of a running command runs out while somebody is asked."""
        await self._approver.approve(question, self.unified.paused())

    # Telling ---------------------------------------------------------------------------------------

    def _happened(self, event: ExecEvent) -> None:
        if isinstance(event, ExecCommandBegin):
            call = self._calls.get(event.call_id)
            where = without_surrogates(shown(event.cwd))
            ext = {"cwd": where, "environment_id": call.environment_id if call is not None else None}
            self._items[event.call_id] = self._writer.started(as_item(event), ext=ext)
            self._printed[event.call_id] = bytearray()
        elif isinstance(event, ExecCommandOutputDelta):
            self._show_output(event)
        elif isinstance(event, ExecCommandEnd):
            self._printed.pop(event.call_id, None)
            item_id = self._items.pop(event.call_id, None)
            if item_id is None:
                return
            item = as_item(event)
            reason = {"reason": item.aggregated_output} if item.status == "declined" else None
            self._writer.completed(item, item_id, ext=reason)

    def _show_output(self, event: ExecCommandOutputDelta) -> None:
        """What a command has printed so far, if anybody wants to see it while it runs."""
        printed, item_id = self._printed.get(event.call_id), self._items.get(event.call_id)
        if not self._writer.live_output or printed is None or item_id is None:
            return
        printed += event.chunk[: MAX_SHOWN_BYTES - len(printed)]
        item = self._writer.open_items.get(item_id)
        if isinstance(item, CommandExecution):
            text = printed.decode("utf-8", "replace")
            self._writer.updated(item_id, replace(item, aggregated_output=text))

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
