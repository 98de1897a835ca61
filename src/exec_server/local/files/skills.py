"""What the user of this machine has installed for agents: plugins in the server's home, and skills.

Skills describe themselves in the YAML at the top of their instructions. A skill or plugin that
cannot be understood is left out, and a warning says that something was.
"""

from __future__ import annotations

import os
import re
from functools import cmp_to_key
from typing import Any, Final

from msgspec import DecodeError, Struct, ValidationError
from msgspec.json import decode, encode

from ...wire.capabilities import (
    CapabilityFile,
    DiscoveredSkill,
    DiscoveryRoot,
    InstalledPlugin,
    PluginFiles,
    UserResult,
    UserSkill,
)
from ...wire.errors import RpcError
from .discovery import METADATA, Bundle, Scan, basename_of, child_of, parent_of
from .lane import ALONE, Turn
from .paths import to_uri

__all__ = ["discover_user"]

WARNING: Final = "some capability metadata could not be loaded; discovery may be incomplete"

MAX_NAME_LENGTH: Final = 64
"""Of a skill's own name, in characters."""

_NAME = re.compile(rb"[A-Za-z0-9._-]+")
"""What markets and plugins may be called."""

_VERSION = re.compile(rb"[A-Za-z0-9._+-]+")
_NUMBERED = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?")
_FRONT = re.compile(r"---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_LINE = re.compile(r"(name|description):[ \t]+(.+)")


class _Interface(Struct, rename="camel"):
    display_name: str | None = None


class _Manifest(Struct, rename="camel"):
    name: str | None = None
    interface: _Interface | None = None
    mcp_servers: Any = None
    apps: Any = None


def discover_user(home: bytes, user_home: bytes | None, turn: Turn = ALONE) -> UserResult:
    """What is installed in the server's home, and in the user's own folder for agents."""
    turn.leave()
    result = UserResult([], [], [])
    for market, plugin, root in _installed(os.path.join(home, b"plugins", b"cache")):
        turn.check()
        found = _plugin(market, plugin, root, result.warnings, turn)
        if found is not None:
            result.plugins.append(found)
    result.plugins.sort(key=lambda plugin: plugin.id)
    folders = [("codex-home-skills", os.path.join(home, b"skills"))]
    if user_home is not None:
        folders.append(("user-agent-skills", os.path.join(user_home, b".agents", b"skills")))
    for folder_id, folder in folders:
        if not os.path.isdir(folder):
            continue
        where = DiscoveryRoot(folder_id, to_uri(folder))
        skills, complete = _skills(where.path, Bundle(turn), turn)
        result.skills += [_with_root(skill, where) for skill in skills]
        if not complete:
            result.warnings.append(WARNING)
    return result


def _with_root(skill: DiscoveredSkill, where: DiscoveryRoot) -> UserSkill:
    return UserSkill(
        skill.name,
        skill.description,
        skill.short_description,
        skill.path,
        where,
        skill.dependencies,
        skill.policy,
    )


# Plugins -----------------------------------------------------------------------------------------


def _installed(cache: bytes) -> list[tuple[str, str, bytes]]:
    """Market, name and folder of every plugin: the newest version of each."""
    found: list[tuple[str, str, bytes]] = []
    for market in _directories(cache, _NAME):
        for plugin in _directories(os.path.join(cache, market), _NAME):
            folder = os.path.join(cache, market, plugin)
            versions = [version.decode() for version in _directories(folder, _VERSION)]
            if versions:
                newest = "local" if "local" in versions else max(versions, key=cmp_to_key(_compare_versions))
                found.append((market.decode(), plugin.decode(), os.path.join(folder, newest.encode())))
    return found


def _directories(path: bytes, name: re.Pattern[bytes]) -> list[bytes]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if name.fullmatch(entry.name) and entry.is_dir())
    except OSError:
        return []


def _compare_versions(one: str, other: str) -> int:
    """By number where both are numbers, else by text."""
    first, second = _NUMBERED.fullmatch(one), _NUMBERED.fullmatch(other)
    if first and second:
        numbers = [tuple(map(int, match.groups()[:3])) for match in (first, second)]
        if numbers[0] != numbers[1]:
            return 1 if numbers[0] > numbers[1] else -1
        if first[4] != second[4]:
            # What comes before a release is older than the release.
            if first[4] is None or second[4] is None:
                return 1 if first[4] is None else -1
            return 1 if first[4] > second[4] else -1
    return (one > other) - (one < other)


def _plugin(market: str, name: str, root: bytes, warnings: list[str], turn: Turn) -> InstalledPlugin | None:
    uri, bundle = to_uri(root), Bundle(turn)
    file = bundle.manifest_of(uri)
    try:
        manifest = decode(file.contents, type=_Manifest) if file is not None else None
    except (DecodeError, ValidationError, RecursionError):
        manifest = None
    if file is None or manifest is None:
        warnings.append(WARNING)
        return None
    version = basename_of(uri)
    own_name = (manifest.name or "").strip() or version
    shown = manifest.interface.display_name if manifest.interface is not None else None
    files, complete = _declared_files(uri, file, manifest, bundle)
    skills, all_understood = _skills(uri, bundle, turn)
    if bundle.warnings or not complete or not all_understood:
        warnings.append(WARNING)
    return InstalledPlugin(
        id=f"{name}@{market}",
        display_name=(shown or "").strip() or own_name,
        remote_plugin_id=None,
        version=version,
        root=uri,
        files=files,
        skills=skills,
    )


