"""The commands in a shell script, for rules about their words. Pure, and linear in its length.

A reader of scripts, not a shell: it finds what would be run in lists, groups, conditions, substitutions and
`bash -c`, and knows what it cannot know. Variables, for instance, are never looked up.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

__all__ = ["UNKNOWN", "Script", "forms", "read_script"]

UNKNOWN: Final = "\0"
"""Stands in a word for what only a shell could say: a variable, the output of a command."""

MAX_DEPTH: Final = 20
"""Substitutions within substitutions that are followed."""

MAX_WRAPPED: Final = 100
"""Assignments, keywords and programs before a command that are looked through."""

_PLAIN: Final = re.compile(r"[^ \t\r\n'\"\\$`;&|()<>]+")
_IN_QUOTES: Final = re.compile(r'[^"\\$`]+')
_IN_BRACES: Final = re.compile(r"[^}'\"\\$`]+")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_REDIRECTION: Final = re.compile(r"<<<|<<-|<<|<>|>>|>\||[<>]\(|[<>]&|[<>]|&>>|&>")
_ANSI: Final = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL)
_TICKED: Final = re.compile(r"((?:[^`\\]|\\.)*)`", re.DOTALL)
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[[^\]]*\])?\+?=")
_SHELLS: Final = frozenset({"sh", "bash", "zsh", "dash", "ksh", "mksh", "ash"})
_SHELL_SCRIPT: Final = re.compile(r"-[a-zA-Z]*c[a-zA-Z]*")

_KEYWORDS: Final = frozenset(
    ["if", "then", "else", "elif", "fi", "do", "done", "while", "until", "{", "}", "!", "coproc"]
)

_WRAPPERS: Final[dict[str, tuple[frozenset[str], int]]] = {
    "sudo": (frozenset(["-u", "-g", "-h", "-p", "-C", "-r", "-t", "-T", "-U", "-D", "-R"]), 0),
    "doas": (frozenset(["-u", "-C"]), 0),
    "env": (frozenset(["-u", "-C", "--unset", "--chdir"]), 0),
    "command": (frozenset(), 0),
    "builtin": (frozenset(), 0),
    "exec": (frozenset(["-a"]), 0),
    "time": (frozenset(["-f", "-o"]), 0),
    "nohup": (frozenset(), 0),
    "setsid": (frozenset(), 0),
    "nice": (frozenset(["-n"]), 0),
    "ionice": (frozenset(["-c", "-n", "-p"]), 0),
    "stdbuf": (frozenset(["-i", "-o", "-e"]), 0),
    "timeout": (frozenset(["-s", "-k"]), 1),
    "xargs": (frozenset(["-I", "-n", "-P", "-L", "-d", "-E", "-s", "-a"]), 0),
}
"""Programs that run the command behind them: their options that take a word of their own, and how many words
they want before the command."""


class Script(Struct, frozen=True):
    """What was found."""

    commands: list[list[str]]
    """Every simple command, those within others too, in words. Words may hold UNKNOWN."""
    exact: bool
    """Whether these are all words it will run with, and nothing else happens: no variable, no substitution,
    no redirection, nothing unfinished."""


def read_script(text: str) -> Script:
    """Take a script apart."""
    reader = _Reader(text.replace(UNKNOWN, " "), 0)
    reader.read()
    return Script(reader.commands, reader.exact)


def forms(words: list[str], depth: int = 0) -> Iterator[list[str]]:
    """A command, and what is run by it: without assignments, keywords and programs that only run another; and
    the commands of a script it hands to a shell."""
    for _ in range(MAX_WRAPPED):
        if not words:
            return
        yield words
        first = words[0]
        name = posixpath.basename(first)
        if first in _KEYWORDS or _ASSIGNMENT.match(first):
            words = words[1:]
        elif first == "function":
            words = words[2:]
        elif name in _WRAPPERS:
            words = _behind(words, *_WRAPPERS[name])
        else:
            inner = _handed_over(name, words)
            if inner is not None and depth < MAX_DEPTH:
                for command in read_script(inner).commands:
                    yield from forms(command, depth + 1)
            return


def _behind(words: list[str], with_value: frozenset[str], wanted: int) -> list[str]:
    at = 1
    while at < len(words):
        word = words[at]
        if word == "-S" or word.startswith("--split-string"):
            return ["eval", *words[at + 1 :]]
        if word in with_value:
            at += 2
        elif word.startswith("-") or _ASSIGNMENT.match(word):
            at += 1
        elif wanted:
            wanted -= 1
            at += 1
        else:
            break
    return words[at:]


def _handed_over(name: str, words: list[str]) -> str | None:
    """The script a command gives to a shell."""
    if name == "eval":
        return " ".join(words[1:])
    if name in _SHELLS:
        for at, word in enumerate(words[1:], 1):
            if not word.startswith(("-", "+")):
                return None
            if _SHELL_SCRIPT.fullmatch(word):
                return next((later for later in words[at + 1 :] if not later.startswith("-")), None)
    return None


class _Unfinished(Exception):
    """A quotation has no end."""


class _Reader:
    def __init__(self, text: str, depth: int) -> None:
        self._text = text
        self._at = 0
        self._depth = depth
        self.commands: list[list[str]] = []
        self.exact = True

    def read(self) -> None:
        while self._at < len(self._text):
            try:
                self._list("")
            except _Unfinished:
                # The rest may be anything; its words are looked at as they stand.
                self.exact = False
                self.commands.append(self._text[self._at :].split())
                break
        self.commands = [words for words in self.commands if words]

    def _list(self, closing: str) -> None:
        """Commands up to the closing sign, or to the end."""
        text = self._text
        words: list[str] = []
        self.commands.append(words)
        documents: list[tuple[str, bool]] = []
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Unfinished
        while self._at < len(text):
            char = text[self._at]
            if char in " \t\r":
                self._at += 1
            elif text.startswith("\\\n", self._at):
                self.exact = False
                self._at += 2
            elif char == "\n":
                self._at += 1
                for marker, tabs in documents:
                    self._skip_document(marker, tabs)
                documents.clear()
                words = self._next()
            elif char == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif char == closing:
                self._at += 1
                self._depth -= 1
                return
            elif found := _REDIRECTION.match(text, self._at):
                self._redirect(found[0], documents)
            elif char in ";&|":
                self._at += 1
                words = self._next()
            elif char == "(":
                self._at += 1
                self._list(")")
                words = self._next()
            elif char == ")":
                self._at += 1
                words = self._next()
            else:
                word = self._word()
                following = text[self._at : self._at + 1]
                if not (word.isdigit() and following in ("<", ">") and following):
                    words.append(word)
        self._depth -= 1
        if closing:
            self.exact = False

    def _next(self) -> list[str]:
        words: list[str] = []
        self.commands.append(words)
        return words

    def _redirect(self, sign: str, documents: list[tuple[str, bool]]) -> None:
        self.exact = False
        self._at += len(sign)
        if sign.endswith("("):
            self._list(")")
            return
        while self._text[self._at : self._at + 1] in (" ", "\t"):
            self._at += 1
        word = self._word()
        if sign in ("<<", "<<-"):
            documents.append((word, sign == "<<-"))

    def _skip_document(self, marker: str, tabs: bool) -> None:
        """A document in the script: only what is substituted in it would be run."""
        while self._at < len(self._text):
            end = self._text.find("\n", self._at)
            end = len(self._text) if end < 0 else end
            line = self._text[self._at : end]
            if (line.lstrip("\t") if tabs else line) == marker:
                self._at = end
                return
            if "$(" in line or "`" in line:
                inner = _Reader('"' + line.replace('"', "") + '"', self._depth)
                inner.read()
                self.commands.extend(inner.commands)
            self._at = end + 1

    def _word(self) -> str:
        text = self._text
        parts: list[str] = []
        while self._at < len(text):
            char = text[self._at]
            if plain := _PLAIN.match(text, self._at):
                parts.append(plain[0])
                self._at = plain.end()
            elif char == "'":
                end = text.find("'", self._at + 1)
                if end < 0:
                    raise _Unfinished
                parts.append(text[self._at + 1 : end])
                self._at = end + 1
            elif char == "\\":
                escaped = text[self._at + 1 : self._at + 2]
                if escaped == "\n":
                    self.exact = False
                else:
                    parts.append(escaped)
                self._at += 2
            elif char in '"$`':
                self._at += 1
                self._part(char, parts)
            else:
                break
        return "".join(parts)

    def _part(self, sign: str, parts: list[str]) -> None:
        """What begins with a quotation mark, a dollar or a backtick."""
        if sign == '"':
            self._until('"', _IN_QUOTES, parts)
            return
        self.exact = False
        text = self._text
        if sign == "`":
            ticked = _TICKED.match(text, self._at)
            if ticked is None:
                raise _Unfinished
            self._at = ticked.end()
            self._inside(re.sub(r"\\([`\\$])", r"\1", ticked[1]))
            parts.append(UNKNOWN)
            return
        following = text[self._at : self._at + 1]
        if following == "(":
            self._at += 1
            self._list(")")
        elif following == "{":
            self._at += 1
            self._until("}", _IN_BRACES, [])
        elif following == "'":
            ansi = _ANSI.match(text, self._at + 1)
            if ansi is None:
                raise _Unfinished
            self._at = ansi.end()
        elif following == '"':
            return  # the quotation follows
        elif name := _NAME.match(text, self._at):
            self._at = name.end()
        else:
            parts.append("$")
            return
        parts.append(UNKNOWN)

    def _until(self, closing: str, plain: re.Pattern[str], parts: list[str]) -> None:
        """The inside of a quotation or of `${…}`."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Unfinished
        text = self._text
        while self._at < len(text):
            if run := plain.match(text, self._at):
                parts.append(run[0])
                self._at = run.end()
                continue
            char = text[self._at]
            self._at += 1
            if char == closing:
                self._depth -= 1
                return
            if char == "\\":
                escaped = text[self._at : self._at + 1]
                parts.append(escaped if escaped in '"\\$`' else "" if escaped == "\n" else "\\" + escaped)
                self.exact = self.exact and escaped != "\n"
                self._at += 1
            elif char == "'":
                end = text.find("'", self._at)
                if end < 0:
                    raise _Unfinished
                self._at = end + 1
            else:
                self._part(char, parts)
        raise _Unfinished

    def _inside(self, script: str) -> None:
        inner = _Reader(script, self._depth)
        if self._depth < MAX_DEPTH:
            inner.read()
        self.commands.extend(inner.commands)
