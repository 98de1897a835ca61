"""The one message of the relay, `codex.exec_server.relay.v1.RelayMessageFrame`, to bytes and back.

Protocol buffers by hand, because the message is small and a pinned protobuf runtime would fight with the one
of whoever installs this. Tests compare it with the protobuf package.

    1 version     2 stream_id   3 ack         4 ack_bits
    5 data        6 ack_frame   7 resume      8 reset      9 heartbeat   10 handshake    (one of these)
    11 traceparent              12 tracestate
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

__all__ = [
    "MAX_FRAME_BYTES",
    "Ack",
    "BadFrame",
    "Body",
    "Data",
    "Frame",
    "Handshake",
    "Heartbeat",
    "Reset",
    "Resume",
    "decode",
    "encode",
    "encode_data",
]

VERSION: Final = 1
MAX_FRAME_BYTES: Final = 262_144
"""Largest WebSocket message of the relay, and so the largest frame."""

NOTHING_RECEIVED: Final = 0xFFFF_FFFF
"""`ack` of an end that takes part in acknowledging and has received nothing yet."""

WIDE: Final = 1
"""`ack_bits` of the handshake of an end that holds more ahead of a missing record than the reference does. On
a handshake nothing can have arrived, and so the field says nothing else."""

_UINT32: Final = 0xFFFF_FFFF
_MAX_VARINT_BYTES: Final = 10
_MAX_GROUP_DEPTH: Final = 100
"""Of groups inside groups in fields nobody knows; protobuf stops there, too."""


class BadFrame(ValueError):
    """Not a valid frame. `stream_id` is whose it would have been, as far as that can be told."""

    def __init__(self, reason: str, stream_id: str = "") -> None:
        super().__init__(reason)
        self.stream_id = stream_id


class Data(Struct, frozen=True):
    """One record. Its segment fields are always 0 of 1; large messages are cut inside the records."""

    seq: int
    payload: bytes | memoryview
    segment_index: int = 0
    segment_count: int = 1


class Ack(Struct, frozen=True):
    """Nothing but the ack fields every frame has."""


class Resume(Struct, frozen=True):
    """This stream is here now; the sender's next record is that one."""

    next_seq: int = 0


class Reset(Struct, frozen=True):
    """The stream is over. The reason is for logs; anybody on the way could have written it."""

    reason: str


class Heartbeat(Struct, frozen=True):
    """Still here."""


class Handshake(Struct, frozen=True):
    """A message of the Noise handshake."""

    payload: bytes


Body = Data | Ack | Resume | Reset | Heartbeat | Handshake


class Frame(Struct, frozen=True):
    """A valid frame."""

    stream_id: str
    body: Body
    ack: int = 0
    ack_bits: int = 0
    traceparent: str | None = None
    tracestate: str | None = None

    @property
    def acknowledges(self) -> bool:
        """Whether this can only come from an end that takes part in acknowledging."""
        return bool(self.ack or self.ack_bits) or type(self.body) is Ack

    @property
    def wide(self) -> bool:
        """Whether this is the handshake of an end with a wide window."""
        return type(self.body) is Handshake and self.ack == NOTHING_RECEIVED and self.ack_bits == WIDE


# Writing -----------------------------------------------------------------------------------------


def encode(frame: Frame) -> bytes:
    """The bytes of a frame, fields in ascending order, defaults left out."""
    body = frame.body
    if type(body) is Data:
        content = b"".join(
            (
                _number(0x08, body.seq),
                _number(0x10, body.segment_index),
                _number(0x18, body.segment_count),
                _bytes(0x22, body.payload) if body.payload else b"",
            )
        )
        field = _bytes(0x2A, content)
    elif type(body) is Ack:
        field = b"\x32\x00"
    elif type(body) is Resume:
        field = _bytes(0x3A, _number(0x08, body.next_seq))
    elif type(body) is Reset:
        field = _bytes(0x42, _bytes(0x0A, body.reason.encode()) if body.reason else b"")
    elif type(body) is Heartbeat:
        field = b"\x4a\x00"
    elif type(body) is Handshake:
        field = _bytes(0x52, _bytes(0x0A, body.payload) if body.payload else b"")
    parts = [head(frame.stream_id), _number(0x18, frame.ack), _number(0x20, frame.ack_bits), field]
    if frame.traceparent is not None:
        parts.append(_bytes(0x5A, frame.traceparent.encode()))
    if frame.tracestate is not None:
        parts.append(_bytes(0x62, frame.tracestate.encode()))
    return b"".join(parts)


def head(stream_id: str) -> bytes:
    """What every frame of a stream begins with."""
    return b"\x08\x01" + (_bytes(0x12, stream_id.encode()) if stream_id else b"")


