"""Patches as models write them: parsed, and planned against the files they are about. Pure.

The format has no line numbers. A change says which lines it replaces and where to look for them, and is found
again in a file that is not exactly what the model remembers: spaces at the ends of lines, indentation and
typographic quotes may differ. What is understood, and the words for what is not, are the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

__all__ = [
    "AddFile",
    "Change",
    "Chunk",
    "DeleteFile",
    "Hunk",
    "Patch",
    "PatchError",
    "Plan",
    "UpdateFile",
    "check_targets",
    "parse",
    "patched",
    "plan",
]

BEGIN: Final = "*** Begin Patch"
END: Final = "*** End Patch"
ENVIRONMENT: Final = "*** Environment ID:"
ADD: Final = "*** Add File: "
DELETE: Final = "*** Delete File: "
UPDATE: Final = "*** Update File: "
MOVE: Final = "*** Move to: "
END_OF_FILE: Final = "*** End of File"
CONTEXT: Final = "@@"

HEREDOCS: Final = ("<<EOF", "<<'EOF'", '<<"EOF"')
"""How a patch begins that a model has wrapped for a shell although there is none."""

LOOKALIKES: Final = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        **dict.fromkeys("\u2018\u2019\u201a\u201b", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f", '"'),
        **dict.fromkeys(
            "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "
        ),
    }
)
"""Characters that models write as the ones on a keyboard."""


class PatchError(ValueError):
    """Not a patch, or not one for these files. The text is for the model."""


class Chunk(Struct, frozen=True):
    """Some lines in place of others."""

    context: str | None
    """A line after which to look, as it stands in the file."""
    old: tuple[str, ...]
    new: tuple[str | int, ...]
    """A text, or the place in `old` of a line that stays: as it is in the file, not as it is written here."""
    at_end: bool
    """The old lines are the last of the file."""


class AddFile(Struct, frozen=True):
    """A file to be there with this content, whether or not there is one already."""

    path: str
    content: str


class DeleteFile(Struct, frozen=True):
    """A file to be gone."""

    path: str


class UpdateFile(Struct, frozen=True):
    """Changes to a file, which may get another name."""

    path: str
    move_to: str | None
    chunks: tuple[Chunk, ...]


Hunk = AddFile | DeleteFile | UpdateFile


class Patch(Struct, frozen=True):
    """What a patch asks for. `environment_id` is the machine it is meant for, if it says."""

    hunks: tuple[Hunk, ...]
    environment_id: str | None = None


# Parsing -----------------------------------------------------------------------------------------


def parse(text: str) -> Patch:
    """The patch in a text; PatchError says what is wrong, and in which line."""
    lines = _unwrapped([line.removesuffix("\r") for line in text.strip().split("\n")])
    if lines[0].strip() != BEGIN:
        raise PatchError(f"invalid patch: The first line of the patch must be '{BEGIN}'")
    if len(lines) < 2 or lines[-1].strip() != END:
        raise PatchError(f"invalid patch: The last line of the patch must be '{END}'")
    parser = _Parser(lines[:-1])
    environment_id = parser.environment()
    hunks: list[Hunk] = []
    while not parser.done:
        hunks.append(parser.hunk())
    return Patch(tuple(hunks), environment_id)


def _unwrapped(lines: list[str]) -> list[str]:
    if len(lines) >= 4 and lines[0] in HEREDOCS and lines[-1].endswith("EOF"):
        return lines[1:-1]
    return lines


class _Parser:
    """The lines between the first and the last, one hunk at a time."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._at = 1

    @property
    def done(self) -> bool:
        return self._at >= len(self._lines)

    @property
    def _line(self) -> str:
        return self._lines[self._at]

    def environment(self) -> str | None:
        if self.done or not self._line.strip().startswith(ENVIRONMENT):
            return None
        name = self._line.strip().removeprefix(ENVIRONMENT).strip()
        if not name:
            raise PatchError("invalid patch: apply_patch environment_id cannot be empty")
        self._at += 1
        return name

    def hunk(self) -> Hunk:
        header = self._line.strip()
        if header.startswith(ADD):
            self._at += 1
            return AddFile(header.removeprefix(ADD), self._added())
        if header.startswith(DELETE):
            self._at += 1
            return DeleteFile(header.removeprefix(DELETE))
        if header.startswith(UPDATE):
            return self._update(header.removeprefix(UPDATE))
        raise self._wrong(
            f"'{header}' is not a valid hunk header. Valid hunk headers: '{ADD}{{path}}', '{DELETE}{{path}}',"
            f" '{UPDATE}{{path}}'"
        )

    def _added(self) -> str:
        content = []
        while not self.done and self._line.startswith("+"):
            content.append(self._line[1:] + "\n")
            self._at += 1
        return "".join(content)

    def _update(self, path: str) -> UpdateFile:
        header_at = self._at
        self._at += 1
        move_to = None
        if not self.done and self._line.startswith(MOVE):
            move_to = self._line.removeprefix(MOVE).rstrip()
            self._at += 1
        chunks: list[Chunk] = []
        while not self.done:
            if not self._line.strip():
                self._at += 1
            elif self._line.startswith("***"):
                break
            else:
                chunks.append(self._chunk(first=not chunks))
        if not chunks:
            raise self._wrong(f"Update file hunk for path '{path}' is empty", header_at)
        return UpdateFile(path, move_to, tuple(chunks))

    def _chunk(self, first: bool) -> Chunk:
        context = None
        if self._line == CONTEXT or self._line.startswith(CONTEXT + " "):
            context = self._line[len(CONTEXT) + 1 :] or None
            self._at += 1
        elif not first:
            raise self._wrong(f"Expected update hunk to start with a @@ context marker, got: '{self._line}'")
        old: list[str] = []
        new: list[str | int] = []
        start = self._at
        while not self.done:
            line = self._line
            if line == END_OF_FILE:
                if self._at == start:
                    break
                self._at += 1
                return Chunk(context, tuple(old), tuple(new), True)
            if line[:1] not in ("", " ", "+", "-"):
                if self._at == start:
                    raise self._wrong(
                        f"Unexpected line found in update hunk: '{line}'. Every line should start with ' '"
                        " (context line), '+' (added line), or '-' (removed line)"
                    )
                break
            if line[:1] == "+":
                new.append(line[1:])
            else:
                if line[:1] != "-":
                    new.append(len(old))
                old.append(line[1:])
            self._at += 1
        if self._at == start:
            raise self._wrong("Update hunk does not contain any lines")
        return Chunk(context, tuple(old), tuple(new), False)

    def _wrong(self, message: str, at: int | None = None) -> PatchError:
        return PatchError(f"invalid hunk at line {(self._at if at is None else at) + 1}, {message}")


