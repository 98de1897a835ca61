"""Configuration files: which are read, in which order, and which are not to be trusted."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exec_server.local import config as config_module
from exec_server.local.config import DENIED_TO_PROJECTS, read_environment_config
from exec_server.wire.config import ConfigReadParams, ConfigReadResult
from exec_server.wire.errors import INTERNAL_ERROR, INVALID_PARAMS, RpcError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A machine of its own under `tmp_path`: `etc`, `codex` (the user's) and whatever is written."""
    monkeypatch.setattr(config_module, "SYSTEM_DIRECTORY", str(tmp_path / "etc"))
    monkeypatch.setenv("CODEX_HOME", str(tmp_path / "codex"))
    (tmp_path / "codex").mkdir()

    def to(name: str, content: str | bytes = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return to


def read(cwd: Path, *config: list[str], requirements: list[list[str]] | None = None) -> ConfigReadResult:
    return read_environment_config(
        ConfigReadParams(cwd.as_uri(), list(config) or [["model"]], requirements or [])
    )


def models(cwd: Path) -> list[str]:
    """What each layer says about `model`, lowest first."""
    return [tomllib.loads(layer.toml)["model"] for layer in read(cwd).config.layers]


def problem(cwd: Path, **options: Any) -> str:
    with pytest.raises(RpcError) as caught:
        read(cwd, **options)
    assert caught.value.code == INTERNAL_ERROR
    return caught.value.message


def trust(*directories: Path, level: str = "trusted") -> str:
    return "".join(f'[projects."{path}"]\ntrust_level = "{level}"\n' for path in directories)


# Params ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (ConfigReadParams("file://h/x", [], []), "at least one config or requirements path is required"),
        (ConfigReadParams("file://h/x", [["a"], []], []), "TOML paths must contain at least one key segment"),
        (ConfigReadParams("file:///", [["a"]], [[]]), "TOML paths must contain at least one key segment"),
        (ConfigReadParams("file://h/x", [["a"]], []), "'file://h/x' is invalid on 'linux'"),
        (ConfigReadParams("/x", [["a"]], []), "invalid URI: relative URL without a base"),
    ],
)
def test_bad_params(params: ConfigReadParams, text: str) -> None:
    with pytest.raises(RpcError) as caught:
        read_environment_config(params)
    assert (caught.value.code, caught.value.message) == (INVALID_PARAMS, text)


# The machine -------------------------------------------------------------------------------------


