"""Where a cluster's NATS servers are, and who we are to them. Nothing here shows a password. Pure, but for a
file that it may be in."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Struct

from ..relay.secret_file import SecretFileError, read_secret_file

__all__ = ["BadAddress", "ClusterAddress", "read_address"]

SCHEMES: Final = ("nats", "tls", "ws", "wss")
DEFAULT_PORTS: Final = {"nats": 4222, "tls": 4222, "ws": 80, "wss": 443}
EXPECTED: Final = "expected nats://HOST:PORT, or several with commas in between"

MAX_FILE_BYTES: Final = 64 * 1024
_JWT_FILE: Final = b"-----BEGIN NATS USER JWT-----"


class BadAddress(Exception):
    """It cannot be one; the text says what is wrong, without what is secret in it."""


class ClusterAddress(Struct, frozen=True):
    """Servers without who we are, and that apart."""

    servers: tuple[str, ...]
    user: str | None = None
    password: str | None = None
    token: str | None = None
    credentials: str | None = None
    """A file as NATS makes them, with a token and a key in it."""

    def __str__(self) -> str:
        return ",".join(self.servers)

    def __repr__(self) -> str:
        return f"ClusterAddress({self})"

    def options(self) -> dict[str, Any]:
        """For a connection to it."""
        return {
            "user": self.user,
            "password": self.password,
            "token": self.token,
            "user_credentials": self.credentials,
        }


def read_address(text: str, credentials: str | None = None) -> ClusterAddress:
    """From what was typed, and a file with `USER:PASSWORD`, a token, or NATS credentials."""
    servers: list[str] = []
    known: set[tuple[str, str | None]] = set()
    words = text.split(",")
    for number, word in enumerate(words):
        # A comma may be one of a password's: then this is a piece of it.
        piece = "@" not in word and any("@" in later for later in words[number:])
        parts, port = _split(word.strip(), f"number {number + 1}" if piece else f"`{_shown(word.strip())}`")
        servers.append(f"{parts.scheme}://{_host(parts)}:{port}")
        if parts.username is not None:
            known.add((unquote(parts.username), None if parts.password is None else unquote(parts.password)))
    if len({server.startswith("ws") for server in servers}) != 1:
        raise BadAddress("the cluster's servers are either all reached by WebSocket, or none of them")
    if len(known) > 1:
        raise BadAddress("the cluster's servers have different users or passwords; give one for all of them")
    found = ClusterAddress(tuple(dict.fromkeys(servers)))
    if credentials is not None:
        if known:
            raise BadAddress("who we are to NATS is said twice: in the address and in a file")
        return _from_file(found.servers, credentials)
    if not known:
        return found
    ((user, password),) = known
    return _known(found.servers, user, password)


def _known(servers: tuple[str, ...], user: str, password: str | None) -> ClusterAddress:
    if password is None:
        return ClusterAddress(servers, token=user)
    return ClusterAddress(servers, user, password)


def _split(word: str, shown: str) -> tuple[SplitResult, int]:
    try:
        parts = urlsplit(word if "://" in word else f"nats://{word}")
        port = parts.port
    except ValueError:
        raise BadAddress(f"{shown} is no address of a NATS server; {EXPECTED}") from None
    more = parts.path not in ("", "/") or parts.query or parts.fragment
    if parts.scheme not in SCHEMES or not parts.hostname or more or any(map(str.isspace, word)):
        raise BadAddress(f"{shown} is no address of a NATS server; {EXPECTED}")
    return parts, DEFAULT_PORTS[parts.scheme] if port is None else port


def _host(parts: SplitResult) -> str:
    host = parts.hostname or ""
    return f"[{host}]" if ":" in host else host


def _shown(word: str) -> str:
    """Whatever may be a secret is in front of the last @."""
    before, at, host = word.rpartition("@")
    return f"…{at}{host}" if before else word


def _from_file(servers: tuple[str, ...], path: str) -> ClusterAddress:
    try:
        content = read_secret_file(path, "file with NATS credentials", " read it yet", MAX_FILE_BYTES)
    except SecretFileError as error:
        raise BadAddress(str(error)) from None
    if _JWT_FILE in content:
        return ClusterAddress(servers, credentials=path)
    try:
        text = content.decode().strip()
    except UnicodeDecodeError:
        text = ""
    if not text or len(text.split()) != 1 or len(content) > MAX_FILE_BYTES:
        raise BadAddress(f"{path} has neither USER:PASSWORD nor a token nor NATS credentials in it")
    user, colon, password = text.partition(":")
    return _known(servers, user, password if colon else None)
