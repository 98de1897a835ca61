"""Files, as they travel: the params of every `fs/*` method, and its results.

Params are decoded by tables (`checks.py`). Results with many entries, and file contents,
are put together as bytes without a JSON encoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal
from urllib.parse import quote

import pybase64
from msgspec import Struct
from msgspec.json import encode

from .checks import Decoder, boolean, content, one_of, optional, string, strings, uri, uris, whole_number
from .envelope import Encoded
from .sandbox import SandboxContext, fs_sandbox

__all__ = [
    "BadBase64",
    "BlockResult",
    "CanonicalizeResult",
    "CloseParams",
    "CopyParams",
    "CreateDirectoryParams",
    "GlobParams",
    "MetadataParams",
    "MetadataResult",
    "MoveParams",
    "OpenMode",
    "OpenParams",
    "OpenResult",
    "PathParams",
    "ReadBlockParams",
    "ReadDirectoryParams",
    "ReadFileParams",
    "RemoveParams",
    "SearchParams",
    "UnwatchParams",
    "WalkParams",
    "WatchMissingParams",
    "WatchParams",
    "WriteBlockParams",
    "WriteFileParams",
    "base64_problem",
    "content_result",
    "decode_base64",
    "directory_page_result",
    "directory_result",
    "walk_result",
]

OpenMode = Literal["read", "replace"]

# Params ------------------------------------------------------------------------------------------


class Params(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """Paths are URIs in normal form. What has a default may be absent or, mostly, null."""


class PathParams(Params):
    """`fs/canonicalize`."""

    path: str
    sandbox: SandboxContext | None = None


class ReadDirectoryParams(Params):
    """`fs/readDirectory`."""

    path: str
    sandbox: SandboxContext | None = None
    after: str | None = None
    """Ours: the names that come after this one, written as in a URI; "" for the first page."""


class MetadataParams(Params):
    """`fs/getMetadata`."""

    path: str
    follow_symlinks: bool = True
    sandbox: SandboxContext | None = None


class ReadFileParams(Params):
    """`fs/readFile`. `offset` and `length` are ours: a part of a file of any size."""

    path: str
    follow_symlinks: bool = True
    sandbox: SandboxContext | None = None
    offset: int | None = None
    length: int | None = None


class WriteFileParams(Params):
    """`fs/writeFile`. The content is base64, or the bytes themselves if the message was read that far."""

    path: str
    data_base64: str | bytes
    follow_symlinks: bool = True
    sandbox: SandboxContext | None = None


class CreateDirectoryParams(Params):
    """`fs/createDirectory`."""

    path: str
    recursive: bool = True
    follow_symlinks: bool = True
    sandbox: SandboxContext | None = None


class RemoveParams(Params):
    """`fs/remove`."""

    path: str
    recursive: bool = True
    force: bool = True
    follow_symlinks: bool = True
    sandbox: SandboxContext | None = None


class CopyParams(Params):
    """`fs/copy`."""

    source_path: str
    destination_path: str
    recursive: bool
    sandbox: SandboxContext | None = None


class WalkOptions(Params):
    """How far `fs/walk` goes."""

    max_depth: int
    max_directories: int
    max_entries: int
    follow_directory_symlinks: bool
    prune_hidden_directories: bool = False


class WalkParams(Params):
    """`fs/walk`."""

    path: str
    options: WalkOptions
    sandbox: SandboxContext | None = None


class OpenParams(Params):
    """`fs/open`."""

    handle_id: str
    path: str
    mode: OpenMode = "read"
    atomic: bool = False
    """Ours: with mode `replace`, the old content stays until the stream is closed."""
    part: Literal["keep", "empty"] | None = None
    """Ours: with mode `replace`, what a transfer writes to before it gets its name: a plain file of the
    server's user, through no link, that nobody else has open this way. `keep`: what is in it stays."""
    sandbox: SandboxContext | None = None


class ReadBlockParams(Params):
    """`fs/readBlock`."""

    handle_id: str
    offset: int
    len: int


class WriteBlockParams(Params):
    """`fs/writeBlock`. The chunk is base64, or the bytes themselves if the message was read that far."""

    handle_id: str
    offset: int
    chunk: str | bytes


class CloseParams(Params):
    """`fs/close`."""

    handle_id: str
    discard: bool = False
    """Ours: what an atomic stream has written is forgotten."""


