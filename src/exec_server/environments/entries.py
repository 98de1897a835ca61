"""One entry of the configuration: how a machine is reached, and everything that can be wrong with saying so.

Pure: text in, values or a ConfigurationError out. Texts in backquotes of the specification are literal,
because people search for them; what no specification words is worded here for the person who has just
edited the file by hand.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import Struct

from ..client.errors import ExecServerError
from ..transport.address import without_password

__all__ = [
    "DEFAULT_TIMEOUT_SECONDS",
    "LOCAL_ID",
    "BadShape",
    "CommandTransport",
    "ConfigurationError",
    "Entry",
    "NamedEnvironment",
    "RelayTransport",
    "Transport",
    "WebsocketTransport",
    "check_entry",
    "check_keys",
    "check_kind",
    "is_disabled",
    "read_entry",
    "shown",
]

LOCAL_ID: Final = "local"
"""The id of this machine; no other environment may have it."""

MAX_ID_BYTES: Final = 64
"""Longest id in a file, in UTF-8 bytes: what the reference counts, although it speaks of characters."""

DEFAULT_TIMEOUT_SECONDS: Final = 10.0
"""For a connection, and again for its handshake."""

ENTRY_KEYS: Final = (
    "id",
    "url",
    "program",
    "args",
    "env",
    "cwd",
    "connect_timeout_sec",
    "initialize_timeout_sec",
    "auth_bearer_token",
    "skills",
)

RELAY_SCHEMES: Final = ("relay+https://", "relay+http://")
"""Of addresses behind a relay of ours; the reference does not know them."""

MAX_SECONDS: Final = 2.0**64
"""More is no time: the reference cannot count it either."""

_ID: Final = re.compile(r"[A-Za-z0-9_-]+")

_KINDS: Final[dict[type, str]] = {
    str: "text in quotes",
    bool: "true or false",
    list: "a list",
    dict: "a table",
    int: "a whole number",
    float: "a number",
}


class ConfigurationError(ExecServerError):
    """What was configured, or asked of the registry of environments, cannot be. `reason` is the bare text."""

    def __init__(self, reason: str, kind: str = "exec-server protocol error") -> None:
        super().__init__(f"{kind}: {reason}")
        self.reason = reason


class WebsocketTransport(Struct, frozen=True, kw_only=True):
    """A server that listens, or an environment behind a relay (`relay+https://`). Times are seconds."""

    url: str
    connect_timeout: float = DEFAULT_TIMEOUT_SECONDS
    initialize_timeout: float = DEFAULT_TIMEOUT_SECONDS
    bearer_token: str | None = None

    def __repr__(self) -> str:
        """Without the token and a password: this ends up in logs."""
        token = "" if self.bearer_token is None else ", bearer_token=..."
        return f"WebsocketTransport({without_password(self.url)!r}{token})"


class CommandTransport(Struct, frozen=True, kw_only=True):
    """A server to start and to speak to over its stdin and stdout. `env` is added to our own."""

    program: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    cwd: str | None = None
    initialize_timeout: float = DEFAULT_TIMEOUT_SECONDS


class RelayTransport(Struct, frozen=True, kw_only=True):
    """A machine behind a rendezvous, reached through an encrypted relay."""

    registry_url: str
    environment_id: str
    auth_token: str
    account_id: str | None = None

    def __repr__(self) -> str:
        return f"RelayTransport({self.registry_url!r}, {self.environment_id!r}, auth_token=...)"


Transport = WebsocketTransport | CommandTransport | RelayTransport


class NamedEnvironment(Struct, frozen=True):
    """An environment and how it is reached."""

    id: str
    transport: Transport


def is_disabled(value: str) -> bool:
    """Whether a value means "no environment": the word `none`, however it is written."""
    return value.strip().lower() == "none"


# The shape of the file ---------------------------------------------------------------------------


class BadShape(Exception):
    """The file is not of the right form. Whoever reads it knows which file it is."""


def check_keys(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuse a key nobody knows; it is usually a known one misspelt."""
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean `{close[0]}`?" if close else f"; known are {', '.join(known)}"
            raise BadShape(f"unknown key `{shown(key)}`{where}{hint}")


