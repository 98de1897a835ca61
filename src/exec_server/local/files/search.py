"""Searching file contents: with ripgrep where it is installed, with a plain program of our own elsewhere.

Either runs as a process: it uses no thread of ours for thinking, can be killed when there are results
enough or nobody waits any more, and a regular expression that never ends hurts only itself.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
from shutil import which
from time import monotonic
from typing import Any, Final

from msgspec.json import decode

from ...wire.errors import internal_error, invalid_request
from ...wire.files import SearchParams
from .lane import ALONE, Turn
from .paths import to_uri

__all__ = ["search"]

MAX_RESULTS: Final = 10_000
"""Matching lines of one answer."""

MAX_CONTEXT: Final = 100
"""Lines around a match."""

MAX_LINE_BYTES: Final = 4096
"""Of a line in an answer; longer ones are cut."""

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
_MAX_BUFFERED: Final = 64 * 1024 * 1024
"""Of one line of the program's output: a file may be a single line of any length."""


def search(path: bytes, params: SearchParams, turn: Turn = ALONE) -> dict[str, Any]:
    """Matching lines with their place, sorted by path and line."""
    if not 1 <= params.max_results <= MAX_RESULTS:
        raise invalid_request(f"maxResults must be between 1 and {MAX_RESULTS}")
    if max(params.before_context, params.after_context) > MAX_CONTEXT:
        raise invalid_request(f"beforeContext and afterContext must be at most {MAX_CONTEXT}")
    os.stat(path)  # it must be there
    turn.leave(os.path.realpath(path))
    ripgrep = which("rg")
    command = _ripgrep(ripgrep, path, params) if ripgrep else _ours(path, params)
    # The program gets nothing of what the server was started with but where to find things.
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=path if os.path.isdir(path) else os.path.dirname(path),
        env=environment,
    ) as process:
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
        "beforeContext": params.before_context,
        "afterContext": params.after_context,
    }
    # Not msgspec: a path that is not UTF-8 travels as lone surrogates, in ASCII.
    return [sys.executable, "-I", "-c", _GREP.format(start=_START, package=_PACKAGE), json.dumps(options)]


def _read(process: subprocess.Popen[bytes], results: _Results, turn: Turn) -> str:
    """Take in matches until there are enough or no more; what the program complained about."""
    assert process.stdout is not None  # noqa: S101  # they are pipes, as was asked for above
    assert process.stderr is not None  # noqa: S101
    output, errors = process.stdout.fileno(), process.stderr.fileno()
    poll = select.poll()
    poll.register(output, select.POLLIN)
    poll.register(errors, select.POLLIN)
    buffered, complaint, open_pipes = b"", b"", 2
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
                *lines, buffered = (buffered + data).split(b"\n")
                for line in lines:
                    results.take(line)
                if len(buffered) > _MAX_BUFFERED:
                    raise internal_error("fs/search found a line that is too long to read")
    if not results.truncated:
        process.wait()
    return complaint.decode("utf-8", "replace").strip()


class _Results:
    """Matches as they come, each with the lines around it."""

    def __init__(self, most: int) -> None:
        self.matches: list[dict[str, Any]] = []
        self.truncated = False
        self._most = most
        self._context: list[tuple[bytes, int, str]] = []

    def take(self, line: bytes) -> None:
        """One line of what the program printed."""
        message = decode(line)
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
        if len(text) > MAX_LINE_BYTES:
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
        return {"matches": self.matches, "context": context, "truncated": self.truncated, "engine": engine}


def _bytes(value: dict[str, str]) -> bytes:
    """ripgrep's text, or its base64 where it is not text."""
    if "text" in value:
        return value["text"].encode("utf-8", "surrogateescape")
    return base64.b64decode(value["bytes"])
