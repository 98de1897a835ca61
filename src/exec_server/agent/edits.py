"""Edits by patch: whether each may be made, and how they are told in the event stream."""

from __future__ import annotations

import asyncio
import difflib
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ..events.model import FileChange, FileEdit
from .approvals import Approver, Question, forbid
from .confinement import shown
from .exec import Declined
from .patch import Change, PatchError, Plan
from .patching import PatchFailed, TypedPatch, apply, edits, prepare, report

if TYPE_CHECKING:
    from ..events.writer import EventWriter
    from .machines import Machines

__all__ = ["Edits"]

MAX_DIFF_BYTES: Final = 256 * 1024
"""Largest file of which a diff is told: comparing takes time that nobody asked for."""

_LINES: Final = re.compile(r"[^\n]*\n|[^\n]+")


class Edits:
    """What `apply_patch` does, however a model calls it."""

    def __init__(self, writer: EventWriter, machines: Machines, approver: Approver) -> None:
        self._writer = writer
        self._machines = machines
        self._approver = approver

    async def patch(self, patch: TypedPatch, name: str | None = None, workdir: str | None = None) -> str:
        """Apply a patch, on a machine and in a directory of its own perhaps; what the model is told."""
        name = name or self._machines.primary
        machine = self._machines.find(name)
        cwd = self._machines.place(workdir, name)
        confined = self._machines.confinement(name).files(machine)
        if patch.directory:
            cwd = self._machines.place(patch.directory, name, cwd)
            # A shell would not have come further either.
            if not await confined.exists(cwd):
                return f"exec_command failed: cd: {patch.directory}: No such file or directory"
        began = time.monotonic()
        try:
            plan = await prepare(patch.text, confined, cwd)
        except PatchError as error:
            return str(error)
        changes = edits(plan)
        item_id = self._writer.started(FileChange(changes=changes, status="in_progress"))
        status = "failed"
        ext: dict[str, Any] | None = None
        try:
            outside = await self._may_leave_sandbox(changes, shown(self._machines.cwd(name)))
            files = machine.files if outside else confined
            try:
                await apply(plan, files)
            except PatchFailed as error:
                if outside or not error.denied or not self._approver.can_ask:
                    raise
                # Nothing was changed: the sandbox did not let it. Somebody may.
                what = _summary(changes)
                await self._approver.approve(
                    Question(kind="edit", what=what, why=str(error).partition("\n")[0], outside=True)
                )
                await apply(plan, machine.files)
            status = "completed"
        except PatchFailed as error:
            return report(time.monotonic() - began, 1, str(error))
        except Declined as refusal:
            ext = {"reason": str(refusal)}
            return f"patch rejected: {refusal}"
        except asyncio.CancelledError:
            status = "completed"  # a patch that is not whole is a PatchFailed, also when it is cancelled
            raise
        finally:
            self._tell(item_id, plan, changes, status, ext)
        return report(time.monotonic() - began, 0, plan.summary)

    async def _may_leave_sandbox(self, changes: tuple[FileEdit, ...], cwd: str) -> bool:
        """What the rules say: Declined, or whether the sandbox is not needed."""
        decided = self._approver.policy.decide_edit([change.path for change in changes], cwd)
        forbid(decided)
        if decided is not None and decided[0] == "ask":
            await self._approver.approve(Question(kind="edit", what=_summary(changes), why=decided[1]))
        return decided is not None and decided[0] == "allow"

    def _tell(
        self,
        item_id: str,
        plan: Plan,
        changes: tuple[FileEdit, ...],
        status: str,
        ext: dict[str, Any] | None,
    ) -> None:
        if self._writer.extended and status == "completed":
            ext = {**(ext or {}), "changes": _told(plan.changes)}
        self._writer.completed(FileChange(changes=changes, status=status), item_id, ext=ext)


def _summary(changes: tuple[FileEdit, ...]) -> str:
    return ", ".join(f"{change.kind} {change.path}" for change in changes)


def _told(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """The changes for whoever wants to see them; what was moved says where to."""
    moved = {change.moved_from: change.path for change in changes if change.moved_from is not None}
    told: list[dict[str, Any]] = []
    for change in changes:
        goes = {"move_path": moved[change.path]} if change.kind == "delete" and change.path in moved else {}
        told.append({"path": change.path, "diff": _diff(change), **goes})
    return told


def _diff(change: Change) -> str | None:
    """A unified diff; None where there is none to make."""
    before, after = change.before or b"", change.after or b""
    if max(len(before), len(after)) > MAX_DIFF_BYTES:
        return None
    old, new = (_LINES.findall(text.decode("utf-8", "replace")) for text in (before, after))
    return "".join(difflib.unified_diff(old, new, fromfile=change.path, tofile=change.path))