def check_kind(value: Any, kind: type, name: str, where: str) -> Any:
    """The value, if it is of the kind; a truth value is no number."""
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise BadShape(f"`{name}`{where} must be {_KINDS[kind]}, not {_KINDS.get(type(value), 'a date or time')}")


class Entry(Struct, frozen=True, kw_only=True):
    """An entry whose members are of the right kinds, and not more than that."""

    id: str
    url: str | None
    program: str | None
    args: list[str] | None
    env: dict[str, str] | None
    cwd: str | None
    connect_timeout: float | None
    initialize_timeout: float | None
    bearer_token: str | None


def read_entry(table: Any, number: int) -> Entry:
    """The members of the entry; BadShape for unknown keys, missing ids and values of the wrong kind."""
    if type(table) is not dict:
        raise BadShape("`environments` must be a list of tables: write [[environments]] above each")
    named = table.get("id")
    where = (
        f" of environment `{shown(named)}`" if isinstance(named, str) else f" of environment number {number}"
    )
    check_keys(table, ENTRY_KEYS, where)
    if named is None:
        raise BadShape(f"environment number {number} has no `id`")

    def text(key: str) -> str | None:
        return None if key not in table else str(check_kind(table[key], str, key, where))

    def seconds(key: str) -> float | None:
        if key not in table:
            return None
        number = check_kind(table[key], float, key, where)
        if number >= MAX_SECONDS:  # compared as it is: a whole number may be too large to be converted
            raise BadShape(f"`{key}`{where} is longer than anybody can wait")
        value = -1.0 if number < 0 else float(number)
        if not math.isfinite(value) or value < 0:
            raise BadShape(f"`{key}`{where} must be a number of seconds, zero or more")
        return value

    args = env = None
    if "args" in table:
        args = [
            str(check_kind(word, str, "args", where))
            for word in check_kind(table["args"], list, "args", where)
        ]
    if "env" in table:
        env = {
            name: str(check_kind(value, str, f"env.{name}", where))
            for name, value in check_kind(table["env"], dict, "env", where).items()
        }
    if "skills" in table:
        # For the agent that shares this file with us; we only make sure that it is not a slip of the pen.
        skills = check_kind(table["skills"], dict, "skills", where)
        check_keys(skills, ("required",), f" in `skills`{where}")
        check_kind(skills.get("required", []), list, "skills.required", where)
    return Entry(
        id=str(check_kind(named, str, "id", where)),
        url=text("url"),
        program=text("program"),
        args=args,
        env=env,
        cwd=text("cwd"),
        connect_timeout=seconds("connect_timeout_sec"),
        initialize_timeout=seconds("initialize_timeout_sec"),
        bearer_token=text("auth_bearer_token"),
    )


# What it says ------------------------------------------------------------------------------------


def check_entry(entry: Entry, directory: str | None) -> NamedEnvironment:
    """The environment an entry describes. Relative directories are relative to `directory`."""
    name = entry.id
    _check_id(name)
    if entry.program is None and not (entry.args is None and entry.env is None and entry.cwd is None):
        raise ConfigurationError(f"environment `{name}` args, env, and cwd require program")
    if entry.url is None and entry.connect_timeout is not None:
        raise ConfigurationError(f"environment `{name}` connect_timeout_sec requires url")
    if entry.url is None and entry.bearer_token is not None:
        raise ConfigurationError(f"environment `{name}` auth_bearer_token requires url")
    handshake = DEFAULT_TIMEOUT_SECONDS if entry.initialize_timeout is None else entry.initialize_timeout
    if entry.url is not None and entry.program is None:
        url = _check_url(entry.url)
        if entry.bearer_token is not None:
            _check_token(entry.bearer_token, url)
        elif url.startswith(RELAY_SCHEMES):
            raise ConfigurationError(f"environment `{name}` url of a relay requires auth_bearer_token")
        connect = DEFAULT_TIMEOUT_SECONDS if entry.connect_timeout is None else entry.connect_timeout
        return NamedEnvironment(
            name,
            WebsocketTransport(
                url=url,
                connect_timeout=connect,
                initialize_timeout=handshake,
                bearer_token=entry.bearer_token,
            ),
        )
    if entry.program is not None and entry.url is None:
        program = entry.program.strip()
        if not program:
            raise ConfigurationError(f"environment `{name}` program cannot be empty")
        _check_command(name, program, entry)
        return NamedEnvironment(
            name,
            CommandTransport(
                program=program,
                args=tuple(entry.args or ()),
                env=entry.env or {},
                cwd=_absolute(entry.cwd, directory, name),
                initialize_timeout=handshake,
            ),
        )
    raise ConfigurationError(f"environment `{name}` must set exactly one of url or program")


