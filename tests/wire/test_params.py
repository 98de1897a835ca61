"""wire/params.py: what may be missing, and what may not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, ValidationError

from exec_server.wire.errors import RpcError
from exec_server.wire.params import MAX_U64, U16, U64, NoParams, decode_params


class Sample(Struct, rename="camel"):
    needed_text: str
    number: U64 | None = None
    short: U16 = 1
    flag: bool = False

    def __post_init__(self) -> None:
        if (self.number or 0) > MAX_U64:
            raise ValidationError("invalid number")


def refused(params: Any, kind: type = Sample) -> str:
    with pytest.raises(RpcError) as refusal:
        decode_params(params, kind)
    assert refusal.value.code == -32602
    return refusal.value.message


def test_unknown_fields_are_ignored() -> None:
    assert decode_params({"neededText": "x", "more": [1]}, Sample) == Sample("x")


def test_what_may_be_null_and_what_may_be_absent() -> None:
    assert decode_params({"neededText": "x", "number": None}, Sample) == Sample("x")
    refused({"neededText": "x", "flag": None})
    assert refused({}) == "missing field `neededText`"
    assert "`needed_text`" not in refused({"neededText": None})


@pytest.mark.parametrize("params", [None, [], ["x"], "x", 1, True])
def test_only_objects_are_params(params: Any) -> None:
    refused(params)


@pytest.mark.parametrize("number", [-1, 1.5, 1.0, "1", True, 2**64, 10**30, [], {}])
def test_what_is_no_u64(number: Any) -> None:
    refused({"neededText": "x", "number": number})


@pytest.mark.parametrize("number", [0, 1, 2**53 + 1, 2**63, 2**64 - 1])
def test_what_is_a_u64(number: int) -> None:
    assert decode_params({"neededText": "x", "number": number}, Sample).number == number


@pytest.mark.parametrize("number", [-1, 65536, 2**64])
def test_what_is_no_u16(number: int) -> None:
    refused({"neededText": "x", "short": number})


@pytest.mark.parametrize("params", [None, {}])
def test_no_params(params: Any) -> None:
    assert decode_params(params, NoParams) == NoParams()


@pytest.mark.parametrize("params", [[], {"a": 1}, 1, "x", False, [1]])
def test_more_than_no_params(params: Any) -> None:
    refused(params, NoParams)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["neededText", "number"]), inner)
    ),
    max_leaves=8,
)


@given(json_values)
def test_any_json_is_decoded_or_refused(params: Any) -> None:
    try:
        decoded: Any = decode_params(params, Sample)
    except RpcError as error:
        decoded = error
    assert isinstance(decoded, Sample) or decoded.code == -32602