class WatchMissingParams(Params):
    """`fs/watchMissing`."""

    watch_id: int
    missing: list[str]
    present: str | None = None
    sandbox: SandboxContext | None = None


class WatchParams(Params):
    """`fs/watch`, ours. `recursive`: the whole tree below a directory, not only its entries."""

    watch_id: str
    path: str
    recursive: bool = False
    sandbox: SandboxContext | None = None


class UnwatchParams(Params):
    """`fs/unwatch`, ours."""

    watch_id: str


class MoveParams(Params):
    """`fs/move`, ours: a rename, which replaces only what it is told to."""

    source_path: str
    destination_path: str
    overwrite: bool = False
    keep_attributes: bool = False
    """What replaces a file gets its mode, owner and attributes."""
    sandbox: SandboxContext | None = None


class GlobParams(Params):
    """`fs/glob`, ours: paths below a directory that fit a pattern such as `src/**/*.{py,pyi}`."""

    path: str
    pattern: str
    kind: Literal["file", "directory", "any"] = "file"
    hidden: bool = False
    follow_symlinks: bool = False
    max_results: int = 1000
    sandbox: SandboxContext | None = None


class SearchParams(Params):
    """`fs/search`, ours: lines that match, in a file or in all files below a directory."""

    path: str
    pattern: str
    fixed_strings: bool = False
    ignore_case: bool = False
    whole_words: bool = False
    globs: list[str] = []
    """Which files: patterns as for `fs/glob`, relative to `path`; with a leading `!`, which not."""
    hidden: bool = False
    no_ignore: bool = False
    """Search what `.gitignore` and its like exclude, too."""
    before_context: int = 0
    after_context: int = 0
    max_results: int = 1000
    sandbox: SandboxContext | None = None


_flag_true = optional(boolean, True)
_flag_false = optional(boolean, False)
_u64 = whole_number("u64")
_usize = whole_number("usize")

decode_path: Final = Decoder(PathParams, "FsPathParams", ("path",), path=uri, sandbox=fs_sandbox)
decode_read_directory: Final = Decoder(
    ReadDirectoryParams, "FsPathParams", ("path",), path=uri, sandbox=fs_sandbox, after=optional(string)
)
decode_metadata: Final = Decoder(
    MetadataParams,
    "FsGetMetadataParams",
    ("path",),
    path=uri,
    follow_symlinks=_flag_true,
    sandbox=fs_sandbox,
)
decode_read_file: Final = Decoder(
    ReadFileParams,
    "FsReadFileParams",
    ("path",),
    path=uri,
    follow_symlinks=_flag_true,
    sandbox=fs_sandbox,
    offset=optional(_u64),
    length=optional(_u64),
)
decode_write_file: Final = Decoder(
    WriteFileParams,
    "FsWriteFileParams",
    ("path", "data_base64"),
    path=uri,
    data_base64=content,
    follow_symlinks=_flag_true,
    sandbox=fs_sandbox,
)
decode_create_directory: Final = Decoder(
    CreateDirectoryParams,
    "FsCreateDirectoryParams",
    ("path",),
    path=uri,
    recursive=_flag_true,
    follow_symlinks=_flag_true,
    sandbox=fs_sandbox,
)
decode_remove: Final = Decoder(
    RemoveParams,
    "FsRemoveParams",
    ("path",),
    path=uri,
    recursive=_flag_true,
    force=_flag_true,
    follow_symlinks=_flag_true,
    sandbox=fs_sandbox,
)
decode_copy: Final = Decoder(
    CopyParams,
    "FsCopyParams",
    ("source_path", "destination_path", "recursive"),
    source_path=uri,
    destination_path=uri,
    recursive=boolean,
    sandbox=fs_sandbox,
)
_decode_walk_options: Final = Decoder(
    WalkOptions,
    "WalkOptions",
    ("max_depth", "max_directories", "max_entries", "follow_directory_symlinks"),
    max_depth=_usize,
    max_directories=_usize,
    max_entries=_usize,
    follow_directory_symlinks=boolean,
    prune_hidden_directories=boolean,
)
decode_walk: Final = Decoder(
    WalkParams,
    "FsWalkParams",
    ("path", "options"),
    path=uri,
    options=_decode_walk_options,
    sandbox=fs_sandbox,
)
decode_open: Final = Decoder(
    OpenParams,
    "FsOpenParams",
    ("handle_id", "path"),
    handle_id=string,
    path=uri,
    mode=one_of("read", "replace"),
    atomic=_flag_false,
    part=optional(one_of("keep", "empty")),
    sandbox=fs_sandbox,
)
decode_read_block: Final = Decoder(
    ReadBlockParams,
    "FsReadBlockParams",
    ("handle_id", "offset", "len"),
    handle_id=string,
    offset=_u64,
    len=_usize,
)
decode_write_block: Final = Decoder(
    WriteBlockParams,
    "FsWriteBlockParams",
    ("handle_id", "offset", "chunk"),
    handle_id=string,
    offset=_u64,
    chunk=content,
)
decode_close: Final = Decoder(
    CloseParams, "FsCloseParams", ("handle_id",), handle_id=string, discard=_flag_false
)

