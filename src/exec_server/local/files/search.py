"""Searching file contents: with ripgrep where it is installed, with a plain program of our own elsewhere.

Either runs as a process: it uses no thread of ours for thinking, can be killed when there are results
enough or nobody waits any more, and a regular expression that never ends hurts only itself.
"""

from __future__ import annotations

import base64
import json
import os
import re
import select
import stat
import subprocess
import sys
from collections.abc import Iterator
from time import monotonic
from typing import Any, Final

from msgspec import DecodeError
from msgspec.json import decode

from ...wire.errors import internal_error, invalid_request
from ...wire.files import SearchParams
from ..process.tree import tagged
from ..sandbox.probe import find_program
from .lane import ALONE, SEARCHES, Turn
from .paths import lossy, to_uri

__all__ = ["search"]

MAX_RESULTS: Final = 10_000
"""Matching lines of one answer."""

MAX_CONTEXT: Final = 100
"""Lines around a match."""

MAX_LINE_BYTES: Final = 4096
"""Of a line in an answer; longer ones are cut."""

MAX_TEXT_BYTES: Final = 64 * 1024
"""Of a pattern, and of all globs together: the kernel takes no argument twice as long."""

MAX_SECONDS: Final = 120.0
"""After which an answer has what was found until then."""

_PACKAGE: Final = __name__.partition(".")[0]
_START: Final = os.path.join(os.path.realpath(__file__).rpartition("/local/files/")[0], "__init__.py")
_GREP: Final = """\
import sys
from _frozen_importlib_external import spec_from_file_location

class Package:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, {start!r}) if name == {package!r} else None

sys.meta_path.append(Package)
from runpy import run_module
run_module({package!r} + ".local.files.grep", run_name="__main__")
"""
"""Found from where this file is: whoever runs in a sandbox has no other way to it."""

_LOOK_SECONDS: Final = 0.2
_READ_BYTES: Final = 1024 * 1024
_MAX_OUTPUT_LINE: Final = 1024 * 1024
"""A longer line of the program's output is not kept: a file may be a single line of any length."""

_HEAD_BYTES: Final = 64 * 1024
"""Kept of such a line: the longest path, and as much of the text as an answer has, however escaped."""

_TAIL_BYTES: Final = 128
"""Kept of what follows the text: two numbers."""


def search(path: bytes, params: SearchParams, turn: Turn = ALONE, tag: int | None = None) -> dict[str, Any]:
    """Matching lines with their place, sorted by path and line. The program that searches gets the tag."""
    if not 1 <= params.max_results <= MAX_RESULTS:
        raise invalid_request(f"maxResults must be between 1 and {MAX_RESULTS}")
    if max(params.before_context, params.after_context) > MAX_CONTEXT:
        raise invalid_request(f"beforeContext and afterContext must be at most {MAX_CONTEXT}")
    _check_text(params)
    found = os.stat(path)  # it must be there
    if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
        raise invalid_request(f"path `{lossy(path)}` is neither a file nor a directory")
    turn.leave(os.path.realpath(path))
    turn.admit(SEARCHES, 1)
    ripgrep = find_program("rg")
    command = _ripgrep(ripgrep, path, params) if ripgrep else _ours(path, params)
    # The program gets nothing of what the server was started with but where to find things.
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    with tagged(tag):
        process = subprocess.Popen(  # ended below
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=path if stat.S_ISDIR(found.st_mode) else os.path.dirname(path),
            env=environment,
        )
    with process:
        try:
            results = _Results(params.max_results)
            errors = _read(process, results, turn)
        finally:
            process.kill()
    if process.returncode == 2 and not results.matches and errors:
        raise invalid_request(f"fs/search cannot search for `{params.pattern}`: {errors}")
    if process.returncode == 1 and errors:
        raise internal_error(f"fs/search could not be done: {errors}")  # finding nothing is silent
    return results.answer("ripgrep" if ripgrep else "builtin")