def shown(text: str) -> str:
    """Text as messages quote it: what is not printable, such as a line break, is escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _check_command(name: str, program: str, entry: Entry) -> None:
    """Refuse what the operating system cannot be told."""
    env = entry.env or {}
    for variable in env:
        if not variable or "=" in variable:
            raise ConfigurationError(
                f"environment `{name}` env cannot have a variable named `{shown(variable)}`"
            )
    words = {"program": [program], "args": entry.args or [], "env": [*env, *env.values()]}
    for key, texts in {**words, "cwd": [entry.cwd or ""]}.items():
        if any("\0" in text for text in texts):
            raise ConfigurationError(f"environment `{name}` {key} cannot contain a NUL character")


def _check_id(name: str) -> None:
    if not name.strip():
        raise ConfigurationError("environment id cannot be empty")
    if name != name.strip():
        raise ConfigurationError(f"environment id `{shown(name)}` must not contain surrounding whitespace")
    if name == LOCAL_ID or is_disabled(name):
        raise ConfigurationError(f"environment id `{shown(name)}` is reserved")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        raise ConfigurationError(
            f"environment id `{shown(name)}` cannot be longer than {MAX_ID_BYTES} characters"
        )
    if not _ID.fullmatch(name):
        raise ConfigurationError(
            f"environment id `{shown(name)}` must contain only ASCII letters, numbers, '-' or '_'"
        )


def _check_url(text: str) -> str:
    url = text.strip()
    if not url:
        raise ConfigurationError("environment url cannot be empty")
    if not url.startswith(("ws://", "wss://", *RELAY_SCHEMES)):
        raise ConfigurationError(
            f"environment url `{_shown_url(url)}` must use ws:// or wss://"
            + (" (or relay+https://)" if url.startswith("relay") else "")
        )
    try:
        parts = urlsplit(url)
        wrong = None if parts.hostname else "it names no host"
        if wrong is None and url.startswith(RELAY_SCHEMES) and not parts.path.rpartition("/")[2]:
            wrong = "it names no environment"
    except ValueError as error:
        wrong = str(error)
    if any(character.isspace() or not character.isprintable() for character in url):
        wrong = "it contains a blank or a control character"
    if wrong:
        raise ConfigurationError(f"environment url `{_shown_url(url)}` is invalid: {wrong}")
    return url


def _shown_url(url: str) -> str:
    return shown(without_password(url))


def _check_token(token: str, url: str) -> None:
    if any(((code := ord(character)) < 0x20 and code != 9) or code == 0x7F for character in token):
        raise ConfigurationError("invalid value for exec-server WebSocket header `authorization`")
    if not url.startswith(("wss://", "relay+https://")) and not _is_loopback(urlsplit(url).hostname or ""):
        raise ConfigurationError("exec-server WebSocket headers require wss:// or a loopback destination")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _absolute(cwd: str | None, directory: str | None, name: str) -> str | None:
    if cwd is None or os.path.isabs(cwd):
        return cwd
    if cwd.split("/", 1)[0].startswith("~"):
        raise ConfigurationError(
            f"environment `{name}` cwd `{shown(cwd)}` must be written out: `~` is not a home directory here"
        )
    if directory is None:
        raise ConfigurationError(f"environment `{name}` cwd must be absolute")
    return os.path.join(directory, cwd)
