"""The facts about this machine."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from exec_server.limits import Limits
from exec_server.local import info as info_module
from exec_server.local.info import environment_info, login_shell, user_home
from exec_server.wire.environment import EnvironmentShell


def facts(limits: Limits | None = None) -> dict[str, object]:
    info = environment_info(limits or Limits(), {"httpHeaderEnvVars": True}, "1.2.3")
    result: dict[str, object] = msgspec.json.decode(msgspec.json.encode(info))
    return result


def set_account(monkeypatch: pytest.MonkeyPatch, *, home: str = "/home/me", shell: str = "/bin/sh") -> None:
    entry = SimpleNamespace(pw_dir=home, pw_shell=shell)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: entry)


def remove_account(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", missing)


def make_program(folder: Path, name: str, *, executable: bool = True) -> str:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text("")
    program.chmod(0o755 if executable else 0o644)
    return str(program)


def test_what_is_always_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/some one")
    found = facts()
    assert found["executorVersion"] == "1.2.3"
    assert found["cwd"] == f"file://{tmp_path}"
    assert found["userHomeDir"] == "file:///home/some%20one"
    assert found["platformOs"] == "linux"
    assert found["prependPathDirs"] == []
    assert found["capabilities"] == {"httpHeaderEnvVars": True}
    assert found["limits"] == {
        "maxProcesses": None,
        "retainedOutputBytes": 1 << 20,
        "shutdownGraceMs": 0,
        "detachTtlMs": 30000,
    }


def test_limits_are_announced() -> None:
    limits = Limits(max_processes=7, retained_output=5, shutdown_grace=1.5, detach_ttl=3600)
    assert facts(limits)["limits"] == {
        "maxProcesses": 7,
        "retainedOutputBytes": 5,
        "shutdownGraceMs": 1500,
        "detachTtlMs": 3600000,
    }


def test_a_working_directory_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "getcwd", gone)
    assert facts()["cwd"] is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [("/x//y/", "file:///x/y"), ("rel/x y", "file:///srv/rel/x%20y"), ("a/../b", "file:///srv/b")],
)
def test_a_temporary_directory_is_made_absolute(
    value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/srv")
    monkeypatch.setenv("TMPDIR", value)
    found = facts()
    assert (found["temporaryDirectories"], found["tempDir"]) == ([expected], expected)


@pytest.mark.parametrize("value", [None, ""])
def test_no_temporary_directory(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    if value is not None:
        monkeypatch.setenv("TMPDIR", value)
    found = facts()
    assert (found["temporaryDirectories"], found["tempDir"]) == ([], "file:///tmp")


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("/a//b/", "/a/b"), ("//a", "/a"), ("", "/home/me"), (None, "/home/me"), ("relative", None)],
)
def test_the_home_directory(
    variable: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_account(monkeypatch)
    monkeypatch.delenv("HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("HOME", variable)
    assert user_home() == expected


def test_no_home_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_account(monkeypatch)
    monkeypatch.delenv("HOME", raising=False)
    assert user_home() is None
    assert "userHomeDir" not in facts()


# Shells ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "name"), [("bash", "bash"), ("zsh", "zsh"), ("sh", "sh"), ("pwsh", "powershell")]
)
def test_the_account_decides(
    program: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_program(tmp_path, program)
    set_account(monkeypatch, shell=path)
    monkeypatch.setenv("SHELL", "/bin/other")
    shell = login_shell()
    assert (shell.name, shell.path) == (name, path)


@pytest.mark.parametrize(
    "shell", ["/usr/sbin/nologin", "/usr/bin/fish", "", "/opt/bash-5.1", "/nonexistent/"]
)
def test_other_shells_are_passed_over(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bash = make_program(tmp_path, "bash")
    set_account(monkeypatch, shell=shell)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert login_shell() == EnvironmentShell("bash", bash)


def test_a_shell_that_moved_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zsh = make_program(tmp_path, "zsh")
    set_account(monkeypatch, shell="/nonexistent/zsh")
    monkeypatch.setenv("PATH", f"/nonexistent:{tmp_path}")
    assert login_shell() == EnvironmentShell("zsh", zsh)


def test_sh_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_account(monkeypatch)
    monkeypatch.setattr(info_module, "_find_program", lambda name: None)
    assert login_shell() == EnvironmentShell("sh", "/bin/sh")


def test_programs_must_be_executable_and_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_program(tmp_path / "here", "zsh")
    make_program(tmp_path / "plain", "zsh", executable=False)
    right = make_program(tmp_path / "right", "zsh")
    set_account(monkeypatch, shell="/nonexistent/zsh")
    monkeypatch.setenv("PATH", f"here::{tmp_path}/plain:{tmp_path}/right")
    assert login_shell().path == right


# Identity ----------------------------------------------------------------------------------------


def test_the_identity_is_stable_and_opaque() -> None:
    first, second = facts()["providerId"], facts()["providerId"]
    assert first == second
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", str(first))


def test_the_identity_tells_machines_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for content in (b"one\n", b"two\n", b"\xff", None):
        file = tmp_path / "machine-id"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        monkeypatch.setattr(info_module, "_MACHINE_ID_FILES", (str(file),))
        found.add(facts()["providerId"])
    assert len(found) == 3  # one that cannot be read is like none
