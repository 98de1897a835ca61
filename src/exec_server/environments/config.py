"""Which machines there are: `environments.toml`, `CODEX_EXEC_SERVER_URL`, `[exec_server] url`, or this one.

The first of them that says anything is the whole configuration; they are never mixed. Reading it opens no
connection: a program can look at what is configured, and whether its default is this machine, and decide.
"""

from __future__ import annotations

import codecs
import os
import stat
import tomllib
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from .entries import (
    LOCAL_ID,
    BadShape,
    CommandTransport,
    ConfigurationError,
    NamedEnvironment,
    RelayTransport,
    Transport,
    WebsocketTransport,
    check_entry,
    check_keys,
    check_kind,
    is_disabled,
    read_entry,
    shown,
)

__all__ = [
    "FILE_NAME",
    "LOCAL_ID",
    "REMOTE_ID",
    "URL_VARIABLE",
    "CommandTransport",
    "Configuration",
    "ConfigurationError",
    "NamedEnvironment",
    "RelayTransport",
    "Transport",
    "WebsocketTransport",
    "find_home",
    "load",
    "parse",
]

FILE_NAME: Final = "environments.toml"

URL_VARIABLE: Final = "CODEX_EXEC_SERVER_URL"

REMOTE_ID: Final = "remote"
"""The id of an environment that has an address and no name."""

RELAY_VARIABLES: Final = (
    "CODEX_EXEC_SERVER_NOISE_REGISTRY_URL",
    "CODEX_EXEC_SERVER_NOISE_ENVIRONMENT_ID",
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
)
RELAY_ACCOUNT_VARIABLE: Final = "CODEX_EXEC_SERVER_NOISE_CHATGPT_ACCOUNT_ID"


class Configuration(Struct, frozen=True, kw_only=True):
    """The environments in their order, the one to use when none is named, and whether this machine is one."""

    environments: tuple[NamedEnvironment, ...] = ()
    default: str | None = LOCAL_ID
    """None: nothing may be run unless an environment is named."""
    include_local: bool = True
    source: str = "nothing is configured"
    """Where this was read, for people."""

    @property
    def default_is_remote(self) -> bool:
        """Whether what names no environment leaves this machine."""
        return self.default not in (None, LOCAL_ID)

    def ids(self) -> list[str]:
        """Every id, this machine first."""
        return [*([LOCAL_ID] if self.include_local else []), *(entry.id for entry in self.environments)]

    def find(self, name: str) -> NamedEnvironment | None:
        """The environment of that id, unless it is this machine or there is none."""
        return next((entry for entry in self.environments if entry.id == name), None)


def find_home(environ: Mapping[str, str] | None = None) -> str:
    """The directory of the configuration and the threads: `CODEX_HOME`, or `~/.codex`."""
    environ = os.environ if environ is None else environ
    if chosen := environ.get("CODEX_HOME"):
        if not os.path.isdir(chosen):
            wrong = "is not a directory" if os.path.exists(chosen) else "does not exist"
            raise ConfigurationError(f"CODEX_HOME points to `{chosen}`, but that path {wrong}")
        return os.path.realpath(chosen)
    home = environ.get("HOME") or os.path.expanduser("~")
    if not os.path.isabs(home):
        raise ConfigurationError("there is no home directory to find the configuration in; set CODEX_HOME")
    return os.path.join(home, ".codex")


def load(home: str | None = None, environ: Mapping[str, str] | None = None) -> Configuration:
    """What is configured in `home` (by default where `find_home` says) and in the variables."""
    environ = os.environ if environ is None else environ
    home = find_home(environ) if home is None else home
    relay = _from_relay_variables(environ)
    if relay is not None:
        return relay
    path = os.path.join(home, FILE_NAME)
    text = _read(path, "environment config")
    if text is not None:
        return parse(text, path)
    url = environ.get(URL_VARIABLE, "")
    if url.strip():
        return _from_url(url, URL_VARIABLE)
    path = os.path.join(home, "config.toml")
    text = _read(path, "config")
    if text is not None:
        url = _exec_server_url(text, path)
        if url.strip():
            return _from_url(url, f"[exec_server] in {path}")
    return Configuration()