def _declared_files(
    root: str, file: CapabilityFile, manifest: _Manifest, bundle: Bundle
) -> tuple[PluginFiles, bool]:
    """The files of a plugin, and whether all that it declares are there."""
    files = PluginFiles(file)
    complete = True
    if isinstance(manifest.mcp_servers, dict):
        files.mcp_config = CapabilityFile(file.path, encode(manifest.mcp_servers).decode())
    else:
        declared = bundle.declared_path(root, file.path, "mcpServers", manifest.mcp_servers)
        files.mcp_config = bundle.read(declared or child_of(root, ".mcp.json"))
        complete = declared is None or files.mcp_config is not None
    apps = bundle.declared_path(root, file.path, "apps", manifest.apps)
    if apps is not None:
        files.apps_config = bundle.read(apps)
        complete = complete and files.apps_config is not None
    return files, complete


# Skills ------------------------------------------------------------------------------------------


def _skills(root: str, bundle: Bundle, turn: Turn) -> tuple[list[DiscoveredSkill], bool]:
    """The skills below a folder, and whether all of them could be understood."""
    problems: list[str] = []
    try:
        scan = Scan(root, problems.append, turn)
    except (OSError, RpcError):
        return [], False
    namespaces = {plugin_root: manifest for plugin_root, _, manifest in reversed(scan.manifests)}
    names: dict[str, str] = {}
    found: list[DiscoveredSkill] = []
    for uri in scan.skills:
        file = bundle.read(uri)
        skill = None if file is None else _skill(file, bundle)
        if skill is None:
            problems.append(uri)
            continue
        above = parent_of(uri)
        while above is not None and len(above) >= len(root) and above.rstrip("/") not in namespaces:
            above = parent_of(above)
        manifest = None if above is None else namespaces.get(above.rstrip("/"))
        if manifest is not None:
            if manifest not in names:
                names[manifest] = _plugin_name(manifest, bundle)
            skill.name = f"{names[manifest]}:{skill.name}"
        found.append(skill)
    return found, not problems


def _plugin_name(manifest: str, bundle: Bundle) -> str:
    file = bundle.read(manifest)
    name = ""
    if file is not None:
        try:
            name = (decode(file.contents, type=_Manifest).name or "").strip()
        except (DecodeError, ValidationError, RecursionError):
            pass  # then by its folder
    return name or basename_of(parent_of(parent_of(manifest) or "") or "")


def _skill(file: CapabilityFile, bundle: Bundle) -> DiscoveredSkill | None:
    """A skill from its instructions; None if they do not say what it is for."""
    front = _FRONT.match(file.contents)
    about = None if front is None else _front_matter(front[1])
    if about is None:
        return None
    folder = parent_of(file.path) or file.path
    name = _one_line(about.get("name")) or basename_of(folder)
    description = _one_line(about.get("description"))
    if not description or len(name) > MAX_NAME_LENGTH:
        return None
    more = about.get("metadata")
    short = _one_line(more.get("short-description")) if isinstance(more, dict) else ""
    metadata = bundle.read(child_of(folder, METADATA))
    details = {} if metadata is None else _yaml(metadata.contents) or {}
    return DiscoveredSkill(
        name,
        description,
        short or None,
        file.path,
        _dependencies(details.get("dependencies")),
        _policy(details.get("policy")),
    )


def _front_matter(text: str) -> dict[str, Any] | None:
    about = _yaml(text)
    if about is None:
        # Many are written by hand: `description: Use this: now` is no YAML, but plain enough.
        lines = [_LINE.fullmatch(line.rstrip()) for line in text.splitlines()]
        about = {match[1]: match[2] for match in lines if match is not None} or None
    return about


def _yaml(text: str) -> dict[str, Any] | None:
    """A mapping of texts, lists and mappings; None if it is anything else."""
    import yaml  # type: ignore[import-untyped]

    try:
        value = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506  # knows texts and nothing that acts
    except (yaml.YAMLError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _one_line(value: Any) -> str:
    return " ".join(value.split()) if isinstance(value, str) else ""


def _dependencies(value: Any) -> dict[str, Any] | None:
    tools = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(tools, list):
        return None
    found = [
        {
            "type": tool["type"],
            "value": tool["value"],
            "description": _text(tool.get("description")),
            "transport": _text(tool.get("transport")),
            "command": _text(tool.get("command")),
            "url": _text(tool.get("url")),
            "oauthCallbackPort": _port(tool.get("oauth_callback_port")),
        }
        for tool in tools
        if isinstance(tool, dict) and _text(tool.get("type")) and _text(tool.get("value"))
    ]
    return {"tools": found} if found else None


def _policy(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    products = value.get("products")
    return {
        "allowImplicitInvocation": {"true": True, "false": False}.get(
            str(value.get("allow_implicit_invocation"))
        ),
        "products": [product for product in products if isinstance(product, str)]
        if isinstance(products, list)
        else [],
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _port(value: Any) -> int | None:
    return int(value) if isinstance(value, str) and value.isdigit() and int(value) < 65536 else None
