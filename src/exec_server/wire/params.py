"""From decoded JSON to a typed value, with the protocol's rules for what may be missing."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from .errors import invalid_params

__all__ = ["U16", "U64", "NoParams", "decode_params"]

T = TypeVar("T")

MAX_U64: Final = 2**64 - 1

U64 = Annotated[int, Meta(ge=0)]
"""A non-negative integer. msgspec knows no bound this high, so whoever uses it compares with MAX_U64."""

U16 = Annotated[int, Meta(ge=0, le=65535)]


class NoParams(Struct, frozen=True):
    """Methods without parameters take null, nothing, or an empty object."""


NO_PARAMS: Final = NoParams()


def decode_params(params: Any, kind: type[T]) -> T:
    """The params of a request as `kind`, or RpcError -32602."""
    if kind is NoParams:
        if not params and (params is None or type(params) is dict):
            return NO_PARAMS  # type: ignore[return-value]  # kind is NoParams, which mypy cannot narrow
        shape = "sequence" if isinstance(params, list) else "map" if isinstance(params, dict) else "value"
        raise invalid_params(f"invalid type: {shape}, expected no params")
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise invalid_params(str(error).replace("Object missing required field", "missing field")) from None
    except (OverflowError, RecursionError) as error:
        raise invalid_params(f"invalid number: {error}") from None
