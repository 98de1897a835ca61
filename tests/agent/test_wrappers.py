"""What a command comes to: certainly, or perhaps. The spellings that rules know are in test_policy.py."""

from __future__ import annotations

import pytest

from exec_server.agent.script import UNKNOWN, read_script
from exec_server.agent.wrappers import forms


def run_by(script: str) -> list[tuple[str, bool]]:
    """The words of every form, UNKNOWN as `…`."""
    found = [form for command in read_script(script).commands for form in forms(command)]
    return [(" ".join(form.words).replace(UNKNOWN, "…"), form.certain) for form in found]


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("x=1 ls -l", "ls -l"),
        ("sudo -u me env A=b ls", "ls"),
        ("timeout 5 ls", "ls"),
        ("xargs ls", "ls …"),
        ("xargs -I{} ls {}", "ls … …"),
        ("find . -exec ls {} +", "ls …"),
        ("find . -exec echo + ';' -o -exec ls \\;", "ls"),
        ("sh -c 'cd x; ls'", "ls"),
        ("bash -eo pipefail <<E\nls\nE", "ls"),
        ("env -S 'ls -l' x", "ls -l x"),
        ("alias l='ls -l'", "ls -l"),
        ("trap 'ls' EXIT", "ls"),
        ("source /dev/stdin <<< ls", "ls"),
    ],
)
def test_what_is_run_for_certain(script: str, last: str) -> None:
    assert run_by(script)[-1] == (last, True)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("watch -n 1 ls -l", "ls -l"),
        ("flock f -c 'cd x; ls'", "ls"),
        ("sudo --user me ls", "ls"),
        ("parallel ls ::: a b", "ls …"),
        ("ssh host <<E\nls\nE", "ls"),
        ("env " * 101, "…"),
    ],
)
def test_what_may_be_run(script: str, found: str) -> None:
    assert (found, False) in run_by(script)
    assert (found, True) not in run_by(script)


@pytest.mark.parametrize("script", ["sh", "x | sh", "bash -s", "sh -", "bash <(x)", "eval $x", 'sh -c "$x"'])
def test_a_script_that_is_not_known(script: str) -> None:
    assert ("…", True) in run_by(script)


@pytest.mark.parametrize(
    "script", ["sh file", "source file", "bash --version", "command -v ls", "trap - EXIT"]
)
def test_what_runs_nothing_that_is_in_its_words(script: str) -> None:
    assert {words for words, _ in run_by(script)} <= {script, "-"}