def parse(text: str, path: str | None = None) -> Configuration:
    """What an `environments.toml` says. Its path, if it has one, is for messages and relative directories."""
    source = path or FILE_NAME
    try:
        table = tomllib.loads(text)
        check_keys(table, ("default", "include_local", "environments"), "")
        default = table.get("default")
        if default is not None:
            check_kind(default, str, "default", "")
        include_local = bool(check_kind(table.get("include_local", True), bool, "include_local", ""))
        listed = check_kind(table.get("environments", []), list, "environments", "")
        entries = [read_entry(entry, number) for number, entry in enumerate(listed, 1)]
    except (tomllib.TOMLDecodeError, BadShape, RecursionError) as error:
        raise ConfigurationError(f"failed to parse environment config `{source}`: {_said(error)}") from None
    environments: list[NamedEnvironment] = []
    taken: set[str] = set()
    directory = None if path is None else os.path.dirname(os.path.abspath(path))
    for entry in entries:
        environment = check_entry(entry, directory)
        if environment.id in taken:
            raise ConfigurationError(f"environment id `{shown(environment.id)}` is duplicated")
        taken.add(environment.id)
        environments.append(environment)
    if include_local:
        taken.add(LOCAL_ID)
    return Configuration(
        environments=tuple(environments),
        default=_choose_default(default, taken, include_local),
        include_local=include_local,
        source=source,
    )


def _choose_default(default: str | None, taken: set[str], include_local: bool) -> str | None:
    if default is None:
        return LOCAL_ID if include_local else None
    default = default.strip()
    if not default:
        raise ConfigurationError("default environment id cannot be empty")
    if is_disabled(default):
        return None
    if default not in taken:
        raise ConfigurationError(f"default environment `{shown(default)}` is not configured")
    return default


def _from_url(value: str, source: str) -> Configuration:
    """The rules of the variable. Whether the address is any good shows when it is used."""
    if is_disabled(value):
        return Configuration(default=None, include_local=False, source=source)
    entry = NamedEnvironment(REMOTE_ID, WebsocketTransport(url=value.strip()))
    return Configuration(environments=(entry,), default=REMOTE_ID, include_local=False, source=source)


def _from_relay_variables(environ: Mapping[str, str]) -> Configuration | None:
    values = [environ.get(name, "").strip() for name in RELAY_VARIABLES]
    if not any(values):
        return None
    if not all(values):
        # What was meant for another machine must not run on this one. The words are the reference's.
        *first, last = RELAY_VARIABLES
        raise ConfigurationError(
            f"Noise environment requires {', '.join(first)}, and {last}",
            "environment registry configuration error",
        )
    registry_url, environment_id, auth_token = values
    transport = RelayTransport(
        registry_url=registry_url,
        environment_id=environment_id,
        auth_token=auth_token,
        account_id=environ.get(RELAY_ACCOUNT_VARIABLE) or None,
    )
    return Configuration(
        environments=(NamedEnvironment(REMOTE_ID, transport),),
        default=REMOTE_ID,
        include_local=False,
        source="the CODEX_EXEC_SERVER_NOISE_ variables",
    )


def _exec_server_url(text: str, path: str) -> str:
    """`[exec_server] url` of a config.toml in which everything else is somebody else's."""
    try:
        table = check_kind(tomllib.loads(text).get("exec_server", {}), dict, "exec_server", "")
        check_keys(table, ("url",), " in [exec_server]")
        return str(check_kind(table.get("url", ""), str, "exec_server.url", ""))
    except (tomllib.TOMLDecodeError, BadShape, RecursionError) as error:
        raise ConfigurationError(f"failed to parse config `{path}`: {_said(error)}") from None


def _read(path: str, what: str) -> str | None:
    """A file as text; None if there is none."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigurationError(f"failed to read {what} `{path}`: not a file")
            return file.read().removeprefix(codecs.BOM_UTF8).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = f"{error.strerror} (os error {error.errno})"
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    raise ConfigurationError(f"failed to read {what} `{path}`: {reason}")


def _without_waiting(path: str, flags: int) -> int:
    """Open without waiting for whoever may write into a pipe of that name."""
    return os.open(path, flags | os.O_NONBLOCK)


def _said(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
