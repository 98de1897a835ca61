"""From a tool call to what is started."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.agent.exec import (
    ExecCommand,
    ToolError,
    WriteStdin,
    arguments,
    command_line,
    directory,
    variables,
)
from exec_server.services import EnvironmentFacts, Shell
from exec_server.version import __version__
from support.scripted import ScriptedMachine


def machine(name: str = "bash", path: str = "/bin/bash", remote: bool = False, cwd: str | None = None) -> Any:
    made = ScriptedMachine(remote=remote, shell=Shell(name, path))
    if cwd is not None:
        made.info = EnvironmentFacts(shell=Shell(name, path), cwd=cwd)
    return made


@pytest.mark.parametrize(
    ("shell", "login", "words"),
    [
        (("bash", "/bin/bash"), None, ["/bin/bash", "-lc", "x"]),
        (("bash", "/bin/bash"), False, ["/bin/bash", "-c", "x"]),
        (("zsh", "/usr/bin/zsh"), True, ["/usr/bin/zsh", "-lc", "x"]),
        (("powershell", r"C:\pwsh.exe"), None, [r"C:\pwsh.exe", "-Command", "x"]),
        (("powershell", r"C:\pwsh.exe"), False, [r"C:\pwsh.exe", "-NoProfile", "-Command", "x"]),
        (("cmd", r"C:\cmd.exe"), None, [r"C:\cmd.exe", "/c", "x"]),
    ],
)
def test_command_lines(shell: tuple[str, str], login: bool | None, words: list[str]) -> None:
    assert command_line(ExecCommand(cmd="x", login=login), machine(*shell), "e", True) == words


def test_another_shell() -> None:
    for there in ("/bin/sh", "sh"):
        call = ExecCommand(cmd="x", shell=there)
        assert command_line(call, machine(), "e", True) == [there, "-lc", "x"], "this machine has it"
    for not_there in ("/nope/zsh", "zsh-that-nobody-has"):
        call = ExecCommand(cmd="x", shell=not_there)
        assert command_line(call, machine(), "e", True) == ["/bin/bash", "-lc", "x"], "its own will do"
    with pytest.raises(ToolError, match=r"^environment `far` only supports `bash`$"):
        command_line(call, machine(remote=True), "far", True)
    same = ExecCommand(cmd="x", shell="/opt/bin/bash")
    assert command_line(same, machine(remote=True), "far", True) == ["/bin/bash", "-lc", "x"], "its own"
    silent = ScriptedMachine(remote=True)
    silent.info = EnvironmentFacts()
    with pytest.raises(ToolError, match=r"^environment `far` does not report a shell$"):
        command_line(ExecCommand(cmd="x"), silent, "far", True)  # type: ignore[arg-type]


def test_login_may_be_forbidden() -> None:
    assert command_line(ExecCommand(cmd="x"), machine(), "e", False)[1] == "-c"
    with pytest.raises(
        ToolError, match=r"^login shell is disabled by config; omit `login` or set it to false"
    ):
        command_line(ExecCommand(cmd="x", login=True), machine(), "e", False)


@pytest.mark.parametrize(
    ("cwd", "workdir", "uri"),
    [
        ("file:///project", None, "file:///project"),
        ("file:///project", "", "file:///project"),
        ("file:///project", "src/../a b", "file:///project/a%20b"),
        ("file:///project", "/etc", "file:///etc"),
        ("file:///project", "../../..", "file:///"),
        ("file:///project", "file:///x/y", "file:///x/y"),
        ("file:///C:/work", "src\\a", "file:///C:/work/src/a"),
        ("file:///C:/work", "D:\\x", "file:///D:/x"),
        ("file:///C:/work", "\\x", "file:///C:/x"),
        (None, "a", "file:///a"),
    ],
)
def test_directories(cwd: str | None, workdir: str | None, uri: str) -> None:
    assert directory(workdir, cwd) == uri


def test_variables() -> None:
    env = variables("t", "s", "c", None)
    assert env["TERM"] == "dumb"
    assert env["PAGER"] == "cat"
    assert (env["CODEX_THREAD_ID"], env["CODEX_SESSION_ID"], env["CODEX_TOOL_CALL_ID"]) == ("t", "s", "c")
    assert env["CODEX_VERSION"] == __version__
    assert variables(None, None, "c", "linux")["TERM"] == "linux"


def test_arguments() -> None:
    assert arguments('{"cmd":"x"}', ExecCommand) == ExecCommand(cmd="x")
    half = arguments('{"cmd":"a\\ud800b \\ud83d\\ude00"}', ExecCommand)
    assert half.cmd == "a\ufffdb 😀", "half a character"
    assert arguments(b'{"session_id":5}', WriteStdin).chars == ""
    wrong = ["", "[]", '{"cmd":5}', "{}", '{"cmd":', '{"cmd":"x","yield_time_ms":"soon"}', "\ud800"]
    wrong += [f'{{"cmd":"x","{name}":-1}}' for name in ("yield_time_ms", "max_output_tokens")]
    for text in wrong:
        with pytest.raises(ToolError, match="failed to parse function arguments"):
            arguments(text, ExecCommand)
    with pytest.raises(ToolError, match="they are empty; expected a JSON object"):
        arguments(" ", ExecCommand)
    with pytest.raises(ToolError, match="there is no `timeout`, only `cmd`, `workdir`"):
        arguments('{"cmd":"x","timeout":1}', ExecCommand)
    with pytest.raises(ToolError, match="truncated"):
        arguments('{"cmd":"x', ExecCommand)
