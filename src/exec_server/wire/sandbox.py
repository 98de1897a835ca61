"""What an operation may touch, as it travels: the `sandbox` object of `process/start` and of `fs/*`.

The outer object is camelCase, all inside `permissions` snake_case. Unknown fields are ignored at every
depth; nothing else is: a profile that cannot be understood is an error, never a weaker profile. The
values are frozen and can be compared, and encode to the very object they were decoded from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct
from msgspec.json import encode

from .checks import Check, boolean, one_of, optional, uri, uris, wrong_type
from .errors import RpcError, invalid_params

__all__ = [
    "Access",
    "Disabled",
    "Entry",
    "External",
    "GlobPattern",
    "Managed",
    "NetworkAccess",
    "PathEntry",
    "PolicyContext",
    "Restricted",
    "SandboxContext",
    "Special",
    "SpecialPath",
    "Unrestricted",
    "decode_sandbox",
    "fs_sandbox",
]

Access: TypeAlias = Literal["read", "write", "deny"]
NetworkAccess: TypeAlias = Literal["restricted", "enabled"]
SpecialKind: TypeAlias = Literal["root", "minimal", "project_roots", "tmpdir", "slash_tmp", "unknown"]
WindowsLevel: TypeAlias = Literal["disabled", "restricted-token", "elevated", "mxc"]
Override: TypeAlias = Literal["noOverride", "escalatedSandboxWithRestrictions", "bypassSandboxFirstAttempt"]
ProxySettings: TypeAlias = Literal["reconcile", "preserve"]

PROJECT_ROOTS_PREFIX: Final = "codex-project-roots://"
"""A pattern that begins like this is one below each workspace root."""


class PathEntry(Struct, frozen=True, tag_field="type", tag="path"):
    """One path, as a URI in normal form, and all below it."""

    path: str


class GlobPattern(Struct, frozen=True, tag_field="type", tag="glob_pattern"):
    """Files that fit a pattern. It can only deny."""

    pattern: str


class Special(Struct, frozen=True, omit_defaults=True):
    """A path with a name: where it is depends on the machine and on the request."""

    kind: SpecialKind
    path: str | None = None
    """The name of one that only later servers know."""
    subpath: str | None = None


class SpecialPath(Struct, frozen=True, tag_field="type", tag="special"):
    """See `Special`."""

    value: Special


class Entry(Struct, frozen=True, omit_defaults=True):
    """What may be done with a path. `none` on the wire is `deny`."""

    path: PathEntry | GlobPattern | SpecialPath
    access: Access
    missing_path_behavior: Literal["skip"] | None = None
    """Taken and ignored: a missing path inside of a writable root is protected in any case."""


class Restricted(Struct, frozen=True, tag_field="type", tag="restricted", omit_defaults=True):
    """Nothing but what the entries allow."""

    entries: tuple[Entry, ...]
    glob_scan_max_depth: int | None = None
    """How many directories deep patterns are looked up; 1 is directly in where the search starts."""


class Unrestricted(Struct, frozen=True, tag_field="type", tag="unrestricted"):
    """Every file."""


class Managed(Struct, frozen=True, tag_field="type", tag="managed"):
    """The server enforces it."""

    file_system: Restricted | Unrestricted
    network: NetworkAccess


class Disabled(Struct, frozen=True, tag_field="type", tag="disabled"):
    """Nobody enforces anything."""


class External(Struct, frozen=True, tag_field="type", tag="external"):
    """Somebody else isolates the files; the network is as given."""

    network: NetworkAccess


class PolicyContext(Struct, frozen=True, rename="camel", omit_defaults=True):
    """What project roots and relative patterns are relative to, instead of the outer fields."""

    cwd: str | None = None
    workspace_roots: tuple[str, ...] = ()


class SandboxContext(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The `sandbox` object. What has no effect on Linux is taken, kept and ignored."""

    permissions: Managed | Disabled | External
    windows_sandbox_level: WindowsLevel
    cwd: str | None = None
    workspace_roots: tuple[str, ...] = ()
    policy_context: PolicyContext | None = None
    use_legacy_landlock: bool = False
    sandbox_override: Override = "noOverride"
    user_home_dir: str | None = None
    temporary_directories: tuple[str, ...] | None = None
    windows_sandbox_proxy_settings_mode: ProxySettings | None = None

    @property
    def policy_cwd(self) -> str | None:
        """The URI that relative patterns are relative to."""
        if self.policy_context is not None and self.policy_context.cwd is not None:
            return self.policy_context.cwd
        return self.cwd

    @property
    def project_roots(self) -> tuple[str, ...]:
        """The URIs that `project_roots` stands for."""
        return self.workspace_roots if self.policy_context is None else self.policy_context.workspace_roots

    @property
    def entries(self) -> tuple[Entry, ...] | None:
        """What a restricted profile allows; None for one that restricts no file."""
        if isinstance(self.permissions, Managed) and isinstance(self.permissions.file_system, Restricted):
            return self.permissions.file_system.entries
        return None

    @property
    def network(self) -> NetworkAccess:
        """Whether there may be any."""
        return "enabled" if isinstance(self.permissions, Disabled) else self.permissions.network


