"""What a machine says of itself: the answers to `environment/info` and `environment/status`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

__all__ = [
    "EnvironmentInfo",
    "EnvironmentLimits",
    "EnvironmentSandbox",
    "EnvironmentShell",
    "EnvironmentStatus",
]


class EnvironmentShell(Struct, rename="camel"):
    """The shell that commands are written for."""

    name: Literal["bash", "zsh", "sh", "powershell", "cmd"]
    path: str


class EnvironmentLimits(Struct, rename="camel"):
    """What this server allows; `max_processes` null is no limit."""

    max_processes: int | None
    retained_output_bytes: int
    shutdown_grace_ms: int
    detach_ttl_ms: int | UnsetType = UNSET
    """How long a session without a connection is kept."""


class EnvironmentSandbox(Struct, rename="camel", omit_defaults=True):
    """What carries out sandboxes here: `bubblewrap`, `landlock` (for what it can express), `filter` (for the
    network alone) or `none`; `unknown` if that is still being found out."""

    backend: Literal["bubblewrap", "landlock", "filter", "none", "unknown"]
    version: str | UnsetType = UNSET
    landlock_abi: int | UnsetType = UNSET
    reasons: list[str] | UnsetType = UNSET
    """Why it is not something better, in words."""


class EnvironmentInfo(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """Facts about the machine and the server on it.

    Directories are `file:` URIs. What may be UNSET is absent from other builds of the protocol, so a
    client must not count on it; `cwd` is always written, null when the server has none any more.
    """

    shell: EnvironmentShell
    executor_version: str | UnsetType = UNSET
    provider_id: str | UnsetType = UNSET
    """Opaque and stable: two servers with the same one run on the same machine for the same account."""
    cwd: str | None
    user_home_dir: str | UnsetType = UNSET
    platform_os: str | UnsetType = UNSET
    prepend_path_dirs: list[str] | UnsetType = UNSET
    temporary_directories: list[str] | UnsetType = UNSET
    temp_dir: str | UnsetType = UNSET
    capabilities: dict[str, bool]
    """A client uses an optional feature only when its flag is here and true."""
    limits: EnvironmentLimits | UnsetType = UNSET
    sandbox: EnvironmentSandbox | UnsetType = UNSET
    """Only in the answer to `environment/info`: finding out takes longer than a handshake may."""


class EnvironmentStatus(Struct, rename="camel"):
    """An answer at all is the health check."""

    status: str = "ready"