# Planning ----------------------------------------------------------------------------------------


class Change(Struct, frozen=True):
    """One file from what it is to what it shall be; None is "not there"."""

    kind: Literal["add", "delete", "update"]
    path: str
    """Absolute."""
    shown: str
    """As the patch wrote it."""
    before: bytes | None
    after: bytes | None
    moved_from: str | None = None
    """Of an `add`: the absolute path of the file that gets this name."""
    place: str | None = None
    """Where `path` leads, once somebody has looked: what is written or removed in the end."""

    @property
    def target(self) -> str:
        """What to write or remove."""
        return self.path if self.place is None else self.place


class Plan(Struct, frozen=True):
    """Everything a patch will do, decided before anything is done."""

    changes: tuple[Change, ...]
    summary: str
    """What to tell the model when it is done."""


def check_targets(patch: Patch, resolve: Callable[[str], str]) -> None:
    """Refuse a patch that says two things about one file: no order of them would be right."""
    taken: set[str] = set()
    for hunk in patch.hunks:
        target = hunk.move_to if isinstance(hunk, UpdateFile) else None
        for path in dict.fromkeys([resolve(hunk.path), *([] if target is None else [resolve(target)])]):
            if path in taken:
                raise PatchError(f"invalid patch: multiple operations target {path}")
            taken.add(path)


def plan(patch: Patch, resolve: Callable[[str], str], contents: Mapping[str, bytes]) -> Plan:
    """What the patch does to these files. `contents` has what is updated or deleted, by absolute path.

    A file that is added needs no old content here; whoever applies the plan learns it before it is replaced.
    """
    check_targets(patch, resolve)
    changes: list[Change] = []
    modified: list[str] = []
    for hunk in patch.hunks:
        path = resolve(hunk.path)
        if isinstance(hunk, AddFile):
            changes.append(Change("add", path, hunk.path, None, hunk.content.encode()))
            continue
        before = contents[path]
        if isinstance(hunk, DeleteFile):
            _text(before, f"Failed to read {path}")
            changes.append(Change("delete", path, hunk.path, before, None))
            continue
        text = _text(before, f"Failed to read file to update {path}")
        after = patched(text, hunk.chunks, path).encode()
        target = path if hunk.move_to is None else resolve(hunk.move_to)
        modified.append(hunk.path if hunk.move_to is None else hunk.move_to)
        if target == path:
            changes.append(Change("update", path, hunk.path, before, after))
        else:
            shown = hunk.move_to or hunk.path
            changes.append(Change("add", target, shown, None, after, moved_from=path))
            changes.append(Change("delete", path, hunk.path, before, None))
    return Plan(tuple(changes), _summary(patch, modified))


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            wrong = "incomplete utf-8 byte sequence"
        else:
            wrong = f"invalid utf-8 sequence of {error.end - error.start} bytes"
        raise PatchError(f"{what}: {wrong} from index {error.start}") from None


