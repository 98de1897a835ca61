"""Rules about commands: what they say about a script, and files that cannot be used."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.agent.approvals import BadPolicy, Policy, Rule, words

POLICY = Policy(
    (
        Rule(("git", "status"), "allow"),
        Rule(("ls",), "allow"),
        Rule(("git", "push"), "ask", "others see it"),
        Rule(("rm",), "forbid", "no"),
        Rule(("ls", "/secret"), "forbid", "private"),
    )
)


@pytest.mark.parametrize(
    ("script", "decision"),
    [
        ("ls -l", "allow"),
        ("git status && ls", "allow"),
        ("'ls' \"-l\"", "allow"),
        ("ls; whoami", None),
        ("git commit", None),
        ("git push --force", "ask"),
        ("ls | git push", "ask"),
        ("git push; rm x", "forbid"),
        ("ls /secret", "forbid"),
        ("(rm x)", "forbid"),
        ("ls\nrm x", "forbid"),
        ("ls > file", None),
        ("ls $(rm x)", None),
        ("ls `rm x`", None),
        ("ls 'unfinished", None),
        ("rm $HOME", "forbid"),
        ("", None),
    ],
)
def test_what_a_script_may(script: str, decision: str | None) -> None:
    found = POLICY.decide(script)
    assert (None if found is None else found[0]) == decision


@settings(max_examples=50)
@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4))
def test_what_is_allowed_begins_with_allowed_words(argv: list[str]) -> None:
    script = shlex.join(argv)
    decided = POLICY.decide(script)
    if decided is not None and decided[0] == "allow":
        assert argv[0] == "ls" or argv[:2] == ["git", "status"]
    if argv[0] == "rm" and "$" not in script and "`" not in script:
        assert decided is not None
        assert decided[0] == "forbid"


@settings(max_examples=50)
@given(st.text())
def test_any_script_is_decided(script: str) -> None:
    POLICY.decide(script)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('[[rule]]\nprefix = ["git", "push"]\ndecision = "ask"\nreason = "others see it"\n')
    assert Policy.load(str(path)) == Policy((Rule(("git", "push"), "ask", "others see it"),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "cannot be read"),
        ("rules = []", "where only"),
        ("rule = 5", "where only"),
        ('[[rule]]\nprefix = []\ndecision = "ask"', "`prefix` must be words"),
        ('[[rule]]\nprefix = ["a"]\ndecision = "perhaps"', "`decision` must be one of allow, ask, forbid"),
        ('[[rule]]\nprefix = ["a"]\ndecision = "ask"\nmore = 1', "only `prefix`, `decision` and `reason`"),
        ('[[rule]]\nprefix = ["a"]\ndecision = "ask"\nreason = 1', "`reason` must be a text"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(BadPolicy, match=said):
        Policy.load(str(path))


def test_the_script_of_a_command_line() -> None:
    assert words(["/bin/bash", "-lc", "echo 'hi'"]) == "echo 'hi'"
    assert words(["echo", "a b"]) == "echo 'a b'"


QUESTION = """
import asyncio, fcntl, termios
from exec_server.agent.approvals import ask_on_terminal
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
raise SystemExit(7 if asyncio.run(ask_on_terminal("rm \\x1b[2Jx", "because")) else 8)
"""


@pytest.mark.parametrize(("typed", "code"), [(b"y\n", 7), (b"yes\n", 7), (b"\n", 8), (b"no\n", 8)])
def test_a_question_on_the_terminal(typed: bytes, code: int) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", QUESTION]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as asking:
        os.close(theirs)
        shown = b""
        while not shown.endswith(b"[y/N] "):
            shown += os.read(ours, 1000)
        os.write(ours, typed)
        assert asking.wait(30) == code
    os.close(ours)
    assert b"rm \\u001b[2Jx" in shown, "what a model wrote does not steer the terminal"


def test_nobody_to_ask() -> None:
    command = [sys.executable, "-c", QUESTION.replace("fcntl.ioctl(0, termios.TIOCSCTTY, 0)", "")]
    done = subprocess.run(command, start_new_session=True, stdin=subprocess.DEVNULL, timeout=30, check=False)
    assert done.returncode == 8
