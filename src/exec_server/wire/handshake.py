"""How a connection begins: `initialize`, its answer, and `initialized`."""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType

__all__ = ["LEGACY_PROTOCOL_VERSION", "InitializeParams", "InitializeResult"]

LEGACY_PROTOCOL_VERSION: Final = "exec-server.v0"
"""What clients of the first generation look for; later ones ignore it, so everybody gets it."""


class InitializeParams(Struct, rename="camel", frozen=True, omit_defaults=True):
    """What a client says of itself."""

    client_name: str
    resume_session_id: str | None = None
    lifecycle_events: bool | None = None
    """Wants `process/started` and `process/failed`."""
    extensions: bool | None = None
    """Knows what this server adds: `process/list`, and `killed` in the answer to `process/terminate`."""
    binary_output: bool | None = None
    """Wants output as binary frames where the transport has them (wire/binary.py)."""
    acknowledges_output: bool | None = None
    """Will say what output it has received, so that what it has not is kept longer."""
    binary_files: bool | None = None
    """Wants file contents as binary frames, and may send them so."""


class InitializeResult(Struct, rename="camel"):
    """One answer for clients of every generation: each finds the member it needs."""

    session_id: str
    environment_info: Any = None
    protocol_version: str = LEGACY_PROTOCOL_VERSION
    binary_output: bool | UnsetType = UNSET
    """Present and true when output will come as binary frames."""
    binary_files: bool | UnsetType = UNSET
    """Present and true when file contents will, and may be sent so."""
