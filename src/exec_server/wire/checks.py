"""Decoding by tables: which of several mistakes is reported, and in which words, is part of the protocol.

Fields are looked at in the order in which the message has them; the first bad one decides, then the first
missing one. msgspec, which decodes what has no such rules, tells neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .errors import RpcError, invalid_params
from .params import MAX_U64
from .uri import parse as parse_uri

__all__ = [
    "Check",
    "Decoder",
    "boolean",
    "content",
    "one_of",
    "optional",
    "string",
    "strings",
    "uri",
    "uris",
    "whole_number",
    "wrong_type",
]

T = TypeVar("T")
Check = Callable[[Any], Any]

# Wrong values ------------------------------------------------------------------------------------


def wrong_type(value: Any, wanted: str) -> RpcError:
    """`value` is of a JSON type that cannot be here."""
    if value is None:
        found = "null"
    elif type(value) is bool:
        found = f"boolean `{'true' if value else 'false'}`"
    elif type(value) is str:
        found = f"string {_quoted(value)}"
    elif type(value) is list:
        found = "sequence"
    elif type(value) is dict:
        found = "map"
    else:
        found = "number"
    return invalid_params(f"invalid type: {found}, expected {wanted}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


# Checks: a JSON value in, what it stands for out ---------------------------------------------------


def string(value: Any) -> str:
    if type(value) is not str:
        raise wrong_type(value, "a string")
    return value


def content(value: Any) -> str | bytes:
    """Base64 in a string; bytes, which no JSON decoder makes, were decoded before (envelope.py)."""
    return value if type(value) is bytes else string(value)


def uri(value: Any) -> str:
    """A path URI, in normal form afterwards."""
    return parse_uri(string(value))


def uris(value: Any) -> list[str]:
    if type(value) is not list:
        raise wrong_type(value, "a sequence")
    return [uri(item) for item in value]


def strings(value: Any) -> list[str]:
    if type(value) is not list:
        raise wrong_type(value, "a sequence")
    return [string(item) for item in value]


def boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise wrong_type(value, "a boolean")
    return value


def whole_number(wanted: str) -> Check:
    """An unsigned 64-bit integer; `wanted` is its name in the error."""

    def check(value: Any) -> int:
        if type(value) is int and 0 <= value <= MAX_U64:
            return value
        if type(value) is int or type(value) is float:
            raise invalid_params("invalid number")
        raise wrong_type(value, wanted)

    return check


def optional(check: Check, default: Any = None) -> Check:
    """Null means what absence means."""
    return lambda value: default if value is None else check(value)


def one_of(*names: str) -> Check:
    quoted = [f"`{name}`" for name in names]
    expected = " or ".join(quoted) if len(quoted) < 3 else "one of " + ", ".join(quoted)

    def check(value: Any) -> str:
        if type(value) is not str:
            raise wrong_type(value, "string or map")
        if value not in names:
            raise invalid_params(f"unknown variant `{value}`, expected {expected}")
        return value

    return check


class Decoder(Generic[T]):
    """Makes a `T` of a JSON object: `fields` says how, by wire name, in the order of the protocol."""

    def __init__(
        self, kind: Callable[..., T], name: str, required: tuple[str, ...], /, **fields: Check
    ) -> None:
        self._kind = kind
        self._name = name
        self._fields = {_camel(attribute): (attribute, check) for attribute, check in fields.items()}
        self._required = [(attribute, _camel(attribute)) for attribute in required]

    def __call__(self, params: Any) -> T:
        """The typed params, or RpcError -32602."""
        if type(params) is not dict:
            raise wrong_type(params, f"struct {self._name}")
        values: dict[str, Any] = {}
        fields = self._fields
        for key, value in params.items():
            field = fields.get(key)
            if field is not None:
                values[field[0]] = field[1](value)
        for attribute, name in self._required:
            if attribute not in values:
                raise invalid_params(f"missing field `{name}`")
        return self._kind(**values)


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)