def _check_text(params: SearchParams) -> None:
    """What neither program could be given, or would understand."""
    for name, texts in (("pattern", [params.pattern]), ("globs", params.globs)):
        if any("\0" in text for text in texts):
            raise invalid_request(f"fs/search takes no NUL in {name}: files with one are not searched")
        if sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) > MAX_TEXT_BYTES:
            raise invalid_request(f"fs/search takes at most {MAX_TEXT_BYTES} bytes of {name}")
    if "\n" in params.pattern:
        raise invalid_request("fs/search looks at one line at a time: there is no line break in any of them")


def _ripgrep(program: str, path: bytes, params: SearchParams) -> list[bytes]:
    arguments = [program, "--json", "--no-config", "--no-messages"]
    for flag, given in (
        ("--fixed-strings", params.fixed_strings),
        ("--ignore-case", params.ignore_case),
        ("--word-regexp", params.whole_words),
        ("--hidden", params.hidden),
        ("--no-ignore", params.no_ignore),
    ):
        if given:
            arguments.append(flag)
    arguments += [f"--before-context={params.before_context}", f"--after-context={params.after_context}"]
    arguments += [f"--glob={glob}" for glob in params.globs]
    arguments += [f"--regexp={params.pattern}", "--"]
    return [*(argument.encode("utf-8", "surrogateescape") for argument in arguments), path]


def _ours(path: bytes, params: SearchParams) -> list[str]:
    options = {
        "path": os.fsdecode(path),
        "pattern": params.pattern,
        "fixedStrings": params.fixed_strings,
        "ignoreCase": params.ignore_case,
        "wholeWords": params.whole_words,
        "globs": params.globs,
        "hidden": params.hidden,
        "noIgnore": params.no_ignore,
        "beforeContext": params.before_context,
        "afterContext": params.after_context,
    }
    # Not msgspec: a path that is not UTF-8 travels as lone surrogates, in ASCII.
    text = json.dumps(options)
    pieces = [text[at : at + MAX_TEXT_BYTES] for at in range(0, len(text), MAX_TEXT_BYTES)]
    return [sys.executable, "-I", "-c", _GREP.format(start=_START, package=_PACKAGE), *pieces]


def _read(process: subprocess.Popen[bytes], results: _Results, turn: Turn) -> str:
    """Take in matches until there are enough or no more; what the program complained about."""
    assert process.stdout is not None  # noqa: S101  # they are pipes, as was asked for above
    assert process.stderr is not None  # noqa: S101
    output, errors = process.stdout.fileno(), process.stderr.fileno()
    poll = select.poll()
    poll.register(output, select.POLLIN)
    poll.register(errors, select.POLLIN)
    lines, complaint, open_pipes = _Lines(), b"", 2
    deadline = monotonic() + MAX_SECONDS
    while open_pipes and not results.truncated:
        turn.check()
        if monotonic() > deadline:
            results.truncated = True
        for descriptor, _ in poll.poll(_LOOK_SECONDS * 1000):
            data = os.read(descriptor, _READ_BYTES)
            if not data:
                poll.unregister(descriptor)
                open_pipes -= 1
            elif descriptor == errors:
                complaint = (complaint + data)[-MAX_LINE_BYTES:]
            else:
                for message in lines.feed(data):
                    results.take(message)
    if not results.truncated:
        process.wait()
    return complaint.decode("utf-8", "replace").strip()