def encode_data(head: bytes, ack: int, ack_bits: int, seq: int, payload: bytes) -> bytes:
    """A data frame of a stream whose head is known: the same bytes as `encode` makes, in one copy."""
    before = b"%b\x18\x01\x22%b" % (_number(0x08, seq), _varint(len(payload)))
    return b"".join(
        (
            head,
            _number(0x18, ack),
            _number(0x20, ack_bits),
            b"\x2a",
            _varint(len(before) + len(payload)),
            before,
            payload,
        )
    )


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SMALL[value]
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_SMALL: Final = [bytes((value,)) for value in range(0x80)]


def _number(tag: int, value: int) -> bytes:
    return _SMALL[tag] + _varint(value) if value else b""


def _bytes(tag: int, value: bytes | memoryview) -> bytes:
    return b"".join((_SMALL[tag], _varint(len(value)), value))


# Reading -----------------------------------------------------------------------------------------


class _Fields:
    """What a message being read has said so far; later values replace earlier ones, as everywhere."""

    __slots__ = (
        "ack",
        "ack_bits",
        "body",
        "body_number",
        "stream_id",
        "traceparent",
        "tracestate",
        "version",
    )

    def __init__(self) -> None:
        self.version = 0
        self.stream_id = ""
        self.ack = 0
        self.ack_bits = 0
        self.body_number = 0
        self.body: list[_Piece] = []
        self.traceparent: str | None = None
        self.tracestate: str | None = None


def decode(message: bytes | memoryview) -> Frame:
    """Read a frame and check that it is valid; BadFrame says why not. Payloads of data are views into it."""
    if len(message) > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {len(message)} bytes")
    return _decode_record(message) or _decode_any(message)


_VARINT: Final = rb"([\x80-\xff]{0,4}[\x00-\x7f])"
_RECORD: Final = re.compile(
    rb"\x08\x01\x12\x24([0-9a-f-]{36})(?:\x18%b)?(?:\x20%b)?\x2a%b(?:\x08%b)?\x18\x01\x22%b"
    % ((_VARINT,) * 5)
)
"""All of a data frame up to its payload, as everybody writes it: nearly every frame there is, and five times
faster to read like this than field by field."""


def _decode_record(message: bytes | memoryview) -> Frame | None:
    """A data frame of the usual form; None for any other, valid or not."""
    match = _RECORD.match(message)
    if match is None:
        return None
    stream_id, ack, ack_bits, size, seq, length = match.groups()
    start, end = match.end(), len(message)
    number = 0 if seq is None else _value(seq)
    if (
        _value(length) != end - start
        or _value(size) != end - match.end(4)
        or start == end
        or number == _UINT32
    ):
        return None
    return Frame(
        stream_id.decode(),
        Data(number, memoryview(message)[start:]),
        0 if ack is None else _value(ack),
        0 if ack_bits is None else _value(ack_bits),
    )


def _value(varint: bytes) -> int:
    value = shift = 0
    for byte in varint:
        value |= (byte & 0x7F) << shift
        shift += 7
    return value & _UINT32


def _decode_any(message: bytes | memoryview) -> Frame:
    """Any frame, field by field."""
    fields = _Fields()
    view = memoryview(message)
    at, end = 0, len(message)
    try:
        while at < end:
            at = _read_field(fields, view, at, end)
        body = _read_body(fields)
    except _Malformed as error:
        raise BadFrame(str(error), fields.stream_id) from None
    if fields.version != VERSION:
        raise BadFrame(f"version {fields.version}", fields.stream_id)
    if not fields.stream_id.strip():
        raise BadFrame("no stream id")
    reason = _invalid(body)
    if reason is not None or body is None:
        raise BadFrame(reason or "no body", fields.stream_id)
    return Frame(fields.stream_id, body, fields.ack, fields.ack_bits, fields.traceparent, fields.tracestate)


def _invalid(body: Body | None) -> str | None:
    if type(body) is Data:
        if not body.payload:
            return "data without a payload"
        if not body.segment_index < body.segment_count or body.segment_index > body.seq:
            return f"segment {body.segment_index} of {body.segment_count}"
        if body.seq == _UINT32:
            return "a record number that does not exist"
    elif type(body) is Handshake and not body.payload:
        return "a handshake without a payload"
    elif type(body) is Reset and not body.reason:
        return "a reset without a reason"
    return None


class _Malformed(Exception):
    """Not protocol buffers."""


