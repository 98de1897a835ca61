"""The environment of a child: what it inherits, what is taken away, what is added. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from ...wire.process import EnvPolicy, Metadata

__all__ = ["child_environment", "is_own_credential"]

CORE_NAMES: Final = frozenset(
    ["PATH", "SHELL", "TMPDIR", "TEMP", "TMP", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "USER"]
)
"""What `inherit: core` keeps, whatever the case."""

SECRET_PATTERNS: Final = ("*KEY*", "*SECRET*", "*TOKEN*")
"""What is not inherited unless the policy says so."""

RESERVED_NAMES: Final = frozenset(
    (
        "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
        "NODE_REPL_AUTH_TOKEN",
        "OPENAI_FEDERATION_RULE_ID",
        "OPENAI_IDENTITY_TOKEN_FILE",
        "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
    )
)
"""The server's own credentials: no child ever sees them, whatever the case of the name."""

OWN_CREDENTIALS: Final = frozenset(
    ("EXEC_SERVER_API_KEY", "EXEC_SERVER_RENDEZVOUS_CLUSTER", "CODEX_API_KEY", "CODEX_ACCESS_TOKEN")
)
OWN_CREDENTIALS_BEGIN: Final = "EXEC_SERVER_TOKEN"
"""What a server or a client of ours is given to show to others. No child inherits it, under any policy; who
names such a variable gets it."""

EXIT_ON_STDIN_CLOSE: Final = "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE"


def child_environment(
    env: Mapping[str, str],
    policy: EnvPolicy | None,
    metadata: Metadata | None,
    own: Mapping[str, str],
) -> dict[str, str]:
    """What the child gets; `own` is the environment of the server."""
    result = _inherited(policy, own) if policy is not None else {}
    result.update(env)

    result.pop("CODEX_TOOL_CALL_ID", None)
    if metadata is not None:
        if metadata.tool_call_id is not None and "\0" not in metadata.tool_call_id:
            result["CODEX_TOOL_CALL_ID"] = metadata.tool_call_id
        result.pop("CODEX_THREAD_ID", None)
        if metadata.thread_id is not None:
            from uuid import UUID

            result["CODEX_THREAD_ID"] = str(UUID(metadata.thread_id))

    result.pop(EXIT_ON_STDIN_CLOSE, None)
    for name in [name for name in result if _upper(name) in RESERVED_NAMES]:
        del result[name]
    return result


def _inherited(policy: EnvPolicy, own: Mapping[str, str]) -> dict[str, str]:
    if policy.inherit == "none":
        kept: dict[str, str] = {}
    elif policy.inherit == "core":
        kept = {name: value for name, value in own.items() if _upper(name) in CORE_NAMES}
    else:
        kept = {name: value for name, value in own.items() if not is_own_credential(name)}
    # What is not UTF-8 cannot be named by a policy, so it is not inherited either.
    kept = {name: value for name, value in kept.items() if _is_text(name) and _is_text(value)}
    excludes = [*policy.exclude, *(() if policy.ignore_default_excludes else SECRET_PATTERNS)]
    if excludes:
        excluded = _matcher(excludes)
        kept = {name: value for name, value in kept.items() if not excluded.fullmatch(name)}
    kept.update(policy.set)
    if policy.include_only:
        included = _matcher(policy.include_only)
        kept = {name: value for name, value in kept.items() if included.fullmatch(name)}
    return kept


def is_own_credential(name: str) -> bool:
    """Whether a variable is ours to show to others, and no child's to inherit."""
    upper = _upper(name)
    return upper in OWN_CREDENTIALS or upper.startswith(OWN_CREDENTIALS_BEGIN)


def _upper(name: str) -> str:
    """ASCII letters only: `\u017f`, for one, is no S."""
    return name.upper() if name.isascii() else name


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _matcher(patterns: Iterable[str]) -> re.Pattern[str]:
    """`*` any run, `?` exactly one character, everything else itself; the whole name, any case."""
    return re.compile("|".join(map(_translate, patterns)), re.IGNORECASE | re.DOTALL)


def _translate(pattern: str) -> str:
    """A glob as a regex that cannot be made to backtrack: the first place a middle piece fits will do."""
    pieces = [
        "".join("." if char == "?" else re.escape(char) for char in piece) for piece in pattern.split("*")
    ]
    if len(pieces) == 1:
        return f"(?:{pieces[0]})"
    middle = "".join(f"(?>.*?{piece})" for piece in pieces[1:-1] if piece)
    return f"(?:{pieces[0]}{middle}.*{pieces[-1]})"
