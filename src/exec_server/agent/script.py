"""The commands in a shell script, for rules about their words. Pure, and linear in its length.

A reader of scripts, not a shell: it finds what would be run in lists, groups, conditions and substitutions,
and knows what it cannot know. Variables, for instance, are never looked up.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct, field

__all__ = ["MAX_DEPTH", "UNKNOWN", "Command", "Script", "read_script"]

UNKNOWN: Final = "\0"
"""Stands in a word for what only a shell could say: a variable, the output of a command, the names of files.
It may be nothing, or several words."""

MAX_DEPTH: Final = 20
"""Substitutions within substitutions that are followed."""

_PLAIN: Final = re.compile(r"[^ \t\r\n'\"\\$`;&|()<>]+")
_IN_QUOTES: Final = re.compile(r'[^"\\$`]+')
_IN_BRACES: Final = re.compile(r"[^}'\"\\$`]+")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_REDIRECTION: Final = re.compile(r"<<<|<<-|<<|<>|>>|>\||[<>]\(|[<>]&|[<>]|&>>|&>")
_PATTERN: Final = re.compile(r"[*?]|\[[^][/]+\]")
_ARITHMETIC: Final = re.compile(r"\(\((?:[^()'\"`\\\n]|\([^()'\"`\\\n]*\))*\)\)")
_ANSI: Final = re.compile(r"((?:[^'\\]|\\.)*)'", re.DOTALL)
_ANSI_ESCAPE: Final = re.compile(
    r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})|(.))", re.DOTALL
)
_ANSI_LETTERS: Final = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "e": "\x1b",
}
_TICKED: Final = re.compile(r"((?:[^`\\]|\\.)*)`", re.DOTALL)


class Command(Struct):
    """A simple command."""

    words: list[str] = field(default_factory=list)
    """They may hold UNKNOWN."""
    given: list[str] = field(default_factory=list)
    """Documents and strings in the script that it can read."""


class Script(Struct, frozen=True):
    """What was found."""

    commands: list[Command]
    """Every simple command, those within others too."""
    exact: bool
    """Whether these are all words it will run with, and nothing else happens: no variable, no substitution,
    no redirection, nothing unfinished. Names of files may still be filled in."""


def read_script(text: str) -> Script:
    """Take a script apart; UNKNOWN may stand in it, too."""
    reader = _Reader(text, 0)
    reader.read()
    return Script(reader.commands, reader.exact)


class _Unfinished(Exception):
    """A quotation has no end."""


class _Reader:
    def __init__(self, text: str, depth: int) -> None:
        self._text = text
        self._at = 0
        self._depth = depth
        self.commands: list[Command] = []
        self.exact = True

    def read(self) -> None:
        while self._at < len(self._text):
            try:
                self._list("")
            except _Unfinished:
                # The rest may be anything; its words are looked at as they stand.
                self.exact = False
                self.commands.append(Command(self._text[self._at :].split()))
                break
        self.commands = [command for command in self.commands if command.words]

    def _list(self, closing: str) -> None:
        """Commands up to the closing sign, or to the end."""
        text = self._text
        command = self._next()
        documents: list[tuple[str, bool, Command]] = []
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
                for marker, tabs, reader in documents:
                    reader.given.append(self._document(marker, tabs))
                documents.clear()
                command = self._next()
            elif char == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif char == closing:
                self._at += 1
                self._depth -= 1
                return
            elif found := _REDIRECTION.match(text, self._at):
                self._redirect(found[0], command, documents)
            elif char in ";&|":
                self._at += 1
                command = self._next()
            elif char == "(":
                self._group()
                command = self._next()
            elif char == ")":
                self._at += 1
                command = self._next()
            else:
                word = self._word()
                following = text[self._at : self._at + 1]
                if not (word.isdigit() and following in ("<", ">") and following):
                    command.words.append(word)
        self._depth -= 1
        if closing:
            self.exact = False

    def _next(self) -> Command:
        command = Command()
        self.commands.append(command)
        return command

    def _group(self) -> None:
        """What is in parentheses. In arithmetic a variable is no program."""
        arithmetic = _ARITHMETIC.match(self._text, self._at)
        before = len(self.commands)
        self._at += 1
        self._list(")")
        if arithmetic is not None and "$(" not in arithmetic[0]:
            self.commands[before:] = [
                command for command in self.commands[before:] if UNKNOWN not in "".join(command.words[:1])
            ]

    def _redirect(self, sign: str, command: Command, documents: list[tuple[str, bool, Command]]) -> None:
        self.exact = False
        self._at += len(sign)
        if sign.endswith("("):
            self._list(")")
            command.words.append(UNKNOWN)
            return
        while self._text[self._at : self._at + 1] in (" ", "\t"):
            self._at += 1
        word = self._word()
        if sign == "<<<":
            command.given.append(word)
        if sign in ("<<", "<<-"):
            documents.append((word, sign == "<<-", command))

    def _document(self, marker: str, tabs: bool) -> str:
        """A document in the script: what is substituted in it is run in any case."""
        lines: list[str] = []
        while self._at < len(self._text):
            end = self._text.find("\n", self._at)
            end = len(self._text) if end < 0 else end
            line = self._text[self._at : end]
            if tabs:
                line = line.lstrip("\t")
            if line == marker:
                self._at = end
                break
            lines.append(line)
            if "$(" in line or "`" in line:
                inner = _Reader('"' + line.replace('"', "") + '"', self._depth)
                inner.read()
                self.commands.extend(inner.commands)
            self._at = end + 1
        return "\n".join(lines)

    def _word(self) -> str:
        text = self._text
        parts: list[str] = []
        plainly: list[str] = []
        while self._at < len(text):
            char = text[self._at]
            if plain := _PLAIN.match(text, self._at):
                plainly.append(plain[0])
                parts.append(_PATTERN.sub(UNKNOWN, plain[0]))
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
        return UNKNOWN if _has_braces("".join(plainly)) else "".join(parts)

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
            self._group()
        elif following == "{":
            self._at += 1
            self._until("}", _IN_BRACES, [])
        elif following == "'":
            ansi = _ANSI.match(text, self._at + 1)
            if ansi is None:
                raise _Unfinished
            self._at = ansi.end()
            parts.append(_ANSI_ESCAPE.sub(_unescaped, ansi[1]))
            return
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


def _has_braces(plain: str) -> bool:
    """Whether a shell makes several words of one: `a{b,c}`, `{1..3}`."""
    inside = plain[plain.find("{") + 1 : max(plain.rfind("}"), 0)] if "{" in plain else ""
    return "," in inside or ".." in inside


def _unescaped(found: re.Match[str]) -> str:
    byte, short, long, octal, letter = found.groups()
    if letter is not None:
        return _ANSI_LETTERS.get(letter, letter if letter in "\\'\"?" else UNKNOWN)
    code = int(octal, 8) & 0xFF if octal else int(byte or short or long, 16)
    return chr(code) if 0 < code < 0x80 else UNKNOWN
