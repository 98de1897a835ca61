"""Rules about what a model may do: commands by their words, edits by their place, tools by their name. Pure.

Rules are for the well-meaning: they look at the words of a command, and whoever wants to get around them can.
What confines a command is its sandbox; a rule says when to do without it, or not to do it at all.
"""

from __future__ import annotations

import posixpath
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from msgspec import Struct

from ..client.errors import ExecServerError
from .script import UNKNOWN, Command, read_script
from .wrappers import Form, forms

__all__ = ["BadPolicy", "Decided", "Decision", "EditRule", "Policy", "Rule", "ToolRule", "words"]

Decision = Literal["allow", "ask", "forbid"]

Decided = tuple[Decision, str]
"""What a rule says, and why."""

_LOOKED_AT: Final = 100
"""Words of a command that are looked at: options may stand before those that a rule speaks of."""

_STRICTNESS: Final[tuple[Decision, ...]] = get_args(Decision)


class BadPolicy(ExecServerError):
    """A policy file that cannot be used; says why."""


class Rule(Struct, frozen=True):
    """What to do with commands that begin with these words."""

    prefix: tuple[str, ...]
    decision: Decision
    reason: str = ""


class EditRule(Struct, frozen=True):
    """What to do with edits of a file, or of everything below a directory."""

    path: str
    """Absolute, or relative to the directory of the thread."""
    decision: Decision
    reason: str = ""

    def place(self, cwd: str) -> str:
        """What it speaks about, by name."""
        return posixpath.normpath(posixpath.join(cwd, self.path))

    def fits(self, path: str, cwd: str, real: Mapping[str, str]) -> bool:
        """Whether it speaks about a path, which is absolute; `real` says where paths lead.

        What allows something does so only in its own place: a model may have put a link there. What does not
        is about everything that has its name, or that its name leads to.
        """
        place = self.place(cwd)
        if self.decision == "allow":
            if _below(place, cwd):
                place = real.get(cwd, cwd).rstrip("/") + place[len(cwd.rstrip("/")) :]
            return _below(real.get(path, path), place)
        places = {place, real.get(place, place)}
        return any(_below(name, place) for name in {path, real.get(path, path)} for place in places)


class ToolRule(Struct, frozen=True):
    """What to do with calls of a tool server: of one tool, or of all it has."""

    server: str
    tool: str | None
    decision: Decision
    reason: str = ""


class Policy(Struct, frozen=True):
    """Rules; of several that fit, the strictest counts."""

    rules: tuple[Rule, ...] = ()
    edits: tuple[EditRule, ...] = ()
    tools: tuple[ToolRule, ...] = ()

    @classmethod
    def load(cls, path: str) -> Policy:
        """The rules in a TOML file: `[[rule]]` (commands), `[[edit]]`, `[[mcp]]`, each with a `decision`."""
        try:
            with open(path, "rb") as file:
                table = tomllib.load(file)
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadPolicy(f"the policy file {path} cannot be read: {error}") from None
        unknown = table.keys() - {"rule", "edit", "mcp"}
        lists = {name: table.get(name, []) for name in ("rule", "edit", "mcp")}
        if unknown or not all(isinstance(listed, list) for listed in lists.values()):
            raise BadPolicy(
                f"the policy file {path} has {sorted(unknown) or 'something'} where only [[rule]], [[edit]]"
                " and [[mcp]] tables belong"
            )

        def each(name: str) -> Iterable[tuple[Any, str]]:
            return ((entry, f"{path}: {name} {place}") for place, entry in enumerate(lists[name], 1))

        return cls(
            tuple(_rule(entry, where) for entry, where in each("rule")),
            tuple(_edit_rule(entry, where) for entry, where in each("edit")),
            tuple(_tool_rule(entry, where) for entry, where in each("mcp")),
        )

    def decide(self, script: str) -> Decided | None:
        """The decision about a shell script and why; None if no rule speaks about it.

        A script of several commands is allowed only if each of them is. One of which not everything is known
        is never allowed by a rule.
        """
        taken_apart = read_script(script.replace(UNKNOWN, " "))
        decided = _together([_about(self.rules, command) for command in taken_apart.commands])
        return None if not taken_apart.exact and decided is not None and decided[0] == "allow" else decided

    def edit_places(self, cwd: str) -> list[str]:
        """The paths in rules about edits; whoever asks for a decision says where they lead."""
        return [cwd, *(rule.place(cwd) for rule in self.edits)] if self.edits else []

    def decide_edit(
        self, paths: Sequence[str], cwd: str, real: Mapping[str, str] | None = None
    ) -> Decided | None:
        """The same about an edit of these files: it is allowed only if each of them may be edited.

        `real` says where these paths, and those of the rules, lead if links are followed.
        """
        return _together(
            [_strictest(rule for rule in self.edits if rule.fits(path, cwd, real or {})) for path in paths]
        )

    def decide_tool(self, server: str, tool: str) -> Decided | None:
        """The same about a call of a tool server."""
        return _strictest(rule for rule in self.tools if rule.server == server and rule.tool in (None, tool))


