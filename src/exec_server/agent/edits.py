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
from .exec import Declined, ToolError
from .patch import Change, PatchError, Plan
from .patching import PatchFailed, apply, edits, prepare, read, report
from .places import DecidedFiles, Editable, real_path
from .policy import Decision
from .typed import TypedPatch

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
        try:
            wanted = read(patch.text)
        except PatchError as error:
            return str(error)
        if name and wanted.environment_id not in (None, name):
            raise ToolError(
                f"the patch is for environment `{wanted.environment_id}`, and the call for `{name}`"
            )
        name = name or wanted.environment_id or self._machines.primary
        machine = self._machines.find(name)
        cwd = self._machines.place(workdir, name)
        confined = self._machines.confinement(name).files(machine)
        outside = DecidedFiles(machine.files, confined)
        if patch.directory:
            cwd = self._machines.place(patch.directory, name, cwd)
            # A shell would not have come further either.
            if not await confined.exists(cwd):
                return f"exec_command failed: cd: {patch.directory}: No such file or directory"
        began = time.monotonic()
        try:
            plan = await prepare(wanted, confined, cwd)
        except PatchError as error:
            return str(error)
        changes = edits(plan)
        item_id = self._writer.started(FileChange(changes=changes, status="in_progress"))
        status = "failed"
        ext: dict[str, Any] | None = None
        applying = False
        try:
            decision = await self._decide(plan, confined, shown(self._machines.cwd(name)))
            files: dict[Decision | None, Editable] = {
                "allow": outside,
                "ask": DecidedFiles(confined, confined),
                None: confined,
            }
            try:
                applying = True
                await apply(plan, files[decision])
            except PatchFailed as error:
                applying = False
                if decision == "allow" or not error.denied or not self._approver.can_ask:
                    raise
                # Nothing was changed: the sandbox did not let it. Somebody may.
                why = str(error).partition("\n")[0]
                await self._approver.approve(
                    Question(kind="edit", what=_summary(plan), why=why, outside=True)
                )
                applying = True
                await apply(plan, outside)
            status = "completed"
        except PatchFailed as error:
            return report(time.monotonic() - began, 1, str(error))
        except Declined as refusal:
            ext = {"reason": str(refusal)}
            return f"patch rejected: {refusal}"
        except asyncio.CancelledError:
            # A patch that was begun is whole, or a PatchFailed; a question that nobody answers begins none.
            status = "completed" if applying else "failed"
            raise
        finally:
            self._tell(item_id, plan, changes, status, ext)
        return report(time.monotonic() - began, 0, plan.summary)

    async def _decide(self, plan: Plan, files: Editable, cwd: str) -> Decision | None:
        """What the rules say, and whoever they want to be asked; Declined if it may not be done."""
        policy = self._approver.policy
        real = {place: await real_path(files, place) for place in policy.edit_places(cwd)}
        real |= {change.path: change.target for change in plan.changes}
        decided = policy.decide_edit([change.path for change in plan.changes], cwd, real)
        forbid(decided)
        if decided is not None and decided[0] == "ask":
            await self._approver.approve(Question(kind="edit", what=_summary(plan), why=decided[1]))
        return None if decided is None else decided[0]

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


def _summary(plan: Plan) -> str:
    """What is asked about: each path, and where it leads if that is somewhere else."""
    changes = sorted(plan.changes, key=lambda change: change.path)
    return ", ".join(
        f"{change.kind} {change.path}{f' (that is {change.target})' if change.target != change.path else ''}"
        for change in changes
    )


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
