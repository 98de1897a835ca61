"""The params of fs/*: what is accepted, and which words refuse the rest."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.wire import files
from exec_server.wire.errors import RpcError
from exec_server.wire.files import BadBase64, decode_base64


def refused(decode: Any, params: Any) -> str:
    with pytest.raises(RpcError) as caught:
        decode(params)
    assert caught.value.code == -32602
    return caught.value.message


def test_defaults() -> None:
    params = files.decode_remove({"path": "file:///a/../b", "recursive": None, "unknown": 1})
    assert params == files.RemoveParams(path="file:///b", recursive=True, force=True, follow_symlinks=True)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "missing field `path`"),
        ({"path": 5}, "invalid type: number, expected a string"),
        ({"path": None}, "invalid type: null, expected a string"),
        ({"path": []}, "invalid type: sequence, expected a string"),
        ({"path": {}}, "invalid type: map, expected a string"),
        ({"path": True}, "invalid type: boolean `true`, expected a string"),
        ({"path": "/a"}, "invalid URI: relative URL without a base"),
        (
            {"path": "file:///a", "followSymlinks": 'y"\n'},
            'invalid type: string "y\\"\\n", expected a boolean',
        ),
        ({"followSymlinks": 1, "path": 5}, "invalid type: number, expected a boolean"),
        ({"path": 5, "followSymlinks": "y"}, "invalid type: number, expected a string"),
        ({"followSymlinks": "y"}, 'invalid type: string "y", expected a boolean'),
        (
            {"path": "file:///a", "sandbox": 5},
            "invalid type: number, expected struct WireFileSystemSandboxContext",
        ),
    ],
)
def test_the_first_mistake_decides(params: Any, message: str) -> None:
    assert refused(files.decode_read_file, params) == message


@pytest.mark.parametrize("params", [None, [], 5, "x", True])
def test_params_must_be_an_object(params: Any) -> None:
    assert "expected struct" in refused(files.decode_read_file, params)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "invalid number"),
        (1.0, "invalid number"),
        (2**64, "invalid number"),
        ("1", 'invalid type: string "1", expected u64'),
        (None, "invalid type: null, expected u64"),
        (True, "invalid type: boolean `true`, expected u64"),
    ],
)
def test_numbers(value: Any, message: str) -> None:
    assert refused(files.decode_read_block, {"handleId": "h", "offset": value, "len": 1}) == message


def test_modes() -> None:
    params = {"handleId": "h", "path": "file:///a"}
    assert files.decode_open(params).mode == "read"
    assert refused(files.decode_open, {**params, "mode": "w"}) == (
        "unknown variant `w`, expected `read` or `replace`"
    )
    assert refused(files.decode_open, {**params, "mode": None}) == (
        "invalid type: null, expected string or map"
    )


def test_walk_options_are_all_needed() -> None:
    options: dict[str, Any] = {"maxDepth": 1, "maxDirectories": 2, "maxEntries": 3}
    assert refused(files.decode_walk, {"path": "file:///a", "options": options}) == (
        "missing field `followDirectorySymlinks`"
    )
    options["followDirectorySymlinks"] = True
    assert files.decode_walk({"path": "file:///a", "options": options}).options == files.WalkOptions(
        max_depth=1, max_directories=2, max_entries=3, follow_directory_symlinks=True
    )


# Base64 ------------------------------------------------------------------------------------------


@given(st.binary())
def test_base64_round_trip(data: bytes) -> None:
    assert decode_base64(base64.b64encode(data).decode()) == data


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("!!!", "Invalid symbol 33, offset 0."),
        ("YQ", "Invalid padding"),
        ("YQ=", "Invalid padding"),
        ("Y Q==", "Invalid symbol 32, offset 1."),
        ("YQ==\n", "Invalid symbol 10, offset 4."),
        ("YR==", "Invalid last symbol 82, offset 1."),
        ("_-8=", "Invalid symbol 95, offset 0."),
        ("YWJj====", "Invalid symbol 61, offset 4."),
        ("A", "Invalid input length: 1"),
        ("AAAAA", "Invalid input length: 5"),
        ("=", "Invalid symbol 61, offset 0."),
        ("AA=A", "Invalid symbol 61, offset 2."),
        ("AAAA=AAA", "Invalid symbol 61, offset 4."),
        ("AAAé", "Invalid symbol 169, offset 4."),
        ("YWI=YWI=", "Invalid symbol 61, offset 3."),
    ],
)
def test_base64_problems(text: str, problem: str) -> None:
    with pytest.raises(BadBase64) as caught:
        decode_base64(text)
    assert str(caught.value) == problem


@given(st.text(alphabet="AQgwz/+=9 _\n", max_size=12))
def test_base64_is_strict(text: str) -> None:
    """Accepted is exactly what encoding the result gives back."""
    try:
        data = decode_base64(text)
    except BadBase64:
        return
    assert base64.b64encode(data).decode() == text


# Results -----------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=1)), st.lists(st.binary(min_size=1)), st.lists(st.binary(min_size=1)))
def test_listings_are_json_whatever_the_names(a: list[bytes], b: list[bytes], c: list[bytes]) -> None:
    entries = json.loads(bytes(files.directory_result(a, b, c)))["entries"]
    assert [entry["fileName"] for entry in entries] == [name.decode("utf-8", "replace") for name in a + b + c]
    assert [(entry["isDirectory"], entry["isFile"]) for entry in entries] == (
        [(True, False)] * len(a) + [(False, True)] * len(b) + [(False, False)] * len(c)
    )


@given(st.binary(), st.booleans())
def test_contents(data: bytes, eof: bool) -> None:
    encoded = base64.b64encode(data).decode()
    assert json.loads(bytes(files.content_result(data))) == {"dataBase64": encoded}
    assert json.loads(bytes(files.block_result(data, eof))) == {"chunk": encoded, "eof": eof}
