"""`environmentConfig/read`: its messages, and how a layer of configuration is written as TOML."""

from __future__ import annotations

import re
from datetime import date, datetime, time
from typing import Any, Final

from msgspec import Struct

from .checks import Decoder, strings, uri, wrong_type

__all__ = [
    "ConfigLayer",
    "ConfigLayers",
    "ConfigReadParams",
    "ConfigReadResult",
    "decode_config_read",
    "select_paths",
    "write_toml",
]


class ConfigReadParams(Struct, rename="camel"):
    """Which keys to read, for somebody who works in `cwd`. A path is a list of TOML keys."""

    cwd: str
    config_paths: list[list[str]]
    requirements_paths: list[list[str]]


def _paths(value: Any) -> list[list[str]]:
    if type(value) is not list:
        raise wrong_type(value, "a sequence")
    return [strings(item) for item in value]


decode_config_read: Final = Decoder(
    ConfigReadParams,
    "EnvironmentConfigReadParams",
    ("cwd", "config_paths", "requirements_paths"),
    cwd=uri,
    config_paths=_paths,
    requirements_paths=_paths,
)


class ConfigLayer(Struct, rename="camel"):
    """One file, reduced to the keys that were asked for."""

    source: str
    """For people: what kind of file it is, and its path."""
    base_dir: str
    """The directory that relative paths in it are relative to."""
    toml: str


class ConfigLayers(Struct, rename="camel"):
    """From lowest to highest precedence."""

    layers: list[ConfigLayer]
    cloud_insertion_index: int
    """Where layers supplied by a service belong: above the system's, below everybody else's."""


class ConfigReadResult(Struct, rename="camel"):
    user_home_dir: str | None
    codex_home_dir: str
    hostname: str | None
    config: ConfigLayers
    requirements: ConfigLayers


def select_paths(table: dict[str, Any], paths: list[list[str]]) -> dict[str, Any]:
    """The table with only what lies at or on the way to one of the paths, in its own order.

    A table on the way stays even when it ends up empty: that it is there may matter. Anything else on the
    way is kept whole, because nothing inside it can be named.
    """
    chosen: dict[str, Any] = {}
    for key, value in table.items():
        deeper = [path[1:] for path in paths if path[:1] == [key]]
        if deeper:
            partly = isinstance(value, dict) and all(deeper)
            chosen[key] = select_paths(value, deeper) if partly else value
    return chosen


# Writing TOML ------------------------------------------------------------------------------------

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_MUST_ESCAPE = re.compile('["\\\\\x00-\x1f\x7f]')
_SHORT_ESCAPES: Final = {
    '"': '\\"',
    "\\": "\\\\",
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\f": "\\f",
    "\r": "\\r",
}


def write_toml(table: dict[str, Any]) -> str:
    """A document that says the same as `table`, for anything that `tomllib` reads."""
    sections: list[str] = []
    _write_section(table, (), "", sections)
    return "\n".join(sections)


def _write_section(table: dict[str, Any], path: tuple[str, ...], header: str, sections: list[str]) -> None:
    """The table's own values under its header, then the tables in it as sections of their own."""
    lines = [
        f"{_key(key)} = {_value(value)}\n"
        for key, value in table.items()
        if not isinstance(value, dict) and not _is_array_of_tables(value)
    ]
    if lines or header.startswith("[[") or (header and not table):
        sections.append("".join((header, *lines)))
    for key, value in table.items():
        deeper = (*path, _key(key))
        if isinstance(value, dict):
            _write_section(value, deeper, f"[{'.'.join(deeper)}]\n", sections)
        elif _is_array_of_tables(value):
            for item in value:
                _write_section(item, deeper, f"[[{'.'.join(deeper)}]]\n", sections)


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    return f'"{_MUST_ESCAPE.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    return _SHORT_ESCAPES.get(match[0]) or f"\\u{ord(match[0]):04X}"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    raise TypeError(f"TOML has no {type(value).__name__}")
