"""How an agent runs, from `config.toml`: its model, its tool servers, its sandbox. The reference's names.

Everything else in that file belongs to other programs and is left alone.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from msgspec import Struct

from ..client.errors import ExecServerError
from .approvals import ApprovalMode
from .confinement import MODES, Mode
from .mcp_client import STARTUP_SECONDS, TOOL_SECONDS, ApprovalNeed, McpServer
from .model import IDLE_SECONDS, STREAM_RETRIES, ModelSettings
from .subagents import MAX_AGENTS

__all__ = ["AgentConfig", "BadConfig", "load_config"]

APPROVALS: Final[dict[str, ApprovalMode]] = {
    "never": "never",
    "on-request": "on-request",
    "on-failure": "on-request",
}
"""What is asked is a request of the model's own, or what the sandbox did not let. The reference's `untrusted`
promises more, to ask about every command it does not know; so it is refused rather than taken for less."""

BUILT_IN_PROVIDER: Final = "openai"
"""The one provider that needs no table: the vendor's own endpoint."""


class BadConfig(ExecServerError):
    """A configuration that cannot be used; says where and why."""


class AgentConfig(Struct, frozen=True, kw_only=True):
    """What the file says. None where it says nothing."""

    model: str | None = None
    provider: str | None = None
    base_url: str | None = None
    api_key: str | None = None
    headers: Mapping[str, str] = {}
    max_retries: int = STREAM_RETRIES
    idle_seconds: float = IDLE_SECONDS
    reasoning_effort: str | None = None
    mode: Mode | None = None
    approvals: ApprovalMode | None = None
    web_search: bool = False
    writable: tuple[str, ...] = ()
    network: bool = False
    compact_tokens: int | None = None
    context_window: int | None = None
    max_agents: int = MAX_AGENTS
    agent_depth: int = 1
    servers: tuple[McpServer, ...] = ()

    def model_settings(
        self, model: str | None = None, base_url: str | None = None, api_key: str | None = None
    ) -> ModelSettings:
        """With what was said elsewhere, which wins."""
        chosen = model or self.model
        if not chosen:
            raise BadConfig("which model? give --model, or `model` in config.toml")
        return ModelSettings(
            model=chosen,
            base_url=base_url or self.base_url,
            api_key=api_key if api_key is not None else self.api_key,
            headers=self.headers,
            max_retries=self.max_retries,
            idle_seconds=self.idle_seconds,
        )


def load_config(
    home: str, environ: Mapping[str, str] | None = None, overrides: Sequence[str] = ()
) -> AgentConfig:
    """What `config.toml` in the home directory says; nothing, if there is none.

    `overrides` are `KEY=VALUE` texts that win over it: a dotted key, and a value in TOML, or a plain text.
    """
    environ = os.environ if environ is None else environ
    path = os.path.join(home, "config.toml")
    values: dict[str, Any] = {}
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        pass
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"failed to read {path}: {error}") from None
    typed = tuple(_override(values, override) for override in overrides)
    table = _Table(values, path, typed=typed)
    provider = table.text("model_provider")
    if provider not in (None, BUILT_IN_PROVIDER) and provider not in table.table("model_providers").values:
        # Without its table the prompt and the key would go to somebody else.
        raise BadConfig(
            f"{table.at('model_provider')}: `model_provider` is `{provider}`,"
            f" but there is no [model_providers.{provider}]"
        )
    entry = table.table("model_providers").table(provider) if provider else _Table({}, path)
    key_name = entry.text("env_key")
    if key_name and key_name not in environ:
        raise BadConfig(
            f"{path}: the key of provider `{provider}` is in the variable {key_name}, which is not set"
        )
    # A provider of one's own gets the vendor's key only if it says that it wants it.
    ours = provider in (None, BUILT_IN_PROVIDER) or entry.flag("requires_openai_auth")
    workspace, agents = table.table("sandbox_workspace_write"), table.table("agents")
    window, limit = table.count("model_context_window"), table.count("model_auto_compact_token_limit")
    return AgentConfig(
        model=table.text("model"),
        provider=provider,
        base_url=entry.text("base_url") or table.text("openai_base_url"),
        api_key=environ[key_name] if key_name else None if ours else "",
        headers=entry.texts("http_headers"),
        max_retries=int(entry.number("stream_max_retries", STREAM_RETRIES)),
        idle_seconds=entry.number("stream_idle_timeout_ms", IDLE_SECONDS * 1000) / 1000,
        reasoning_effort=table.text("model_reasoning_effort"),
        mode=_mode(table),
        approvals=_approvals(table),
        web_search=table.text("web_search") in ("live", "cached") or table.table("tools").flag("web_search"),
        writable=workspace.list_of_texts("writable_roots"),
        network=workspace.flag("network_access"),
        compact_tokens=limit,
        context_window=window,
        max_agents=int(agents.number("max_threads", MAX_AGENTS)),
        agent_depth=int(agents.number("max_depth", 1)),
        servers=_servers(table.table("mcp_servers"), environ),
    )


def _override(values: dict[str, Any], text: str) -> tuple[str, ...]:
    """Put one `KEY=VALUE` where it belongs; its key."""
    key, equals, value = text.partition("=")
    *tables, name = [part.strip() for part in key.split(".")]
    if not equals or not name or not all(tables):
        raise BadConfig(f"the setting {text!r} is not KEY=VALUE")
    for part in tables:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise BadConfig(f"the setting {text!r}: `{part}` is no table")
        values = inner
    try:
        values[name] = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        values[name] = value.strip()
    return (*tables, name)