def _read_field(fields: _Fields, view: memoryview, at: int, end: int) -> int:
    tag, at = _read_varint(view, at, end)
    tag &= _UINT32
    if tag in (0x08, 0x18, 0x20):
        value, at = _read_varint(view, at, end)
        value &= _UINT32
        if tag == 0x08:
            fields.version = value
        elif tag == 0x18:
            fields.ack = value
        else:
            fields.ack_bits = value
    elif tag in _DELIMITED:
        content, at = _read_bytes(view, at, end)
        if tag == 0x12:
            fields.stream_id = _text(content)
        elif tag == 0x5A:
            fields.traceparent = _text(content)
        elif tag == 0x62:
            fields.tracestate = _text(content)
        else:
            number = tag >> 3
            if number != fields.body_number:
                fields.body_number, fields.body = number, []
            # Also of a body that is replaced later: half a message is no message.
            fields.body.append(_PIECES[number](content))
    else:
        at = _skip(view, at, end, tag)
    return at


_DELIMITED: Final = frozenset((0x12, 0x2A, 0x32, 0x3A, 0x42, 0x4A, 0x52, 0x5A, 0x62))


def _read_body(fields: _Fields) -> Body | None:
    """The body from all its pieces: a message given twice is the two of them merged."""
    number = fields.body_number
    numbers: dict[int, int] = {}
    payload: memoryview | None = None
    for piece_numbers, piece in fields.body:
        numbers |= piece_numbers
        payload = payload if piece is None else piece
    if number == 5:
        return Data(
            numbers.get(1, 0), payload if payload is not None else b"", numbers.get(2, 0), numbers.get(3, 0)
        )
    if number == 6:
        return Ack()
    if number == 7:
        return Resume(numbers.get(1, 0))
    if number == 8:
        return Reset("" if payload is None else _text(payload))
    if number == 9:
        return Heartbeat()
    if number == 10:
        return Handshake(b"" if payload is None else bytes(payload))
    return None


_Piece = tuple[dict[int, int], memoryview | None]


def _read_piece(view: memoryview, numbers: frozenset[int], payload_tag: int, text: bool) -> _Piece:
    """The uint32 fields and the one string or bytes field of a submessage."""
    found: dict[int, int] = {}
    payload: memoryview | None = None
    at, end = 0, len(view)
    while at < end:
        tag, at = _read_varint(view, at, end)
        tag &= _UINT32
        if tag in numbers:
            value, at = _read_varint(view, at, end)
            found[tag >> 3] = value & _UINT32
        elif tag == payload_tag:
            payload, at = _read_bytes(view, at, end)
            if text:
                _text(payload)
        else:
            at = _skip(view, at, end, tag)
    return found, payload


_NO_PAYLOAD: Final = -1
_PIECES: Final = {
    5: lambda view: _read_piece(view, frozenset((0x08, 0x10, 0x18)), 0x22, False),
    6: lambda view: _read_piece(view, frozenset(), _NO_PAYLOAD, False),
    7: lambda view: _read_piece(view, frozenset((0x08,)), _NO_PAYLOAD, False),
    8: lambda view: _read_piece(view, frozenset(), 0x0A, True),
    9: lambda view: _read_piece(view, frozenset(), _NO_PAYLOAD, False),
    10: lambda view: _read_piece(view, frozenset(), 0x0A, False),
}


def _read_varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    if at < end and (byte := view[at]) < 0x80:
        return byte, at + 1
    value = shift = 0
    for index in range(at, min(end, at + _MAX_VARINT_BYTES)):
        byte = view[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, index + 1
        shift += 7
    raise _Malformed("a number without an end")


def _read_bytes(view: memoryview, at: int, end: int) -> tuple[memoryview, int]:
    length, at = _read_varint(view, at, end)
    if length > end - at:
        raise _Malformed("a length beyond the end")
    return view[at : at + length], at + length


def _text(content: memoryview) -> str:
    try:
        return str(content, "utf-8")
    except UnicodeDecodeError:
        raise _Malformed("a text that is not UTF-8") from None


def _skip(view: memoryview, at: int, end: int, tag: int, depth: int = 0) -> int:
    """Past a field nobody knows."""
    if not tag >> 3:
        raise _Malformed("field number 0")
    kind = tag & 7
    if kind == 0:
        return _read_varint(view, at, end)[1]
    if kind == 2:
        return _read_bytes(view, at, end)[1]
    if kind in (1, 5):
        at += 8 if kind == 1 else 4
        if at > end:
            raise _Malformed("a field beyond the end")
        return at
    if kind == 3 and depth < _MAX_GROUP_DEPTH:
        while True:
            inner, at = _read_varint(view, at, end)
            inner &= _UINT32
            if inner & 7 == 4:
                if inner >> 3 != tag >> 3:
                    raise _Malformed("a group that ends as another")
                return at
            at = _skip(view, at, end, inner, depth + 1)
    raise _Malformed(f"wire type {kind}")
