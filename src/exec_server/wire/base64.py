"""Bytes inside JSON: standard base64, strict on the way in."""

from __future__ import annotations

import binascii

import pybase64

__all__ = ["decode", "encode", "encode_bytes"]


def encode(data: bytes | bytearray | memoryview) -> str:
    """Bytes as base64 text."""
    return pybase64.b64encode_as_string(data)


encode_bytes = pybase64.b64encode
"""Bytes as base64 bytes, for messages that are put together without a JSON encoder."""


def decode(text: str | bytes | memoryview) -> bytes:
    """Base64 text as bytes; ValueError unless it is exactly what `encode` would have written.

    Blanks, missing padding and stray bits after the last byte are refused: two spellings of the same
    bytes would be two different messages to anything that compares or signs them.
    """
    try:
        data = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"invalid base64: {error}") from None
    rest = len(data) % 3
    if rest:
        end = text[-4:] if isinstance(text, str) else bytes(text[-4:]).decode()
        if pybase64.b64encode_as_string(data[-rest:]) != end:
            raise ValueError("invalid base64: the last symbol has stray bits")
    return data
