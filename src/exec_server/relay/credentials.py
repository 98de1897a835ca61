"""How an end of the relay shows the registry who it is: a key, a token that changes, or an agent's signature.

The same headers go with every call to the registry and never with the WebSocket, whose URL is the credential.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from .secret_file import SecretFileError, read_secret_file

__all__ = [
    "AgentIdentity",
    "Bearer",
    "BearerFile",
    "CredentialError",
    "Credentials",
    "Expired",
    "RotatingCredential",
]

MAX_LINE_BYTES: Final = 16_384
"""Of a line on stdin, its newline included."""

FIRST_LINE_SECONDS: Final = 30.0
"""For the first credential to arrive."""


class CredentialError(Exception):
    """What was given as a credential is none; the program ends."""


class Expired(Exception):
    """The credential has run out and no newer one has come."""


class Credentials(Protocol):
    """The headers for one call."""

    def headers(self) -> dict[str, str]: ...


class Bearer:
    """One key for as long as the program runs."""

    def __init__(self, key: str, account_id: str | None = None) -> None:
        if not key.strip() or not key.isascii() or any(ord(letter) < 0x21 for letter in key.strip()):
            raise CredentialError("the key for the registry is empty or has characters no header can carry")
        self._headers = {"Authorization": f"Bearer {key.strip()}"}
        if account_id is not None:
            self._headers["chatgpt-account-id"] = account_id

    def headers(self) -> dict[str, str]:
        return dict(self._headers)


class BearerFile:
    """A key in a file that is ours alone, read again when we are told to."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._before = self._bearer = self._read()

    def reload(self) -> bool:
        """Whether it is another key now. CredentialError where the file is no good; the key stays then."""
        self._before, self._bearer = self._bearer, self._read()
        return self._before.headers() != self._bearer.headers()

    def undo(self) -> None:
        """Back to the key that was good before."""
        self._bearer = self._before

    def headers(self) -> dict[str, str]:
        return self._bearer.headers()

    def _read(self) -> Bearer:
        advice = ", or revoke the key in it and make a new one"
        try:
            content = read_secret_file(self._path, "file of the API key", advice, MAX_LINE_BYTES)
            if len(content) > MAX_LINE_BYTES:
                raise CredentialError(f"{self._path} holds more than a key")
            return Bearer(content.decode().strip())
        except SecretFileError as error:
            raise CredentialError(str(error)) from None
        except UnicodeDecodeError:
            raise CredentialError(f"{self._path} holds no key: it is not text") from None


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    environment_id: str
    token: str
    expires_at: int


class RotatingCredential:
    """Tokens from stdin, one JSON object per line, each replacing the one before."""

    def __init__(self, environment_id: str, clock: Callable[[], float] = time.time) -> None:
        self._environment_id = environment_id
        self._clock = clock
        self._rest = b""
        self._current: _Line | None = None

    @property
    def present(self) -> bool:
        """Whether there was a credential at all."""
        return self._current is not None

    @property
    def expired(self) -> bool:
        return self._current is None or self._clock() >= self._current.expires_at

    def feed(self, data: bytes) -> None:
        """Bytes of stdin. A line that is wrong ends the program, whenever it comes."""
        self._rest += data
        while (end := self._rest.find(b"\n")) >= 0:
            if end + 1 > MAX_LINE_BYTES:
                break
            line, self._rest = self._rest[:end], self._rest[end + 1 :]
            self._take(line)
        if len(self._rest) >= MAX_LINE_BYTES:
            raise CredentialError(f"a credential is longer than {MAX_LINE_BYTES} bytes")

    def _take(self, line: bytes) -> None:
        try:
            found = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError as error:
            raise CredentialError(f"a line on stdin is not a credential: {error}") from None
        if found.version != 1:
            raise CredentialError(f"a credential has version {found.version}; this program knows 1")
        if not found.token.strip():
            raise CredentialError("a credential has an empty token")
        if found.environment_id != self._environment_id:
            raise CredentialError("a credential is for another environment")
        if self._clock() >= found.expires_at:
            raise CredentialError("a credential had expired before it came")
        Bearer(found.token)
        self._current = found

    def headers(self) -> dict[str, str]:
        if self._current is None or self.expired:
            raise Expired("the credential has expired; a new one is expected on stdin")
        return Bearer(self._current.token).headers()


class AgentIdentity:
    """Signs every call with the key inside an agent's access token."""

    def __init__(self, access_token: str, task_id: str = "", clock: Callable[[], float] = time.time) -> None:
        """`task_id` may be set later, but before the first call."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_der_private_key

        claims = _claims(access_token)
        try:
            key = load_der_private_key(base64.b64decode(claims["agent_private_key"], validate=True), None)
        except (KeyError, ValueError, TypeError, UnsupportedAlgorithm):
            raise CredentialError("the access token holds no Ed25519 key") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise CredentialError("the key in the access token is not an Ed25519 key")
        for name in ("agent_runtime_id", "account_id"):
            if not isinstance(claims.get(name), str):
                raise CredentialError(f"the access token has no {name}")
        self._key = key
        self.runtime_id: str = claims["agent_runtime_id"]
        self._account_id: str = claims["account_id"]
        self._fedramp = claims.get("chatgpt_account_is_fedramp") is True
        self.task_id = task_id
        self._clock = clock

    def registration(self) -> dict[str, str]:
        """The body that registers a task for this agent."""
        stamp = self._stamp()
        return {"timestamp": stamp, "signature": self._sign(f"{self.runtime_id}:{stamp}")}

    def headers(self) -> dict[str, str]:
        stamp = self._stamp()
        assertion = {
            "agent_runtime_id": self.runtime_id,
            "signature": self._sign(f"{self.runtime_id}:{self.task_id}:{stamp}"),
            "task_id": self.task_id,
            "timestamp": stamp,
        }
        text = json.dumps(assertion, separators=(",", ":"), sort_keys=True).encode()
        encoded = base64.urlsafe_b64encode(text).rstrip(b"=").decode()
        headers = {"Authorization": f"AgentAssertion {encoded}", "ChatGPT-Account-ID": self._account_id}
        if self._fedramp:
            headers["X-OpenAI-Fedramp"] = "true"
        return headers

    def _stamp(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock()))

    def _sign(self, text: str) -> str:
        return base64.b64encode(self._key.sign(text.encode())).decode()


def _claims(access_token: str) -> dict[str, Any]:
    """What the token says. Its signature is the registry's to check; the key in it proves itself."""
    import jwt

    try:
        claims: dict[str, Any] = jwt.decode(access_token, options={"verify_signature": False})
    except jwt.InvalidTokenError as error:
        raise CredentialError(f"the access token is not a JWT: {error}") from None
    return claims
