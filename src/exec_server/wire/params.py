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
        raise invalid_params(_reworded(str(error), kind)) from None
    except (OverflowError, RecursionError) as error:
        raise invalid_params(f"invalid number: {error}") from None


def _reworded(text: str, kind: type) -> str:
    """The decoder's complaint in the words peers of the reference know, where there are such words."""
    import re

    text = text.replace("Object missing required field", "missing field")
    unknown = re.fullmatch(r"Invalid enum value '(.*)' - at `\$\.(\w+)`", text, re.DOTALL)
    if unknown is None:
        return text
    choices = [f"`{choice}`" for choice in _choices(kind, unknown[2])]
    expected = " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"
    return f"unknown variant `{unknown[1]}`, expected {expected}"


def _choices(kind: type, name: str) -> list[str]:
    """What a field of literals may hold."""
    from typing import get_args, get_type_hints

    position = kind.__struct_encode_fields__.index(name)  # type: ignore[attr-defined]  # kind is a Struct
    hint = get_type_hints(kind)[kind.__struct_fields__[position]]  # type: ignore[attr-defined]
    found: list[str] = []
    todo = [hint]
    while todo:
        for argument in get_args(todo.pop()):
            found.append(argument) if isinstance(argument, str) else todo.append(argument)
    return found
