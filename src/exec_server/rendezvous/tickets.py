"""What a rendezvous hands out: URLs and authorizations that prove themselves. Pure.

Every one is signed over all that it is bound to, so nothing has to be kept to check it. That a harness's URL
and authorization are used only once is the store's to say.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from urllib.parse import quote, urlencode

from msgspec import Struct

from .clock import TOLERATED_SECONDS

__all__ = [
    "Authorization",
    "BadTicket",
    "EnvironmentTicket",
    "HarnessTicket",
    "Signer",
    "Untimely",
    "key_digest",
]

LIFETIME: Final = 60.0
"""Seconds from a bundle to its use."""

OVERLAP_SECONDS: Final = 2 * LIFETIME
"""For how long what an earlier secret has signed is accepted: what expires is good for no longer."""

LEEWAY: Final = TOLERATED_SECONDS
"""Seconds for which one is good after that: another node may have made it, with another clock."""

MOST_AHEAD: Final = 45.0
"""Seconds by which the clock of that node may be ahead of ours. Beyond, what was used would be good for
longer than it is remembered."""


class BadTicket(Exception):
    """Forged, expired, or not for this."""


class Untimely(BadTicket):
    """It was good, or will be, or the clocks differ."""


class EnvironmentTicket(Struct, frozen=True):
    """Who may be the environment of a registration: reusable while that is current."""

    registration_id: str
    caller: str = ""
    """The id of the API key that it was registered with; not in the ticket, which outlives keys."""
    until: float | None = None
    """When that key expires, if it does; not in the ticket, either."""
    environment: str = ""
    tenant: str = ""
    key_name: str = ""
    """What a log may say of it; not in the ticket."""


class HarnessTicket(Struct, frozen=True):
    """Who may open one connection to an environment."""

    registration_id: str
    key_digest: str
    nonce: str
    expires: float
    caller: str = ""
    """The id of the API key that asked for it."""
    until: float | None = None
    """When that key expires, if it does; not in the ticket."""
    environment: str = ""
    tenant: str = ""
    key_name: str = ""
    """What a log may say of it; not in the ticket."""


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

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret
        self._clock = clock
        self._before: tuple[bytes, float] | None = None

    def take(self, secret: bytes) -> None:
        """Sign with another one from now on. What was signed before is good for as long as bundles are;
        an environment whose URL is refused then registers again, and has a new one."""
        if secret != self._secret:
            self._before = self._secret, self._clock() + OVERLAP_SECONDS
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
        return HarnessTicket(registration_id, digest, nonce, _end("URL", expires, now), caller)

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
        return Authorization(nonce, _end("authorization", expires, now), caller)

    def _sign(self, *parts: str) -> str:
        return _signature(self._secret, parts)

    def _check(self, given: str, *parts: str) -> None:
        accepted = [self._secret]
        if self._before is not None and self._clock() < self._before[1]:
            accepted.append(self._before[0])
        signature = given.encode("utf-8", "surrogateescape")
        if not any(hmac.compare_digest(_signature(known, parts).encode(), signature) for known in accepted):
            raise BadTicket("the signature is wrong")


def _signature(secret: bytes, parts: Sequence[str]) -> str:
    """Over parts with their lengths, so that no two lists of them look alike."""
    message = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)
    return urlsafe_b64encode(hmac.digest(secret, message, "sha256")).rstrip(b"=").decode()


def _end(what: str, expires: str, now: float) -> float:
    """Until when something is good, if it is now. It is signed, so it is a number."""
    end = float(expires) + LEEWAY
    if now > end:
        raise Untimely(f"the {what} has expired, {now - float(expires):.0f} s ago by the clock of this node")
    if end - now > LIFETIME + LEEWAY + MOST_AHEAD:
        raise Untimely(f"the {what} comes from the future: the clocks of the cluster's nodes differ")
    return end


def _path(environment: str, query: Mapping[str, str]) -> str:
    return f"/ws/environment/{quote(environment, safe='')}?{urlencode(query)}"
