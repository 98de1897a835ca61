"""Where to listen: the `--listen` URL, read literally, as the reference does."""

from __future__ import annotations

import re

from msgspec import Struct

__all__ = ["BadAddress", "Listen", "parse_listen", "without_password"]

_SOCKET_ADDRESS = re.compile(r"(?:(\d{1,3}(?:\.\d{1,3}){3})|\[([0-9A-Fa-f:.]+(?:%\w+)?)\]):(\d{1,5})")


_PASSWORD = re.compile(r"(://[^/?#:@]*:)[^/?#]*(?=@)")


def without_password(url: str) -> str:
    """A URL as messages, lists and logs show it."""
    return _PASSWORD.sub(r"\1***", url, count=1)


class BadAddress(ValueError):
    """The URL is not one of those that can be listened on."""


class Listen(Struct, frozen=True):
    """A parsed `--listen`: `kind` is "stdio", "off", "unix", "ws" or "wss"."""

    kind: str
    host: str = ""
    port: int = 0
    path: str = ""

    def url(self, port: int) -> str:
        """The bound address, once the port is known."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.kind}://{host}:{port}"

    @property
    def is_loopback(self) -> bool:
        return self.host.startswith("127.") or self.host in ("::1", "0:0:0:0:0:0:0:1")


def parse_listen(url: str) -> Listen:
    """Literal and case-sensitive; BadAddress says what would have been right."""
    if url in ("stdio", "stdio://"):
        return Listen("stdio")
    if url == "off":
        return Listen("off")
    if url.startswith("unix://") and len(url) > 7:
        return Listen("unix", path=url[7:])
    for kind in ("ws", "wss"):
        prefix = f"{kind}://"
        if url.startswith(prefix):
            match = _SOCKET_ADDRESS.fullmatch(url[len(prefix) :])
            if match is not None and _valid_host(match) and int(match[3]) <= 65535:
                return Listen(kind, match[1] or match[2], int(match[3]))
            raise BadAddress(f"invalid websocket --listen URL `{url}`; expected `{kind}://IP:PORT`")
    raise BadAddress(
        f"unsupported --listen URL `{url}`; expected `ws://IP:PORT` or `stdio`"
        " (or `wss://IP:PORT`, `unix://PATH`, `off`)"
    )


def _valid_host(match: re.Match[str]) -> bool:
    import ipaddress

    try:
        ipaddress.ip_address(match[1] or match[2])
    except ValueError:
        return False
    return True