# Decoding ----------------------------------------------------------------------------------------

MAX_REMEMBERED: Final = 64
"""Decoded objects that are kept: clients send the same few with every call."""

_remembered: dict[bytes, SandboxContext] = {}


def decode_sandbox(value: Any) -> SandboxContext:
    """The typed object, or RpcError -32602 in the words of the protocol."""
    if type(value) is not dict:
        raise wrong_type(value, "struct WireFileSystemSandboxContext")
    try:
        key = encode(value)
    except OverflowError:
        raise invalid_params("invalid number") from None
    known = _remembered.get(key)
    if known is None:
        known = SandboxContext(
            **_object(value, _CONTEXT, ("permissions", "windowsSandboxLevel"), _CONTEXT_NAMES)
        )
        if len(_remembered) >= MAX_REMEMBERED:
            _remembered.clear()
        _remembered[key] = known
    return known


def fs_sandbox(value: Any) -> SandboxContext | None:
    """The same for a file call, where what depends on a directory needs one."""
    if value is None:
        return None
    context = decode_sandbox(value)
    if context.policy_cwd is None and any(map(_is_dynamic, context.entries or ())):
        raise invalid_params("file system sandbox context with dynamic permissions requires cwd")
    return context


def _is_dynamic(entry: Entry) -> bool:
    match entry.path:
        case GlobPattern(pattern):
            return not pattern.startswith("/")
        case SpecialPath(special):
            return special.kind == "project_roots"
        case _:
            return False


