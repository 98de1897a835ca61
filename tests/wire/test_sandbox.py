"""The sandbox object: every mistake in the words of the reference (observed on it), and back to JSON."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.wire.errors import INVALID_PARAMS, RpcError
from exec_server.wire.process import StartParams
from exec_server.wire.sandbox import Disabled, SandboxContext, decode_sandbox, fs_sandbox
from support.profiles import managed, path, pattern, sandbox, special

DISABLED = {"type": "disabled"}
LEVEL = {"windowsSandboxLevel": "disabled"}
ROOT = {"type": "special", "value": {"kind": "root"}}


def profile(value: Any) -> dict[str, Any]:
    return {"permissions": value, **LEVEL}


def file_system(value: Any) -> dict[str, Any]:
    return profile({"type": "managed", "file_system": value, "network": "restricted"})


def entry(value: Any) -> dict[str, Any]:
    return file_system({"type": "restricted", "entries": [value]})


def place(value: Any) -> dict[str, Any]:
    return entry({"path": value, "access": "read"})


def depth(value: Any) -> dict[str, Any]:
    return file_system({"type": "restricted", "entries": [], "glob_scan_max_depth": value})


def outer(**fields: Any) -> dict[str, Any]:
    return {"permissions": DISABLED, **LEVEL, **fields}


LEVELS = "expected one of `disabled`, `restricted-token`, `elevated`, `mxc`"
OVERRIDES = "expected one of `noOverride`, `escalatedSandboxWithRestrictions`, `bypassSandboxFirstAttempt`"
KINDS = (
    "expected one of `root`, `minimal`, `current_working_directory`, `project_roots`, `tmpdir`, "
    "`slash_tmp`, `unknown`"
)

MISTAKES: list[tuple[Any, str]] = [
    ("x", 'invalid type: string "x", expected struct WireFileSystemSandboxContext'),
    (5, "invalid type: number, expected struct WireFileSystemSandboxContext"),
    (5.5, "invalid type: number, expected struct WireFileSystemSandboxContext"),
    (True, "invalid type: boolean `true`, expected struct WireFileSystemSandboxContext"),
    ({}, "missing field `permissions`"),
    ({"permissions": {}}, "missing field `type`"),
    ({"permissions": []}, "missing field `type`"),
    ({"permissions": 5}, "invalid type: integer `5`, expected internally tagged enum ExecPermissionProfile"),
    ({"permissions": None}, "invalid type: null, expected internally tagged enum ExecPermissionProfile"),
    (
        {"permissions": {"type": "x"}},
        "unknown variant `x`, expected one of `managed`, `disabled`, `external`",
    ),
    ({"permissions": DISABLED}, "missing field `windowsSandboxLevel`"),
    ({"permissions": DISABLED, "windowsSandboxLevel": "x"}, f"unknown variant `x`, {LEVELS}"),
    # The first bad field of the message decides, bad before missing.
    ({"windowsSandboxLevel": "x"}, f"unknown variant `x`, {LEVELS}"),
    ({"windowsSandboxLevel": "x", "permissions": 5}, f"unknown variant `x`, {LEVELS}"),
    (
        {"permissions": 5, "windowsSandboxLevel": "x"},
        "invalid type: integer `5`, expected internally tagged enum ExecPermissionProfile",
    ),
    (
        {"windowsSandboxLevel": 5, "permissions": DISABLED},
        "invalid type: number, expected string or map",
    ),
    (profile({"type": 5}), "invalid type: number, expected variant identifier"),
    (profile({"type": None}), "invalid type: null, expected variant identifier"),
    # The kind is looked at before everything else, wherever it stands.
    (profile({"network": 5}), "missing field `type`"),
    (profile({"network": 5, "type": "managed"}), "invalid type: integer `5`, expected string or map"),
    (
        profile({"network": "x", "file_system": 5, "type": "managed"}),
        "unknown variant `x`, expected `restricted` or `enabled`",
    ),
    (profile({"type": "managed"}), "missing field `file_system`"),
    (
        file_system(5),
        "invalid type: integer `5`, expected internally tagged enum ExecManagedFileSystemPermissions",
    ),
    (file_system({}), "missing field `type`"),
    (file_system({"type": "x"}), "unknown variant `x`, expected `restricted` or `unrestricted`"),
    (file_system({"type": 5}), "invalid value: integer `5`, expected variant index 0 <= i < 2"),
    (file_system({"type": None}), "invalid type: null, expected variant identifier"),
    (profile({"type": "managed", "file_system": {"type": "unrestricted"}}), "missing field `network`"),
    (profile({"type": "external"}), "missing field `network`"),
    (
        profile({"type": "external", "network": {}}),
        "invalid value: map, expected map with a single key",
    ),
    (file_system({"type": "restricted"}), "missing field `entries`"),
    (file_system({"type": "restricted", "entries": 5}), "invalid type: integer `5`, expected a sequence"),
    (file_system({"type": "restricted", "entries": {}}), "invalid type: map, expected a sequence"),
    (depth(0), "invalid value: integer `0`, expected a nonzero usize"),
    (depth(-1), "invalid value: integer `-1`, expected a nonzero usize"),
    (depth(1.5), "invalid type: floating point `1.5`, expected a nonzero usize"),
    (depth(True), "invalid type: boolean `true`, expected a nonzero usize"),
    (depth("x"), 'invalid type: string "x", expected a nonzero usize'),
    (entry(5), "invalid type: integer `5`, expected struct ExecFileSystemSandboxEntry"),
    (entry({}), "missing field `path`"),
    (entry({"path": ROOT}), "missing field `access`"),
    (
        entry({"access": "rw", "path": 5}),
        "unknown variant `rw`, expected one of `read`, `write`, `deny`, `none`",
    ),
    (
        entry({"path": "x"}),
        'invalid type: string "x", expected internally tagged enum ExecFileSystemPath',
    ),
    (
        entry({"path": ROOT, "access": "read", "missing_path_behavior": "x"}),
        "unknown variant `x`, expected `skip`",
    ),
    (place({"type": "zz"}), "unknown variant `zz`, expected one of `path`, `glob_pattern`, `special`"),
    (place({"type": 5}), "invalid value: integer `5`, expected variant index 0 <= i < 3"),
    (place({"type": "path"}), "missing field `path`"),
    (place({"type": "path", "path": 5}), "invalid type: integer `5`, expected a string"),
    (place({"type": "path", "path": "/x"}), "invalid URI: relative URL without a base"),
    (place({"type": "path", "path": "http://x"}), "unsupported path URI scheme `http`"),
    (place({"type": "path", "path": "file:///a%00b"}), "'file:///a%00b' is invalid on 'linux'"),
    (place({"type": "glob_pattern"}), "missing field `pattern`"),
    (place({"type": "glob_pattern", "pattern": None}), "invalid type: null, expected a string"),
    (place({"type": "special"}), "missing field `value`"),
    (
        place({"type": "special", "value": "root"}),
        'invalid type: string "root", expected internally tagged enum FileSystemSpecialPath',
    ),
    (place({"type": "special", "value": {}}), "missing field `kind`"),
    (place({"type": "special", "value": {"kind": "zz"}}), f"unknown variant `zz`, {KINDS}"),
    (
        place({"type": "special", "value": {"kind": "project_roots", "subpath": 5}}),
        "invalid type: integer `5`, expected a string",
    ),
    (place({"type": "special", "value": {"kind": "unknown"}}), "missing field `path`"),
    (outer(cwd="/x"), "invalid URI: relative URL without a base"),
    (outer(cwd=5), "invalid type: number, expected a string"),
    (outer(workspaceRoots=None), "invalid type: null, expected a sequence"),
    (outer(workspaceRoots=["x"]), "invalid URI: relative URL without a base"),
    (outer(policyContext=5), "invalid type: number, expected struct WireFileSystemPolicyContext"),
    (outer(policyContext={"workspaceRoots": None}), "invalid type: null, expected a sequence"),
    (outer(useLegacyLandlock=None), "invalid type: null, expected a boolean"),
    (outer(sandboxOverride=None), "invalid type: null, expected string or map"),
    (outer(sandboxOverride="x"), f"unknown variant `x`, {OVERRIDES}"),
    (outer(userHomeDir="x"), "invalid URI: relative URL without a base"),
    (outer(temporaryDirectories=5), "invalid type: number, expected a sequence"),
    (outer(windowsSandboxProxySettingsMode="x"), "unknown variant `x`, expected `reconcile` or `preserve`"),
]


@pytest.mark.parametrize(("value", "words"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes(value: Any, words: str) -> None:
    with pytest.raises(RpcError) as caught:
        decode_sandbox(value)
    assert (caught.value.code, caught.value.message) == (INVALID_PARAMS, words)


@pytest.mark.parametrize(
    "value",
    [
        outer(),
        outer(cwd=None, policyContext=None, temporaryDirectories=None, userHomeDir=None, bogus=1),
        outer(policyContext={}, useLegacyLandlock=True, sandboxOverride="noOverride"),
        profile({"type": "disabled", "network": 5}),
        file_system({"type": "unrestricted", "entries": 5}),
        depth(None),
        depth(2**64 - 1),
        managed(special("root", "read"), path("/x", "none"), pattern("**/*.env")),
        managed(special("unknown", "write", path=":future"), special("root", "read", subpath=5)),
    ],
    ids=range(9),
)
def test_what_is_accepted(value: Any) -> None:
    decoded = decode_sandbox(value)
    # What it encodes to means the same again.
    assert decode_sandbox(msgspec.json.decode(msgspec.json.encode(decoded))) == decoded
    assert hash(decoded) == hash(decode_sandbox(value))


def test_aliases() -> None:
    decoded = decode_sandbox(managed(path("/x", "none"), special("current_working_directory", "read")))
    assert decoded == decode_sandbox(managed(path("/x", "deny"), special("project_roots", "read")))


def test_a_policy_context_replaces_roots_and_perhaps_the_directory() -> None:
    plain = outer(cwd="file:///c", workspaceRoots=["file:///w"])
    assert decode_sandbox(plain).policy_cwd == "file:///c"
    assert decode_sandbox(plain).project_roots == ("file:///w",)
    empty = decode_sandbox({**plain, "policyContext": {}})
    assert (empty.policy_cwd, empty.project_roots) == ("file:///c", ())
    full = decode_sandbox({**plain, "policyContext": {"cwd": "file:///d", "workspaceRoots": ["file:///v"]}})
    assert (full.policy_cwd, full.project_roots) == ("file:///d", ("file:///v",))


def test_network_and_entries() -> None:
    assert decode_sandbox(outer()).network == "enabled"
    assert decode_sandbox(profile({"type": "external", "network": "restricted"})).network == "restricted"
    assert decode_sandbox(outer()).entries is None
    assert decode_sandbox(managed()).entries == ()


DYNAMIC = "file system sandbox context with dynamic permissions requires cwd"


@pytest.mark.parametrize(
    "dynamic", [special("project_roots", "write"), pattern("**/*.env")], ids=("root", "glob")
)
def test_file_calls_need_a_directory_for_what_depends_on_one(dynamic: Any) -> None:
    with pytest.raises(RpcError, match=DYNAMIC) as caught:
        fs_sandbox(managed(dynamic))
    assert caught.value.code == INVALID_PARAMS
    assert fs_sandbox(managed(dynamic, cwd="file:///w")) is not None
    assert fs_sandbox(managed(dynamic, policyContext={"cwd": "file:///w"})) is not None
    assert decode_sandbox(managed(dynamic)) is not None  # process/start has a directory anyway


def test_no_sandbox() -> None:
    assert fs_sandbox(None) is None
    assert fs_sandbox(managed(pattern("/x/**/*.env"))) is not None


def test_process_start_decodes_it_with_the_same_words() -> None:
    base = {"processId": "p", "argv": ["x"], "cwd": "file:///", "env": {}, "tty": False}
    with pytest.raises(RpcError, match="missing field `windowsSandboxLevel`"):
        msgspec.convert({**base, "sandbox": {"permissions": DISABLED}}, StartParams)
    started = msgspec.convert({**base, "sandbox": outer()}, StartParams)
    assert isinstance(started.sandbox, SandboxContext)
    assert started.sandbox.permissions == Disabled()
    assert msgspec.json.decode(msgspec.json.encode(started))["sandbox"]["permissions"] == DISABLED


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(["permissions", "windowsSandboxLevel", "cwd", "workspaceRoots", "policyContext"])


@given(st.dictionaries(fields, json_values, max_size=5), json_values, json_values)
def test_whatever_comes_it_is_decoded_or_refused(some: dict[str, Any], deep: Any, deeper: Any) -> None:
    for value in (some, sandbox(deep), managed(deep), managed({"path": deeper, "access": deep})):
        decoded = _decoded_or_refused(value)
        if decoded is not None:
            assert decode_sandbox(msgspec.json.decode(msgspec.json.encode(decoded))) == decoded


def _decoded_or_refused(value: Any) -> SandboxContext | None:
    try:
        return decode_sandbox(value)
    except RpcError:
        return None  # anything else would be a bug


def test_numbers_of_any_size() -> None:
    with pytest.raises(RpcError) as caught:
        decode_sandbox(depth(2**64))
    assert caught.value.code == INVALID_PARAMS
