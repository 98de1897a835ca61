"""Plugins and skills below a root: which manifests and instructions there are, and their text.

The order of the warnings is the order of the work: inspect, scan, manifests, declared files, skills.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

from msgspec import DecodeError
from msgspec.json import decode

from ...wire.capabilities import CapabilityFile, CapabilityRoot, DiscoveredRoot, PluginFiles, RootSkill
from ...wire.errors import RpcError
from ...wire.files import WalkOptions
from ...wire.uri import is_opaque, path_to_uri
from .errors import failure
from .lane import ALONE, Turn
from .paths import to_native
from .procfs import CannotTell, OnProc, open_off_proc
from .walk import walk

__all__ = ["MAX_ROOTS", "Bundle", "Scan", "discover_root", "discover_roots"]

MAX_ROOTS: Final = 128
"""Roots of one request."""

MAX_FILE_BYTES: Final = 1_048_576
"""Of one file that is answered."""

MAX_BUNDLE_BYTES: Final = 16_777_216
"""Of all files of one root."""

SCAN: Final = WalkOptions(
    max_depth=6, max_directories=2000, max_entries=20_000, follow_directory_symlinks=True
)

MANIFEST_DIRECTORIES: Final = (".codex-plugin", ".claude-plugin", ".cursor-plugin")
"""By priority."""

MANIFEST: Final = "plugin.json"
INSTRUCTIONS: Final = "SKILL.md"
METADATA: Final = "agents/openai.yaml"


Elsewhere = Callable[[CapabilityRoot, Turn], Any | None]
"""Looks below a root with fewer rights, and gives what `discover_root` would; None if there is no need."""


def discover_roots(
    roots: list[CapabilityRoot], elsewhere: Elsewhere | None = None, turn: Turn = ALONE
) -> dict[str, list[Any]]:
    """All of them, in the order of the request."""
    turn.leave()
    return {"roots": [_discover(root, elsewhere, turn) for root in roots]}


def _discover(root: CapabilityRoot, elsewhere: Elsewhere | None, turn: Turn) -> Any:
    try:
        found = None if elsewhere is None else elsewhere(root, turn)
    except (OSError, RpcError) as error:
        wrong = f"failed to inspect capability root {root.path}: {_message(error)}"
        return DiscoveredRoot(root.id, root.path, None, [], [], [], wrong)
    return discover_root(root, turn) if found is None else found


def discover_root(root: CapabilityRoot, turn: Turn = ALONE) -> DiscoveredRoot:
    """What is below one root. Whatever goes wrong is in the answer."""
    turn.check()
    bundle = Bundle(turn)
    found = DiscoveredRoot(root.id, root.path, None, [], [], bundle.warnings, None)
    try:
        is_directory = stat.S_ISDIR(os.stat(to_native(root.path)).st_mode)
    except (OSError, RpcError) as error:
        found.error = f"failed to inspect capability root {root.path}: {_message(error)}"
        return found
    if not is_directory:
        found.error = f"capability root {root.path} is not a directory"
        return found
    try:
        scan = Scan(root.path, bundle.warnings.append, turn)
    except (OSError, RpcError) as error:
        found.error = f"failed to scan capability root {root.path}: {_message(error)}"
        return found
    manifest = bundle.manifest_of(root.path)
    namespace, owner = manifest, root.path
    above = parent_of(root.path)
    while namespace is None and above is not None:
        namespace, owner = bundle.manifest_of(above), above
        above = parent_of(above)
    claimed: set[str] = set()
    if namespace is not None:
        claimed.add(owner.rstrip("/"))
        found.namespace_manifests.append(namespace)
    for plugin_root, _, uri in scan.manifests:
        if plugin_root not in claimed:
            claimed.add(plugin_root)
            other = bundle.read(uri)
            if other is not None:
                found.namespace_manifests.append(other)
    if manifest is not None:
        found.plugin = bundle.plugin_files(root.path, manifest)
    for uri in scan.skills:
        instructions = bundle.read(uri)
        if instructions is not None:
            found.skills.append(
                RootSkill(instructions, bundle.read(child_of(parent_of(uri) or uri, METADATA)))
            )
    return found


class Scan:
    """The skills and manifests that a walk comes across, as URIs, sorted."""

    def __init__(self, root: str, warn: Callable[[str], object], turn: Turn = ALONE) -> None:
        result = decode(bytes(walk(to_native(root), root, SCAN, turn)))
        for error in result["errors"]:
            warn(f"failed to scan capability path {error['path']}: {error['message']}")
        if result["truncated"]:
            warn(f"capability scan reached its traversal limit (root: {root})")
        files = [entry["path"] for entry in result["entries"] if entry["kind"] == "file"]
        self.skills: list[str] = sorted(uri for uri in files if basename_of(uri) == INSTRUCTIONS)
        self.manifests: list[tuple[str, int, str]] = []
        """Plugin root, priority, manifest."""
        for uri in files:
            directory = parent_of(uri)
            if basename_of(uri) == MANIFEST and directory and basename_of(directory) in MANIFEST_DIRECTORIES:
                plugin_root = (parent_of(directory) or directory).rstrip("/")
                priority = MANIFEST_DIRECTORIES.index(basename_of(directory))
                self.manifests.append((plugin_root, priority, uri))
        self.manifests.sort()


class Bundle:
    """The texts read for one root, and what went wrong."""

    def __init__(self, turn: Turn = ALONE) -> None:
        self.warnings: list[str] = []
        self._turn = turn
        self._total = 0

    def manifest_of(self, directory: str) -> CapabilityFile | None:
        """The manifest of a plugin whose root this directory may be."""
        if is_opaque(directory):
            return None  # it has no children
        for name in MANIFEST_DIRECTORIES:
            manifest = self.read(child_of(directory, f"{name}/{MANIFEST}"))
            if manifest is not None:
                return manifest
        return None

    def plugin_files(self, root: str, manifest: CapabilityFile) -> PluginFiles:
        """The manifest and the files that it declares, or that plugins have by custom."""
        declared = parsed_object(manifest.contents)
        files = PluginFiles(manifest)
        servers = declared.get("mcpServers")
        if not isinstance(servers, dict):
            path = self.declared_path(root, manifest.path, "mcpServers", servers)
            files.mcp_config = self.read(path or child_of(root, ".mcp.json"))
        apps = self.declared_path(root, manifest.path, "apps", declared.get("apps"))
        if apps is not None:
            files.apps_config = self.read(apps)
        return files

    def declared_path(self, root: str, manifest: str, field: str, value: Any) -> str | None:
        """The URI of a file that a manifest names; None if it names none, or one it must not."""
        if not isinstance(value, str):
            return None
        if not value.startswith("./"):
            self.warnings.append(f"ignoring {field} in {manifest}: path must start with `./`")
            return None
        rest = value[2:]
        parts = rest.replace("\\", "/").split("/")
        if not rest or rest.startswith("/") or ".." in parts or "\0" in rest:
            self.warnings.append(
                f"ignoring {field} in {manifest}: path must remain below the capability root"
            )
            return None
        return child_of(root, rest)

    def read(self, uri: str) -> CapabilityFile | None:
        """A text file; None if there is none, or after saying why it cannot be had."""
        self._turn.check()
        try:
            path = to_native(uri)
            info = os.stat(path)
        except FileNotFoundError:
            return None
        except (OSError, RpcError) as error:
            self.warnings.append(f"failed to inspect capability file {uri}: {_message(error)}")
            return None
        if not stat.S_ISREG(info.st_mode):
            return None
        if info.st_size > MAX_FILE_BYTES:
            self.warnings.append(f"capability file {uri} exceeds the {MAX_FILE_BYTES}-byte limit")
            return None
        if self._total + info.st_size > MAX_BUNDLE_BYTES:
            self.warnings.append(f"capability root bundle exceeds the {MAX_BUNDLE_BYTES}-byte limit")
            return None
        try:
            with open(path, "rb", opener=_open_at_once) as file:
                raw = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            self.warnings.append(f"failed to read capability file {uri}: {_message(error)}")
            return None
        if len(raw) > MAX_FILE_BYTES or self._total + len(raw) > MAX_BUNDLE_BYTES:
            self.warnings.append(f"capability file {uri} exceeded its read limit")
            return None
        try:
            contents = raw.decode()
        except UnicodeDecodeError as error:
            self.warnings.append(f"capability file {uri} is not UTF-8: {_what_is_not_utf8(error)}")
            return None
        self._total += len(raw)
        return CapabilityFile(uri, contents)


def _open_at_once(path: str | bytes, flags: int) -> int:
    """It was a file a moment ago; if it is a FIFO now, do not wait for a writer. Whoever may write to a root
    could make a link to `/proc` of what is read here, which no sandbox would let him read."""
    try:
        return open_off_proc(os.fsencode(path), flags | os.O_NONBLOCK)
    except CannotTell:
        return os.open(path, flags | os.O_NONBLOCK)
    except OnProc:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


def parsed_object(text: str) -> dict[str, Any]:
    """JSON that should be an object; an empty one if it is not."""
    try:
        value = decode(text)
    except (DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def child_of(uri: str, text: str) -> str:
    """The URI of something below a directory, by native path text."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    base = "file://" + uri.removeprefix("file://").rstrip("/")
    return base + "".join(path_to_uri("/_/" + part)[9:] for part in parts)


def parent_of(uri: str) -> str | None:
    """The URI of the directory above; None above the root, and where there is no above."""
    path = uri.removeprefix("file://").rstrip("/")
    if not path or is_opaque(uri):
        return None
    above = path.rpartition("/")[0].rstrip("/")
    return f"file://{above}" if above else "file:///"


def basename_of(uri: str) -> str:
    """The last name of a URI."""
    return unquote(uri.rstrip("/").rpartition("/")[2], errors="surrogateescape")


def _message(error: OSError | RpcError) -> str:
    return error.message if isinstance(error, RpcError) else failure(error).message


def _what_is_not_utf8(error: UnicodeDecodeError) -> str:
    if error.reason == "unexpected end of data":
        return f"incomplete utf-8 byte sequence from index {error.start}"
    return f"invalid utf-8 sequence of {error.end - error.start} bytes from index {error.start}"
