"""Whether a model's command may run, and how: by a rule, by asking somebody, or not at all.

Rules are for the well-meaning: they look at the words of a command, and whoever wants to get around them can.
What confines a command is its sandbox; a rule says when to do without it, or not to run at all.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal, get_args

from msgspec import Struct

from ..client.errors import ExecServerError

__all__ = ["Ask", "BadPolicy", "Decision", "Policy", "Rule", "ask_on_terminal"]

ApprovalMode = Literal["never", "on-request"]
Decision = Literal["allow", "ask", "forbid"]

Ask = Callable[[str, str], Awaitable[bool]]
"""Asks a person about a command and why it is wanted; True if it may run."""

_SHELL_OPERATORS: Final = frozenset("();<>|&\n")


class BadPolicy(ExecServerError):
    """A policy file that cannot be used; says why."""


class Rule(Struct, frozen=True):
    """What to do with commands that begin with these words."""

    prefix: tuple[str, ...]
    decision: Decision
    reason: str = ""


class Policy(Struct, frozen=True):
    """Rules; of several that fit, the strictest counts."""

    rules: tuple[Rule, ...] = ()

    @classmethod
    def load(cls, path: str) -> Policy:
        """The rules in a TOML file: `[[rule]]` with `prefix` (words), `decision` and perhaps `reason`."""
        try:
            with open(path, "rb") as file:
                table = tomllib.load(file)
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadPolicy(f"the policy file {path} cannot be read: {error}") from None
        unknown = table.keys() - {"rule"}
        listed = table.get("rule", [])
        if unknown or not isinstance(listed, list):
            raise BadPolicy(
                f"the policy file {path} has {sorted(unknown) or 'a `rule`'} where only"
                " [[rule]] tables belong"
            )
        return cls(tuple(_rule(entry, f"{path}: rule {number}") for number, entry in enumerate(listed, 1)))

    def decide(self, script: str) -> tuple[Decision, str] | None:
        """The decision about a shell script and why; None if no rule speaks about it.

        A script of several commands is allowed only if each of them is. One that cannot be taken apart is
        never allowed by a rule.
        """
        commands = _commands(script)
        found: list[tuple[Decision, str] | None] = []
        for words in commands if commands is not None else [script.split()]:
            fits = [rule for rule in self.rules if tuple(words[: len(rule.prefix)]) == rule.prefix]
            strictest = max(fits, key=lambda rule: get_args(Decision).index(rule.decision), default=None)
            found.append(None if strictest is None else (strictest.decision, strictest.reason))
        for decision in ("forbid", "ask"):
            for one in found:
                if one is not None and one[0] == decision:
                    return one
        if commands and all(one is not None for one in found):
            return found[0]
        return None


def _rule(entry: Any, where: str) -> Rule:
    if not isinstance(entry, dict) or entry.keys() - {"prefix", "decision", "reason"}:
        raise BadPolicy(f"{where}: only `prefix`, `decision` and `reason` belong here")
    prefix, decision, reason = entry.get("prefix"), entry.get("decision"), entry.get("reason", "")
    if not isinstance(prefix, list) or not prefix or not all(isinstance(word, str) for word in prefix):
        raise BadPolicy(f'{where}: `prefix` must be words, for example ["git", "push"]')
    if decision not in ("allow", "ask", "forbid"):
        raise BadPolicy(f"{where}: `decision` must be one of {', '.join(get_args(Decision))}")
    if not isinstance(reason, str):
        raise BadPolicy(f"{where}: `reason` must be a text")
    chosen: Decision = decision
    return Rule(tuple(prefix), chosen, reason)


def _commands(script: str) -> list[list[str]] | None:
    """The simple commands of a script; None if it has what only a shell can take apart."""
    if any(sign in script for sign in ("$", "`", "\\\n")):
        return None
    lexer = shlex.shlex(script, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    try:
        for token in lexer:
            if token and set(token) <= _SHELL_OPERATORS:
                if "<" in token or ">" in token:
                    return None
                commands.append([])
            else:
                commands[-1].append(token)
    except ValueError:
        return None
    return [words for words in commands if words]


async def ask_on_terminal(command: str, why: str) -> bool:
    """Ask whoever sits at this terminal; False if nobody does."""
    import asyncio

    return await asyncio.to_thread(_ask, command, why)


def _ask(command: str, why: str) -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return False
    with open(terminal, "r+b", buffering=0) as file:
        shown = _printable(command)
        reason = f"\n  {_printable(why)}" if why else ""
        file.write(f"\nMay this run outside the sandbox?\n  {shown}{reason}\n[y/N] ".encode())
        return file.readline().strip().lower() in (b"y", b"yes")


def _printable(text: str) -> str:
    """What a model wrote must not steer the terminal on which it is judged."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)


def words(argv: Sequence[str]) -> str:
    """The script of a shell's command line, or the command line itself."""
    if len(argv) == 3 and argv[1] in ("-c", "-lc"):
        return argv[2]
    return shlex.join(argv)
