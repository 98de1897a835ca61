"""Which proxy a request goes through."""

from __future__ import annotations

from collections.abc import Mapping

from ...wire.http import HttpUrl

__all__ = ["proxy_for"]


def proxy_for(url: HttpUrl, environ: Mapping[str, str]) -> str | None:
    """The proxy that the server's environment names for this URL.

    Not left to aiohttp: its `trust_env` would also send passwords out of `~/.netrc`.
    """
    own = f"{url.scheme}_proxy"
    for name in (own.upper(), own, "ALL_PROXY", "all_proxy"):
        if name == "HTTP_PROXY" and "REQUEST_METHOD" in environ:
            continue  # under CGI this is the caller's `Proxy:` header, not a setting
        if proxy := environ.get(name):
            if _bypasses_proxy(url.host, environ.get("NO_PROXY") or environ.get("no_proxy") or ""):
                return None
            return proxy if "://" in proxy else f"http://{proxy}"
    return None


def _bypasses_proxy(host: str, exceptions: str) -> bool:
    """`NO_PROXY`: names with everything below them, addresses, networks, or `*`."""
    if not exceptions:
        return False
    from ipaddress import ip_address, ip_network

    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        address = None
    for exception in (entry.strip().lower() for entry in exceptions.split(",")):
        if exception == "*":
            return True
        if address is None:
            name = exception.removeprefix(".")
            if name and (host == name or host.endswith(f".{name}")):
                return True
            continue
        try:
            if address in ip_network(exception, strict=False):
                return True
        except ValueError:
            continue  # a name, and this is an address
    return False
