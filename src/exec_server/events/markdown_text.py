"""The model's own markdown, without what others could be shown or made to load by it: HTML and images.

Lists, tables, code and links stay. What is in code stays as it is, but only where that is certain: the rules
of CommonMark for what is code are long, and a text may be written to be read differently by us than by
whoever shows it. In doubt it is escaped, which at worst shows `&lt;` where `<` was meant.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["tamed"]

_FENCE: Final = re.compile(r"( {0,3})(`{3,}|~{3,})([^\n]*)\Z")
_HIDDEN_FENCE: Final = re.compile(r"[^`~]*(?:```|~~~)")
_TICKS: Final = re.compile(r"`+")


def tamed(text: str) -> str:
    """The text with no HTML and no image in it; it has as many lines as before."""
    if "<" not in text and "![" not in text:
        return text
    out: list[str] = []
    paragraph: list[str] = []
    fence: tuple[int, str] | None = None
    doubtful = False

    def flush() -> None:
        out.extend(_paragraph(paragraph, doubtful))
        paragraph.clear()

    for line in text.split("\n"):
        if doubtful:
            out.append(_escaped(line))
        elif fence is not None:
            state = _in_fence(line, *fence)
            fence = fence if state == "code" else None
            doubtful = state == "doubtful"
            out.append(_escaped(line) if doubtful else line)
        elif (opening := _opening(line)) is not None:
            flush()
            fence = opening
            out.append(line if "<" not in line and "![" not in line else _escaped(line))
        elif _HIDDEN_FENCE.match(line):
            # In a list or a quotation, perhaps: whether and where such a block ends is not for us to tell.
            doubtful = True
            flush()
            out.append(_escaped(line))
        elif not line.strip(" \t"):
            flush()
            out.append(line)
        else:
            paragraph.append(line)
    flush()
    return "\n".join(out)


def _opening(line: str) -> tuple[int, str] | None:
    """The indentation and the marks of a line that opens a block of code, wherever it stands."""
    found = _FENCE.match(line)
    if found is None or (found[2][0] == "`" and "`" in found[3]):
        return None
    return len(found[1]), found[2]


def _in_fence(line: str, indent: int, marks: str) -> str:
    """What a line within a block of code is: `code`, its end (`over`), or `doubtful`.

    A block that is not indented is one for itself. One that is may belong to an entry of a list, and then
    ends with the entry.
    """
    stripped = line.strip(" \t")
    spaces = len(line) - len(line.lstrip(" "))
    closes = len(stripped) >= len(marks) and not stripped.strip(marks[0])
    if (
        closes
        and stripped
        and spaces <= 3
        and "\t" not in line[: spaces + 1]
        and (not indent or spaces >= indent)
    ):
        return "over"
    if indent and stripped and (closes or spaces < indent):
        return "doubtful"
    return "code"


def _paragraph(lines: list[str], doubtful: bool) -> list[str]:
    """Lines that belong together. Code in them stays if every line opens and closes its own."""
    pieces = [None if doubtful else _spans(line) for line in lines]
    if any(found is None for found in pieces):
        return [_escaped(line) for line in lines]
    return [
        "".join(piece if is_code else _escaped(piece) for piece, is_code in found)
        for found in pieces
        if found is not None
    ]


def _spans(line: str) -> list[tuple[str, bool]] | None:
    """A line in pieces that are code or not; None if it cannot be told."""
    if "\\`" in line:
        return None
    pieces: list[tuple[str, bool]] = []
    at = 0
    while opening := _TICKS.search(line, at):
        closing = next(
            (run for run in _TICKS.finditer(line, opening.end()) if len(run[0]) == len(opening[0])), None
        )
        if closing is None or "|" in line[opening.end() : closing.start()]:
            return None
        pieces.append((line[at : opening.start()], False))
        pieces.append((line[opening.start() : closing.end()], True))
        at = closing.end()
    return [*pieces, (line[at:], False)]


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("![", "!\\[")
