"""Rules about what a model may do: the strictest counts, and what no rule can take apart none allows."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.agent.policy import BadPolicy, EditRule, Policy, Rule, ToolRule, words

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
        ("ls $(rm x)", "forbid"),
        ("ls `rm x`", "forbid"),
        ("ls $(whoami)", "ask"),
        ("git status $(whoami)", None),
        ("ls '$HOME'", "allow"),
        ("ls # rm x", "allow"),
        ("ls <<'END'\nrm x\nEND\n", None),
        ("ls <<END\n$(rm x)\nEND\n", "forbid"),
        ("ls <<END\nrm x\nEND\nrm y", "forbid"),
        ("env ls", None),
        ("/bin/ls", None),
        ("x=1 ls", None),
        ("ls 'unfinished", None),
        ("rm $HOME", "forbid"),
        ("", None),
    ],
)
def test_what_a_script_may(script: str, decision: str | None) -> None:
    found = POLICY.decide(script)
    assert (None if found is None else found[0]) == decision


PUSH = Policy((Rule(("git", "push"), "forbid", "no"),))


@pytest.mark.parametrize(
    ("script", "decision"),
    [
        ("x=1 git push", "forbid"),
        ("x=$y git push", "forbid"),
        ("/usr/bin/git push", "forbid"),
        ("$HOME/bin/git push", "forbid"),
        ("\\git push", "forbid"),
        ('g"i"t push', "forbid"),
        ("git 2>/dev/null push", "forbid"),
        ("{ git push; }", "forbid"),
        ("f() { git push; }; f", "forbid"),
        ("function f { git push; }", "forbid"),
        ("if true; then git push; fi", "forbid"),
        ("for x in a b; do git push $x; done", "forbid"),
        ("case $x in a) git push;; esac", "forbid"),
        ("while ! git push; do sleep 1; done", "forbid"),
        ("! git push", "forbid"),
        ("time -p git push", "forbid"),
        ("env -u HOME A=b git push", "forbid"),
        ("env -S 'git push'", "forbid"),
        ("command git push", "forbid"),
        ("nohup git push &", "forbid"),
        ("sudo -u me git push", "forbid"),
        ("timeout -k 5 10 git push", "forbid"),
        ("nice -n 5 sudo -E env A=1 git push", "forbid"),
        ("echo origin | xargs -n 1 git push", "forbid"),
        ("bash -c 'git push'", "forbid"),
        ("/bin/sh -ec 'cd x; git push'", "forbid"),
        ("bash -lc \"bash -c 'git push'\"", "forbid"),
        ("eval git push", "forbid"),
        ("echo $(git push)", "forbid"),
        ('echo "${x:-$(git push)}"', "forbid"),
        ("echo `git push`", "forbid"),
        ("diff <(git push) x", "forbid"),
        ("(cd x && git push)", "forbid"),
        ("git \\\n push", "forbid"),
        ("git push 'unfinished", "forbid"),
        ("git -C . push", "ask"),
        ("git --no-pager push", "ask"),
        ("git $what", "ask"),
        ("git log", None),
        ("git log push", None),
        ("git -C . log", None),
        ("echo git push", None),
        ("echo 'git push'", None),
        ("cat > README <<'END'\ngit push\nEND", None),
        ("# git push", None),
        ("gitpush", None),
        ("bash script.sh git push", None),
    ],
)
def test_other_spellings(script: str, decision: str | None) -> None:
    found = PUSH.decide(script)
    assert (None if found is None else found[0]) == decision


def test_what_is_allowed_is_not_allowed_in_other_spellings() -> None:
    policy = Policy((Rule(("git", "push"), "allow"),))
    assert policy.decide("git push") == ("allow", "")
    for script in ("/tmp/git push", "env git push", "git push > x", "git push $x", "bash -c 'git push'"):
        assert policy.decide(script) is None


@pytest.mark.parametrize(
    "unit", ["A", "a ", "true;", "\u00a0", "x=1 ", "$(", "`", "(", "\\", '"', "${", "<<E\n", "{ "]
)
def test_a_long_script_takes_no_longer_than_it_is_long(unit: str) -> None:
    script = "git push " + unit * (500_000 // len(unit))
    began = time.process_time()
    assert PUSH.decide(script) == ("forbid", "no")
    assert time.process_time() - began < 10


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
        ("edit = 5", "where only"),
        ("rule = 5", "where only"),
        ('[[rule]]\nprefix = []\ndecision = "ask"', "`prefix` must be words"),
        ('[[rule]]\nprefix = ["a"]\ndecision = "perhaps"', "`decision` must be one of allow, ask, forbid"),
        ('[[rule]]\nprefix = ["a"]\ndecision = "ask"\nmore = 1', "only `prefix`, `decision` and `reason`"),
        ('[[edit]]\npath = 1\ndecision = "ask"', "`path` must be a text"),
        ('[[edit]]\npath = "a"\ndecision = "ask"\ntool = "x"', "only `path`, `decision` and `reason`"),
        ('[[mcp]]\ntool = "a"\ndecision = "ask"', "`server` must be a text"),
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


EDITS = Policy(
    edits=(
        EditRule("src", "allow"),
        EditRule("src/keys", "forbid", "secret"),
        EditRule("/etc/", "ask", "the system's"),
        EditRule("notes.md", "allow"),
    )
)


@pytest.mark.parametrize(
    ("paths", "decided"),
    [
        (["/w/src/a.py"], ("allow", "")),
        (["/w/src"], ("allow", "")),
        (["/w/srcs"], None),
        (["/w/src/a.py", "/w/other"], None),
        (["/w/src/a.py", "/w/notes.md"], ("allow", "")),
        (["/w/src/a.py", "/etc/passwd"], ("ask", "the system's")),
        (["/etc/passwd", "/w/src/keys/id"], ("forbid", "secret")),
        ([], None),
    ],
)
def test_edits_by_their_place(paths: list[str], decided: object) -> None:
    assert EDITS.decide_edit(paths, "/w") == decided


def test_tools_by_their_name() -> None:
    tools = (ToolRule("docs", None, "allow"), ToolRule("docs", "drop", "forbid", "no"))
    policy = Policy(tools=tools)
    assert policy.decide_tool("docs", "find") == ("allow", "")
    assert policy.decide_tool("docs", "drop") == ("forbid", "no")
    assert policy.decide_tool("other", "find") is None


def test_a_file_of_every_kind_of_rule(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        '[[edit]]\npath = "src"\ndecision = "ask"\nreason = "read it first"\n'
        '[[mcp]]\nserver = "docs"\ndecision = "allow"\n'
        '[[mcp]]\nserver = "docs"\ntool = "drop"\ndecision = "forbid"\n'
    )
    assert Policy.load(str(path)) == Policy(
        edits=(EditRule("src", "ask", "read it first"),),
        tools=(ToolRule("docs", None, "allow"), ToolRule("docs", "drop", "forbid")),
    )