decode_watch_missing: Final = Decoder(
    WatchMissingParams,
    "FsWatchMissingParams",
    ("watch_id", "missing"),
    watch_id=_u64,
    missing=uris,
    present=optional(uri),
    sandbox=fs_sandbox,
)

decode_watch: Final = Decoder(
    WatchParams,
    "FsWatchParams",
    ("watch_id", "path"),
    watch_id=string,
    path=uri,
    recursive=_flag_false,
    sandbox=fs_sandbox,
)
decode_unwatch: Final = Decoder(UnwatchParams, "FsUnwatchParams", ("watch_id",), watch_id=string)
decode_move: Final = Decoder(
    MoveParams,
    "FsMoveParams",
    ("source_path", "destination_path"),
    source_path=uri,
    destination_path=uri,
    overwrite=_flag_false,
    keep_attributes=_flag_false,
    sandbox=fs_sandbox,
)
decode_glob: Final = Decoder(
    GlobParams,
    "FsGlobParams",
    ("path", "pattern"),
    path=uri,
    pattern=string,
    kind=one_of("file", "directory", "any"),
    hidden=_flag_false,
    follow_symlinks=_flag_false,
    max_results=_usize,
    sandbox=fs_sandbox,
)
decode_search: Final = Decoder(
    SearchParams,
    "FsSearchParams",
    ("path", "pattern"),
    path=uri,
    pattern=string,
    fixed_strings=_flag_false,
    ignore_case=_flag_false,
    whole_words=_flag_false,
    globs=strings,
    hidden=_flag_false,
    no_ignore=_flag_false,
    before_context=_usize,
    after_context=_usize,
    max_results=_usize,
    sandbox=fs_sandbox,
)


# Results -----------------------------------------------------------------------------------------


class Result(Struct, rename="camel", gc=False):
    """Every field is written."""


class MetadataResult(Result):
    """`fs/getMetadata`."""

    is_directory: bool
    is_file: bool
    is_symlink: bool
    size: int
    created_at_ms: int
    modified_at_ms: int


class CanonicalizeResult(Result):
    """`fs/canonicalize`."""

    path: str


class OpenResult(Result):
    """`fs/open`."""

    handle_id: str


class BlockResult(Result):
    """`fs/readBlock`."""

    chunk: str
    eof: bool


def content_result(data: bytes | bytearray | memoryview) -> Encoded:
    """`fs/readFile`."""
    return encoded_content(pybase64.b64encode(data))


def encoded_content(text: bytes | memoryview) -> Encoded:
    """`fs/readFile`, from base64."""
    return Encoded(b'{"dataBase64":"', text, b'"}')


def block_result(data: bytes | memoryview, eof: bool) -> Encoded:
    """`fs/readBlock`."""
    return Encoded(b'{"chunk":"', pybase64.b64encode(data), b'","eof":true}' if eof else b'","eof":false}')


_NOT_PLAIN = re.compile(rb"[^ !#-\[\]-~]")
"""A byte that is not itself inside a JSON string."""

_DIRECTORY_KINDS: Final = (
    b'","isDirectory":true,"isFile":false}',
    b'","isDirectory":false,"isFile":true}',
    b'","isDirectory":false,"isFile":false}',
)
"""What follows the name of a directory, of a file, and of something else."""


