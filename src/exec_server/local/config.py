"""The configuration files of this machine, as an agent that works on it would read them.

Four kinds, lowest precedence first: the system's (`/etc/codex/config.toml`), the user's
(`$CODEX_HOME/config.toml`), the project's (`.codex/config.toml` in every directory from the project's
root down to `cwd`, as far as it is trusted), and the administrator's (`/etc/codex/managed_config.toml`).
Requirements, which nobody below may break, are the administrator's and in files of their own.

A project is somebody else's files. Nothing of it is read until a file that is not part of it says
that it is trusted, and even then there are keys it may not set.
"""

from __future__ import annotations

import os
from typing import Any, Final

from ..wire.config import (
    ConfigLayer,
    ConfigLayers,
    ConfigReadParams,
    ConfigReadResult,
    select_paths,
    write_toml,
)
from ..wire.errors import RpcError, internal_error, invalid_params, os_error_text
from ..wire.uri import path_to_uri, uri_to_path
from .info import user_home

__all__ = ["read_environment_config"]

Table = dict[str, Any]

SYSTEM_DIRECTORY: Final = "/etc/codex"

MAX_CONFIG_BYTES: Final = 16 * 1024 * 1024
"""Longest file that is read; a configuration is a few kilobytes."""

DENIED_TO_PROJECTS: Final = (
    "openai_base_url",
    "chatgpt_base_url",
    "apps_mcp_product_sku",
    "model_provider",
    "model_providers",
    "notify",
    "profile",
    "profiles",
    "experimental_realtime_ws_base_url",
    "experimental_realtime_webrtc_call_base_url",
    "otel",
)
"""Keys that decide where secrets are sent or which programs run on the user's side."""

_APPROVAL_POLICIES: Final = {
    "untrusted": "untrusted",
    "on-failure": "on-request",
    "on-request": "on-request",
    "never": "never",
}
_REVIEWERS: Final = {
    "user": ["user"],
    "auto_review": ["auto_review", "user"],
    "guardian_subagent": ["auto_review", "user"],
}
_SANDBOX_MODES: Final = {
    "read-only": ["read-only"],
    "workspace-write": ["read-only", "workspace-write"],
    "danger-full-access": ["read-only", "danger-full-access"],
}


def read_environment_config(params: ConfigReadParams) -> ConfigReadResult:
    """Read and reduce every layer. Blocks on the disk; RpcError says which file is wrong and where."""
    if not params.config_paths and not params.requirements_paths:
        raise invalid_params("at least one config or requirements path is required")
    if not all(params.config_paths) or not all(params.requirements_paths):
        raise invalid_params("TOML paths must contain at least one key segment")
    cwd = uri_to_path(params.cwd)
    home, codex_home = user_home(), _codex_home()

    system_path = f"{SYSTEM_DIRECTORY}/config.toml"
    managed_path = f"{SYSTEM_DIRECTORY}/managed_config.toml"
    user_path = os.path.join(codex_home, "config.toml")
    system = _load(system_path)
    user = _load(user_path)
    managed = _load(managed_path)
    projects = _project_layers(cwd, codex_home, [system, user, managed])

    below_cloud = _reduce([(f"system ({system_path})", system_path, system)], params.config_paths)
    above_cloud = _reduce(
        [
            (f"user ({user_path})", user_path, user),
            *[(f"project ({path})", path, table) for path, table in projects],
            (f"legacy managed_config.toml ({managed_path})", managed_path, managed),
        ],
        params.config_paths,
    )
    requirements_path = f"{SYSTEM_DIRECTORY}/requirements.toml"
    required = _load(requirements_path, syntax="failed to parse requirements layer ")
    below = _reduce([(requirements_path, requirements_path, required)], params.requirements_paths)
    above = _reduce([(managed_path, managed_path, _required_by(managed))], params.requirements_paths)
    return ConfigReadResult(
        user_home_dir=None if home is None else path_to_uri(home),
        codex_home_dir=path_to_uri(codex_home),
        hostname=os.uname().nodename.lower() or None,
        config=ConfigLayers(below_cloud + above_cloud, len(below_cloud)),
        requirements=ConfigLayers(below + above, len(below)),
    )