def test_a_machine_without_configuration(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    result = read(tmp_path)
    assert result.user_home_dir == f"file://{tmp_path}/home"
    assert result.codex_home_dir == f"file://{tmp_path}/codex"
    assert result.hostname == os.uname().nodename.lower()
    for part in (result.config, result.requirements):
        assert (part.layers, part.cloud_insertion_index) == ([], 0)


def test_the_default_home_need_not_exist(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CODEX_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert read(tmp_path).codex_home_dir == f"file://{tmp_path}/home/.codex"


@pytest.mark.parametrize(("name", "wrong"), [("none", "does not exist"), ("file", "is not a directory")])
def test_a_chosen_home_must_exist(
    name: str, wrong: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("file")
    monkeypatch.setenv("CODEX_HOME", str(tmp_path / name))
    assert problem(tmp_path) == (
        f'failed to find Codex home: CODEX_HOME points to "{tmp_path}/{name}", but that path {wrong}'
    )


def test_no_home_at_all(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CODEX_HOME")
    monkeypatch.setenv("HOME", "relative")
    assert problem(tmp_path).startswith("failed to find Codex home: ")


# Layers ------------------------------------------------------------------------------------------


def test_layers_in_order_of_precedence(write: Write, tmp_path: Path) -> None:
    write("etc/config.toml", 'model = "system"')
    write("etc/managed_config.toml", 'model = "managed"')
    write("codex/config.toml", 'model = "user"\nother = 1\n' + trust(tmp_path / "repo"))
    write("repo/.git/HEAD")
    write("repo/.codex/config.toml", 'model = "root"')
    write("repo/a/b/.codex/config.toml", 'model = "deep"')
    config = read(tmp_path / "repo/a/b/c").config
    assert [(layer.source, layer.base_dir, layer.toml) for layer in config.layers] == [
        (f"system ({tmp_path}/etc/config.toml)", f"file://{tmp_path}/etc", 'model = "system"\n'),
        (f"user ({tmp_path}/codex/config.toml)", f"file://{tmp_path}/codex", 'model = "user"\n'),
        (
            f"project ({tmp_path}/repo/.codex/config.toml)",
            f"file://{tmp_path}/repo/.codex",
            'model = "root"\n',
        ),
        (
            f"project ({tmp_path}/repo/a/b/.codex/config.toml)",
            f"file://{tmp_path}/repo/a/b/.codex",
            'model = "deep"\n',
        ),
        (
            f"legacy managed_config.toml ({tmp_path}/etc/managed_config.toml)",
            f"file://{tmp_path}/etc",
            'model = "managed"\n',
        ),
    ]
    assert config.cloud_insertion_index == 1


def test_layers_with_nothing_selected_are_left_out(write: Write, tmp_path: Path) -> None:
    write("etc/config.toml", "other = 1")
    write("codex/config.toml", "[model]")
    config = read(tmp_path, ["model", "x"]).config
    assert [layer.toml for layer in config.layers] == ["[model]\n"]
    assert config.cloud_insertion_index == 0


def test_requirements(write: Write, tmp_path: Path) -> None:
    write("etc/requirements.toml", 'allowed_sandbox_modes = ["read-only"]\nother = 1')
    write("etc/managed_config.toml", 'sandbox_mode = "workspace-write"')
    write("codex/requirements.toml", "allowed_sandbox_modes = []")
    found = read(tmp_path, requirements=[["allowed_sandbox_modes"]]).requirements
    assert [(layer.source, layer.toml) for layer in found.layers] == [
        (f"{tmp_path}/etc/requirements.toml", 'allowed_sandbox_modes = ["read-only"]\n'),
        (
            f"{tmp_path}/etc/managed_config.toml",
            'allowed_sandbox_modes = ["read-only", "workspace-write"]\n',
        ),
    ]
    assert found.cloud_insertion_index == 1


@pytest.mark.parametrize(
    ("managed", "key", "allowed"),
    [
        ('approval_policy = "never"', "allowed_approval_policies", ["never"]),
        ('approval_policy = "on-failure"', "allowed_approval_policies", ["on-request"]),
        ("approval_policy = { granular = { a = 1 } }", "allowed_approval_policies", [{"granular": {"a": 1}}]),
        ('approvals_reviewer = "user"', "allowed_approvals_reviewers", ["user"]),
        ('approvals_reviewer = "guardian_subagent"', "allowed_approvals_reviewers", ["auto_review", "user"]),
        ('sandbox_mode = "read-only"', "allowed_sandbox_modes", ["read-only"]),
    ],
)
def test_managed_values_are_the_only_ones(
    managed: str, key: str, allowed: list[Any], write: Write, tmp_path: Path
) -> None:
    write("etc/managed_config.toml", managed)
    (layer,) = read(tmp_path, requirements=[[key]]).requirements.layers
    assert tomllib.loads(layer.toml) == {key: allowed}


@pytest.mark.parametrize("managed", ['approval_policy = "bogus"', "sandbox_mode = 3"])
def test_managed_values_that_mean_nothing(managed: str, write: Write, tmp_path: Path) -> None:
    write("etc/managed_config.toml", managed)
    assert problem(tmp_path).startswith(
        "failed to load executor-local config: Failed to parse config requirements as TOML: unknown variant"
    )


# Files that cannot be read -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["etc/config.toml", "codex/config.toml", "etc/managed_config.toml"])
def test_a_syntax_error_has_a_place(name: str, write: Write, tmp_path: Path) -> None:
    path = write(name, "a = 1\nb = = 2\n")
    assert problem(tmp_path) == f"failed to load executor-local config: {path}:2:5: Invalid value"


def test_a_syntax_error_at_the_end(write: Write, tmp_path: Path) -> None:
    path = write("etc/requirements.toml", "a = [")
    assert problem(tmp_path) == (
        "failed to load executor-local config: failed to parse requirements layer "
        f"{path}: Invalid value (at end of document)"
    )


def test_a_file_that_is_not_text(write: Write, tmp_path: Path) -> None:
    path = write("codex/config.toml", b'x = "\xff"')
    assert problem(tmp_path) == (
        f"failed to load executor-local config: Failed to read config file {path}: "
        "invalid utf-8 sequence of 1 bytes from index 5"
    )


def test_a_file_that_is_a_directory(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "codex/config.toml"
    path.mkdir()
    assert problem(tmp_path) == (
        f"failed to load executor-local config: Failed to read config file {path}: "
        f"path `{path}` is not a file"
    )


def test_a_file_that_is_too_long(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "MAX_CONFIG_BYTES", 10)
    write("codex/config.toml", "model = 123")
    assert problem(tmp_path).endswith("longer than 10 bytes")


@pytest.mark.parametrize("content", ["a = " + "[" * 5000, "model." + "a." * 5000 + "b = 1"])
def test_a_file_nested_too_deeply(content: str, write: Write, tmp_path: Path) -> None:
    path = write("codex/config.toml", content)
    assert problem(tmp_path) == f"failed to load executor-local config: {path}: nested too deeply"


def test_a_file_we_may_not_read(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("codex/config.toml", "model = 1")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert problem(tmp_path) == (
        f"failed to load executor-local config: Failed to read config file {path}: "
        "Permission denied (os error 13)"
    )


def test_a_byte_order_mark_is_skipped(write: Write, tmp_path: Path) -> None:
    write("codex/config.toml", b'\xef\xbb\xbfmodel = "x"\r\n')
    assert models(tmp_path) == ["x"]


# Projects ----------------------------------------------------------------------------------------


def test_nothing_is_read_of_an_untrusted_project(write: Write, tmp_path: Path) -> None:
    write("repo/.git/HEAD")
    write("repo/.codex/config.toml", "not even TOML")
    assert models(tmp_path / "repo") == []
    write("codex/config.toml", trust(tmp_path / "repo", level="untrusted"))
    assert models(tmp_path / "repo") == []


def test_a_trusted_project_is_checked(write: Write, tmp_path: Path) -> None:
    write("codex/config.toml", trust(tmp_path / "repo"))
    path = write("repo/.codex/config.toml", "a = = 1")
    assert problem(tmp_path / "repo") == (
        f"failed to load executor-local config: Error parsing project config file {path}:1:5: Invalid value"
    )


def test_the_nearest_word_decides(write: Write, tmp_path: Path) -> None:
    write("repo/.git/HEAD")
    for name in ("repo", "repo/a", "repo/a/b"):
        write(f"{name}/.codex/config.toml", f'model = "{name}"')
    cwd = tmp_path / "repo/a/b"
    write("codex/config.toml", trust(tmp_path / "repo") + trust(tmp_path / "repo/a", level="untrusted"))
    assert models(cwd) == ["repo", "repo/a/b"]
    write("codex/config.toml", trust(tmp_path / "repo/a"))
    assert models(cwd) == ["repo/a"]
    write("codex/config.toml", trust(tmp_path / "repo") + f'[projects."{tmp_path}/repo/a"]\n')
    assert models(cwd) == ["repo", "repo/a", "repo/a/b"]
    write("codex/config.toml", trust(tmp_path))
    assert models(cwd) == []


def test_without_a_repository_only_cwd_is_the_project(write: Write, tmp_path: Path) -> None:
    write("codex/config.toml", trust(tmp_path / "plain"))
    write("plain/.codex/config.toml", 'model = "plain"')
    write("plain/x/.codex/config.toml", 'model = "x"')
    assert models(tmp_path / "plain") == ["plain"]
    assert models(tmp_path / "plain/x") == []


def test_who_may_call_a_project_trusted(write: Write, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    write("repo/.codex/config.toml", 'model = "repo"\n' + trust(repo))
    assert models(repo) == []
    write("etc/config.toml", trust(repo))
    assert models(repo) == ["repo"]
    write("codex/config.toml", trust(repo, level="untrusted"))
    assert models(repo) == []
    write("etc/managed_config.toml", trust(repo))
    assert models(repo) == ["repo"]


def test_links_count_as_what_they_point_to(write: Write, tmp_path: Path) -> None:
    write("repo/.git/HEAD")
    write("repo/.codex/config.toml", 'model = "repo"')
    (tmp_path / "link").symlink_to(tmp_path / "repo")
    write("codex/config.toml", trust(tmp_path / "repo"))
    (layer,) = read(tmp_path / "link").config.layers
    assert layer.source == f"project ({tmp_path}/link/.codex/config.toml)"
    write("codex/config.toml", trust(tmp_path / "link"))
    assert models(tmp_path / "repo") == []
    assert models(tmp_path / "link") == ["repo"]


def test_the_users_own_folder_is_no_project(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODEX_HOME", str(tmp_path / "home/.codex"))
    write("home/.codex/config.toml", 'model = "user"\n' + trust(tmp_path / "home"))
    assert models(tmp_path / "home") == ["user"]


@pytest.mark.parametrize(
    ("projects", "text"),
    [
        (
            '[projects."/x"]\ntrust_level = "bogus"',
            "unknown variant `bogus`, expected `trusted` or `untrusted`",
        ),
        ("projects = 3", "in `projects`"),
        ("project_root_markers = 3", "project_root_markers must be an array of strings"),
        ("project_root_markers = [1]", "project_root_markers must be an array of strings"),
    ],
)
def test_trust_that_means_nothing(projects: str, text: str, write: Write, tmp_path: Path) -> None:
    write("codex/config.toml", projects)
    assert text in problem(tmp_path)


def test_keys_that_a_project_may_not_set(write: Write, tmp_path: Path) -> None:
    keys = [*DENIED_TO_PROJECTS, "mcp_servers"]
    content = "".join(f'{key} = "v"\n' for key in keys)
    write("codex/config.toml", content + trust(tmp_path / "repo"))
    write("repo/.codex/config.toml", content)
    user, project = read(tmp_path / "repo", *[[key] for key in keys]).config.layers
    assert list(tomllib.loads(user.toml)) == keys
    assert list(tomllib.loads(project.toml)) == ["mcp_servers"]


# Where a project begins --------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "found"), [("HEAD", True), ("config", False), (None, True)])
def test_what_is_a_repository(content: str | None, found: bool, write: Write, tmp_path: Path) -> None:
    write("codex/config.toml", trust(tmp_path / "repo"))
    write("repo/.codex/config.toml", 'model = "root"')
    write(f"repo/.git/{content}" if content else "repo/.git")
    assert models(tmp_path / "repo/a") == (["root"] if found else [])


def test_other_markers(write: Write, tmp_path: Path) -> None:
    trusted = trust(tmp_path / "m")
    write("m/mark")
    write("m/.codex/config.toml", 'model = "m"')
    write("m/n/.git/HEAD")
    write("m/n/.codex/config.toml", 'model = "n"')
    cwd = tmp_path / "m/n"
    write("codex/config.toml", trusted)
    assert models(cwd) == []
    write("codex/config.toml", 'project_root_markers = ["mark"]\n' + trusted)
    assert models(cwd) == ["m", "n"]
    write("codex/config.toml", "project_root_markers = []\n" + trusted)
    assert models(cwd) == []


def test_the_repository_is_trusted_where_the_root_is_not(write: Write, tmp_path: Path) -> None:
    write("codex/config.toml", 'project_root_markers = ["mark"]\n' + trust(tmp_path / "repo"))
    write("repo/.git/HEAD")
    write("repo/part/mark")
    write("repo/part/.codex/config.toml", 'model = "part"')
    assert models(tmp_path / "repo/part") == ["part"]


# Linked worktrees --------------------------------------------------------------------------------


@pytest.fixture
def worktree(write: Write, tmp_path: Path) -> Path:
    """A worktree of a trusted repository, as `git worktree add` makes one."""
    write("codex/config.toml", trust(tmp_path / "main"))
    write("main/.git/HEAD")
    write("main/.git/worktrees/tree/HEAD")
    write("main/.git/worktrees/tree/commondir", "../..\n")
    write("main/.git/worktrees/tree/gitdir", f"{tmp_path}/tree/.git\n")
    write("tree/.git", f"gitdir: {tmp_path}/main/.git/worktrees/tree\n")
    write("tree/.codex/config.toml", 'model = "tree"\n[hooks]\nx = "tree"\n')
    return tmp_path / "tree"


def test_a_worktree_is_trusted_with_its_repository(worktree: Path) -> None:
    assert models(worktree) == ["tree"]
    (worktree / ".git").write_text("gitdir: ../main/.git/worktrees/tree\n")
    assert models(worktree) == ["tree"]


@pytest.mark.parametrize("missing", ["commondir", "gitdir"])
def test_a_worktree_that_its_repository_does_not_know(missing: str, worktree: Path) -> None:
    (worktree.parent / "main/.git/worktrees/tree" / missing).unlink()
    assert models(worktree) == []


def test_a_worktree_known_as_another(worktree: Path) -> None:
    (worktree.parent / "main/.git/worktrees/tree/gitdir").write_text("/elsewhere/.git\n")
    assert models(worktree) == []


def test_trust_cannot_be_claimed(worktree: Path, write: Write, tmp_path: Path) -> None:
    """A folder of one's own making that points at somebody else's repository vouches for nothing."""
    write("evil/fake/commondir", f"{tmp_path}/main/.git\n")
    write("evil/fake/gitdir", f"{tmp_path}/evil/tree/.git\n")
    write("evil/tree/.git", f"gitdir: {tmp_path}/evil/fake\n")
    write("evil/tree/.codex/config.toml", 'model = "evil"')
    assert models(tmp_path / "evil/tree") == []


def test_a_git_file_of_another_kind(worktree: Path) -> None:
    (worktree / ".git").write_text("garbage")
    assert models(worktree) == []


def test_hooks_come_from_the_main_checkout(worktree: Path, write: Write, tmp_path: Path) -> None:
    keys = [["model"], ["hooks"]]
    assert [layer.toml for layer in read(worktree, *keys).config.layers] == ['model = "tree"\n']
    write("main/.codex/config.toml", 'model = "main"\n[hooks]\nx = "main"\n')
    write("main/sub/.codex/config.toml", '[hooks]\nx = "sub"\n')
    write("tree/sub/.codex/config.toml", 'model = "sub"\n')
    assert [(layer.base_dir, layer.toml) for layer in read(worktree / "sub", *keys).config.layers] == [
        (f"file://{worktree}/.codex", 'model = "tree"\n'),
        (f"file://{tmp_path}/main/.codex", '[hooks]\nx = "main"\n'),
        (f"file://{worktree}/sub/.codex", 'model = "sub"\n'),
        (f"file://{tmp_path}/main/sub/.codex", '[hooks]\nx = "sub"\n'),
    ]


def test_broken_hooks_are_reported(worktree: Path, write: Write) -> None:
    path = write("main/.codex/config.toml", "x = [")
    assert problem(worktree) == (
        "failed to load executor-local config: Error parsing project hooks config file "
        f"{path}: Invalid value (at end of document)"
    )
