"""What a rendezvous hands out: URLs and authorizations that prove themselves. Pure.

Every one is signed over all that it is bound to, so nothing has to be kept to check it. That a harness's URL
and authorization are used only once is the store's to say.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, urlencode

from msgspec import Struct

__all__ = ["Authorization", "BadTicket", "EnvironmentTicket", "HarnessTicket", "Signer", "key_digest"]

LIFETIME: Final = 60.0
"""Seconds from a bundle to its use."""


class BadTicket(Exception):
    """Forged, expired, or not for this."""


class EnvironmentTicket(Struct, frozen=True):
    """Who may be the environment of a registration: reusable while that is current."""

    registration_id: str
    caller: str = ""
    """The id of the API key that it was registered with; not in the ticket, which outlives keys."""


class HarnessTicket(Struct, frozen=True):
    """Who may open one connection to an environment."""

    registration_id: str
    key_digest: str
    nonce: str
    expires: float
    caller: str = ""
    """The id of the API key that asked for it."""


class Authorization(Struct, frozen=True):
    """Who may open one stream."""

    nonce: str
    expires: float
    caller: str = ""


def key_digest(key: Mapping[str, str]) -> str:
    """A public-key object in short, for tables and tickets."""
    text = "\n".join((key["suite"], key["x25519_public_key"], key["mlkem768_public_key"]))
    return hashlib.sha256(text.encode()).hexdigest()


class Signer:
    """Makes tickets and checks them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def environment_path(self, environment: str, registration_id: str) -> str:
        """Path and query of an environment's WebSocket."""
        query = {"role": "environment", "reg": registration_id}
        return _path(environment, query | {"sig": self._sign("environment", environment, registration_id)})

    def harness_path(
        self, environment: str, registration_id: str, digest: str, now: float, caller: str = ""
    ) -> str:
        """Path and query of a harness's WebSocket, for one connection."""
        nonce, expires = secrets.token_urlsafe(16), str(int(now + LIFETIME))
        query = {"role": "harness", "reg": registration_id, "hk": digest, "exp": expires, "n": nonce}
        query["by"] = caller
        signature = self._sign("harness", environment, registration_id, digest, expires, nonce, caller)
        return _path(environment, query | {"sig": signature})

    def read_path(
        self, environment: str, query: Mapping[str, str], now: float
    ) -> EnvironmentTicket | HarnessTicket:
        """Check the path and query of an upgrade."""
        registration_id, given = query.get("reg", ""), query.get("sig", "")
        if query.get("role") == "environment":
            self._check(given, "environment", environment, registration_id)
            return EnvironmentTicket(registration_id)
        if query.get("role") != "harness":
            raise BadTicket("the role is neither environment nor harness")
        digest, nonce, expires = query.get("hk", ""), query.get("n", ""), query.get("exp", "")
        caller = query.get("by", "")
        self._check(given, "harness", environment, registration_id, digest, expires, nonce, caller)
        if now > float(expires):
            raise BadTicket("the URL has expired")
        return HarnessTicket(registration_id, digest, nonce, float(expires), caller)

    def authorization(
        self, tenant: str, registration_id: str, digest: str, now: float, caller: str = ""
    ) -> str:
        """Binds a harness key and whoever asked to a registration, for one stream."""
        nonce, expires = secrets.token_urlsafe(16), str(int(now + LIFETIME))
        signature = self._sign("authorization", tenant, registration_id, digest, expires, nonce, caller)
        return f"{expires}.{nonce}.{caller}.{signature}"

    def read_authorization(
        self, text: str, tenant: str, registration_id: str, digest: str, now: float
    ) -> Authorization:
        """Check one that an environment brings."""
        expires, _, rest = text.partition(".")
        nonce, _, rest = rest.partition(".")
        caller, _, given = rest.partition(".")
        self._check(given, "authorization", tenant, registration_id, digest, expires, nonce, caller)
        if now > float(expires):
            raise BadTicket("the authorization has expired")
        return Authorization(nonce, float(expires), caller)

    def _sign(self, *parts: str) -> str:
        """Parts with their lengths, so that no two lists of them look alike."""
        message = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)
        return urlsafe_b64encode(hmac.digest(self._secret, message, "sha256")).rstrip(b"=").decode()

    def _check(self, given: str, *parts: str) -> None:
        expected = self._sign(*parts)
        if not hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogateescape")):
            raise BadTicket("the signature is wrong")


def _path(environment: str, query: Mapping[str, str]) -> str:
    return f"/ws/environment/{quote(environment, safe='')}?{urlencode(query)}"