def _codex_home() -> str:
    """`CODEX_HOME`, which must be there if it is set; else `~/.codex`, which need not be."""
    if chosen := os.environ.get("CODEX_HOME"):
        if not os.path.isdir(chosen):
            wrong = "is not a directory" if os.path.exists(chosen) else "does not exist"
            raise internal_error(
                f'failed to find Codex home: CODEX_HOME points to "{chosen}", but that path {wrong}'
            )
        return os.path.realpath(chosen)
    home = user_home()
    if home is None:
        raise internal_error("failed to find Codex home: there is no home directory; set CODEX_HOME")
    return os.path.join(home, ".codex")


def _reduce(files: list[tuple[str, str, Table]], paths: list[list[str]]) -> list[ConfigLayer]:
    """Layers of the files (source, path, content) in which anything was selected."""
    layers: list[ConfigLayer] = []
    for source, path, table in files:
        try:
            selected = select_paths(table, paths)
            toml = write_toml(selected)
        except RecursionError:
            raise _failure(f"{path}: nested too deeply") from None
        if selected:
            text = source.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            layers.append(ConfigLayer(text, path_to_uri(os.path.dirname(path)), toml))
    return layers


def _required_by(managed: Table) -> Table:
    """What the older kind of managed configuration requires: the value it sets is the only one allowed."""
    rules: Table = {}
    if (policy := managed.get("approval_policy")) is not None:
        rules["allowed_approval_policies"] = [
            policy if isinstance(policy, dict) else _known(_APPROVAL_POLICIES, "approval_policy", policy)
        ]
    if (reviewer := managed.get("approvals_reviewer")) is not None:
        rules["allowed_approvals_reviewers"] = _known(_REVIEWERS, "approvals_reviewer", reviewer)
    if (mode := managed.get("sandbox_mode")) is not None:
        rules["allowed_sandbox_modes"] = _known(_SANDBOX_MODES, "sandbox_mode", mode)
    return rules


def _known(choices: dict[str, Any], key: str, value: object) -> Any:
    if isinstance(value, str) and value in choices:
        return choices[value]
    names = ", ".join(f"`{name}`" for name in choices)
    raise _failure(
        f"Failed to parse config requirements as TOML: unknown variant `{value}`, "
        f"expected one of {names}\nin `{key}`\n"
    )


# Files -------------------------------------------------------------------------------------------


def _failure(text: str) -> RpcError:
    return internal_error(f"failed to load executor-local config: {text}")


