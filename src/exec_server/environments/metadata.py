"""What was found below the roots of a thread: asked once, kept by environment id and root.

The key is the id, never the handle: one id always names the same contents, so a fresh handle for it neither
invalidates what is known nor makes anybody look again. What failed because the machine could not be reached
is asked again the next time; everything else stays for the life of the thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from ..client.errors import ExecServerError, Unsupported
from ..client.recovery import is_worth_another_try
from ..wire.capabilities import DiscoveredRoot
from .roots import SelectedRoot

if TYPE_CHECKING:
    from .handle import Handle

__all__ = ["MAX_ROOTS_PER_CALL", "REPLAY_SECONDS", "MetadataCache", "RootMetadata"]

MAX_ROOTS_PER_CALL: Final = 128
"""Most roots a server takes in one call."""

REPLAY_SECONDS: Final = 8.0
"""How long a machine that was lost during the call may take to come back before the first error counts."""

Sandbox = Mapping[str, Any]
"""The sandbox object of the protocol."""


class RootMetadata(Struct, frozen=True):
    """What is known of one root: what was found, or why not."""

    root: SelectedRoot
    found: DiscoveredRoot | None
    error: str | None


class _Reply(Struct):
    roots: list[DiscoveredRoot]


class _Kept(Struct):
    metadata: RootMetadata
    sandbox: Sandbox | None
    ask_again: bool
    recovered: bool = False


class MetadataCache:
    """The metadata of one thread's roots. A fork has its own."""

    def __init__(self) -> None:
        self._kept: dict[SelectedRoot, _Kept] = {}
        self._busy: dict[str, asyncio.Lock] = {}

    async def get(
        self,
        roots: Sequence[SelectedRoot],
        handle_of: Callable[[str], Handle | None],
        sandboxes: Mapping[str, Sandbox] | None = None,
    ) -> list[RootMetadata]:
        """What is known of the roots, in their order; what is missing is asked for, all at once.

        `handle_of` gives the handle of an environment id, usually a step's own; `sandboxes` has the sandbox
        by environment id. Never raises for what a machine does: that is part of the answer.
        """
        by_environment: dict[str, list[SelectedRoot]] = {}
        for root in dict.fromkeys(roots):
            by_environment.setdefault(root.environment_id, []).append(root)
        await asyncio.gather(
            *(
                self._fill(name, group, handle_of, (sandboxes or {}).get(name))
                for name, group in by_environment.items()
            )
        )
        return [self._kept[root].metadata for root in roots]

    def take_recovered(self, root: SelectedRoot) -> bool:
        """Whether the root was found after it could not be reached before. Says so once."""
        kept = self._kept.get(root)
        recovered = kept is not None and kept.recovered
        if kept is not None:
            kept.recovered = False
        return recovered

    async def _fill(
        self,
        name: str,
        roots: Sequence[SelectedRoot],
        handle_of: Callable[[str], Handle | None],
        sandbox: Sandbox | None,
    ) -> None:
        # One at a time for each environment: who comes second finds what the first has learned.
        async with self._busy.setdefault(name, asyncio.Lock()):
            missing = [root for root in roots if self._is_missing(root, sandbox)]
            for first in range(0, len(missing), MAX_ROOTS_PER_CALL):
                batch = missing[first : first + MAX_ROOTS_PER_CALL]
                handle = handle_of(name)
                if handle is None:
                    self._keep_error(batch, sandbox, f"environment `{name}` is unavailable", ask_again=True)
                    continue
                try:
                    found = await _discover(handle, batch, sandbox)
                except (ExecServerError, OSError) as error:
                    self._keep_error(batch, sandbox, str(error), ask_again=is_worth_another_try(error))
                else:
                    self._keep_found(batch, sandbox, found)

    def _is_missing(self, root: SelectedRoot, sandbox: Sandbox | None) -> bool:
        kept = self._kept.get(root)
        return kept is None or kept.ask_again or kept.sandbox != sandbox

    def _keep_error(
        self, roots: Sequence[SelectedRoot], sandbox: Sandbox | None, error: str, *, ask_again: bool
    ) -> None:
        for root in roots:
            self._kept[root] = _Kept(RootMetadata(root, None, error), sandbox, ask_again)

    def _keep_found(
        self, roots: Sequence[SelectedRoot], sandbox: Sandbox | None, found: Sequence[DiscoveredRoot]
    ) -> None:
        if len(found) != len(roots):
            text = f"exec-server returned {len(found)} capability roots for {len(roots)} requests"
            self._keep_error(roots, sandbox, text, ask_again=False)
            return
        for root, answer in zip(roots, found, strict=True):
            before = self._kept.get(root)
            metadata = RootMetadata(root, answer, answer.error)
            if (answer.id, answer.path) != (root.id, root.path):
                text = f"exec-server returned mismatched capability root `{answer.id}` at {answer.path}"
                metadata = RootMetadata(root, None, text)
            recovered = before is not None and (before.ask_again or before.recovered)
            self._kept[root] = _Kept(metadata, sandbox, False, recovered and metadata.error is None)


async def _discover(
    handle: Handle, roots: Sequence[SelectedRoot], sandbox: Sandbox | None
) -> list[DiscoveredRoot]:
    """One call; once more if the machine was lost meanwhile and comes back in time."""
    try:
        return await _ask(handle, roots, sandbox)
    except (ExecServerError, OSError) as error:
        if not is_worth_another_try(error):
            raise
        try:
            async with asyncio.timeout(REPLAY_SECONDS):
                await handle.wait_until_connected()
        except (ExecServerError, OSError):
            raise error from None
    return await _ask(handle, roots, sandbox)


async def _ask(
    handle: Handle, roots: Sequence[SelectedRoot], sandbox: Sandbox | None
) -> list[DiscoveredRoot]:
    environment = await handle.environment()
    if _must_be_enforced(sandbox) and not environment.has("capabilityDiscoverySandbox"):
        raise Unsupported("exec-server does not support sandboxed capability discovery")
    params = {"roots": [{"id": root.id, "path": root.path, "sandbox": sandbox} for root in roots]}
    return (await environment.call("capabilityRoots/discoverV1", params, _Reply)).roots


def _must_be_enforced(sandbox: Sandbox | None) -> bool:
    """Whether ignoring it would let something be read that must not be."""
    if sandbox is None:
        return False
    permissions = sandbox.get("permissions")
    return not (isinstance(permissions, Mapping) and permissions.get("type") == "disabled")
