"""Where the paths of a patch lead, and files that are changed there and nowhere else.

Links give a file other names. What is decided about an edit, by a rule or by a person, is about the place
that is written in the end; so that is looked up first, and then written without following any link that has
appeared since.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final, Protocol

from ..client.errors import ExecServerError
from ..services import FileMetadata

if TYPE_CHECKING:
    from ..client.files import RemoteFiles

__all__ = ["DecidedFiles", "Editable", "parent_of", "real_entry", "real_path"]


class Editable(Protocol):
    """What it takes to apply a patch; any services.Files can."""

    async def canonicalize(self, path: str, /) -> str: ...
    async def metadata(self, path: str, /, follow_symlinks: bool = True) -> FileMetadata: ...
    async def exists(self, path: str, /) -> bool: ...
    async def read(self, path: str, /) -> bytes: ...
    async def write(self, path: str, data: bytes, /) -> None: ...
    async def make_directory(self, path: str, /) -> None: ...
    async def remove(self, path: str, /, *, force: bool = False) -> None: ...
    async def copy(self, source: str, destination: str, /) -> None: ...


_IS_LINK: Final = frozenset((errno.EINVAL, errno.ELOOP))
"""How servers say of a path that its end is a link; one on the way there is ENOTDIR."""


class DecidedFiles:
    """Files by places that were looked up before, and that somebody has decided about.

    What the protocol cannot do without following links is done in the sandbox, whatever was decided: copies,
    and what there is to do with a link that is to be removed.
    """

    def __init__(self, files: RemoteFiles, confined: RemoteFiles) -> None:
        self._confined = confined
        self._unlinked = files.without_links()
        self.canonicalize = files.canonicalize
        self.metadata = files.metadata
        self.write = self._unlinked.write
        self.exists = self._unlinked.exists
        self.make_directory = self._unlinked.make_directory
        self.copy = confined.copy

    async def read(self, path: str) -> bytes:
        try:
            return await self._unlinked.read(path)
        except OSError as error:
            if error.errno not in _IS_LINK:
                raise
            return await self._confined.read(path)

    async def remove(self, path: str, *, force: bool = False) -> None:
        try:
            await self._unlinked.remove(path, force=force)
        except OSError as error:
            if error.errno not in _IS_LINK:
                raise
            await self._confined.remove(path, force=force)


async def real_path(files: Editable, path: str) -> str:
    """Where a path leads, as far as there is something already."""
    missing = ""
    while True:
        try:
            return (await files.canonicalize(path)).rstrip("/") + missing or "/"
        except (ExecServerError, OSError):
            parent = parent_of(path)
            if parent is None:
                return path + missing
            missing = path[len(parent) :] + missing
            path = parent


async def real_entry(files: Editable, path: str) -> str:
    """The same for a name itself, whether or not it is a link: what is removed when it is."""
    parent, _, name = path.rpartition("/")
    return f"{(await real_path(files, parent or '/')).rstrip('/')}/{name}"


def parent_of(path: str) -> str | None:
    """The directory of a path or URI; None of what is at the top."""
    parent = path.rpartition("/")[0]
    if not parent or parent == "file://":
        return None
    return parent
