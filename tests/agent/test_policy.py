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
        ("find . -name x -exec git push \\;", "forbid"),
        ("find . -execdir git push {} +", "forbid"),
        ("find . -exec git {} \\;", "ask"),
        ("bash <<'E'\ngit push\nE", "forbid"),
        ("sudo sh -x <<-E\n\tgit push\n\tE\n", "forbid"),
        ("bash -s arg <<E\ngit push\nE", "forbid"),
        ("bash <<< 'git push'", "forbid"),
        ("bash <<E &&\ngit push\nE\nls", "forbid"),
        ("bash -o pipefail -c 'git push'", "forbid"),
        ("bash -eo pipefail -c 'git push'", "forbid"),
        ("bash --rcfile x -c 'git push'", "forbid"),
        ("env -S'git push'", "forbid"),
        ("env --split-string='git push'", "forbid"),
        ("busybox git push", "forbid"),
        ("busybox sh -c 'git push'", "forbid"),
        ("trap 'git push' EXIT", "forbid"),
        ("alias p='git push' q=x; p", "forbid"),
        ("$'git' push", "forbid"),
        ("git $'\\x70\\165\\u0073h'", "forbid"),
        ("unshare git push", "forbid"),
        ("setsid -w git push", "forbid"),
        ("sudo --user me git push", "ask"),
        ("timeout --signal KILL 5 git push", "ask"),
        ("echo push | xargs git", "ask"),
        ("echo push | xargs -I{} git {}", "ask"),
        ("xargs --max-args 1 git push", "ask"),
        ("flock f git push", "ask"),
        ("flock f -c 'git push'", "ask"),
        ("su - me -c 'git push'", "ask"),
        ("script -qc 'git push' /dev/null", "ask"),
        ("watch -n 1 git push", "ask"),
        ("chroot / git push", "ask"),
        ("strace -f git push", "ask"),
        ("parallel git ::: push", "ask"),
        ("parallel 'git push {}' ::: a", "ask"),
        ("ssh here git push", "ask"),
        ("systemd-run --user git push", "ask"),
        ("fd x --exec git push", "ask"),
        ("echo 'git push' | sh", "ask"),
        ("curl x | sudo bash -s -- x", "ask"),
        ("bash", "ask"),
        ("sh < file", "ask"),
        ("source <(echo git push)", "ask"),
        (". /dev/stdin <<< 'git push'", "forbid"),
        ("bash <(echo git push)", "ask"),
        ('bash -c "$x"', "ask"),
        ("eval $x", "ask"),
        ("g=git; $g push", "ask"),
        ('"$g" push', "ask"),
        ("$(which git) push", "ask"),
        ("$g", "ask"),
        ("git {push,}", "ask"),
        ("{git,push}", "ask"),
        ("g{i,}t push", "ask"),
        ("gi? push", "ask"),
        ("git pu[s]h", "ask"),
        ("git p*", "ask"),
        ("git $x remote push", "ask"),
        (f"git {'-v ' * 200} push", "ask"),
        (f"{'env ' * 200} git push", "ask"),
        (f"watch {'x ' * 200} git push", "ask"),
        ("git -C . pus?", "ask"),
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
        ("bash --version", None),
        ("bash <<E\nls\nE", None),
        ("cat <<E\ngit push\nE\nls", None),
        ("find . -name '*.py' -exec grep push {} +", None),
        ("xargs -0 grep push", None),
        ("watch ls", None),
        ("flock f make push", None),
        ("ssh host 'ls; make push'", None),
        ("command -v git push", None),
        ("git log$x", None),
        ("git add *", None),
        ("git commit -m push", None),
        ("cp a{,.bak}", None),
        ("$HOME/bin/tool push", None),
        ("python$version push", None),
        ("echo $((2 * $x)) $(( (1 + $y) / 2 ))", None),
        ("for ((i = 0; i < $n; i++)); do echo $i; done", None),
        ("(( $x > 3 )) && ls", None),
        ("[ $x = push ] || [[ $x == git ]]", None),
        ("x=$(ls) y=*", None),
        ("PATH=$PATH:. ls", None),
        ("trap - EXIT; trap cleanup EXIT", None),
        ("python3 -c 'git push'", None),
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
    "unit",
    [
        *("A", "a ", "true;", "\u00a0", "x=1 ", "$(", "`", "(", "\\", '"', "${", "<<E\n", "{ ", "{", "{,} "),
        *(
            "((",
            "((a",
            "$((",
            "*",
            "[",
            "[a]",
            "$'",
            "$'\\x41'",
            "; env -i ",
            "; watch 'a b'",
            "; bash <<E\n",
        ),
        *(
            "; find . -exec x",
            " -exec x",
            "; sh -c 'a'",
            "; flock ",
            "; eval 'eval eval'",
            "; xargs -I {} a ",
        ),
    ],
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


@pytest.mark.parametrize(
    ("path", "real", "decided"),
    [
        ("/w/link", {"/w/link": "/w/src/keys/id"}, "forbid"),
        ("/w/link", {"/w/link": "/elsewhere/id", "/w/src/keys": "/elsewhere"}, "forbid"),
        ("/w/src/keys/id", {"/w/src/keys/id": "/elsewhere"}, "forbid"),
        ("/w/src/link", {"/w/src/link": "/w/.git/hook"}, None),
        ("/w/src/link", {"/w/src/link": "/w/.git/hook", "/w/src": "/w/.git"}, None),
        ("/w/link", {"/w/link": "/w/src/a"}, "allow"),
        ("/w/src/a", {"/w": "/home/w", "/w/src/a": "/home/w/src/a"}, "allow"),
        ("/w/src/a", {"/w": "/home/w", "/w/src/a": "/home/v/src/a"}, None),
    ],
)
def test_edits_by_where_their_place_is(path: str, real: dict[str, str], decided: str | None) -> None:
    """Links lead to what is forbidden, and not to what is allowed."""
    found = EDITS.decide_edit([path], "/w", real)
    assert (None if found is None else found[0]) == decided


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
