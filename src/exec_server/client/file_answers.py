"""What servers answer to file calls, and what callers are given for it."""

from __future__ import annotations

import os
from urllib.parse import quote, unquote_to_bytes

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from ..services import (
    DirectoryEntry,
    FileMetadata,
    SearchFound,
    SearchLine,
    SearchMatch,
    Walked,
    WalkEntry,
    WalkError,
)
from ..wire import base64
from ..wire.binary import FilePart
from ..wire.errors import RpcError
from ..wire.files import MetadataResult
from ..wire.uri import ForeignPath, native_path
from .errors import ProtocolError

__all__ = ["ListedAnswer", "SearchAnswer", "WalkAnswer", "metadata_of", "native", "part_of"]


class _ListedEntry(Struct, rename="camel"):
    file_name: str
    is_directory: bool
    is_file: bool
    name: str | None = None
    """As in a URI, where it is not UTF-8."""


class ListedAnswer(Struct):
    """Of `fs/readDirectory`."""

    entries: list[_ListedEntry]
    more: bool = False

    def found(self) -> list[DirectoryEntry]:
        return [DirectoryEntry(_listed_name(item), item.is_directory, item.is_file) for item in self.entries]

    def next_page(self) -> str | None:
        """What to go on after; None if this was the last page."""
        if not self.more or not self.entries:
            return None
        last = self.entries[-1]
        return last.name or quote(last.file_name)


def _listed_name(entry: _ListedEntry) -> str:
    return entry.file_name if entry.name is None else os.fsdecode(unquote_to_bytes(entry.name))


class WalkAnswer(Struct):
    """Of `fs/walk`."""

    entries: list[WalkEntry]
    errors: list[WalkError]
    truncated: bool

    def found(self) -> Walked:
        return Walked(
            [WalkEntry(native(entry.path), entry.kind) for entry in self.entries],
            [WalkError(native(error.path), error.message) for error in self.errors],
            self.truncated,
        )


class _Span(Struct):
    start: int
    end: int


class _Match(Struct, rename="camel"):
    path: str
    line_number: int
    byte_offset: int
    line: str
    submatches: list[_Span]
    line_truncated: bool = False


class _Context(Struct, rename="camel"):
    path: str
    line_number: int
    line: str


class SearchAnswer(Struct):
    """Of `fs/search`."""

    matches: list[_Match]
    context: list[_Context]
    truncated: bool

    def found(self) -> SearchFound:
        matches = [
            SearchMatch(
                native(match.path),
                match.line_number,
                match.line,
                match.byte_offset,
                [(span.start, span.end) for span in match.submatches],
                match.line_truncated,
            )
            for match in self.matches
        ]
        context = [SearchLine(native(line.path), line.line_number, line.line) for line in self.context]
        return SearchFound(matches, context, self.truncated)


def metadata_of(found: MetadataResult) -> FileMetadata:
    return FileMetadata(
        found.is_directory,
        found.is_file,
        found.is_symlink,
        found.size,
        found.created_at_ms,
        found.modified_at_ms,
    )


class _Part(Struct, rename="camel"):
    """`fs/readBlock` says `chunk`, `fs/readFile` says `dataBase64`, and without our extensions no `eof`."""

    chunk: str | UnsetType = UNSET
    data_base64: str | UnsetType = UNSET
    eof: bool = True


_decode_part = msgspec.json.Decoder(_Part).decode


def part_of(method: str, answer: Raw) -> FilePart:
    """What was read, from an answer in JSON."""
    try:
        part = _decode_part(answer)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the answer to `{method}` is not what it should be: {error}") from None
    text = part.chunk if part.data_base64 is UNSET else part.data_base64
    if text is UNSET:
        raise ProtocolError(f"the answer to `{method}` has no content")
    try:
        return FilePart(base64.decode(text), part.eof)
    except ValueError as error:
        raise ProtocolError(f"the server sent file content that is not base64: {error}") from None


def native(uri: str) -> str:
    """The native path, or the URI itself where this kind of machine has no such path."""
    try:
        return native_path(uri)
    except (ForeignPath, RpcError):
        return uri