def directory_result(directories: list[bytes], files: list[bytes], others: list[bytes]) -> Encoded:
    """`fs/readDirectory`, from the names of each kind as the operating system has them."""
    entries: list[bytes] = []
    for end, names in zip(_DIRECTORY_KINDS, (directories, files, others), strict=True):
        if not names:
            continue
        if _NOT_PLAIN.search(b"".join(names)):
            names = [_json_text(name) for name in names]
        begin = b'{"fileName":"'
        entries += (begin, (end + b"," + begin).join(names), end, b",")
    return Encoded(b'{"entries":[', b"".join(entries[:-1]), b"]}")


def directory_page_result(entries: Iterable[tuple[bytes, int]], more: bool) -> Encoded:
    """`fs/readDirectory` with `after`, from names and kinds (0 directory, 1 file, 2 something else).

    A name that is not UTF-8 is said a second time, as in a URI.
    """
    said: list[bytes] = []
    for name, kind in entries:
        end = _DIRECTORY_KINDS[kind]
        try:
            name.decode()
        except UnicodeDecodeError:
            end = b'","name":"%b%b' % (quote(name).encode(), end)
        said.append(b'{"fileName":"%b%b' % (_json_text(name), end))
    return Encoded(b'{"entries":[', b",".join(said), b'],"more":%b}' % (b"true" if more else b"false"))


def _json_text(name: bytes) -> bytes:
    """The inside of a JSON string; what is not UTF-8 becomes U+FFFD."""
    if _NOT_PLAIN.search(name) is None:
        return name
    return encode(name.decode("utf-8", "replace"))[1:-1]


def ranged_result(content: Encoded, eof: bool) -> Encoded:
    """`fs/readFile` of a part: the content's result, and whether the file ends with it."""
    return Encoded(content.head, content.body, b'","eof":true}' if eof else b'","eof":false}')


def walk_result(entries: Iterable[bytes], errors: list[tuple[str, str]], truncated: bool) -> Encoded:
    """`fs/walk`, from entries that are JSON already and errors as URI and message."""
    said = encode([{"path": path, "message": message} for path, message in errors])
    end = b'],"errors":%b,"truncated":%b}' % (said, b"true" if truncated else b"false")
    return Encoded(b'{"entries":[', b",".join(entries), end)


# Base64 from strangers ---------------------------------------------------------------------------


class BadBase64(ValueError):
    """Text that is not base64. Says what is wrong in the words every server of this protocol uses."""


_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_NO_SYMBOL = re.compile(rb"[^A-Za-z0-9+/]")
_PADDING: Final = 0x3D


def decode_base64(text: str) -> bytes:
    """The bytes; BadBase64 unless the text is exactly what an encoder would have written."""
    try:
        data = pybase64.b64decode(text, validate=True)
    except ValueError:
        raise BadBase64(base64_problem(text)) from None
    if text.endswith("="):
        rest = len(data) % 3
        if pybase64.b64encode_as_string(data[-rest:]) != text[-4:]:
            raise BadBase64(base64_problem(text))
    return data


def base64_problem(text: str) -> str:
    """What is wrong with a text that is not base64."""
    raw = text.encode("utf-8", "surrogatepass")
    rest = len(raw) % 4
    if rest == 1 and raw[-1] != _PADDING and raw[-1] not in _ALPHABET:
        return _invalid_symbol(raw[-1], len(raw) - 1)
    # The last quad, whole or not, is looked at separately, for it may be padded.
    start = len(raw) - (rest or min(4, len(raw)))
    bad = _NO_SYMBOL.search(raw, 0, start)
    if bad is not None:
        return _invalid_symbol(raw[bad.start()], bad.start())
    symbols = 0
    padding = 0
    for index in range(start, len(raw)):
        byte = raw[index]
        if byte == _PADDING:
            if index - start < 2:
                return _invalid_symbol(byte, index)
            padding += 1
        elif padding:
            return _invalid_symbol(_PADDING, start + symbols)
        elif byte not in _ALPHABET:
            return _invalid_symbol(byte, index)
        else:
            symbols += 1
    if symbols < 2:
        return f"Invalid input length: {start + symbols}"
    if (padding + symbols) % 4:
        return "Invalid padding"
    last = start + symbols - 1
    return f"Invalid last symbol {raw[last]}, offset {last}."


def _invalid_symbol(byte: int, offset: int) -> str:
    return f"Invalid symbol {byte}, offset {offset}."
