"""Who may open a WebSocket: nobody's browser, and only holders of the token when one is configured."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from msgspec import Struct

__all__ = ["Authenticator", "CapabilityToken", "ConfigError", "Settings", "SignedBearer", "authenticator"]

MIN_SECRET_BYTES: Final = 32
"""Shorter secrets for HMAC-SHA-256 can be guessed."""

DEFAULT_SKEW_SECONDS: Final = 30
"""How far the clocks of both ends may be apart."""


class ConfigError(Exception):
    """The command line asks for something that cannot be, and says what would be right."""


class Settings(Struct, frozen=True):
    """The `--ws-*` options as given."""

    mode: str | None = None
    token_file: str | None = None
    token_sha256: str | None = None
    shared_secret_file: str | None = None
    issuer: str | None = None
    audience: str | None = None
    max_clock_skew_seconds: int | None = None

    @property
    def uses_token(self) -> bool:
        return self.token_file is not None or self.token_sha256 is not None

    @property
    def uses_jwt(self) -> bool:
        settings = (self.shared_secret_file, self.issuer, self.audience, self.max_clock_skew_seconds)
        return any(value is not None for value in settings)


class Authenticator(Protocol):
    """Decides about the value of an Authorization header's bearer token."""

    def refuse(self, token: str) -> str | None:
        """Why the token is not good enough, or None when it is."""


class CapabilityToken:
    """One secret that opens everything; only its digest is kept."""

    def __init__(self, sha256: bytes) -> None:
        self._sha256 = sha256

    def refuse(self, token: str) -> str | None:
        presented = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        return None if hmac.compare_digest(presented, self._sha256) else "invalid websocket bearer token"


class SignedBearer:
    """Short-lived tokens signed with a shared secret (JWT, HS256)."""

    def __init__(
        self,
        secret: bytes,
        issuer: str | None,
        audience: str | None,
        skew: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._secret = secret
        self._issuer = issuer
        self._audience = audience
        self._skew = skew
        self._now = now

    def refuse(self, token: str) -> str | None:
        claims = self._claims(token)
        if claims is None:
            return "invalid websocket jwt"
        now = int(self._now())
        if now > claims["exp"] + self._skew:
            return "expired websocket jwt"
        if claims.get("nbf") is not None and now < claims["nbf"] - self._skew:
            return "websocket jwt is not valid yet"
        if self._issuer is not None and claims.get("iss") != self._issuer:
            return "websocket jwt issuer mismatch"
        if self._audience is not None:
            audience = claims.get("aud")
            if self._audience not in (audience if isinstance(audience, list) else [audience]):
                return "websocket jwt audience mismatch"
        return None

    def _claims(self, token: str) -> dict[str, Any] | None:
        """The verified claims, if signature, algorithm and types are right. Times are judged by us."""
        import jwt

        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._secret,
                algorithms=["HS256"],
                options={
                    "verify_signature": True,
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                    "verify_aud": False,
                    "verify_iss": False,
                    "verify_sub": False,
                    "verify_jti": False,
                },
            )
        except (jwt.PyJWTError, ValueError, UnicodeError):
            return None
        return claims if _well_spelled(token) and _well_typed(claims) else None


def _well_spelled(token: str) -> bool:
    """Whether a token that was verified is written in the one way there is.

    Padding, stray bits and a name that occurs twice are read by some and refused by others, and what two
    readers read differently must not be let through.
    """
    import base64
    import json

    try:
        raw = [base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in token.split(".")]
        if b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in raw) != token.encode():
            return False
        described = json.loads(raw[0], object_pairs_hook=_each_name_once)
        json.loads(raw[1], object_pairs_hook=_each_name_once)
    except (ValueError, RecursionError):
        return False
    return all(type(described.get(name)) in (str, type(None)) for name in ("typ", "cty"))


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    known = dict(pairs)
    if len(known) != len(pairs):
        raise ValueError("a name occurs twice")
    return known


