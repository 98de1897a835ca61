"""wire/binary.py: output frames without base64."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.wire.binary import MAX_PROCESS_ID_BYTES, STREAM_CODES, BinaryOutput, decode, header


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
