"""Files as tools: read, write, list, find and search, with answers that fit into a model's context."""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Struct

from ..client.errors import ExecServerError, ServerRejected, Unsupported
from ..services import Files
from .exec import ToolError, arguments
from .file_lines import MAX_READ_BYTES, Lines, cut

__all__ = ["MAX_READ_BYTES", "FileTools"]

DEFAULT_LINES: Final = 2000
MAX_ENTRIES: Final = 1000
DEFAULT_MATCHES: Final = 200
MAX_MATCHES: Final = 2000

BINARY_LOOK_BYTES: Final = 8192
"""A NUL this early in a file says that it is no text."""


class ReadFile(Struct, frozen=True, kw_only=True):
    path: str
    line: int = 1
    limit: int = DEFAULT_LINES
    column: int = 1


class WriteFile(Struct, frozen=True, kw_only=True):
    path: str
    content: str


class ListDirectory(Struct, frozen=True, kw_only=True):
    path: str = "."


class FindFiles(Struct, frozen=True, kw_only=True):
    pattern: str
    path: str = "."
    hidden: bool = False


class SearchFiles(Struct, frozen=True, kw_only=True):
    pattern: str
    path: str = "."
    glob: str | None = None
    ignore_case: bool = False
    literal: bool = False
    limit: int = DEFAULT_MATCHES


_PATH: Final = ("string", "Absolute, or relative to the machine's directory.")

DEFINITIONS: Final[dict[str, tuple[str, dict[str, tuple[str, str]], list[str]]]] = {
    "read_file": (
        "Read a text file, or some of its lines.",
        {
            "path": _PATH,
            "line": ("integer", "First line to read. Default: 1."),
            "limit": ("integer", f"How many lines. Default: {DEFAULT_LINES}."),
            "column": ("integer", "First character of that line, to go on within a long one. Default: 1."),
        },
        ["path"],
    ),
    "write_file": (
        "Make a file have this content. Replaces what is there; directories on the way are made.",
        {"path": _PATH, "content": ("string", "All of the new content.")},
        ["path", "content"],
    ),
    "list_directory": (
        "The names in a directory; those of directories end with a slash.",
        {"path": ("string", "Default: the machine's directory.")},
        [],
    ),
    "find_files": (
        "Paths of files below a directory that fit a pattern.",
        {
            "pattern": ("string", "For example `src/**/*.{py,pyi}`; `**` stands for any directories."),
            "path": ("string", "Where to look. Default: the machine's directory."),
            "hidden": ("boolean", "Whether names that begin with a dot count. Default: false."),
        },
        ["pattern"],
    ),
    "search_files": (
        "Lines that match a regular expression, in a file or below a directory. Ignored files are skipped.",
        {
            "pattern": ("string", "The regular expression."),
            "path": ("string", "Where to look. Default: the machine's directory."),
            "glob": ("string", "Only in files that fit, for example `*.py`."),
            "ignore_case": ("boolean", "Default: false."),
            "literal": ("boolean", "The pattern is a plain text. Default: false."),
            "limit": ("integer", f"Most matches to return. Default: {DEFAULT_MATCHES}."),
        },
        ["pattern"],
    ),
}


class FileTools:
    """The tools over some files. What cannot be done is a ToolError, whose text is for the model."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._tools: dict[str, tuple[type[Struct], Callable[[Any], Awaitable[str]]]] = {
            "read_file": (ReadFile, self._read),
            "write_file": (WriteFile, self._write),
            "list_directory": (ListDirectory, self._list),
            "find_files": (FindFiles, self._find),
            "search_files": (SearchFiles, self._search),
        }

    @staticmethod
    def definitions() -> list[dict[str, Any]]:
        """Every tool as models are told of it."""
        return [
            {
                "type": "function",
                "name": name,
                "description": description,
                "strict": False,
                "parameters": {
                    "type": "object",
                    "properties": {
                        field: {"type": kind, "description": text} for field, (kind, text) in fields.items()
                    },
                    "required": required,
                    "additionalProperties": False,
                },
            }
            for name, (description, fields, required) in DEFINITIONS.items()
        ]

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    async def call(self, name: str, text: str | bytes) -> str:
        """Do it, with arguments as the model wrote them."""
        kind, tool = self._tools[name]
        call = arguments(text, kind)
        try:
            return await tool(call)
        except Unsupported as error:
            raise ToolError(f"{name} failed: {error}; use exec_command instead") from None
        except (ExecServerError, OSError, ValueError) as error:
            said = error.message if isinstance(error, ServerRejected) else str(error)
            raise ToolError(f"{name} failed: {getattr(call, 'path', '')}: {said}") from None

    async def _read(self, call: ReadFile) -> str:
        reader = Lines(max(call.line, 1), max(call.limit, 1), max(call.column, 1))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        looked = False
        async for block in self._files.stream(call.path):
            if not looked and b"\0" in block[:BINARY_LOOK_BYTES]:
                raise ToolError(f"read_file failed: {call.path}: not a text file")
            looked = True
            if reader.feed(decoder.decode(block)):
                return reader.text()
        reader.feed(decoder.decode(b"", final=True))
        return reader.end()

    async def _write(self, call: WriteFile) -> str:
        data = call.content.encode("utf-8", "replace")
        parent = call.path.rpartition("/")[0]
        if parent:
            await self._files.make_directory(parent)
        await self._files.write(call.path, data)
        return f"wrote {len(data)} bytes to {call.path}"

    async def _list(self, call: ListDirectory) -> str:
        entries = await self._files.list(call.path)
        lines = [entry.name + ("/" if entry.is_directory else "") for entry in entries[:MAX_ENTRIES]]
        if len(entries) > MAX_ENTRIES:
            lines.append(f"[{len(entries) - MAX_ENTRIES} more]")
        return "\n".join(lines) if lines else "[the directory is empty]"

    async def _find(self, call: FindFiles) -> str:
        found = await self._files.glob(call.path, call.pattern, hidden=call.hidden, max_results=MAX_ENTRIES)
        lines = [*found.paths, *(["[there are more]"] if found.truncated else [])]
        if lines:
            return "\n".join(lines)
        sign = _unclosed(call.pattern)
        note = "" if sign is None else f"; `{sign}` is not closed, so it stands for itself"
        return f"[nothing fits{note}]"

    async def _search(self, call: SearchFiles) -> str:
        found = await self._files.search(
            call.path,
            call.pattern,
            fixed_strings=call.literal,
            ignore_case=call.ignore_case,
            globs=[call.glob] if call.glob else [],
            max_results=min(max(call.limit, 1), MAX_MATCHES),
        )
        lines = [f"{match.path}:{match.line_number}: {cut(match.line.rstrip())}" for match in found.matches]
        if found.truncated:
            lines.append("[there are more]")
        return "\n".join(lines) if lines else "[nothing matches]"


def _unclosed(pattern: str) -> str | None:
    """The bracket or brace of a pattern that has no end, and so means something else than was meant."""
    for opening, closing in ("[]", "{}"):
        if pattern.rfind(opening) > pattern.rfind(closing):
            return opening
    return None
