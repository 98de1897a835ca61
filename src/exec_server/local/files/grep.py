"""A plain search program, for machines without ripgrep. Run as a process of its own: a regular
expression that never ends, ends with the process.

    python -m exec_server.local.files.grep '{"path": ..., "pattern": ..., ...}'

Prints what `rg --json` prints, as far as `search` reads it, and `incomplete` if lines were given up.
"""

from __future__ import annotations

import base64
import codecs
import io
import json
import os
import re
import stat
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from exec_server.local.files.matcher import Matcher
from exec_server.local.files.pattern import BadPattern
from exec_server.local.files.selection import Rules, selected_files

__all__ = ["main"]

BINARY_LOOK_BYTES = 8192
"""A file with a NUL byte in its beginning is not text."""

MAX_LINE_BYTES = 4096
"""Of a line that is printed, as in search.py: a file may be one line of any length."""

MAX_GIVEN_UP = 3
"""Lines of one file that took too long, after which the rest of it is left alone."""

_FLAGS = re.compile(r"\(\?[aimsux]+\)")


def main(options: dict[str, Any]) -> int:
    """0 if something was found, 1 if not, 2 if the question makes no sense."""
    try:
        regex = _compile(options)
        globs = Rules(options["globs"])
    except (re.error, OverflowError, RecursionError, BadPattern) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    matcher = Matcher(regex, MAX_LINE_BYTES)
    found = False
    path = os.fsencode(options["path"])
    for file in selected_files(path, globs, options["hidden"], not options["noIgnore"]):
        found |= _search(file, matcher, options["beforeContext"], options["afterContext"])
    return 0 if found else 1


def _compile(options: dict[str, Any]) -> re.Pattern[str]:
    source: str = options["pattern"]
    flags = ""
    if options["fixedStrings"]:
        source = re.escape(source)
    elif begin := _FLAGS.match(source):
        flags, source = begin[0], source[begin.end() :]  # Python wants them in front of everything
    if options["wholeWords"]:
        source = rf"(?<!\w)(?:{source})(?!\w)"
    return re.compile(flags + source, re.IGNORECASE if options["ignoreCase"] else 0)


def _search(path: bytes, matcher: Matcher, before: int, after: int) -> bool:
    found = False
    recent: deque[tuple[int, int, bytes]] = deque(maxlen=before)
    owed = given_up = 0
    try:
        # Without waiting: somebody may have put a FIFO there meanwhile.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            for number, offset, line in _lines(file):
                matches = matcher.spans(line.rstrip(b"\r\n"))
                if matches is None:
                    given_up += 1
                    if given_up == 1:
                        sys.stdout.write('{"type": "incomplete"}\n')
                    if given_up == MAX_GIVEN_UP:
                        break
                    matches = []
                if matches:
                    found = True
                    for earlier in recent:
                        _say("context", path, earlier, [])
                    recent.clear()
                    shown = [span for span in matches if span[1] <= MAX_LINE_BYTES]
                    _say("match", path, (number, offset, line), shown)
                    owed = after
                elif owed:
                    owed -= 1
                    _say("context", path, (number, offset, line), [])
                elif before:
                    recent.append((number, offset, line))
    except OSError:
        pass  # gone, or not ours to read
    return found


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """The lines of a text with their number and place, in UTF-8 if it says that it is in UTF-16."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return
    beginning = file.read(BINARY_LOOK_BYTES)
    file.seek(0)
    lines: Iterable[bytes] = file
    offset = 0
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = io.TextIOWrapper(file, "utf-16", "replace", newline="\n")
        lines = (line.encode() for line in text)
    elif b"\0" in beginning:
        return
    elif beginning.startswith(codecs.BOM_UTF8):
        offset = file.seek(len(codecs.BOM_UTF8))
    for number, line in enumerate(lines, 1):
        yield number, offset, line
        offset += len(line)


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
        sys.exit(main(json.loads("".join(sys.argv[1:]))))
    except BrokenPipeError:
        os._exit(1)  # enough was found
