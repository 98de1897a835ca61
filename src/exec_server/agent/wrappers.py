"""Programs that run other programs, for rules about words: what a command comes to in the end. Pure.

Of some it is known where the command behind them begins, of others only that it is somewhere among their
words; then it is looked for everywhere, and what is found is not certain.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from .script import MAX_DEPTH, UNKNOWN, Command, read_script

__all__ = ["Form", "forms"]

MAX_WRAPPED: Final = 100
"""Assignments, keywords and programs before a command that are looked through."""

_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[[^\]]*\])?\+?=")
_SHELLS: Final = frozenset({"sh", "bash", "zsh", "dash", "ksh", "mksh", "ash", "rbash", "fish"})
_SHELL_SCRIPT: Final = re.compile(r"-[a-zA-Z]*c[a-zA-Z]*")
_SHELL_VALUE: Final = re.compile(r"[-+][a-zA-Z]*[oO]|--rcfile|--init-file|--init-command")

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
    "unshare": (frozenset(["-S", "-G", "-R", "-w"]), 0),
    "nice": (frozenset(["-n"]), 0),
    "ionice": (frozenset(["-c", "-n", "-p"]), 0),
    "stdbuf": (frozenset(["-i", "-o", "-e"]), 0),
    "timeout": (frozenset(["-s", "-k"]), 1),
    "xargs": (frozenset(["-I", "-n", "-P", "-L", "-d", "-E", "-s", "-a"]), 0),
    "busybox": (frozenset(), 0),
    "toybox": (frozenset(), 0),
}
"""Programs that run the command behind them: their options that take a word of their own, and how many words
they want before the command."""

_RUNNERS: Final = frozenset(
    [
        *("su", "runuser", "pkexec", "flock", "script", "watch", "parallel", "chroot", "nsenter", "setpriv"),
        *("capsh", "chrt", "taskset", "numactl", "prlimit", "cgexec", "systemd-run", "systemd-inhibit"),
        *("strace", "ltrace", "perf", "gdb", "valgrind", "fakeroot", "bwrap", "firejail", "proot", "ssh"),
        *("dbus-run-session", "xvfb-run", "unbuffer", "tmux", "screen", "entr", "fd", "fdfind"),
    ]
)
"""Programs that run a command which is somewhere among their words, or in one of them as a script."""

_FILLED: Final = frozenset(["xargs", "parallel"])
"""Programs that put words of their own into the command: at its end, or where `{}` is."""

_FIND_RUNS: Final = frozenset(["-exec", "-execdir", "-ok", "-okdir"])


class Form(NamedTuple):
    """A command, or what may be run by it."""

    words: list[str]
    certain: bool
    """Whether it is run; otherwise it may be."""


def forms(command: Command, depth: int = 0, certain: bool = True) -> Iterator[Form]:
    """A command, and what is run by it: without assignments, keywords and programs that only run another; and
    the commands of a script it hands to a shell."""
    words = command.words
    searched = False
    for _ in range(MAX_WRAPPED):
        if not words:
            return
        yield Form(words, certain)
        first = words[0]
        name = posixpath.basename(first)
        if first in _KEYWORDS or _ASSIGNMENT.match(first):
            words = words[1:]
        elif first == "function":
            words = words[2:]
        elif name == "command" and words[1:2] in (["-v"], ["-V"]):
            return  # it only says what would be run
        elif name in _WRAPPERS:
            if not searched and words[1:] and words[1].startswith("-"):
                # An option that is not known here may take a word, and what follows it is the command.
                searched = True
                yield from _anywhere(name, words, depth)
            words = _behind(words, *_WRAPPERS[name])
            words = _filled(words) if name in _FILLED and words else words
        else:
            yield from _run_by(name, Command(words, command.given), depth, certain)
            return
    yield Form([UNKNOWN], False)


def _run_by(name: str, command: Command, depth: int, certain: bool) -> Iterator[Form]:
    """What a program runs that is no mere wrapper."""
    scripts: Sequence[str]
    if name in _RUNNERS:
        yield from _anywhere(name, command.words, depth)
        scripts, certain = command.given, False
    elif name == "find":
        for found in _found(command.words):
            yield from forms(Command(found), depth, certain)
        return
    else:
        scripts = _handed_over(name, command)
    yield from _read(scripts, depth, certain)


def _read(scripts: Sequence[str], depth: int, certain: bool) -> Iterator[Form]:
    for script in scripts:
        if depth >= MAX_DEPTH:
            yield Form([UNKNOWN], False)
            return
        for command in read_script(script).commands:
            yield from forms(command, depth + 1, certain)


def _anywhere(name: str, words: list[str], depth: int) -> Iterator[Form]:
    """Whatever among the words of a program may be a command."""
    for at in range(1, min(len(words), MAX_WRAPPED)):
        found = words[at : at + MAX_WRAPPED]
        yield Form(_filled(found) if name in _FILLED else found, False)
        if " " in words[at]:
            yield from _read([words[at]], depth, False)
    if len(words) > MAX_WRAPPED:
        yield Form([UNKNOWN], False)


def _filled(words: list[str]) -> list[str]:
    own = takewhile(lambda word: not word.startswith(":::"), words)
    return [*(word.replace("{}", UNKNOWN) for word in own), UNKNOWN]


def _found(words: list[str]) -> Iterator[list[str]]:
    """The commands that `find` runs."""
    found: list[str] | None = None
    for word in words:
        if found is None:
            found = [] if word in _FIND_RUNS else None
        elif word == ";" or (word == "+" and found[-1:] == [UNKNOWN]):
            yield found
            found = None
        else:
            found.append(word.replace("{}", UNKNOWN))
    yield found or []


def _behind(words: list[str], with_value: frozenset[str], wanted: int) -> list[str]:
    at = 1
    while at < len(words):
        word = words[at]
        split = re.match(r"-S|--split-string=?", word) if words[0].endswith("env") else None
        if split is not None:
            return ["eval", word[split.end() :], *words[at + 1 :]]
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


def _handed_over(name: str, command: Command) -> Sequence[str]:
    """The scripts that a command gives to a shell; UNKNOWN for one that is not in its words."""
    words = command.words
    if name == "eval":
        return [" ".join(words[1:])]
    if name == "trap":
        return words[1:2] if len(words) > 2 else []
    if name == "alias":
        return [word.partition("=")[2] for word in words[1:]]
    if name in ("source", "."):
        return _from_elsewhere(command) if words[1:] and _is_stream(words[1]) else []
    return _shell_scripts(command) if name in _SHELLS else []


def _shell_scripts(command: Command) -> Sequence[str]:
    words = command.words
    at = 1
    while at < len(words) and words[at].startswith(("-", "+")):
        word = words[at]
        if word in ("--version", "--help"):
            return []
        if _SHELL_SCRIPT.fullmatch(word):
            behind = (later for later in words[at + 1 :] if not later.startswith(("-", "+")))
            if _SHELL_VALUE.fullmatch(word):
                next(behind, None)  # -eo pipefail -c, in one word
            return [next(behind, UNKNOWN)]
        if re.fullmatch(r"-[a-zA-Z]*s[a-zA-Z]*", word):
            return _from_elsewhere(command)
        at += 2 if _SHELL_VALUE.fullmatch(word) else 1
    if at >= len(words) or _is_stream(words[at]):
        return _from_elsewhere(command)
    return []  # a script in a file is like any other program


def _is_stream(path: str) -> bool:
    return UNKNOWN in path or path == "-" or path.startswith(("/dev/", "/proc/"))


def _from_elsewhere(command: Command) -> Sequence[str]:
    return command.given or [UNKNOWN]
