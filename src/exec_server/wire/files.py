"""Files, as they travel: the params of every `fs/*` method, and its results.

Params are decoded here by tables and not by msgspec: which of several mistakes is reported, and in
which words, is part of the protocol. Fields are looked at in the order in which the message has them;
the first bad one decides, then the first missing one. Results with many entries, and file contents,
are put together as bytes without a JSON encoder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, Literal, TypeVar

import pybase64
from msgspec import Raw, Struct
from msgspec.json import encode

from .errors import RpcError, invalid_params
from .params import MAX_U64
from .uri import parse as parse_uri

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
    "directory_result",
    "walk_result",
]

T = TypeVar("T")
Check = Callable[[Any], Any]
Kind = Literal["file", "directory", "other"]
OpenMode = Literal["read", "replace"]
Sandbox = dict[str, Any]
"""What an operation may touch. Taken apart where that is decided."""

# Wrong values ------------------------------------------------------------------------------------


def wrong_type(value: Any, wanted: str) -> RpcError:
    """`value` is of a JSON type that cannot be here."""
    if value is None:
        found = "null"
    elif type(value) is bool:
        found = f"boolean `{'true' if value else 'false'}`"
    elif type(value) is str:
        found = f"string {_quoted(value)}"
    elif type(value) is list:
        found = "sequence"
    elif type(value) is dict:
        found = "map"
    else:
        found = "number"
    return invalid_params(f"invalid type: {found}, expected {wanted}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


# Checks: a JSON value in, what it stands for out ---------------------------------------------------


def string(value: Any) -> str:
    if type(value) is not str:
        raise wrong_type(value, "a string")
    return value


def uri(value: Any) -> str:
    """A path URI, in normal form afterwards."""
    return parse_uri(string(value))


def uris(value: Any) -> list[str]:
    if type(value) is not list:
        raise wrong_type(value, "a sequence")
    return [uri(item) for item in value]


def strings(value: Any) -> list[str]:
    if type(value) is not list:
        raise wrong_type(value, "a sequence")
    return [string(item) for item in value]


def boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise wrong_type(value, "a boolean")
    return value


def whole_number(wanted: str) -> Check:
    """An unsigned 64-bit integer; `wanted` is its name in the error."""

    def check(value: Any) -> int:
        if type(value) is int and 0 <= value <= MAX_U64:
            return value
        if type(value) is int or type(value) is float:
            raise invalid_params("invalid number")
        raise wrong_type(value, wanted)

    return check


def optional(check: Check, default: Any = None) -> Check:
    """Null means what absence means."""
    return lambda value: default if value is None else check(value)


def one_of(*names: str) -> Check:
    quoted = [f"`{name}`" for name in names]
    expected = " or ".join(quoted) if len(quoted) < 3 else "one of " + ", ".join(quoted)

    def check(value: Any) -> str:
        if type(value) is not str:
            raise wrong_type(value, "string or map")
        if value not in names:
            raise invalid_params(f"unknown variant `{value}`, expected {expected}")
        return value

    return check


def sandbox(value: Any) -> Sandbox | None:
    if value is not None and type(value) is not dict:
        raise wrong_type(value, "struct WireFileSystemSandboxContext")
    return value


class Decoder(Generic[T]):
    """Makes a `T` of a JSON object: `fields` says how, by wire name, in the order of the protocol."""

    def __init__(
        self, kind: Callable[..., T], name: str, required: tuple[str, ...], /, **fields: Check
    ) -> None:
        self._kind = kind
        self._name = name
        self._fields = {_camel(attribute): (attribute, check) for attribute, check in fields.items()}
        self._required = [(attribute, _camel(attribute)) for attribute in required]

    def __call__(self, params: Any) -> T:
        """The typed params, or RpcError -32602."""
        if type(params) is not dict:
            raise wrong_type(params, f"struct {self._name}")
        values: dict[str, Any] = {}
        fields = self._fields
        for key, value in params.items():
            field = fields.get(key)
            if field is not None:
                values[field[0]] = field[1](value)
        for attribute, name in self._required:
            if attribute not in values:
                raise invalid_params(f"missing field `{name}`")
        return self._kind(**values)


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


# Params ------------------------------------------------------------------------------------------


class Params(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """Paths are URIs in normal form. What has a default may be absent or, mostly, null."""


class PathParams(Params):
    """`fs/canonicalize` and `fs/readDirectory`."""

    path: str
    sandbox: Sandbox | None = None


class MetadataParams(Params):
    """`fs/getMetadata`."""

    path: str
    follow_symlinks: bool = True
    sandbox: Sandbox | None = None


class ReadFileParams(Params):
    """`fs/readFile`. `offset` and `length` are ours: a part of a file of any size."""

    path: str
    follow_symlinks: bool = True
    sandbox: Sandbox | None = None
    offset: int | None = None
    length: int | None = None


class WriteFileParams(Params):
    """`fs/writeFile`."""

    path: str
    data_base64: str
    follow_symlinks: bool = True
    sandbox: Sandbox | None = None


class CreateDirectoryParams(Params):
    """`fs/createDirectory`."""

    path: str
    recursive: bool = True
    follow_symlinks: bool = True
    sandbox: Sandbox | None = None


class RemoveParams(Params):
    """`fs/remove`."""

    path: str
    recursive: bool = True
    force: bool = True
    follow_symlinks: bool = True
    sandbox: Sandbox | None = None


class CopyParams(Params):
    """`fs/copy`."""

    source_path: str
    destination_path: str
    recursive: bool
    sandbox: Sandbox | None = None


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
    sandbox: Sandbox | None = None


class OpenParams(Params):
    """`fs/open`."""

    handle_id: str
    path: str
    mode: OpenMode = "read"
    sandbox: Sandbox | None = None


class ReadBlockParams(Params):
    """`fs/readBlock`."""

    handle_id: str
    offset: int
    len: int


class WriteBlockParams(Params):
    """`fs/writeBlock`."""

    handle_id: str
    offset: int
    chunk: str


class CloseParams(Params):
    """`fs/close`."""

    handle_id: str


class WatchMissingParams(Params):
    """`fs/watchMissing`."""

    watch_id: int
    missing: list[str]
    present: str | None = None


class WatchParams(Params):
    """`fs/watch`, ours. `recursive`: the whole tree below a directory, not only its entries."""

    watch_id: str
    path: str
    recursive: bool = False
    sandbox: Sandbox | None = None


class UnwatchParams(Params):
    """`fs/unwatch`, ours."""

    watch_id: str


class MoveParams(Params):
    """`fs/move`, ours: a rename, which replaces only what it is told to."""

    source_path: str
    destination_path: str
    overwrite: bool = False
    sandbox: Sandbox | None = None


class GlobParams(Params):
    """`fs/glob`, ours: paths below a directory that fit a pattern such as `src/**/*.{py,pyi}`."""

    path: str
    pattern: str
    kind: Literal["file", "directory", "any"] = "file"
    hidden: bool = False
    follow_symlinks: bool = False
    max_results: int = 1000
    sandbox: Sandbox | None = None


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
    sandbox: Sandbox | None = None


_flag_true = optional(boolean, True)
_u64 = whole_number("u64")
_usize = whole_number("usize")

decode_path: Final = Decoder(PathParams, "FsPathParams", ("path",), path=uri, sandbox=sandbox)
decode_metadata: Final = Decoder(
    MetadataParams,
    "FsGetMetadataParams",
    ("path",),
    path=uri,
    follow_symlinks=_flag_true,
    sandbox=sandbox,
)
decode_read_file: Final = Decoder(
    ReadFileParams,
    "FsReadFileParams",
    ("path",),
    path=uri,
    follow_symlinks=_flag_true,
    sandbox=sandbox,
    offset=optional(_u64),
    length=optional(_u64),
)
decode_write_file: Final = Decoder(
    WriteFileParams,
    "FsWriteFileParams",
    ("path", "data_base64"),
    path=uri,
    data_base64=string,
    follow_symlinks=_flag_true,
    sandbox=sandbox,
)
decode_create_directory: Final = Decoder(
    CreateDirectoryParams,
    "FsCreateDirectoryParams",
    ("path",),
    path=uri,
    recursive=_flag_true,
    follow_symlinks=_flag_true,
    sandbox=sandbox,
)
decode_remove: Final = Decoder(
    RemoveParams,
    "FsRemoveParams",
    ("path",),
    path=uri,
    recursive=_flag_true,
    force=_flag_true,
    follow_symlinks=_flag_true,
    sandbox=sandbox,
)
decode_copy: Final = Decoder(
    CopyParams,
    "FsCopyParams",
    ("source_path", "destination_path", "recursive"),
    source_path=uri,
    destination_path=uri,
    recursive=boolean,
    sandbox=sandbox,
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
    sandbox=sandbox,
)
decode_open: Final = Decoder(
    OpenParams,
    "FsOpenParams",
    ("handle_id", "path"),
    handle_id=string,
    path=uri,
    mode=one_of("read", "replace"),
    sandbox=sandbox,
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
    chunk=string,
)
decode_close: Final = Decoder(CloseParams, "FsCloseParams", ("handle_id",), handle_id=string)

decode_watch_missing: Final = Decoder(
    WatchMissingParams,
    "FsWatchMissingParams",
    ("watch_id", "missing"),
    watch_id=_u64,
    missing=uris,
    present=optional(uri),
)

_flag_false = optional(boolean, False)
decode_watch: Final = Decoder(
    WatchParams,
    "FsWatchParams",
    ("watch_id", "path"),
    watch_id=string,
    path=uri,
    recursive=_flag_false,
    sandbox=sandbox,
)
decode_unwatch: Final = Decoder(UnwatchParams, "FsUnwatchParams", ("watch_id",), watch_id=string)
decode_move: Final = Decoder(
    MoveParams,
    "FsMoveParams",
    ("source_path", "destination_path"),
    source_path=uri,
    destination_path=uri,
    overwrite=_flag_false,
    sandbox=sandbox,
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
    sandbox=sandbox,
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
    sandbox=sandbox,
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


def content_result(data: bytes | bytearray | memoryview) -> Raw:
    """`fs/readFile`."""
    return Raw(b'{"dataBase64":"%b"}' % pybase64.b64encode(data))


def block_result(data: bytes | memoryview, eof: bool) -> Raw:
    """`fs/readBlock`."""
    return Raw(b'{"chunk":"%b","eof":%b}' % (pybase64.b64encode(data), b"true" if eof else b"false"))


_NOT_PLAIN = re.compile(rb"[^ !#-\[\]-~]")
"""A byte that is not itself inside a JSON string."""

_DIRECTORY_ENTRY: Final[Mapping[Kind, bytes]] = {
    "directory": b'{"fileName":"%b","isDirectory":true,"isFile":false}',
    "file": b'{"fileName":"%b","isDirectory":false,"isFile":true}',
    "other": b'{"fileName":"%b","isDirectory":false,"isFile":false}',
}


def directory_result(directories: list[bytes], files: list[bytes], others: list[bytes]) -> Raw:
    """`fs/readDirectory`, from the names of each kind as the operating system has them."""
    entries: list[bytes] = []
    for kind, names in (("directory", directories), ("file", files), ("other", others)):
        template = _DIRECTORY_ENTRY[kind]  # type: ignore[index]  # the literals of the line above
        if _NOT_PLAIN.search(b"".join(names)):
            names = [_json_text(name) for name in names]
        entries += [template % name for name in names]
    return Raw(b'{"entries":[%b]}' % b",".join(entries))


def _json_text(name: bytes) -> bytes:
    """The inside of a JSON string; what is not UTF-8 becomes U+FFFD."""
    if _NOT_PLAIN.search(name) is None:
        return name
    return encode(name.decode("utf-8", "replace"))[1:-1]


def ranged_result(content: Raw, eof: bool) -> Raw:
    """`fs/readFile` of a part: the content's result, and whether the file ends with it."""
    return Raw(b"".join((memoryview(content)[:-1], b',"eof":true}' if eof else b',"eof":false}')))


def walk_result(entries: Iterable[bytes], errors: list[tuple[str, str]], truncated: bool) -> Raw:
    """`fs/walk`, from entries that are JSON already (`walk_entry`) and errors as URI and message."""
    return Raw(
        b'{"entries":[%b],"errors":%b,"truncated":%b}'
        % (
            b",".join(entries),
            encode([{"path": path, "message": message} for path, message in errors]),
            b"true" if truncated else b"false",
        )
    )


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
