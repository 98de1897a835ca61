"""The facts about this machine that a client needs before it writes its first command."""

from __future__ import annotations

import os
import sys
from typing import Final, Literal

from ..limits import Limits
from ..wire.environment import EnvironmentInfo, EnvironmentLimits, EnvironmentShell
from ..wire.uri import path_to_uri

__all__ = ["environment_info", "login_shell", "user_home"]

ShellName = Literal["bash", "zsh", "sh", "powershell", "cmd"]

_SHELL_NAMES: Final[dict[str, ShellName]] = {
    "bash": "bash",
    "zsh": "zsh",
    "sh": "sh",
    "pwsh": "powershell",
    "powershell": "powershell",
}
"""File names of the shells that clients know how to write for. Others (fish, nologin) are passed over."""

_FALLBACK_SHELLS: Final[tuple[ShellName, ...]] = ("bash", "zsh")
"""Tried in order when the account's own shell will not do; `/bin/sh` comes after them."""

_MACHINE_ID_FILES: Final = ("/etc/machine-id", "/var/lib/dbus/machine-id")


def environment_info(limits: Limits, capabilities: dict[str, bool], version: str) -> EnvironmentInfo:
    """What `environment/info` answers, read from the machine now."""
    try:
        cwd: str | None = os.getcwd()
    except OSError:
        cwd = None  # the directory was removed under us
    home = user_home()
    temp = os.environ.get("TMPDIR") or None
    if temp is not None:
        temp = _tidy(os.path.join(cwd or "/", temp))
    info = EnvironmentInfo(
        shell=login_shell(),
        executor_version=version,
        provider_id=_provider_id(),
        cwd=None if cwd is None else path_to_uri(cwd),
        platform_os="macos" if sys.platform == "darwin" else "windows" if os.name == "nt" else "linux",
        prepend_path_dirs=[],
        temporary_directories=[] if temp is None else [path_to_uri(temp)],
        temp_dir=path_to_uri(temp or "/tmp"),  # noqa: S108  # the protocol's default, not ours to choose
        capabilities=capabilities,
        limits=EnvironmentLimits(
            max_processes=limits.max_processes,
            retained_output_bytes=limits.retained_output,
            shutdown_grace_ms=round(limits.shutdown_grace * 1000),
            detach_ttl_ms=round(limits.detach_ttl * 1000),
        ),
    )
    if home is not None:
        info.user_home_dir = path_to_uri(home)
    return info


def user_home() -> str | None:
    """`HOME`, else the account's home; None when there is neither, or it is not absolute."""
    home = os.environ.get("HOME") or _account()[0]
    return _tidy(home) if home.startswith("/") else None


def login_shell() -> EnvironmentShell:
    """The account's shell; `SHELL` is not asked, because whoever started the server may have set it."""
    path = _account()[1]
    name = _SHELL_NAMES.get(os.path.basename(path))
    if name is not None:
        if os.path.isfile(path):
            return EnvironmentShell(name, path)
        if found := _find_program(os.path.basename(path)):
            return EnvironmentShell(name, found)
    for fallback in _FALLBACK_SHELLS:
        if found := _find_program(fallback):
            return EnvironmentShell(fallback, found)
    return EnvironmentShell("sh", "/bin/sh")


def _tidy(path: str) -> str:
    """An absolute path in its shortest spelling (`normpath` alone would keep a double slash in front)."""
    return "/" + os.path.normpath(path).lstrip("/")


def _find_program(name: str) -> str | None:
    """In `PATH`, then in `/bin`: a server is often started with less of a PATH than its account has."""
    for directory in (*os.environ.get("PATH", "").split(":"), "/bin"):
        path = os.path.join(directory, name)
        if directory.startswith("/") and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def _account() -> tuple[str, str]:
    """Home directory and shell from the account database; empty where it has no entry for us."""
    import pwd

    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:
        return "", ""
    return entry.pw_dir, entry.pw_shell


def _provider_id() -> str:
    """Hashed, so that it tells machines apart without telling anybody which machine it is."""
    from hashlib import sha256

    machine = ""
    for name in _MACHINE_ID_FILES:
        try:
            with open(name, encoding="utf-8") as file:
                machine = file.read().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if machine:
            break
    host = os.uname()
    facts = ("exec-server", machine, host.nodename, host.sysname, host.machine, str(os.getuid()))
    return "sha256:" + sha256("\0".join(facts).encode("utf-8", "surrogateescape")).hexdigest()