def _summary(patch: Patch, modified: Sequence[str]) -> str:
    lines = ["Success. Updated the following files:"]
    lines += [f"A {hunk.path}" for hunk in patch.hunks if isinstance(hunk, AddFile)]
    lines += [f"M {path}" for path in modified]
    lines += [f"D {hunk.path}" for hunk in patch.hunks if isinstance(hunk, DeleteFile)]
    return "\n".join(lines) + "\n"


# Changing a text ---------------------------------------------------------------------------------


def patched(text: str, chunks: Sequence[Chunk], path: str) -> str:
    """The text with the chunks applied in their order. `path` is for messages.

    Lines that are not replaced stay as they are, with their own ends; new ones get that of the first line.
    The last line always has one.
    """
    lines = _lines(text)
    ending = lines[0][1] if lines and lines[0][1] else "\n"
    for start, count, new in reversed(_replacements([line for line, _ in lines], chunks, path)):
        there = lines[start : start + count]
        lines[start : start + count] = [
            there[line] if isinstance(line, int) else (line, ending) for line in new
        ]
    return "".join(line + (end or ending) for line, end in lines)


def _lines(text: str) -> list[tuple[str, str]]:
    """Each line and how it ends; the last may not end at all."""
    lines = []
    for line in text.split("\n"):
        end = "\r\n" if line.endswith("\r") else "\n"
        lines.append((line.removesuffix("\r"), end))
    last, _ = lines.pop()
    if last or text.endswith("\r"):
        lines.append((text.rpartition("\n")[2], ""))
    return lines


def _replacements(
    lines: list[str], chunks: Sequence[Chunk], path: str
) -> list[tuple[int, int, tuple[str | int, ...]]]:
    """Where each chunk goes: a first line, how many lines it replaces, and by which. In order of place."""
    found: list[tuple[int, int, tuple[str | int, ...]]] = []
    at = 0
    for chunk in chunks:
        if chunk.context is not None:
            place = _find(lines, (chunk.context,), at, False)
            if place is None:
                raise PatchError(f"Failed to find context '{chunk.context}' in {path}")
            at = place + 1
        if not chunk.old:
            # Nothing says where: the end, wherever the context was.
            found.append((len(lines), 0, chunk.new))
            continue
        old, new = chunk.old, chunk.new
        place = _find(lines, old, at, chunk.at_end)
        if place is None and old[-1] == "":
            # A blank line at the end of a chunk is more often one of the patch than one of the file.
            old = old[:-1]
            new = tuple("" if line == len(old) else line for line in new)
            new = new[:-1] if new and new[-1] == "" else new
            place = _find(lines, old, at, chunk.at_end)
        if place is None:
            raise PatchError(f"Failed to find expected lines in {path}:\n" + "\n".join(chunk.old))
        found.append((place, len(old), new))
        at = place + len(old)
    return sorted(found, key=lambda replacement: replacement[0])


_TOLERANT: Final[tuple[Callable[[str], str], ...]] = (
    lambda line: line,
    str.rstrip,
    str.strip,
    lambda line: line.strip().translate(LOOKALIKES),
)
"""How lines are compared: exactly first, and then with less and less care."""


def _find(lines: Sequence[str], wanted: Sequence[str], start: int, at_end: bool) -> int | None:
    """The first place at or after `start` where the wanted lines are, by the strictest comparison that
    finds one. No lines at all are right there."""
    if not wanted:
        return start
    last = len(lines) - len(wanted)
    first = max(start, last) if at_end else start
    for plain in _TOLERANT:
        sought = [plain(line) for line in wanted]
        for place in range(first, last + 1):
            there = lines[place : place + len(sought)]
            if all(plain(line) == one for line, one in zip(there, sought, strict=True)):
                return place
    return None
