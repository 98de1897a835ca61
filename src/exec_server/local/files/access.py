"""Who does a file call: this process, or a helper inside of a sandbox. Every call on a path asks here.

A call that no rule of its profile can forbid is done by this process with all of its rights: any call
under a profile that allows every change, and a reading one under a profile that lets everything be read,
unless this server has files that nobody may.
All others need a helper (local/sandbox/files.py), and so does a reading one that comes upon `/proc`, which
is another one inside of a sandbox (procfs.py). What cannot be enforced is an error, never a plain call.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Final

from ...wire.errors import invalid_request
from ...wire.sandbox import SandboxContext

__all__ = ["confinement", "keeps_off_proc"]

_WORDS: Final = {
    "entry": "invalid sandbox permission path URI: ",
    "cwd": "",
    "workspace root": "file system sandbox workspace root is not native to this exec-server host: ",
}


def confinement(context: SandboxContext | None, *, changes: bool) -> SandboxContext | None:
    """The sandbox that a call must be done in; None if this process may do it itself.

    `changes` is whether the call may change anything. RpcError -32600 if the profile is for another kind
    of machine. Looks at nothing.
    """
    if context is None:
        return None
    needed = _needed(context, changes)
    if isinstance(needed, str):
        raise invalid_request(needed)
    if not needed and not changes and _needed(context, True) is True:
        from ..sandbox.look import secret_files

        needed = bool(secret_files())  # everything can be read but those
    return context if needed else None


def keeps_off_proc(context: SandboxContext | None) -> bool:
    """Whether a reading call that this process may do itself must not be about `/proc`."""
    return context is not None and sys.platform == "linux" and _needed(context, True) is True


@lru_cache(maxsize=256)
def _needed(context: SandboxContext, changes: bool) -> bool | str:
    """Whether a helper is needed, or what is wrong."""
    from ..sandbox.entries import (  # most clients send no sandbox
        Unsuitable,
        check_entries,
        check_places,
        has_full_read,
        has_full_write,
    )

    try:
        check_entries(context)
        if has_full_write(context) or (not changes and has_full_read(context)):
            return False
        check_places(context)
    except Unsuitable as error:
        return _WORDS[error.part] + str(error)
    return True