def _below(path: str, place: str) -> bool:
    return path == place or path.startswith(place.rstrip("/") + "/")


def _strictest(rules: Iterable[Rule | EditRule | ToolRule]) -> Decided | None:
    strictest = max(rules, key=lambda rule: _STRICTNESS.index(rule.decision), default=None)
    return None if strictest is None else (strictest.decision, strictest.reason)


def _together(found: Sequence[Decided | None]) -> Decided | None:
    """What is decided about several things that are done as one."""
    for decision in ("forbid", "ask"):
        for one in found:
            if one is not None and one[0] == decision:
                return one
    return found[0] if found and all(one is not None for one in found) else None


# Reading ---------------------------------------------------------------------------------------------


def _rule(entry: Any, where: str) -> Rule:
    decision, reason = _decision(entry, where, "prefix")
    prefix = entry.get("prefix")
    if not isinstance(prefix, list) or not prefix or not all(isinstance(word, str) for word in prefix):
        raise BadPolicy(f'{where}: `prefix` must be words, for example ["git", "push"]')
    return Rule(tuple(prefix), decision, reason)


def _edit_rule(entry: Any, where: str) -> EditRule:
    decision, reason = _decision(entry, where, "path")
    return EditRule(_text(entry, "path", where), decision, reason)


def _tool_rule(entry: Any, where: str) -> ToolRule:
    decision, reason = _decision(entry, where, "server", "tool")
    tool = _text(entry, "tool", where) if "tool" in entry else None
    return ToolRule(_text(entry, "server", where), tool, decision, reason)


def _decision(entry: Any, where: str, *own: str) -> Decided:
    named = ", ".join(f"`{name}`" for name in (*own, "decision"))
    if not isinstance(entry, dict) or entry.keys() - {*own, "decision", "reason"}:
        raise BadPolicy(f"{where}: only {named} and `reason` belong here")
    decision, reason = entry.get("decision"), entry.get("reason", "")
    if decision not in _STRICTNESS:
        raise BadPolicy(f"{where}: `decision` must be one of {', '.join(_STRICTNESS)}")
    if not isinstance(reason, str):
        raise BadPolicy(f"{where}: `reason` must be a text")
    return decision, reason


def _text(entry: dict[str, Any], name: str, where: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or not value:
        raise BadPolicy(f"{where}: `{name}` must be a text")
    return value


# Commands --------------------------------------------------------------------------------------------


def _about(rules: Iterable[Rule], command: Command) -> Decided | None:
    """What the rules say about one command, and about what it runs.

    Only its very words can be allowed. What is to be asked about or forbidden is recognised in other
    spellings, too; where one is not certain, it is asked about.
    """
    found: list[Decided] = []
    run: list[Form] | None = None
    for rule in rules:
        if tuple(command.words[: len(rule.prefix)]) == rule.prefix:
            found.append((rule.decision, rule.reason))
        elif rule.decision != "allow":
            run = list(forms(command)) if run is None else run
            fits = {(_fits(rule.prefix, form.words), form.certain) for form in run}
            if (True, True) in fits:
                found.append((rule.decision, rule.reason))
            elif any(fit is not False for fit, _ in fits):
                found.append(("ask", rule.reason))
    return max(found, key=lambda one: _STRICTNESS.index(one[0]), default=None)


def _fits(prefix: tuple[str, ...], command: list[str]) -> bool | None:
    """Whether a command is the one a rule speaks of, by whatever path; None if it may be."""
    program, *rest = command[: 1 + _LOOKED_AT]
    name = posixpath.basename(program)
    if prefix[0] not in (program, name):
        # What is not known may be several words, those of the rule among them.
        return None if UNKNOWN in name and _may_be(name, prefix[0]) else False
    wanted = list(prefix[1:])
    fits = _begins(rest, wanted)
    if fits is not False:
        return fits
    # Options may stand between, each perhaps with a word of its own: git -C dir push.
    at = 0
    while at < len(rest) and rest[at].startswith("-"):
        at += 1
        if _begins(rest[at:], wanted) is not False or _begins(rest[at + 1 :], wanted) is not False:
            return None
        if at < len(rest) and not rest[at].startswith("-"):
            at += 1
    return None if at == len(rest) >= _LOOKED_AT else False


def _begins(words: list[str], wanted: list[str]) -> bool | None:
    """Whether words begin with others; None if they may."""
    for place, one in enumerate(wanted):
        word = words[place] if place < len(words) else ""
        if word != one:
            return None if UNKNOWN in word and _may_be(word, one) else False
    return True


def _may_be(word: str, wanted: str) -> bool:
    """Whether a word can be another once everything is known."""
    first, *between, last = word.split(UNKNOWN)
    if len(first) + len(last) > len(wanted) or not (wanted.startswith(first) and wanted.endswith(last)):
        return False
    at, end = len(first), len(wanted) - len(last)
    for part in between:
        at = wanted.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def words(argv: Sequence[str]) -> str:
    """The script of a shell's command line, or the command line itself."""
    if len(argv) == 3 and argv[1] in ("-c", "-lc"):
        return argv[2]
    return shlex.join(argv)
