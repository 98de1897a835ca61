"""Files by paths in which no link is followed: whoever puts one there meanwhile leads nobody astray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..wire import base64
from ..wire.files import MetadataResult
from .errors import RemoteFileNotFound, RemoteNotADirectory, Unsupported
from .file_answers import metadata_of
from .files import WHOLE_WRITE_BYTES

if TYPE_CHECKING:
    from ..services import FileMetadata, FilePath
    from .file_calls import FileCalls

__all__ = ["UnlinkedFiles"]


class UnlinkedFiles:
    """`client.files.without_links()`. A link anywhere in a path, its end included, is an error.

    Contents travel in one message each: WHOLE_WRITE_BYTES, about 12 MB, are the most.
    """

    def __init__(self, calls: FileCalls) -> None:
        self._calls = calls

    async def read(self, path: FilePath) -> bytes:
        """All of a file."""
        self._check_size((await self.metadata(path)).size)
        return bytes((await self._calls.part("fs/readFile", self._params(path), path)).data)

    async def write(self, path: FilePath, data: bytes) -> None:
        """Make a file have this content, creating it if need be; its directory must exist."""
        self._check_size(len(data))
        await self._change("fs/writeFile", path, dataBase64=base64.encode(data))

    async def metadata(self, path: FilePath) -> FileMetadata:
        """What a path is."""
        found = await self._calls.call("fs/getMetadata", self._params(path), MetadataResult, path)
        return metadata_of(found)

    async def exists(self, path: FilePath) -> bool:
        """Whether there is something."""
        try:
            await self.metadata(path)
        except (RemoteFileNotFound, RemoteNotADirectory):
            return False
        return True

    async def make_directory(self, path: FilePath) -> None:
        """Make a directory and its parents; it may be there."""
        await self._change("fs/createDirectory", path, recursive=True)

    async def remove(self, path: FilePath, force: bool = False) -> None:
        """Remove a file or an empty directory."""
        await self._change("fs/remove", path, recursive=False, force=force)

    def _check_size(self, size: int) -> None:
        if size > WHOLE_WRITE_BYTES:
            raise Unsupported(
                f"files of more than {WHOLE_WRITE_BYTES} bytes cannot be had without following links"
            )

    async def _change(self, method: str, path: FilePath, **more: Any) -> None:
        await self._calls.call(method, {**self._params(path), **more}, dict[str, Any], path)

    def _params(self, path: FilePath) -> dict[str, Any]:
        return {"path": self._calls.uri(path), "followSymlinks": False}