def _well_typed(claims: dict[str, Any]) -> bool:
    audience = claims.get("aud")
    return (
        _is_time(claims.get("exp"))
        and (claims.get("nbf") is None or _is_time(claims["nbf"]))
        and type(claims.get("iss")) in (str, type(None))
        and (
            audience is None
            or type(audience) is str
            or (type(audience) is list and all(type(entry) is str for entry in audience))
        )
    )


def _is_time(value: object) -> bool:
    """Seconds since 1970 in 64 bits, as the reference counts them."""
    return type(value) is int and -(2**63) <= value < 2**63


def bearer_token(header: str | None) -> tuple[str, str | None]:
    """The token of an Authorization header, or why there is none."""
    if header is None:
        return "", "missing websocket bearer token"
    scheme, blank, token = header.partition(" ")
    token = token.strip()
    if not blank or scheme.lower() != "bearer" or not token or not re.fullmatch(r"[\x20-\x7e\t]*", header):
        return "", "invalid authorization header"
    return token, None


def authenticator(settings: Settings) -> Authenticator | None:
    """What the options ask for; ConfigError where they contradict each other."""
    if settings.mode is None:
        if settings.uses_token or settings.uses_jwt:
            raise ConfigError(
                "websocket auth flags require `--ws-auth capability-token` or `--ws-auth signed-bearer-token`"
            )
        return None
    if settings.mode == "capability-token":
        return _capability_token(settings)
    return _signed_bearer(settings)


def _capability_token(settings: Settings) -> CapabilityToken:
    if settings.uses_jwt:
        raise ConfigError(
            "`--ws-shared-secret-file`, `--ws-issuer`, `--ws-audience`, and"
            " `--ws-max-clock-skew-seconds` require `--ws-auth signed-bearer-token`"
        )
    if settings.token_file is not None and settings.token_sha256 is not None:
        raise ConfigError("`--ws-token-file` and `--ws-token-sha256` are mutually exclusive")
    if settings.token_sha256 is not None:
        if not re.fullmatch(r"[0-9A-Fa-f]{64}", settings.token_sha256.strip()):
            raise ConfigError("--ws-token-sha256 must be a 64-character hex SHA-256 digest")
        return CapabilityToken(bytes.fromhex(settings.token_sha256.strip()))
    if settings.token_file is None:
        raise ConfigError(
            "`--ws-token-file` or `--ws-token-sha256` is required when `--ws-auth capability-token` is set"
        )
    return CapabilityToken(hashlib.sha256(_read_secret(settings.token_file)).digest())


def _signed_bearer(settings: Settings) -> SignedBearer:
    if settings.uses_token:
        raise ConfigError(
            "`--ws-token-file` and `--ws-token-sha256` require `--ws-auth capability-token`,"
            " not `signed-bearer-token`"
        )
    if settings.shared_secret_file is None:
        raise ConfigError("`--ws-shared-secret-file` is required when `--ws-auth signed-bearer-token` is set")
    skew = settings.max_clock_skew_seconds
    if skew is None:
        skew = DEFAULT_SKEW_SECONDS
    if skew >= 2**63:
        raise ConfigError("websocket auth clock skew must fit in a signed 64-bit integer")
    secret = _read_secret(settings.shared_secret_file)
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"signed websocket bearer secret {os.path.abspath(settings.shared_secret_file)}"
            f" must be at least {MIN_SECRET_BYTES} bytes"
        )
    return SignedBearer(
        secret, (settings.issuer or "").strip() or None, (settings.audience or "").strip() or None, skew
    )


def _read_secret(path: str) -> bytes:
    path = os.path.abspath(path)
    try:
        with open(path, "rb") as file:
            secret = file.read().strip()
    except OSError as error:
        raise ConfigError(
            f"failed to read websocket auth secret {path}: {error.strerror} (os error {error.errno})"
        ) from None
    if not secret:
        raise ConfigError(f"websocket auth secret {path} must not be empty")
    return secret
