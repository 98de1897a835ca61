"""`capabilityRoots/*` and `capabilities/*`: what this machine offers to an agent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from ...local.files.access import confinement
from ...local.files.discovery import MAX_ROOTS, discover_roots
from ...local.files.lane import Turn, reads
from ...local.files.paths import to_native
from ...local.files.skills import discover_user
from ...local.info import user_home
from ...loop import Pending
from ...wire import capabilities as wire
from ...wire.errors import RpcError, invalid_request
from ..connection import Connection
from ..dispatch import Method
from .files import files_of

__all__ = ["METHODS"]

FAMILY: Final = "capability discovery"


def _discover_roots(connection: Connection, params: wire.RootsParams) -> Pending[Any]:
    if len(params.roots) > MAX_ROOTS:
        raise invalid_request(f"capability root discovery accepts at most {MAX_ROOTS} roots")
    touched = reads(*_native(params.roots))
    return files_of(connection).lane.submit(touched, discover_roots, params.roots, _elsewhere(connection))


def _elsewhere(connection: Connection) -> Callable[[wire.CapabilityRoot, Turn], Any | None]:
    """Who looks below a root in a sandbox; None from him if this process may."""

    def discover(root: wire.CapabilityRoot, turn: Turn) -> Any | None:
        confined = confinement(root.sandbox, changes=False)
        if confined is None:
            return None
        alone = wire.RootsParams(roots=[wire.CapabilityRoot(id=root.id, path=root.path)])
        sandboxed = connection.server.sandboxed_files
        return sandboxed.perform(confined, "capabilityRoots/discoverV1", alone, turn)

    return discover


def _native(roots: list[wire.CapabilityRoot]) -> Iterator[bytes]:
    for root in roots:
        try:
            yield to_native(root.path)
        except RpcError:
            continue  # not of this kind of machine, which its own answer will say


def _discover_user(connection: Connection, params: wire.UserParams) -> Pending[Any]:
    confined = confinement(params.sandbox, changes=False)
    home = user_home()
    chosen = os.environ.get("CODEX_HOME") or (None if home is None else os.path.join(home, ".codex"))
    if chosen is None:
        raise invalid_request("there is no home directory; set CODEX_HOME")
    server_home = os.fsencode(os.path.abspath(chosen))
    own_home = None if home is None else os.fsencode(home)
    touched = reads(server_home, *([] if own_home is None else [os.path.join(own_home, b".agents")]))
    lane = files_of(connection).lane
    if confined is not None:
        homes = [None if place is None else place.decode("latin-1") for place in (server_home, own_home)]
        sandboxed = connection.server.sandboxed_files
        return lane.submit(touched, sandboxed.perform, confined, "capabilities/discoverV2", homes)
    return lane.submit(touched, discover_user, server_home, own_home)


METHODS: Final = {
    "capabilityRoots/discoverV1": Method(wire.decode_roots, _discover_roots, FAMILY),
    "capabilities/discoverV2": Method(wire.decode_user, _discover_user, FAMILY),
}