class _Lines:
    """What the program prints, line by line, each a message. Of long lines only both ends are kept."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._long: _LongLine | None = None

    def feed(self, data: bytes) -> Iterator[dict[str, Any] | None]:
        """The messages that are complete now; None for one that could not be read."""
        *ended, rest = data.split(b"\n")
        for line in ended:
            self._add(line)
            yield decode(b"".join(self._parts)) if self._long is None else self._long.message()
            self._parts, self._size, self._long = [], 0, None
        self._add(rest)

    def _add(self, data: bytes) -> None:
        if self._long is not None:
            self._long.feed(data)
            return
        self._parts.append(data)
        self._size += len(data)
        if self._size > _MAX_OUTPUT_LINE:
            self._long = _LongLine()
            for part in self._parts:
                self._long.feed(part)
            self._parts = []


class _LongLine:
    """A message of ripgrep's whose text is too long: where it is about, and how the text begins.

    The text comes in the middle. No quote in it is bare, so what follows it cannot be mistaken.
    """

    _AFTER: Final = b'"},"line_number":'
    _BEGIN: Final = re.compile(
        rb'\{"type":"(match|context)","data":\{"path":(\{"(?:text|bytes)":"(?:[^"\\]|\\.)*"\}),'
        rb'"lines":\{"(text|bytes)":"'
    )
    _END: Final = re.compile(rb'"\},"line_number":(\d+),"absolute_offset":(\d+),')

    def __init__(self) -> None:
        self._head = b""
        self._seen = b""
        self._tail = b""

    def feed(self, data: bytes) -> None:
        if len(self._head) < _HEAD_BYTES:
            self._head += data[: _HEAD_BYTES - len(self._head)]
        if self._tail:
            self._tail += data[: _TAIL_BYTES - len(self._tail)]
            return
        window = self._seen + data
        at = window.find(self._AFTER)
        if at >= 0:
            self._tail = window[at : at + _TAIL_BYTES]
        self._seen = window[1 - len(self._AFTER) :]

    def message(self) -> dict[str, Any] | None:
        begin, end = self._BEGIN.match(self._head), self._END.match(self._tail)
        if begin is None or end is None:
            return None
        kind, path, form = begin.groups()
        rest = self._head[begin.end() :].partition(b'"}')[0]
        text = _beginning_of_text(rest) if form == b"text" else base64.b64decode(rest[: len(rest) // 4 * 4])
        data = {
            "path": decode(path),
            "lines": {"bytes": base64.b64encode(text).decode()},
            "line_number": int(end[1]),
            "absolute_offset": int(end[2]),
            "submatches": [],
            "cut": True,
        }
        return {"type": kind.decode(), "data": data}


def _beginning_of_text(escaped: bytes) -> bytes:
    """The inside of a JSON string that was cut anywhere, even within a character or an escape."""
    for cut in range(13):
        try:
            text: str = decode(b'"%b"' % escaped[: len(escaped) - cut])
        except DecodeError:
            continue
        return text.encode()
    return b""


class _Results:
    """Matches as they come, each with the lines around it."""

    def __init__(self, most: int) -> None:
        self.matches: list[dict[str, Any]] = []
        self.truncated = False
        self._incomplete = False
        self._most = most
        self._context: list[tuple[bytes, int, str]] = []

    def take(self, message: dict[str, Any] | None) -> None:
        """What one line of the program's output says."""
        if message is None or message["type"] == "incomplete":
            self._incomplete = True
            return
        if message["type"] not in ("match", "context") or self.truncated:
            return
        data = message["data"]
        path, text = _bytes(data["path"]), _bytes(data["lines"])
        shown = text[:MAX_LINE_BYTES].rstrip(b"\r\n").decode("utf-8", "replace")
        if message["type"] == "context":
            self._context.append((path, data["line_number"], shown))
            return
        if len(self.matches) == self._most:
            self.truncated = True
            return
        match: dict[str, Any] = {
            "path": path,
            "lineNumber": data["line_number"],
            "byteOffset": data["absolute_offset"],
            "line": shown,
            "submatches": [
                {"start": part["start"], "end": part["end"]}
                for part in data["submatches"]
                if part["end"] <= MAX_LINE_BYTES
            ],
        }
        if len(text) > MAX_LINE_BYTES or data.get("cut"):
            match["lineTruncated"] = True
        self.matches.append(match)

    def answer(self, engine: str) -> dict[str, Any]:
        self.matches.sort(key=lambda match: (match["path"], match["lineNumber"]))
        for match in self.matches:
            match["path"] = to_uri(match["path"])
        context = [
            {"path": to_uri(path), "lineNumber": number, "line": line}
            for path, number, line in sorted(self._context)
        ]
        return {
            "matches": self.matches,
            "context": context,
            "truncated": self.truncated or self._incomplete,
            "engine": engine,
        }


def _bytes(value: dict[str, str]) -> bytes:
    """ripgrep's text, or its base64 where it is not text."""
    if "text" in value:
        return value["text"].encode("utf-8", "surrogateescape")
    return base64.b64decode(value["bytes"])
