"""Calls about files: paths as callers write them, errors as `open` and `os` raise them, files that are open.

An open file belongs to a connection and is gone with it, which a server does not say by itself: the names
given to open files here tell. All of a connection together have only a few blocks on their way, so that a
small call waits for little.
"""

from __future__ import annotations

import asyncio
import copy
import os
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast
from uuid import uuid4

from ..wire import base64, binary
from ..wire.errors import METHOD_NOT_FOUND, RpcError
from ..wire.files import OpenMode, OpenResult
from ..wire.uri import native_path, parse, path_to_uri
from .errors import ConnectionLost, ServerRejected, Unsupported, file_error
from .file_answers import native, part_of

if TYPE_CHECKING:
    from ..services import FilePath
    from ..wire.sandbox import SandboxContext
    from .client import Client
    from .rpc import Take

__all__ = ["BLOCKS_IN_FLIGHT", "FileCalls"]

T = TypeVar("T")

BLOCKS_IN_FLIGHT: Final = 4
"""Blocks asked for or sent and not answered, of all streams of a connection together."""


class FileCalls:
    """File calls of one client, or of one sandbox on it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._blocks = asyncio.Semaphore(BLOCKS_IN_FLIGHT)

    def under(self, sandbox: SandboxContext) -> FileCalls:
        """The same, each of them in a sandbox that the server enforces."""
        from .sandbox import ConfinedClient

        confined = copy.copy(self)
        confined.client = cast("Client", ConfinedClient(self.client, sandbox))
        return confined

    # Any call ------------------------------------------------------------------------------------

    def uri(self, path: FilePath) -> str:
        """The URI of a path as callers write it."""
        path = os.fsdecode(path)
        if path.startswith("file:"):
            try:
                return parse(path)
            except RpcError as error:
                raise ValueError(f"{path!r} is not a path: {error.message}") from None
        if "\0" in path or not path:
            raise ValueError(f"{path!r} is not a path")
        if path.startswith("/"):
            return path_to_uri(path)
        base = self.client.info.cwd
        if not isinstance(base, str):
            raise ValueError(f"{path!r} is relative, and this server does not say to what")
        return path_to_uri(f"{native_path(base).rstrip('/')}/{path}")

    def native(self, path: FilePath) -> str:
        """The native path of a path as callers write it."""
        return native(self.uri(path))

    def require(self, capability: str, what: str) -> None:
        """Raise Unsupported unless the server announces a capability."""
        if not self.client.has(capability):
            raise Unsupported(f"this server cannot {what}: it does not announce {capability}")

    async def call(self, method: str, params: Any, kind: type[T], path: FilePath) -> T:
        """A call and its answer; what the server says against it is about `path`."""
        try:
            return await self.client.call(method, params, kind)
        except ServerRejected as error:
            if error.code == METHOD_NOT_FOUND:
                raise Unsupported(f"this server has no `{method}`") from None
            raise file_error(error, path) from None

    async def part(
        self, method: str, params: dict[str, Any], path: FilePath, take: Take | None = None
    ) -> binary.FilePart:
        """A part of a file, or what `take` leaves of it, and whether the file ends with it."""
        try:
            answer = await self.client.call_for_part(method, params, take)
        except ServerRejected as error:
            raise file_error(error, path) from None
        if isinstance(answer, binary.FilePart):
            return answer
        part = part_of(method, answer)
        return part if take is None else take(part)

    # Open files ----------------------------------------------------------------------------------

    def new_handle(self) -> str:
        """A name for an open file; its end says which connection the file belongs to."""
        return f"{uuid4().hex[:24]}{self.client.losses % 2**32:08x}"

    async def open(
        self,
        handle: str,
        uri: str,
        path: FilePath,
        mode: OpenMode,
        *,
        atomic: bool = False,
        part: Literal["keep", "empty"] | None = None,
    ) -> None:
        """Open a file under a name of ours."""
        params: dict[str, Any] = {"handleId": handle, "path": uri}
        if part is not None:
            params["part"] = part
        if mode != "read":
            params["mode"] = mode
        if atomic:
            params["atomic"] = True
        await self.call("fs/open", params, OpenResult, path)

    def require_open(self, handle: str, path: FilePath) -> None:
        """A server forgets open files with their connection, and closing an unknown one is no error to it."""
        if int(handle[-8:], 16) != self.client.losses % 2**32:
            raise ConnectionLost(f"{path} was open on a connection that is gone; open it again")

    async def read_block(self, params: dict[str, Any], path: FilePath, take: Take) -> binary.FilePart:
        """`fs/readBlock`; there are never more than a few blocks on their way."""
        async with self._blocks:
            self.require_open(params["handleId"], path)
            return await self.part("fs/readBlock", params, path, take)

    async def write_block(self, handle: str, offset: int, block: bytes | memoryview, path: FilePath) -> None:
        """`fs/writeBlock`; likewise."""
        async with self._blocks:
            self.require_open(handle, path)
            if not self.client.binary_files:
                params = {"handleId": handle, "offset": offset, "chunk": base64.encode(block)}
                await self.call("fs/writeBlock", params, dict[str, Any], path)
                return
            try:
                await self.client.put_block(handle, offset, block)
            except ServerRejected as error:
                raise file_error(error, path) from None

    def close(self, handle: str, *, discard: bool = False) -> None:
        """Without waiting for it. The server would do it, too, when the connection ends."""
        self.client.tell("fs/close", {"handleId": handle, **({"discard": True} if discard else {})})