def _object(
    value: dict[str, Any],
    checks: Mapping[str, Check],
    required: tuple[str, ...],
    names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What is known of an object, each as its check gives it."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        check = checks.get(key)
        if check is not None:
            found[key if names is None else names[key]] = check(item)
    for key in required:
        if (key if names is None else names[key]) not in found:
            raise invalid_params(f"missing field `{key}`")
    return found


def _policy_context(value: Any) -> PolicyContext:
    if type(value) is not dict:
        raise wrong_type(value, "struct WireFileSystemPolicyContext")
    checks = {"cwd": optional(uri), "workspaceRoots": _roots}
    return PolicyContext(**_object(value, checks, (), {"cwd": "cwd", "workspaceRoots": "workspace_roots"}))


def _roots(value: Any) -> tuple[str, ...]:
    return tuple(uris(value))


# Inside of `permissions`. The reference reads these through a buffer, which words some errors otherwise.


def _wrong(value: Any, wanted: str) -> RpcError:
    if type(value) is int:
        return invalid_params(f"invalid type: integer `{value}`, expected {wanted}")
    if type(value) is float:
        return invalid_params(f"invalid type: floating point `{value}`, expected {wanted}")
    return wrong_type(value, wanted)


def _string(value: Any) -> str:
    if type(value) is not str:
        raise _wrong(value, "a string")
    return value


def _uri(value: Any) -> str:
    return uri(_string(value))


def _choice(*names: str) -> Check:
    known = one_of(*names)

    def check(value: Any) -> Any:
        if type(value) is dict:
            raise invalid_params("invalid value: map, expected map with a single key")
        if type(value) is not str:
            raise _wrong(value, "string or map")
        return known(value)

    return check


def _tagged(value: Any, tag: str, name: str, kinds: tuple[str, ...], *, outermost: bool = False) -> str:
    """Which of several kinds of object this is."""
    if type(value) is list:
        value = {}  # a sequence has no names either
    if type(value) is not dict:
        raise _wrong(value, f"internally tagged enum {name}")
    if tag not in value:
        raise invalid_params(f"missing field `{tag}`")
    kind = value[tag]
    if type(kind) is int and not outermost:
        raise invalid_params(f"invalid value: integer `{kind}`, expected variant index 0 <= i < {len(kinds)}")
    if type(kind) is not str:
        raise wrong_type(kind, "variant identifier")
    found: str = one_of(*kinds)(kind)
    return found


_network: Final = _choice("restricted", "enabled")
_any_access: Final = _choice("read", "write", "deny", "none")
_missing_path: Final = optional(_choice("skip"))


def _permissions(value: Any) -> Managed | Disabled | External:
    kinds = ("managed", "disabled", "external")
    kind = _tagged(value, "type", "ExecPermissionProfile", kinds, outermost=True)
    if kind == "disabled":
        return Disabled()
    if kind == "external":
        return External(**_object(value, {"network": _network}, ("network",)))
    checks = {"file_system": _file_system, "network": _network}
    return Managed(**_object(value, checks, ("file_system", "network")))


def _file_system(value: Any) -> Restricted | Unrestricted:
    kinds = ("restricted", "unrestricted")
    if _tagged(value, "type", "ExecManagedFileSystemPermissions", kinds) == "unrestricted":
        return Unrestricted()
    checks = {"entries": _entries, "glob_scan_max_depth": optional(_positive)}
    return Restricted(**_object(value, checks, ("entries",)))


def _positive(value: Any) -> int:
    if type(value) is not int:
        raise _wrong(value, "a nonzero usize")
    if not 0 < value < 2**64:
        raise invalid_params(f"invalid value: integer `{value}`, expected a nonzero usize")
    return value


def _entries(value: Any) -> tuple[Entry, ...]:
    if type(value) is not list:
        raise _wrong(value, "a sequence")
    return tuple([_entry(item) for item in value])


def _entry(value: Any) -> Entry:
    if type(value) is not dict:
        raise _wrong(value, "struct ExecFileSystemSandboxEntry")
    checks = {"path": _path, "access": _access, "missing_path_behavior": _missing_path}
    return Entry(**_object(value, checks, ("path", "access")))


def _access(value: Any) -> str:
    found: str = _any_access(value)
    return "deny" if found == "none" else found


def _path(value: Any) -> PathEntry | GlobPattern | SpecialPath:
    kind = _tagged(value, "type", "ExecFileSystemPath", ("path", "glob_pattern", "special"))
    if kind == "path":
        return PathEntry(**_object(value, {"path": _uri}, ("path",)))
    if kind == "glob_pattern":
        return GlobPattern(**_object(value, {"pattern": _string}, ("pattern",)))
    return SpecialPath(**_object(value, {"value": _special}, ("value",)))


_SPECIAL_KINDS: Final = (
    "root",
    "minimal",
    "current_working_directory",
    "project_roots",
    "tmpdir",
    "slash_tmp",
    "unknown",
)


def _special(value: Any) -> Special:
    kind = _tagged(value, "kind", "FileSystemSpecialPath", _SPECIAL_KINDS)
    if kind == "current_working_directory":
        kind = "project_roots"
    checks: dict[str, Check] = {}
    if kind in ("project_roots", "unknown"):
        checks["subpath"] = optional(_string)
    if kind == "unknown":
        checks["path"] = _string
    required = ("path",) if kind == "unknown" else ()
    return Special(kind=kind, **_object(value, checks, required))  # type: ignore[arg-type]  # one of the above


_CONTEXT: Final[Mapping[str, Check]] = {
    "permissions": _permissions,
    "windowsSandboxLevel": one_of("disabled", "restricted-token", "elevated", "mxc"),
    "cwd": optional(uri),
    "workspaceRoots": _roots,
    "policyContext": optional(_policy_context),
    "useLegacyLandlock": boolean,
    "sandboxOverride": one_of("noOverride", "escalatedSandboxWithRestrictions", "bypassSandboxFirstAttempt"),
    "userHomeDir": optional(uri),
    "temporaryDirectories": optional(_roots),
    "windowsSandboxProxySettingsMode": optional(one_of("reconcile", "preserve")),
}
_CONTEXT_NAMES: Final[Mapping[str, str]] = dict(zip(_CONTEXT, SandboxContext.__struct_fields__, strict=True))