def _mode(table: _Table) -> Mode | None:
    said = table.text("sandbox_mode")
    if said is None:
        return None
    for mode in MODES:
        if said == mode:
            return mode
    raise BadConfig(
        f"{table.at('sandbox_mode')}: `sandbox_mode` must be one of {', '.join(MODES)}, not `{said}`"
    )


def _approvals(table: _Table) -> ApprovalMode | None:
    said = table.values.get("approval_policy")
    if said is None:
        return None
    if not isinstance(said, str) or said not in APPROVALS:
        raise BadConfig(
            f"{table.at('approval_policy')}: `approval_policy` must be one of {', '.join(APPROVALS)} here"
            " (`-c approval_policy=never` wins over the file)"
        )
    return APPROVALS[said]


def _servers(table: _Table, environ: Mapping[str, str]) -> tuple[McpServer, ...]:
    servers = []
    for name in table.values:
        entry = table.table(name)
        if not entry.flag("enabled", True):
            continue
        command, url = entry.text("command"), entry.text("url")
        if (command is None) == (url is None):
            raise BadConfig(f"{entry.where}: either `command` or `url` is needed")
        headers = dict(entry.texts("http_headers"))
        for header, variable in entry.texts("env_http_headers").items():
            if environ.get(variable, "").strip():
                headers[header] = environ[variable]
        token = entry.text("bearer_token_env_var")
        if token:
            headers["Authorization"] = f"Bearer {environ.get(token, '')}"
        enabled = entry.list_of_texts("enabled_tools") if "enabled_tools" in entry.values else None
        servers.append(
            McpServer(
                name=name,
                command=command,
                args=entry.list_of_texts("args"),
                env={**_handed_on(entry, environ), **entry.texts("env")},
                cwd=entry.text("cwd"),
                url=url,
                headers=headers,
                startup_seconds=entry.number("startup_timeout_sec", STARTUP_SECONDS),
                tool_seconds=entry.number("tool_timeout_sec", TOOL_SECONDS),
                required=entry.flag("required"),
                approval=_need(entry, "default_tools_approval_mode"),
                tool_approvals=_needs(entry.table("tools")),
                enabled_tools=enabled,
                disabled_tools=entry.list_of_texts("disabled_tools"),
            )
        )
    return tuple(servers)


def _handed_on(entry: _Table, environ: Mapping[str, str]) -> dict[str, str]:
    """Our own variables that a server is to have; without being asked for it, it gets only harmless ones."""
    names = entry.list("env_vars", "a list of names")
    # A name may also be written as a table, which says whose variable is meant: there is only ours here.
    plain: list[Any] = [one.get("name") if isinstance(one, dict) else one for one in names]
    if not all(isinstance(name, str) for name in plain):
        raise BadConfig(f"{entry.at('env_vars')}: `env_vars` must be a list of names")
    return {name: environ[name] for name in plain if name in environ}


def _needs(table: _Table) -> dict[str, ApprovalNeed]:
    tools = {name: table.table(name) for name in table.values}
    return {
        name: _need(tool, "approval_mode") for name, tool in tools.items() if "approval_mode" in tool.values
    }


def _need(table: _Table, name: str) -> ApprovalNeed:
    said = table.text(name) or "auto"
    for need in get_args(ApprovalNeed):
        if said == need:
            return need  # type: ignore[no-any-return]  # get_args does not say of what
    raise BadConfig(
        f"{table.at(name)}: `{name}` must be one of {', '.join(get_args(ApprovalNeed))}, not `{said}`"
    )


class _Table:
    """A table of the file, whose members are what they should be or a BadConfig."""

    def __init__(
        self,
        values: dict[str, Any],
        where: str,
        key: tuple[str, ...] = (),
        typed: Sequence[tuple[str, ...]] = (),
    ) -> None:
        self.values = values
        self.where = where
        self._key = key
        self._typed = typed
        """The keys that were given with -c."""

    def at(self, name: str) -> str:
        """Where a member was written, for whoever has to mend it."""
        key = (*self._key, name)
        given = next((one for one in self._typed if key[: len(one)] == one), None)
        return self.where if given is None else f"-c {'.'.join(given)}"

    def table(self, name: str) -> _Table:
        value = self._get(name, dict, "a table")
        return _Table(value or {}, f"{self.where}: [{name}]", (*self._key, name), self._typed)

    def text(self, name: str) -> str | None:
        value: str | None = self._get(name, str, "a text")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, bool, "true or false")
        return default if value is None else bool(value)

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise BadConfig(f"{self.at(name)}: `{name}` must be a number that is not negative")
        return float(value)

    def count(self, name: str) -> int | None:
        return int(self.number(name, 0)) if name in self.values else None

    def texts(self, name: str) -> dict[str, str]:
        value = self._get(name, dict, "a table of texts") or {}
        if not all(isinstance(one, str) for one in value.values()):
            raise BadConfig(f"{self.at(name)}: `{name}` must be a table of texts")
        return dict(value)

    def list(self, name: str, what: str) -> list[Any]:
        return self._get(name, list, what) or []

    def list_of_texts(self, name: str) -> tuple[str, ...]:
        value = self.list(name, "a list of texts")
        if not all(isinstance(one, str) for one in value):
            raise BadConfig(f"{self.at(name)}: `{name}` must be a list of texts")
        return tuple(value)

    def _get(self, name: str, kind: type, what: str) -> Any:
        value = self.values.get(name)
        if value is not None and not isinstance(value, kind):
            raise BadConfig(f"{self.at(name)}: `{name}` must be {what}")
        return value
