"""Sandboxes as callers ask for them, and files seen through one.

    box = Sandbox.workspace_write("/home/me/project").denying("**/*.env")
    await client.run(["make", "test"], sandbox=box)
    await client.files.under(box).write("/home/me/project/notes", b"...")

What is asked for is enforced by the server, on its machine; a server that cannot, refuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Self

from msgspec.structs import replace

from ..wire.sandbox import (
    Access,
    Disabled,
    Entry,
    External,
    GlobPattern,
    Managed,
    NetworkAccess,
    PathEntry,
    Restricted,
    SandboxContext,
    Special,
    SpecialKind,
    SpecialPath,
)
from ..wire.uri import parse, path_to_uri

if TYPE_CHECKING:
    from .client import Client
    from .process import RemoteProcess

__all__ = ["ConfinedClient", "Sandbox"]

METADATA: Final = (".git", ".agents", ".codex")
"""What stays as it is in a workspace. Servers protect these, and more, in every writable place anyway."""

_WITHOUT_PATH: Final = frozenset({"fs/readBlock", "fs/writeBlock", "fs/close", "fs/unwatch"})
"""File calls that are about something that was opened or watched before."""


_NOT_CONFINED: Final = frozenset({"fsAtomicStreams", "fsParts", "fsListPages"})
"""What servers do for file calls, but not for those in a sandbox."""


class Sandbox(SandboxContext, frozen=True, kw_only=True):
    """What a command, or a file call, may do there. Paths are absolute ones of that machine, or URIs."""

    @classmethod
    def read_only(cls, *, network: bool = False) -> Self:
        """Everything can be read, nothing written."""
        return cls._managed([_special("root", "read")], network)

    @classmethod
    def workspace_write(
        cls,
        *roots: str,
        writable: Iterable[str] = (),
        network: bool = False,
        slash_tmp: bool = True,
        tmpdir: bool = True,
    ) -> Self:
        """Everything can be read; the workspace can be written, and what else is named.

        `roots` are the workspace, if there is one; relative patterns are relative to the first. `slash_tmp`
        and `tmpdir` are whether `/tmp` and the command's TMPDIR can be written, too.
        """
        entries = [_special("root", "read")]
        if roots:
            entries.append(_special("project_roots", "write"))
        if slash_tmp:
            entries.append(_special("slash_tmp", "write"))
        if tmpdir:
            entries.append(_special("tmpdir", "write"))
        entries += [Entry(PathEntry(_uri(path)), "write") for path in writable]
        for name in METADATA if roots else ():  # without roots, file calls must not name them either
            metadata = SpecialPath(Special("project_roots", subpath=name))
            entries.append(Entry(metadata, "read", missing_path_behavior="skip"))
        places = tuple(_uri(root) for root in roots)
        return cls._managed(entries, network, cwd=places[0] if places else None, workspace_roots=places)

    @classmethod
    def scoped(
        cls, *, readable: Iterable[str] = (), writable: Iterable[str] = (), network: bool = False
    ) -> Self:
        """Nothing exists but what is named, and what programs of the system need to run."""
        entries = [_special("minimal", "read")]
        entries += [Entry(PathEntry(_uri(path)), "read") for path in readable]
        entries += [Entry(PathEntry(_uri(path)), "write") for path in writable]
        return cls._managed(entries, network)

    @classmethod
    def full_access(cls) -> Self:
        """No restrictions, said explicitly."""
        return cls(permissions=Disabled(), windows_sandbox_level="disabled")

    @classmethod
    def external(cls, *, network: bool = False) -> Self:
        """Somebody else keeps it from files it should not touch; the network is ours to close."""
        return cls(permissions=External(_network(network)), windows_sandbox_level="disabled")

    def denying(self, *paths: str) -> Self:
        """The same without these: paths, or patterns of files that exist when it is used.

        In a pattern `*` and `?` stay within a name and `**` stands for any directories. A pattern that does
        not begin with `/` begins at the first root of the workspace. Without a workspace it begins where a
        command starts, and file calls, which start nowhere, refuse it.
        """
        permissions = self.permissions
        if not isinstance(permissions, Managed) or not isinstance(permissions.file_system, Restricted):
            raise ValueError("a sandbox that restricts no files cannot deny any")
        more = tuple(Entry(_denied(path), "deny") for path in paths)
        files = replace(permissions.file_system, entries=permissions.file_system.entries + more)
        return replace(self, permissions=replace(permissions, file_system=files))

    @classmethod
    def _managed(cls, entries: list[Entry], network: bool, **more: Any) -> Self:
        permissions = Managed(Restricted(tuple(entries)), _network(network))
        return cls(permissions=permissions, windows_sandbox_level="disabled", **more)


def _special(kind: SpecialKind, access: Access) -> Entry:
    return Entry(SpecialPath(Special(kind)), access)


def _network(allowed: bool) -> NetworkAccess:
    return "enabled" if allowed else "restricted"


def _denied(text: str) -> PathEntry | GlobPattern:
    return GlobPattern(text) if any(character in text for character in "*?[") else PathEntry(_uri(text))


def _uri(path: str) -> str:
    if path.startswith("/"):
        return path_to_uri(path)
    if path.startswith("file:"):
        return parse(path)
    raise ValueError(f"a path of the other machine must be absolute: {path!r}")


class ConfinedClient:
    """A client whose file calls, and the commands it starts, are all in one sandbox."""

    def __init__(self, client: Client, sandbox: SandboxContext) -> None:
        self._client = client
        self._sandbox = sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def has(self, capability: str) -> bool:
        """A file that was opened in a sandbox is written in place: nobody may rename later in its name."""
        return capability not in _NOT_CONFINED and self._client.has(capability)

    async def start(self, *arguments: Any, **options: Any) -> RemoteProcess:
        return await self._client.start(*arguments, **{"sandbox": self._sandbox, **options})

    async def call(self, method: str, params: Any, *more: Any) -> Any:
        return await self._client.call(method, self._confined(method, params), *more)

    async def call_for_part(self, method: str, params: Any, *more: Any) -> Any:
        return await self._client.call_for_part(method, self._confined(method, params), *more)

    def _confined(self, method: str, params: Any) -> Any:
        if method.startswith("fs/") and method not in _WITHOUT_PATH:
            return {**params, "sandbox": self._sandbox}
        return params
