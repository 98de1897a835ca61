"""wire/base64.py: one spelling for each sequence of bytes."""

from __future__ import annotations

import base64 as standard

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.wire import base64

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


@given(st.binary())
def test_what_is_encoded_is_decoded(data: bytes) -> None:
    text = base64.encode(data)
    assert text == standard.b64encode(data).decode()
    assert base64.encode_bytes(data) == text.encode()
    assert base64.decode(text) == data
    assert base64.decode(text.encode()) == base64.decode(memoryview(text.encode())) == data


def strictly(text: str) -> bytes | None:
    try:
        data = standard.b64decode(text, validate=True)
    except ValueError:
        return None
    return data if standard.b64encode(data).decode() == text else None


@given(st.text(alphabet=ALPHABET + "=\n -_é", max_size=24) | st.text())
def test_only_the_one_spelling_is_accepted(text: str) -> None:
    try:
        data: bytes | None = base64.decode(text)
    except ValueError:
        data = None
    assert data == strictly(text)
    try:
        data = base64.decode(memoryview(text.encode("utf-8", "surrogatepass")))
    except ValueError:
        data = None
    assert data == strictly(text)


@pytest.mark.parametrize("text", ["", "QQ==", "QUI=", "QUJD", "+/+/", "AA==", "AAA="])
def test_accepted(text: str) -> None:
    assert base64.encode(base64.decode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "!!!!",  # no symbol of the alphabet
        "Q",  # cannot be
        "QQ",  # no padding
        "QQ=",  # not enough
        "QQ===",  # too much
        "QUI==",
        "QUJD====",
        "QUJD=",
        "=",
        "==",
        "====",
        "=QQ=",
        "QQ==QQ==",  # padding inside
        "QR==",  # bits after the last byte
        "QUJ=",
        "QQ==\n",  # blanks
        " QQ==",
        "Q Q==",
        "-_-_",  # the other alphabet
        "QÜ==",
        "QQ=\0",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError):
        base64.decode(text)
