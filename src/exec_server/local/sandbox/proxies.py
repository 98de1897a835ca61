"""Which proxies a command is to reach, by the variables of its environment. Pure.

In a managed network nothing leads outside but the proxies on loopback that the environment names. Each
gets a port of its own inside, where a relay (relay.py) listens, and the variables are rewritten to that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["NoProxies", "Route", "reroute"]

_FAMILIES: Final = ("", "NPM_CONFIG_", "YARN_", "BUNDLE_", "DOCKER_")
NAMES: Final = frozenset(
    [
        *(f"{family}{scheme}_PROXY" for family in _FAMILIES for scheme in ("HTTP", "HTTPS")),
        *("ALL_PROXY", "WS_PROXY", "WSS_PROXY", "FTP_PROXY", "NPM_CONFIG_PROXY", "PIP_PROXY"),
    ]
)
"""Variables that name a proxy, in any case."""

FIRST_PORT: Final = 3128
"""Of those inside, where every port is free. It is the one that proxies are used to."""

_DEFAULT_PORTS: Final = {"http": 80, "ws": 80, "https": 443, "wss": 443, "ftp": 21}
_LOOPBACK: Final = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "[::1]": "::1"}
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)?(?P<user>[^/@]*@)?(?P<host>\[[^\]]*\]|[^/:@?#]+)"
    r"(?::(?P<port>\d{1,5}))?(?P<rest>[/?#].*)?"
)


class NoProxies(Exception):
    """There is nothing to reach, in the words that peers know."""


class Route(NamedTuple):
    """A port inside, and what is reached there."""

    port: int
    host: str
    host_port: int


def reroute(env: Mapping[str, str]) -> tuple[dict[str, str], list[Route]]:
    """The environment with its loopback proxies where they are inside, and where they really are."""
    named = {name: value for name, value in env.items() if name.upper() in NAMES and value}
    if not named:
        raise NoProxies("managed proxy mode requires proxy environment variables")
    routes: dict[tuple[str, int], Route] = {}
    changed = dict(env)
    for name, value in named.items():
        found = _URL.fullmatch(value)
        endpoint = found and _endpoint(found)
        if not found or endpoint is None:
            continue
        route = routes.setdefault(endpoint, Route(FIRST_PORT + len(routes), *endpoint))
        parts = found["scheme"] or "", found["user"] or "", found["rest"] or ""
        changed[name] = f"{parts[0]}{parts[1]}127.0.0.1:{route.port}{parts[2]}"
    if not routes:
        raise NoProxies("managed proxy mode requires parseable loopback proxy endpoints")
    return changed, list(routes.values())


def _endpoint(found: re.Match[str]) -> tuple[str, int] | None:
    host = _LOOPBACK.get(found["host"].lower())
    scheme = (found["scheme"] or "http://").removesuffix("://").lower()
    port = int(found["port"]) if found["port"] else _DEFAULT_PORTS.get(scheme, 0)
    return (host, port) if host is not None and 0 < port < 65536 else None
