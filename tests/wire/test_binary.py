"""wire/binary.py: frames without base64."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import encode

from exec_server.wire.binary import (
    MAX_PROCESS_ID_BYTES,
    STREAM_CODES,
    BinaryOutput,
    BlockWrite,
    FilePart,
    decode,
    decode_file_part,
    decode_write_block,
    file_part_header,
    header,
    write_block_header,
)


@given(
    st.text(max_size=300),
    st.integers(0, 2**64 - 1),
    st.sampled_from(["stdout", "stderr", "pty"]),
    st.binary(),
)
def test_frames_survive(process_id: str, seq: int, stream: str, data: bytes) -> None:
    frame = header(process_id.encode(), seq, STREAM_CODES[stream]) + data  # type: ignore[index]
    assert decode(frame) == BinaryOutput(process_id, seq, stream, memoryview(data))  # type: ignore[arg-type]
    assert decode(memoryview(frame)).data.tobytes() == data


def test_layout() -> None:
    assert header(b"ab", 258, 2) == bytes([1, 2, 0, 2, 0, 0, 0, 0, 0, 0, 1, 2]) + b"ab"


def test_the_longest_id() -> None:
    frame = header(b"x" * MAX_PROCESS_ID_BYTES, 1, 1) + b"data"
    assert decode(frame).process_id == "x" * MAX_PROCESS_ID_BYTES
    assert decode(frame).data == b"data"


@given(st.binary(max_size=40))
def test_other_bytes_are_refused_or_mean_what_they_say(frame: bytes) -> None:
    try:
        output = decode(frame)
    except ValueError:
        return
    again = header(output.process_id.encode(), output.seq, STREAM_CODES[output.stream]) + output.data
    assert again == frame


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        bytes(11),
        header(b"", 1, 1)[:-1],
        header(b"p", 1, 1)[:-1],  # ends inside the id
        b"\2" + header(b"", 1, 1)[1:],  # another kind
        header(b"", 1, 0),
        header(b"", 1, 4),
        header(b"\xff", 1, 1),  # no UTF-8
    ],
)
def test_refused(frame: bytes) -> None:
    with pytest.raises(ValueError):
        decode(frame)


# Files -------------------------------------------------------------------------------------------

request_ids = st.integers(-(2**63), 2**63 - 1) | st.text(max_size=300)
sizes = st.integers(0, 2**64 - 1)


@given(request_ids, st.booleans(), sizes, st.binary())
def test_parts_survive(request_id: str | int, eof: bool, size: int, data: bytes) -> None:
    frame = file_part_header(encode(request_id), eof, size) + data
    assert decode_file_part(frame) == (request_id, FilePart(data, eof, size))
    assert decode_file_part(memoryview(frame)) == (request_id, FilePart(data, eof, size))


@given(request_ids, st.text(max_size=63), sizes, st.binary())
def test_blocks_survive(request_id: str | int, handle_id: str, offset: int, data: bytes) -> None:
    frame = write_block_header(encode(request_id), handle_id.encode(), offset) + data
    assert decode_write_block(frame) == BlockWrite(request_id, handle_id, offset, memoryview(data))


def test_layout_of_files() -> None:
    assert file_part_header(b"7", True, 258) == bytes([2, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 2]) + b"7"
    assert write_block_header(b"7", b"h", 3) == bytes([3, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3]) + b"7h"


@given(st.sampled_from([2, 3]), st.binary(max_size=40))
def test_other_bytes_are_refused_or_mean_what_they_say_of_files(kind: int, rest: bytes) -> None:
    frame = bytes([kind]) + rest
    try:
        if kind == 2:
            request_id, part = decode_file_part(frame)
            length = int.from_bytes(frame[2:6], "big")
            again = file_part_header(frame[14 : 14 + length], part.eof, part.size) + part.data
        else:
            block = decode_write_block(frame)
            request_id, length = block.request_id, int.from_bytes(frame[2:6], "big")
            raw_id = frame[14 : 14 + length]
            again = write_block_header(raw_id, block.handle_id.encode(), block.offset) + block.data
    except ValueError:
        return
    assert again == frame
    assert isinstance(request_id, str | int)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\2",
        file_part_header(b"1", False, 0)[:-1],  # ends inside the id
        b"\1" + file_part_header(b"1", False, 0)[1:],  # another kind
        b"\2\2" + file_part_header(b"1", False, 0)[2:],  # neither the end nor not
        file_part_header(b"", False, 0),
        file_part_header(b"null", False, 0),
        file_part_header(b"1.5", False, 0),
        file_part_header(b"9223372036854775808", False, 0),
        file_part_header(b'"\xff"', False, 0),
    ],
)
def test_refused_parts(frame: bytes) -> None:
    with pytest.raises(ValueError):
        decode_file_part(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\3",
        write_block_header(b"1", b"h", 0)[:-1],  # ends inside the handle
        write_block_header(b"1", b"", 0)[:-1],  # ends inside the id
        b"\2" + write_block_header(b"1", b"h", 0)[1:],
        write_block_header(b"true", b"h", 0),
        write_block_header(b"1", b"\xff", 0),
    ],
)
def test_refused_blocks(frame: bytes) -> None:
    with pytest.raises(ValueError):
        decode_write_block(frame)
