"""Patches applied to a machine's files: whole or not at all.

Everything a patch needs is read and decided first; only then is anything written. If something fails on the
way, or somebody else has changed a file meanwhile, what was done is taken back, and the model is told so. A
call that is cancelled goes on to its end, one or the other: a patch is never left half-way.
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from .. import log
from ..client.errors import ExecServerError, ServerRejected
from ..events.model import FileEdit
from ..services import Files
from ..wire.errors import RpcError
from ..wire.uri import ForeignPath, native_path
from ..wire.uri import parse as parse_uri
from .patch import (
    ENVIRONMENT,
    AddFile,
    Change,
    Patch,
    PatchError,
    Plan,
    UpdateFile,
    check_targets,
    parse,
    plan,
)
from .places import Editable, parent_of, real_entry, real_path

__all__ = [
    "APPLY_PATCH",
    "VERIFICATION",
    "PatchFailed",
    "apply",
    "apply_patch_tool",
    "edits",
    "prepare",
    "read",
    "report",
]

MAX_PATCH_BYTES: Final = 16 * 1024 * 1024
"""Longest patch that is read at all. Whatever a model means by a longer one, it is not an edit."""

APPLY_PATCH: Final[dict[str, Any]] = {
    "type": "function",
    "name": "apply_patch",
    "description": (
        "Edit files by a patch, whole or not at all. It begins with `*** Begin Patch` and ends with"
        " `*** End Patch`; between them `*** Add File: PATH` with `+` lines, `*** Delete File: PATH`, and"
        " `*** Update File: PATH` (and `*** Move to: PATH`) with chunks: `@@` and lines that begin with a"
        " space (kept), `-` or `+`."
    ),
    "parameters": {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "The patch."}},
        "required": ["input"],
        "additionalProperties": False,
    },
}
"""The tool as a model is told of it."""


def apply_patch_tool(environments: Sequence[str]) -> dict[str, Any]:
    """The same; machines are offered if there is a choice."""
    if len(environments) < 2:
        return APPLY_PATCH
    machine = {
        "type": "string",
        "description": (
            f"Machine whose files are edited. Default: {environments[0]}."
            f" The patch can say so itself, in its second line: `{ENVIRONMENT} ID`."
        ),
        "enum": list(environments),
    }
    parameters = APPLY_PATCH["parameters"]
    properties = {**parameters["properties"], "environment_id": machine}
    return {**APPLY_PATCH, "parameters": {**parameters, "properties": properties}}


VERIFICATION: Final = "apply_patch verification failed: "
"""How the model is told that a patch cannot be applied, before why."""

DENIED: Final = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))
"""What a machine answers for what may not be written."""


class PatchFailed(Exception):
    """The patch could not be applied, and nothing of it was: unless the text says otherwise."""

    def __init__(self, text: str, cause: Exception | None = None) -> None:
        super().__init__(text)
        self.denied = getattr(cause, "errno", None) in DENIED or getattr(cause, "denied", False)
        """Whether it was not allowed, as opposed to not possible; and nothing of it is left."""


# Deciding ----------------------------------------------------------------------------------------


def read(text: str) -> Patch:
    """The patch in a text. PatchError, if it is none."""
    if len(text) > MAX_PATCH_BYTES:
        raise PatchError(f"patch rejected: longer than {MAX_PATCH_BYTES} characters")
    try:
        patch = parse(text)
    except PatchError as error:
        raise PatchError(f"{VERIFICATION}{error}") from None
    if not patch.hunks:
        raise PatchError("patch rejected: empty patch")
    return patch


async def prepare(text: str | Patch, files: Files, cwd: str) -> Plan:
    """What a patch does to the files below `cwd`, a `file:` URI, and where that is, whatever links there are.

    PatchError, if it cannot be done at all.
    """
    patch = read(text) if isinstance(text, str) else text
    try:
        resolve = partial(_resolve, cwd)
        check_targets(patch, resolve)
        contents = {}
        for hunk in patch.hunks:
            if not isinstance(hunk, AddFile):
                what = "file to update " if isinstance(hunk, UpdateFile) else ""
                contents[resolve(hunk.path)] = await _read(files, resolve(hunk.path), what)
        decided = plan(patch, resolve, contents)
    except PatchError as error:
        raise PatchError(f"{VERIFICATION}{error}") from None
    changes = []
    for change in decided.changes:
        # What is removed is a link itself, what is written is what it leads to.
        look_up = real_entry if change.kind == "delete" else real_path
        changes.append(replace(change, place=await look_up(files, change.path)))
    return replace(decided, changes=tuple(changes))


async def _read(files: Files, path: str, what: str) -> bytes:
    try:
        return await files.read(path)
    except (ExecServerError, OSError) as error:
        raise PatchError(f"Failed to read {what}{path}: {_said(error)}") from None


def _resolve(cwd: str, path: str) -> str:
    """The absolute path: a native one, or a URI where the machine is of another kind than this one."""
    if "\0" in path:
        raise PatchError(f"invalid patch: a path cannot contain NUL: {path!r}")
    try:
        base = native_path(parse_uri(cwd))
    except ForeignPath:
        try:
            return parse_uri(f"{cwd.rstrip('/')}/{path.replace(chr(92), '/')}")
        except RpcError as error:
            raise PatchError(f"invalid patch: {path!r}: {error}") from None
    return posixpath.normpath(posixpath.join(base, path))


def _said(error: Exception) -> str:
    return error.message if isinstance(error, ServerRejected) else str(error)


def edits(plan: Plan) -> tuple[FileEdit, ...]:
    """The changes as the event stream has them: sorted, and a rename as a deletion and an addition."""
    return tuple(
        FileEdit(path=change.path, kind=change.kind)
        for change in sorted(plan.changes, key=lambda change: change.path)
    )


# Doing -------------------------------------------------------------------------------------------


async def apply(plan: Plan, files: Editable) -> None:
    """Do all of it. PatchFailed if that is not possible; then the files are as they were before.

    Also when it is cancelled: the cancellation is passed on when all of it is done.
    """
    work = asyncio.ensure_future(_Application(files).run(plan))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await work
        raise


def report(seconds: float, exit_code: int, text: str) -> str:
    """What the model is told about a patch that was applied, or could not be."""
    return f"Exit code: {exit_code}\nWall time: {round(seconds, 1):g} seconds\nOutput:\n{text}"


class _Application:
    """One patch being applied, and how to take back what was done of it."""

    def __init__(self, files: Editable) -> None:
        self._files = files
        self._undo: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        self._aside: list[str] = []
        """Copies of links that were removed, in case they have to come back."""

    async def run(self, plan: Plan) -> None:
        began = time.monotonic()
        # Deletions last: until then everything that was there is still there.
        changes = sorted(plan.changes, key=lambda change: change.kind == "delete")
        try:
            await self._check_distinct(changes)
            for change in changes:
                await self._do(change)
        except (ExecServerError, OSError, PatchFailed) as error:
            raise await self._taken_back(error) from error
        for aside in self._aside:
            try:
                await self._files.remove(aside, force=True)
            except (ExecServerError, OSError) as error:
                log.warning("a link that was put aside is left", path=aside, error=str(error))
        log.debug("patch applied", changes=len(changes), seconds=time.monotonic() - began)

    async def _do(self, change: Change) -> None:
        if change.kind == "delete":
            await self._remove(change)
        elif change.kind == "update":
            await self._check_unchanged(change)
            await self._write(change, change.before)
        else:
            await self._add(change)

    async def _check_distinct(self, changes: list[Change]) -> None:
        """Links give one file several names. A patch that goes by two of them would trip over itself."""
        seen: dict[str, str] = {}
        for change in changes if len(changes) > 1 else ():
            # Of a link that is deleted both: itself, and its file.
            for place in {change.target, await real_path(self._files, change.path)}:
                other = seen.setdefault(place, change.path)
                if other != change.path:
                    raise PatchFailed(
                        f"{other} and {change.path} are the same file; a patch can have it only once"
                    )

    async def _check_not_dangling(self, path: str, place: str) -> None:
        """Writing through a link that leads nowhere would make a file that nobody named."""
        real = await real_path(self._files, place)
        try:
            await self._files.metadata(real, follow_symlinks=False)
        except FileNotFoundError:
            return
        except (ExecServerError, OSError) as error:
            if getattr(error, "errno", None) == errno.EINVAL:
                raise PatchFailed(
                    f"Failed to write file {path}: {place} is a link that leads nowhere"
                ) from None

    async def _check_unchanged(self, change: Change) -> None:
        try:
            now = await self._files.read(change.target)
        except (ExecServerError, OSError) as error:
            raise PatchFailed(f"Failed to read {change.path}: {_said(error)}", error) from None
        if now != change.before:
            raise PatchFailed(f"Failed to write file {change.path}: it has changed meanwhile; read it again")

    async def _add(self, change: Change) -> None:
        before = await self._content(change)
        if before is None:
            await self._make_parents(change)
            await self._check_not_dangling(change.path, change.target)
            if change.moved_from is not None:
                # So that it keeps its permissions; the content comes right after. The file, not a link to it:
                # that would be written through.
                source = await real_path(self._files, change.moved_from)
                self._undo.append((change.path, lambda: self._files.remove(change.target, force=True)))
                with suppress(ExecServerError, OSError):
                    await self._files.copy(source, change.target)
        await self._write(change, before)

    async def _content(self, change: Change) -> bytes | None:
        try:
            return await self._files.read(change.target)
        except FileNotFoundError:
            return None
        except (ExecServerError, OSError) as error:
            raise PatchFailed(f"Failed to write file {change.path}: {_said(error)}", error) from None

    async def _make_parents(self, change: Change) -> None:
        missing: list[str] = []
        parent = parent_of(change.target)
        while parent is not None and not await self._files.exists(parent):
            missing.append(parent)
            parent = parent_of(parent)
        for directory in reversed(missing):
            await self._check_not_dangling(change.path, directory)
            self._undo.append((directory, partial(self._forget_directory, directory)))
            try:
                await self._files.make_directory(directory)
            except (ExecServerError, OSError) as error:
                raise PatchFailed(f"Failed to write file {change.path}: {_said(error)}", error) from None

    async def _forget_directory(self, directory: str) -> None:
        # Somebody may have put something there since; that is not ours to take away.
        with suppress(OSError):
            await self._files.remove(directory)

    async def _write(self, change: Change, before: bytes | None) -> None:
        # First the way back: of a write that failed nobody knows how far it came.
        if before is None:
            self._undo.append((change.path, lambda: self._files.remove(change.target, force=True)))
        else:
            self._undo.append((change.path, partial(self._restore, change.target, before)))
        try:
            await self._files.write(change.target, change.after or b"")
        except (ExecServerError, OSError) as error:
            raise PatchFailed(f"Failed to write file {change.path}: {_said(error)}", error) from None

    async def _restore(self, path: str, before: bytes) -> None:
        # What was refused has changed nothing, and putting it back would be refused as well.
        with suppress(ExecServerError, OSError):
            if await self._files.read(path) == before:
                return
        await self._files.write(path, before)

    async def _remove(self, change: Change) -> None:
        await self._check_unchanged(change)
        if not await self._put_aside(change.target):
            self._undo.append((change.path, partial(self._restore, change.target, change.before or b"")))
        try:
            await self._files.remove(change.target)
        except (ExecServerError, OSError) as error:
            raise PatchFailed(f"Failed to delete file {change.path}: {_said(error)}", error) from None

    async def _put_aside(self, path: str) -> bool:
        """Keep a link that is to be removed; False if it is none, or cannot be kept."""
        aside = f"{path}.{secrets.token_hex(4)}.removed"
        try:
            if not (await self._files.metadata(path)).is_symlink:
                return False
            self._undo.append((aside, lambda: self._files.remove(aside, force=True)))
            await self._files.copy(path, aside)
        except (ExecServerError, OSError):
            return False
        self._undo.append((path, partial(self._put_back, aside, path)))
        self._aside.append(aside)
        return True

    async def _put_back(self, aside: str, path: str) -> None:
        with suppress(ExecServerError, OSError):
            if (await self._files.metadata(path)).is_symlink:
                return
        await self._files.remove(path, force=True)
        await self._files.copy(aside, path)

    async def _taken_back(self, error: Exception) -> PatchFailed:
        """Undo in reverse order; what to tell the model."""
        left: list[str] = []
        for path, undo in reversed(self._undo):
            try:
                await undo()
            except (ExecServerError, OSError) as failure:
                left.append(f"{path}: {_said(failure)}")
        if not left:
            return PatchFailed(f"{error}\nNothing was changed.\n", error)
        log.error("a patch could not be taken back", left=left)
        listed = "".join(f"{one}\n" for one in left)
        return PatchFailed(f"{error}\nThese could not be put back as they were:\n{listed}")
