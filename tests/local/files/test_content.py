"""Base64 in pieces is base64 of the whole."""

from __future__ import annotations

import base64
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from exec_server.local.files.content import PIECE_BYTES, PIECE_TEXT, Decoded, encode_content
from exec_server.local.files.lane import ALONE
from exec_server.wire.files import BadBase64

SIZES = [0, 1, 2, 3, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, PIECE_BYTES * 2, PIECE_BYTES * 3 + 2]


@pytest.mark.parametrize("size", SIZES)
def test_encoding(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    with (tmp_path / "f").open("rb") as file:
        for start, most in ((0, size), (0, size + 10), (1, size), (0, size // 2), (size // 3, size // 3)):
            result = json.loads(bytes(encode_content(file.fileno(), start, most, ALONE)))
            assert base64.b64decode(result["dataBase64"], validate=True) == data[start : start + most]


@pytest.mark.parametrize("expected", [0, 1, PIECE_BYTES, 3 * PIECE_BYTES, 10 * PIECE_BYTES])
def test_memory_is_taken_for_what_comes_and_not_for_what_could(tmp_path: Path, expected: int) -> None:
    path = tmp_path / "f"
    data = os.urandom(2 * PIECE_BYTES + 5)
    path.write_bytes(data)
    with path.open("rb") as file:
        tracemalloc.start()
        try:
            result = encode_content(file.fileno(), 0, 400 * 1024 * 1024, ALONE, expected)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert base64.b64decode(json.loads(bytes(result))["dataBase64"]) == data
    assert most < 40 * 1024 * 1024


@pytest.mark.parametrize("size", SIZES)
def test_decoding(size: int) -> None:
    data = os.urandom(size)
    decoded = Decoded(base64.b64encode(data).decode())
    assert decoded.size == size
    for _ in range(2):
        assert b"".join(decoded.pieces()) == data


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("A" * PIECE_TEXT + "A", f"Invalid input length: {PIECE_TEXT + 1}"),
        ("A" * (PIECE_TEXT - 2) + "==" + "AAAA", f"Invalid symbol 61, offset {PIECE_TEXT - 2}."),
        ("A" * PIECE_TEXT + "A B=", f"Invalid symbol 32, offset {PIECE_TEXT + 1}."),
        ("A" * PIECE_TEXT + "AB==", f"Invalid last symbol 66, offset {PIECE_TEXT + 1}."),
        ("A" * PIECE_TEXT * 2 + "=", f"Invalid symbol 61, offset {PIECE_TEXT * 2}."),
    ],
)
def test_problems_are_where_they_are_in_the_whole(text: str, problem: str) -> None:
    with pytest.raises(BadBase64) as caught:
        Decoded(text)
    assert str(caught.value) == problem