def _load(path: str, *, kind: str = "config file", syntax: str = "") -> Table:
    """The file's content; empty if there is no such file. `syntax` introduces a syntax error."""
    import tomllib

    if not os.path.lexists(path):
        return {}
    try:
        if not os.path.isfile(path) and os.path.exists(path):
            raise _failure(f"Failed to read {kind} {path}: path `{path}` is not a file")
        with open(path, "rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            raise _failure(f"Failed to read {kind} {path}: longer than {MAX_CONFIG_BYTES} bytes")
        return tomllib.loads(raw.decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _failure(f"Failed to read {kind} {path}: {os_error_text(error)}") from None
    except UnicodeDecodeError as error:
        text = f"invalid utf-8 sequence of {error.end - error.start} bytes from index {error.start}"
        raise _failure(f"Failed to read {kind} {path}: {text}") from None
    except tomllib.TOMLDecodeError as error:
        raise _failure(f"{syntax}{path}:{_syntax_error(str(error))}") from None
    except RecursionError:
        raise _failure(f"{path}: nested too deeply") from None


def _syntax_error(text: str) -> str:
    """`Invalid value (at line 1, column 6)` the way compilers say it: `1:6: Invalid value`.

    Follows a path and a colon.
    """
    import re

    match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", text, re.DOTALL)
    return f"{match[2]}:{match[3]}: {match[1]}" if match else f" {text}"


# Projects ----------------------------------------------------------------------------------------


def _project_layers(cwd: str, codex_home: str, outside: list[Table]) -> list[tuple[str, Table]]:
    """Files of the project around `cwd`, root first. `outside` says what is trusted."""
    trust = _Trust(outside)
    root = _project_root(cwd, _root_markers(outside))
    repository = _find_upwards(cwd, [".git"])
    main_checkout = None if repository is None else _main_checkout(repository)
    shared = [root] + [place for place in (main_checkout or repository,) if place is not None]

    layers: list[tuple[str, Table]] = []
    for directory in _directories_between(root, cwd):
        folder = os.path.join(directory, ".codex")
        if not os.path.isdir(folder) or os.path.realpath(folder) == os.path.realpath(codex_home):
            continue
        if not trust.allows([directory, *shared]):
            continue
        path = os.path.join(folder, "config.toml")
        table = _load(path, kind="project config file", syntax="Error parsing project config file ")
        for key in DENIED_TO_PROJECTS:
            table.pop(key, None)
        layers.append((path, table))
        if main_checkout is not None and repository is not None:
            # A branch that is only being looked at must not bring its own hooks.
            table.pop("hooks", None)
            layers.append(_hooks_of(os.path.join(main_checkout, os.path.relpath(directory, repository))))
    return layers


def _hooks_of(directory: str) -> tuple[str, Table]:
    path = os.path.join(os.path.normpath(directory), ".codex", "config.toml")
    kind = "project hooks config file"
    return path, select_paths(_load(path, kind=kind, syntax=f"Error parsing {kind} "), [["hooks"]])


class _Trust:
    """Which directories the files outside of any project call trusted."""

    def __init__(self, outside: list[Table]) -> None:
        self._levels: dict[str, str] = {}
        for table in outside:
            projects = table.get("projects", {})
            if not isinstance(projects, dict):
                raise _failure("expected a table\nin `projects`\n")
            for path, entry in projects.items():
                level = entry.get("trust_level") if isinstance(entry, dict) else entry
                if level is None:
                    continue
                if level not in ("trusted", "untrusted"):
                    raise _failure(
                        f"unknown variant `{level}`, expected `trusted` or `untrusted`\n"
                        f"in `projects.{path}.trust_level`\n"
                    )
                self._levels[path] = level

    def allows(self, directories: list[str]) -> bool:
        """The first directory that anything is said about decides; a link counts as what it points to."""
        for directory in directories:
            for spelling in (directory, os.path.realpath(directory)):
                if spelling in self._levels:
                    return self._levels[spelling] == "trusted"
        return False


def _root_markers(outside: list[Table]) -> list[str]:
    markers = [".git"]
    for table in outside:
        if "project_root_markers" in table:
            markers = table["project_root_markers"]
            if not isinstance(markers, list) or not all(isinstance(name, str) for name in markers):
                raise _failure("project_root_markers must be an array of strings")
    return markers


def _project_root(cwd: str, markers: list[str]) -> str:
    return _find_upwards(cwd, markers) or cwd


def _find_upwards(cwd: str, markers: list[str]) -> str | None:
    """The nearest directory at or above `cwd` that has one of the markers."""
    directory = cwd
    while True:
        if any(_has_marker(directory, name) for name in markers):
            return directory
        parent = os.path.dirname(directory)
        if parent == directory:
            return None
        directory = parent


def _has_marker(directory: str, name: str) -> bool:
    path = os.path.join(directory, name)
    if name == ".git" and os.path.isdir(path):
        return os.path.lexists(os.path.join(path, "HEAD"))  # an empty one is no repository
    return os.path.exists(path)


def _directories_between(root: str, cwd: str) -> list[str]:
    directories = [cwd]
    while directories[-1] != root:
        directories.append(os.path.dirname(directories[-1]))
    return directories[::-1]


def _main_checkout(worktree: str) -> str | None:
    """The checkout that a linked worktree belongs to; None if it is not one.

    Both must say so: the worktree's `.git` file names a folder of the repository, and that folder names
    the worktree. Otherwise any directory could claim the trust of any repository.
    """
    link = os.path.join(worktree, ".git")
    if not os.path.isfile(link):
        return None
    named = _first_line(link)
    if not named.startswith("gitdir:"):
        return None
    folder = os.path.realpath(os.path.join(worktree, named.removeprefix("gitdir:").strip()))
    common_name, back_name = _first_line(f"{folder}/commondir"), _first_line(f"{folder}/gitdir")
    if not common_name or not back_name:
        return None
    common = os.path.realpath(os.path.join(folder, common_name))
    back = os.path.realpath(os.path.join(folder, back_name))
    if back != os.path.realpath(link) or os.path.dirname(folder) != os.path.join(common, "worktrees"):
        return None
    return os.path.dirname(common) if os.path.basename(common) == ".git" else None


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.readline(4096).strip()
    except OSError:
        return ""
