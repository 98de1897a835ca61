"""What a machine offers to an agent: plugins and skills, found below roots or in the user's own folders."""

from __future__ import annotations

from typing import Any, Final

from .checks import Decoder, string, uri, wrong_type
from .files import Params, Result
from .sandbox import SandboxContext, fs_sandbox

__all__ = [
    "CapabilityFile",
    "CapabilityRoot",
    "DiscoveredRoot",
    "DiscoveredSkill",
    "DiscoveryRoot",
    "InstalledPlugin",
    "PluginFiles",
    "RootSkill",
    "RootsParams",
    "UserParams",
    "UserResult",
    "UserSkill",
]


class CapabilityRoot(Params):
    """Where to look, and under which name to answer."""

    id: str
    path: str
    sandbox: SandboxContext | None = None


class RootsParams(Params):
    """`capabilityRoots/discoverV1`."""

    roots: list[CapabilityRoot]


class UserParams(Params):
    """`capabilities/discoverV2`."""

    cwd: str
    sandbox: SandboxContext | None = None


_decode_root: Final = Decoder(
    CapabilityRoot, "CapabilityRootDiscoveryTarget", ("id", "path"), id=string, path=uri, sandbox=fs_sandbox
)


def _roots(value: Any) -> list[CapabilityRoot]:
    if type(value) is not list:
        raise wrong_type(value, "a sequence")
    return [_decode_root(item) for item in value]


decode_roots: Final = Decoder(RootsParams, "CapabilityRootsDiscoverParams", ("roots",), roots=_roots)
decode_user: Final = Decoder(UserParams, "CapabilitiesDiscoverParams", ("cwd",), cwd=uri, sandbox=fs_sandbox)


class CapabilityFile(Result):
    """A text file, whole."""

    path: str
    contents: str


class PluginFiles(Result):
    """What a plugin is made of."""

    manifest: CapabilityFile
    mcp_config: CapabilityFile | None = None
    apps_config: CapabilityFile | None = None


class RootSkill(Result):
    """A skill as it is on disk."""

    instructions: CapabilityFile
    metadata: CapabilityFile | None


class DiscoveredRoot(Result):
    """What was found below one root."""

    id: str
    path: str
    plugin: PluginFiles | None
    skills: list[RootSkill]
    namespace_manifests: list[CapabilityFile]
    warnings: list[str]
    error: str | None


class DiscoveryRoot(Result):
    """Which of the user's folders something was found in."""

    id: str
    path: str


class DiscoveredSkill(Result):
    """A skill as it describes itself."""

    name: str
    description: str
    short_description: str | None
    path: str
    dependencies: dict[str, Any] | None
    policy: dict[str, Any] | None


class UserSkill(Result):
    """One that belongs to no plugin."""

    name: str
    description: str
    short_description: str | None
    path: str
    discovery_root: DiscoveryRoot
    dependencies: dict[str, Any] | None
    policy: dict[str, Any] | None


class InstalledPlugin(Result):
    """A plugin in the server's home."""

    id: str
    display_name: str
    remote_plugin_id: str | None
    version: str
    root: str
    files: PluginFiles
    skills: list[DiscoveredSkill]


class UserResult(Result):
    """`capabilities/discoverV2`."""

    plugins: list[InstalledPlugin]
    skills: list[UserSkill]
    warnings: list[str]
