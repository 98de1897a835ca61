"""Output without base64: the binary frame two of our own ends agree on.

A client that understands it sends `"binaryOutput": true` with `initialize`; a server that will use it
answers `"binaryOutput": true` and announces the capability `binaryOutput`. From then on each
`process/output` of that connection is one binary WebSocket message instead of a text one:

    offset  size  field
    0       1     kind, 1 = process/output
    1       1     stream, 1 = stdout, 2 = stderr, 3 = pty
    2       2     n = length of the process id in UTF-8 bytes, big endian
    4       8     seq, big endian
    12      n     process id
    12+n    rest  the chunk itself

Everything else stays JSON in text messages. Processes whose id is longer than 65,535 bytes stay JSON.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from .process import StreamName

__all__ = ["MAX_PROCESS_ID_BYTES", "OUTPUT", "STREAM_CODES", "BinaryOutput", "decode", "header"]

OUTPUT: Final = 1
"""The only kind there is."""

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
