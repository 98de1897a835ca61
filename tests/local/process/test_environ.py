"""local/process/environ.py: the policy of wire.md 4.3, against a naive reading of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.local.process.environ import child_environment
from exec_server.wire.process import EnvPolicy, Metadata

CORE = ["PATH", "SHELL", "TMPDIR", "TEMP", "TMP", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "USER"]
RESERVED = [
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
    "NODE_REPL_AUTH_TOKEN",
    "OPENAI_FEDERATION_RULE_ID",
    "OPENAI_IDENTITY_TOKEN_FILE",
    "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
]
EXIT_ON_CLOSE = "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE"


def lower(text: str) -> str:
    """Of ASCII letters only."""
    return "".join(char.lower() if char.isascii() else char for char in text)


def glob(pattern: str, name: str) -> bool:
    """The definition, without any cleverness."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(glob(pattern[1:], name[start:]) for start in range(len(name) + 1))
    if not name or (pattern[0] != "?" and lower(pattern[0]) != lower(name[0])):
        return False
    return glob(pattern[1:], name[1:])


def naive(
    env: dict[str, str], policy: EnvPolicy | None, metadata: Metadata | None, own: dict[str, str]
) -> dict[str, str]:
    result: dict[str, str] = {}
    if policy is not None:
        if policy.inherit == "all":
            result = dict(own)
        elif policy.inherit == "core":
            result = {n: v for n, v in own.items() if lower(n) in map(lower, CORE)}
        if not policy.ignore_default_excludes:
            for pattern in ("*KEY*", "*SECRET*", "*TOKEN*"):
                result = {n: v for n, v in result.items() if not glob(pattern, n)}
        for pattern in policy.exclude:
            result = {n: v for n, v in result.items() if not glob(pattern, n)}
        result |= policy.set
        if policy.include_only:
            result = {n: v for n, v in result.items() if any(glob(p, n) for p in policy.include_only)}
    result |= env
    result.pop("CODEX_TOOL_CALL_ID", None)
    if metadata is not None:
        result.pop("CODEX_THREAD_ID", None)
        if metadata.tool_call_id is not None and "\0" not in metadata.tool_call_id:
            result["CODEX_TOOL_CALL_ID"] = metadata.tool_call_id
        if metadata.thread_id is not None:
            result["CODEX_THREAD_ID"] = metadata.thread_id.lower()
    result.pop(EXIT_ON_CLOSE, None)
    return {n: v for n, v in result.items() if lower(n) not in map(lower, RESERVED)}


names = st.sampled_from(
    [
        *CORE,
        "path",
        "Home",
        "API_KEY",
        "monkey",
        "My_Secret_1",
        "TOKENS",
        "FOO",
        "foo",
        "FOOBAR",
        "BAR",
        "",
        "A=B",
        "a.b",
        "Ü",
        "[x]",
        "CODEX_THREAD_ID",
        "CODEX_TOOL_CALL_ID",
        EXIT_ON_CLOSE,
        EXIT_ON_CLOSE.lower(),
        *RESERVED,
        RESERVED[1].lower(),
    ]
)
variables = st.dictionaries(names, st.sampled_from(["", "1", "two words", "ü"]), max_size=8)
patterns = st.lists(st.text(alphabet="*?FOOBARfobar_.[]x", max_size=6) | names, max_size=3)
policies = st.builds(
    EnvPolicy, st.sampled_from(["all", "core", "none"]), st.booleans(), patterns, variables, patterns
)
metadata = st.builds(
    Metadata,
    st.none() | st.just("67E55044-10b1-426f-9247-bb680e5fe0c8"),
    st.none() | st.sampled_from(["", "call", "with\0nul"]),
)


@given(variables, st.none() | policies, st.none() | metadata, variables)
def test_does_what_a_naive_reading_does(env: Any, policy: Any, meta: Any, own: Any) -> None:
    before = dict(env), dict(own)
    assert child_environment(env, policy, meta, own) == naive(env, policy, meta, own)
    assert (env, own) == before


@given(st.text(alphabet="ab*?", max_size=12), st.text(alphabet="abAB", max_size=12))
def test_patterns(pattern: str, name: str) -> None:
    policy = EnvPolicy("all", True, [pattern], {}, [])
    assert (name not in child_environment({}, policy, None, {name: ""})) == glob(pattern, name)


def test_variables_that_are_not_text_are_not_inherited() -> None:
    own = {"GOOD": "1", "BAD": "\udcff", "\udcff": "1"}
    assert child_environment({}, EnvPolicy("all", True, [], {}, []), None, own) == {"GOOD": "1"}


@pytest.mark.parametrize(
    "thread", ["67e5504410b1426f9247bb680e5fe0c8", "{67E55044-10b1-426f-9247-bb680e5fe0c8}"]
)
def test_a_thread_is_spelled_one_way(thread: str) -> None:
    assert child_environment({}, None, Metadata(thread), {}) == {
        "CODEX_THREAD_ID": "67e55044-10b1-426f-9247-bb680e5fe0c8"
    }


def test_no_pattern_takes_long() -> None:
    policy = EnvPolicy("all", True, ["*a" * 40 + "b", "a*" * 40 + "b", "?*" * 40 + "b"], {}, [])
    began = time.process_time()
    assert child_environment({}, policy, None, {"a" * 5000: ""})
    assert time.process_time() - began < 2


OWN = {
    "EXEC_SERVER_API_KEY": "1",
    "codex_api_key": "2",
    "CODEX_ACCESS_TOKEN": "3",
    "EXEC_SERVER_TOKEN": "4",
    "EXEC_SERVER_TOKEN_FILE": "5",
    "EXEC_SERVER_RENDEZVOUS_CLUSTER": "nats://user:password@host",
}


@pytest.mark.parametrize("inherit", ["all", "core", "none"])
def test_credentials_of_the_server_are_not_inherited(inherit: Any) -> None:
    policy = EnvPolicy(inherit, True, [], {}, ["*"])
    assert child_environment({}, policy, None, {"PLAIN": "1", **OWN}).keys() <= {"PLAIN"}
    assert child_environment(OWN, policy, None, {}) == OWN  # who names them gets them
    named = EnvPolicy(inherit, True, [], OWN, [])
    assert child_environment({}, named, None, {}) == OWN
