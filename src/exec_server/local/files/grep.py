"""A plain search program, for machines without ripgrep. Run as a process of its own: a regular
expression that never ends, ends with the process.

    python -m exec_server.local.files.grep '{"path": ..., "pattern": ..., ...}'

Prints what `rg --json` prints, as far as `search` reads it. Knows nothing of `.gitignore`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from exec_server.local.files.pattern import BadPattern, PathPattern

__all__ = ["main"]

BINARY_LOOK_BYTES = 8192
"""A file with a NUL byte in its beginning is not text."""

MAX_LINE_BYTES = 4096
"""Of a line that is printed, as in search.py: a file may be one line of any length."""


def main(options: dict[str, Any]) -> int:
    """0 if something was found, 1 if not, 2 if the question makes no sense."""
    source = re.escape(options["pattern"]) if options["fixedStrings"] else options["pattern"]
    if options["wholeWords"]:
        source = rf"(?<!\w)(?:{source})(?!\w)"
    try:
        regex = re.compile(
            source.encode("utf-8", "surrogateescape"), re.IGNORECASE if options["ignoreCase"] else 0
        )
        wanted = [PathPattern(_anywhere(glob)) for glob in options["globs"] if not glob.startswith("!")]
        unwanted = [PathPattern(_anywhere(glob[1:])) for glob in options["globs"] if glob.startswith("!")]
    except (re.error, BadPattern) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    found = False
    for path, name in _files(os.fsencode(options["path"]), options["hidden"]):
        if wanted and not any(pattern.fits(name) for pattern in wanted):
            continue
        if not any(pattern.fits(name) for pattern in unwanted):
            found |= _search(path, regex, options["beforeContext"], options["afterContext"])
    return 0 if found else 1


def _anywhere(glob: str) -> str:
    """As in `.gitignore`: without a slash, a pattern is about names and not about places."""
    return glob if "/" in glob.rstrip("/") else f"**/{glob}"


def _files(path: bytes, hidden: bool) -> Iterator[tuple[bytes, str]]:
    """Regular files, sorted, and how they are called below the path."""
    if not os.path.isdir(path):
        yield path, os.path.basename(path).decode("utf-8", "surrogateescape")
        return
    todo = [(path, "")]
    while todo:
        directory, prefix = todo.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError:
            continue
        below: list[tuple[bytes, str]] = []
        for entry in entries:
            if entry.name.startswith(b".") and not hidden:
                continue
            name = prefix + entry.name.decode("utf-8", "surrogateescape")
            if entry.is_dir(follow_symlinks=False):
                below.append((entry.path, name + "/"))
            elif entry.is_file(follow_symlinks=False):
                yield entry.path, name
        todo += reversed(below)


def _search(path: bytes, regex: re.Pattern[bytes], before: int, after: int) -> bool:
    found = False
    recent: deque[tuple[int, int, bytes]] = deque(maxlen=before)
    owed = 0
    try:
        # Without waiting: somebody may have put a FIFO there meanwhile.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return False
            if b"\0" in file.read(BINARY_LOOK_BYTES):
                return False
            file.seek(0)
            offset = 0
            for number, line in enumerate(file, 1):
                matches = _matches(regex, line.rstrip(b"\r\n"))
                if matches is not None:
                    found = True
                    for earlier in recent:
                        _say("context", path, earlier, [])
                    recent.clear()
                    _say("match", path, (number, offset, line), matches)
                    owed = after
                elif owed:
                    owed -= 1
                    _say("context", path, (number, offset, line), [])
                elif before:
                    recent.append((number, offset, line))
                offset += len(line)
    except OSError:
        pass  # gone, or not ours to read
    return found


def _matches(regex: re.Pattern[bytes], line: bytes) -> list[tuple[int, int]] | None:
    """Where it matches in what is shown of a line; None if it does not match at all."""
    found: list[tuple[int, int]] | None = None
    for match in regex.finditer(line):
        found = found or []
        if match.end() > MAX_LINE_BYTES:
            break
        found.append(match.span())
    return found


def _say(kind: str, path: bytes, where: tuple[int, int, bytes], matches: list[tuple[int, int]]) -> None:
    number, offset, line = where
    data = {
        "path": _text(path),
        "lines": _text(line[:MAX_LINE_BYTES]),
        "cut": len(line.rstrip(b"\r\n")) > MAX_LINE_BYTES,
        "line_number": number,
        "absolute_offset": offset,
        "submatches": [{"start": start, "end": end} for start, end in matches],
    }
    sys.stdout.write(json.dumps({"type": kind, "data": data}) + "\n")


def _text(raw: bytes) -> dict[str, str]:
    try:
        return {"text": raw.decode()}
    except UnicodeDecodeError:
        return {"bytes": base64.b64encode(raw).decode()}


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except BrokenPipeError:
        os._exit(1)  # enough was found
