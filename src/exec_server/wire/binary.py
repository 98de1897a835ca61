"""Bytes without base64: the binary frames two of our own ends agree on.

Output. A client that understands it sends `"binaryOutput": true` with `initialize`; a server that will use it
answers `"binaryOutput": true` and announces the capability `binaryOutput`. From then on each
`process/output` of that connection is one binary WebSocket message instead of a text one:

    offset  size  field
    0       1     kind, 1 = process/output
    1       1     stream, 1 = stdout, 2 = stderr, 3 = pty
    2       2     n = length of the process id in UTF-8 bytes, big endian
    4       8     seq, big endian
    12      n     process id
    12+n    rest  the chunk itself

Processes whose id is longer than 65,535 bytes stay JSON.

Files. In the same way the two agree on `binaryFiles`. From then on the answer to `fs/readBlock`, and to
`fs/readFile` with a `length` of at most one block, may be a binary message if it is a success:

    offset  size  field
    0       1     kind, 2 = a part of a file
    1       1     1 if the file ends with it, else 0
    2       4     n = length of the request's id, big endian
    6       8     size of the file when it was read, big endian
    14      n     the request's id, as JSON
    14+n    rest  the part itself

and the client may send `fs/writeBlock` as a binary message; the answer to it is JSON as ever:

    offset  size  field
    0       1     kind, 3 = fs/writeBlock
    1       1     m = length of the handle's id in UTF-8 bytes
    2       4     n = length of the request's id, big endian
    6       8     offset in the file, big endian
    14      n     the request's id, as JSON
    14+n    m     the handle's id
    14+n+m  rest  the block itself

Everything else stays JSON in text messages.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import msgspec

from .envelope import RequestId
from .process import StreamName

__all__ = [
    "FILE_PART",
    "MAX_PROCESS_ID_BYTES",
    "OUTPUT",
    "STREAM_CODES",
    "WRITE_BLOCK",
    "BinaryOutput",
    "BlockWrite",
    "FilePart",
    "decode",
    "decode_file_part",
    "decode_write_block",
    "file_part_header",
    "header",
    "write_block_header",
]

OUTPUT: Final = 1
"""The kind of `process/output`."""

FILE_PART: Final = 2
"""The kind of an answer that is a part of a file."""

WRITE_BLOCK: Final = 3
"""The kind of `fs/writeBlock`."""

STREAM_CODES: Final[dict[StreamName, int]] = {"stdout": 1, "stderr": 2, "pty": 3}
_STREAM_NAMES: Final[dict[int, StreamName]] = {code: name for name, code in STREAM_CODES.items()}

MAX_PROCESS_ID_BYTES: Final = 65_535

_HEAD = struct.Struct("!BBHQ")
_pack = _HEAD.pack


class BinaryOutput(NamedTuple):
    """A decoded frame; `data` is a view into the message."""

    process_id: str
    seq: int
    stream: StreamName
    data: memoryview


def header(process_id: bytes, seq: int, stream: int) -> bytes:
    """What goes in front of a chunk."""
    return _pack(OUTPUT, stream, len(process_id), seq) + process_id


def decode(message: bytes | memoryview) -> BinaryOutput:
    """Take a frame apart; ValueError if it is not one."""
    view = memoryview(message)
    if len(view) < _HEAD.size:
        raise ValueError("binary frame is shorter than its header")
    kind, stream, length, seq = _HEAD.unpack_from(view)
    if kind != OUTPUT or stream not in _STREAM_NAMES:
        raise ValueError(f"unknown binary frame kind {kind}, stream {stream}")
    end = _HEAD.size + length
    if len(view) < end:
        raise ValueError("binary frame ends inside its process id")
    try:
        process_id = str(view[_HEAD.size : end], "utf-8")
    except UnicodeDecodeError:
        raise ValueError("binary frame's process id is not UTF-8") from None
    return BinaryOutput(process_id, seq, _STREAM_NAMES[stream], view[end:])


# Files -------------------------------------------------------------------------------------------

_PART_HEAD = struct.Struct("!BBIQ")
_WRITE_HEAD = struct.Struct("!BBIQ")
_decode_id = msgspec.json.Decoder(str | int).decode


class FilePart(NamedTuple):
    """Bytes of a file, on their way to whoever asked. `data` may be a view into a message."""

    data: bytes | memoryview
    eof: bool
    size: int = 0
    """Of the whole file, as far as the operating system says: 0 for many that have content, as in /proc."""


class BlockWrite(NamedTuple):
    """A decoded `fs/writeBlock`; `data` is a view into the message."""

    request_id: RequestId
    handle_id: str
    offset: int
    data: memoryview


def file_part_header(request_id: bytes, eof: bool, size: int) -> bytes:
    """What goes in front of a part; the id is JSON."""
    return _PART_HEAD.pack(FILE_PART, eof, len(request_id), size) + request_id


def decode_file_part(message: bytes | memoryview) -> tuple[RequestId, FilePart]:
    """Who asked, and the part; ValueError if the message is none."""
    view = memoryview(message)
    if len(view) < _PART_HEAD.size:
        raise ValueError("binary frame is shorter than its header")
    kind, eof, length, size = _PART_HEAD.unpack_from(view)
    if kind != FILE_PART or eof > 1:
        raise ValueError(f"binary frame of kind {kind}, {eof} is not a part of a file")
    end = _PART_HEAD.size + length
    return _request_id(view, _PART_HEAD.size, end), FilePart(view[end:], eof == 1, size)


def write_block_header(request_id: bytes, handle_id: bytes, offset: int) -> bytes:
    """What goes in front of a block; the request's id is JSON."""
    head = _WRITE_HEAD.pack(WRITE_BLOCK, len(handle_id), len(request_id), offset)
    return b"".join((head, request_id, handle_id))


def decode_write_block(message: bytes | memoryview) -> BlockWrite:
    """Take a block apart; ValueError if the message is none."""
    view = memoryview(message)
    if len(view) < _WRITE_HEAD.size:
        raise ValueError("binary frame is shorter than its header")
    kind, handle_length, id_length, offset = _WRITE_HEAD.unpack_from(view)
    if kind != WRITE_BLOCK:
        raise ValueError(f"binary frame of kind {kind} is not a block to write")
    handle = _WRITE_HEAD.size + id_length
    request_id = _request_id(view, _WRITE_HEAD.size, handle)
    end = handle + handle_length
    if len(view) < end:
        raise ValueError("binary frame ends inside its handle id")
    try:
        handle_id = str(view[handle:end], "utf-8")
    except UnicodeDecodeError:
        raise ValueError("binary frame's handle id is not UTF-8") from None
    return BlockWrite(request_id, handle_id, offset, view[end:])


def _request_id(view: memoryview, start: int, end: int) -> RequestId:
    if len(view) < end:
        raise ValueError("binary frame ends inside its request id")
    try:
        request_id: RequestId = _decode_id(view[start:end])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ValueError("binary frame's request id is neither a string nor an integer") from None
    if type(request_id) is int and not -(2**63) <= request_id < 2**63:
        raise ValueError("binary frame's request id does not fit 64 bits")
    return request_id
